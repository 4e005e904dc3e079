//! Decisions by the million: a small world and a sequence of steps at the core's entry point, both drawn by a seed, and an oracle
//! that checks every answer.
//!
//! ```text
//!  seed or bytes ─► world: API server, machines ── inputs ──► the core as it ships ── answers ─┐
//!                     └──── what was shown and answered ─► record ─► oracle ◄───────────────────┘
//! ```
//!
//! No HTTP, no thread, no Kubernetes type. [`world`] is what happens outside of the core, [`core_under_test`] hands it in and
//! plain values out. [`record`] is what the core was told and what it answered, and [`gpu_views`] what that leaves of each GPU.
//! By them [`oracle`] says whether an answer is right, [`victims`] whether pods leave rightly, and [`limits`] how many may. None
//! of these reads the ledger. [`rules`] are policies in plain values, [`draws`] the choices, [`step`] the kinds of steps. [`planted`] are bugs that
//! the oracle has to find; [`shrink`](mod@shrink) makes a failing sequence small.

mod core_under_test;
mod draws;
mod gpu_views;
mod limits;
mod oracle;
pub mod planted;
mod record;
mod rules;
pub mod shrink;
pub mod step;
pub mod tally;
mod victims;
mod world;

use draws::Draws;
use planted::PlantedBug;
use step::StepKind;
use tally::DecisionTally;
use world::World;

/// What is played.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecisionSequence {
    pub seed: u64,
    /// [`STEPS`] unless a sequence is shortened.
    pub steps: u32,
    /// Nodes at most; [`MOST_NODES`] unless a sequence is made smaller.
    pub nodes: u8,
    /// Kinds of steps that are drawn and do not happen.
    pub without: Vec<StepKind>,
    /// A bug that is there on purpose.
    pub planted: Option<PlantedBug>,
}

/// Steps of a whole sequence, and nodes of the largest worlds.
pub const STEPS: u32 = 600;
pub const MOST_NODES: u8 = 32;

/// What came of a sequence.
#[derive(Debug, Default, Clone)]
pub struct SequenceResult {
    pub tally: DecisionTally,
    /// The step at which a promise was broken, and which.
    pub broken: Option<(u32, String)>,
    /// The steps, as far as they were asked for.
    pub lines: Vec<String>,
}

impl DecisionSequence {
    pub fn of(seed: u64) -> Self {
        Self {
            seed,
            steps: STEPS,
            nodes: MOST_NODES,
            without: Vec::new(),
            planted: None,
        }
    }

    /// The arguments of `stowage simulate decisions` that play it again.
    pub fn arguments(&self) -> String {
        let mut text = format!("--seeds {}", self.seed);
        if self.steps != STEPS {
            text += &format!(" --steps {}", self.steps);
        }
        if self.nodes != MOST_NODES {
            text += &format!(" --nodes {}", self.nodes);
        }
        if !self.without.is_empty() {
            let kinds: Vec<&str> = self.without.iter().map(|kind| kind.name()).collect();
            text += &format!(" --without {}", kinds.join(","));
        }
        text
    }
}

/// Plays a sequence until its end, or until a promise is broken.
pub fn play(sequence: &DecisionSequence) -> SequenceResult {
    let mut world = World::new(
        Draws::of_seed(sequence.seed),
        sequence.nodes,
        sequence.planted,
    );
    played(&mut world, sequence, None)
}

/// The same, with a line for each step.
pub fn play_aloud(sequence: &DecisionSequence) -> SequenceResult {
    let mut world = World::new(
        Draws::of_seed(sequence.seed),
        sequence.nodes,
        sequence.planted,
    );
    played(&mut world, sequence, Some(Vec::new()))
}

/// Plays the sequence that these bytes draw, in a world of a few nodes.
pub fn play_bytes(bytes: &[u8]) -> SequenceResult {
    let sequence = DecisionSequence {
        nodes: 4,
        ..DecisionSequence::of(0)
    };
    let mut world = World::new(Draws::Bytes(bytes), sequence.nodes, None);
    played(&mut world, &sequence, None)
}

fn played(
    world: &mut World<'_>,
    sequence: &DecisionSequence,
    mut lines: Option<Vec<String>>,
) -> SequenceResult {
    let mut broken = None;
    for step in 0..sequence.steps {
        if world.draws.are_used_up() {
            break;
        }
        world.draws.begin_step(step);
        let kind = StepKind::drawn(world.draws.below(StepKind::WHOLE));
        world.tally.steps += 1;
        if sequence.without.contains(&kind) {
            continue;
        }
        world.notes.clear();
        world.is_aloud = lines.is_some();
        let checked = world.happens(kind);
        if let Some(lines) = &mut lines {
            lines.push(format!(
                "{step} {} ms {kind}: {}",
                world.record.now,
                world.notes.join("; ")
            ));
        }
        if let Err(why) = checked {
            broken = Some((step, why));
            break;
        }
    }
    if broken.is_none() {
        broken = world.check_all().err().map(|why| (sequence.steps, why));
    }
    if let Some(lines) = lines.as_mut().filter(|_| broken.is_some()) {
        lines.extend(world.describe());
    }
    world.tally.sequences += 1;
    SequenceResult {
        tally: std::mem::take(&mut world.tally),
        broken,
        lines: lines.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
