//! `stowage simulate decisions`: sequences by seed until one fails, the seeds end, the time does, or someone interrupts. The
//! simulation is in `lab::simulate::decisions`.

use super::campaign::{
    OutputFormat, Reproduction, SeedOrigin, SeedRange, exit_code, interruption, limit, minutes,
    print,
};
use super::progress;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;
use stowage_lab::campaign::{CampaignResult, CampaignRules};
use stowage_lab::simulate::decisions::shrink::shrink;
use stowage_lab::simulate::decisions::step::StepKind;
use stowage_lab::simulate::decisions::tally::DecisionTally;
use stowage_lab::simulate::decisions::{DecisionSequence, MOST_NODES, STEPS, play, play_aloud};

#[derive(Debug, Args)]
#[command(after_help = step_list())]
pub struct SimulateDecisionsArgs {
    /// One seed, or an inclusive range
    #[arg(long, value_name = "A..B", default_value = "0..999")]
    seeds: SeedRange,

    #[command(flatten)]
    origin: SeedOrigin,

    /// Stop after so many minutes, even if seeds are left
    #[arg(long, value_name = "M", value_parser = minutes)]
    minutes: Option<u64>,

    /// Kinds of steps that do not happen, with commas between them
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    without: Vec<StepKind>,

    /// Steps of each sequence
    #[arg(long, value_name = "N", default_value_t = STEPS, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    steps: u32,

    /// Nodes of the largest worlds
    #[arg(long, value_name = "N", default_value_t = MOST_NODES, value_parser = clap::value_parser!(u8).range(1..=i64::from(MOST_NODES)))]
    nodes: u8,

    /// Print each step of the sequence; for one seed
    #[arg(long)]
    history: bool,

    /// Sequences that are played at once; by default, as many as there are processors
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,

    /// Output format
    #[arg(short, long, value_enum, default_value = "text")]
    output: OutputFormat,
}

fn step_list() -> String {
    let line = |kind: &StepKind| format!("  {:<10} {}\n", kind.name(), kind.what());
    format!(
        "Kinds of steps:\n{}",
        StepKind::ALL.iter().map(line).collect::<String>()
    )
}

/// A sequence that failed: its step, and why.
type Failure = (DecisionSequence, u32, String);

/// What was reached.
struct Reached {
    tally: DecisionTally,
    took: Duration,
    jobs: usize,
    is_interrupted: bool,
}

/// What `-o json` prints.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DecisionsOutput {
    decisions: u64,
    seconds: f64,
    jobs: usize,
    decisions_per_second: f64,
    mean_nodes: f64,
    mean_gpus: f64,
    mean_pods: f64,
    interrupted: bool,
    counts: BTreeMap<&'static str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<FailedSequence>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FailedSequence {
    seed: u64,
    step: u32,
    broken: String,
    #[serde(flatten)]
    again: Reproduction,
}

impl SimulateDecisionsArgs {
    pub fn run(self) -> Result<ExitCode> {
        self.origin.check()?;
        if self.history {
            return self.print_history(self.seeds.only("sequence")?);
        }
        let (reached, failed) = self.play_all();
        let failed = failed.as_ref().map(FailedSequence::of);
        let (has_failed, text) = (failed.is_some(), text(&reached, failed.as_ref()));
        print(self.output, &page(&reached, failed), &text)?;
        Ok(exit_code(has_failed))
    }

    fn sequence_of(&self, seed: u64) -> DecisionSequence {
        let (steps, nodes, without) = (self.steps, self.nodes, self.without.clone());
        DecisionSequence {
            steps,
            nodes,
            without,
            ..DecisionSequence::of(seed)
        }
    }

    fn play_all(&self) -> (Reached, Option<Failure>) {
        let interrupted = interruption();
        let rules = CampaignRules {
            jobs: self.jobs.map(usize::from),
            limit: limit(self.minutes),
            interrupted: Some(&interrupted),
        };
        let bar = progress(self.seeds.count());
        let play = |sequence: DecisionSequence| {
            let result = play(&sequence);
            (
                result.tally,
                result.broken.map(|(step, why)| (sequence, step, why)),
            )
        };
        let sequences = self.seeds.all().map(|seed| self.sequence_of(seed));
        let seen = |tally: &DecisionTally| bar.set_position(tally.sequences);
        let CampaignResult {
            tally,
            failed,
            took,
        } = rules.play_all(sequences, play, seen);
        bar.finish_and_clear();
        let is_interrupted = interrupted.load(Ordering::Relaxed);
        (
            Reached {
                tally,
                took,
                jobs: rules.jobs(),
                is_interrupted,
            },
            failed,
        )
    }

    fn print_history(&self, seed: u64) -> Result<ExitCode> {
        let result = play_aloud(&self.sequence_of(seed));
        let mut out = std::io::stdout().lock();
        result
            .lines
            .iter()
            .try_for_each(|line| writeln!(out, "{line}"))?;
        writeln!(out, "\n{}", result.tally)?;
        if let Some((step, why)) = &result.broken {
            writeln!(out, "step {step} is wrong: {why}")?;
        }
        Ok(exit_code(result.broken.is_some()))
    }
}

impl FailedSequence {
    fn of((sequence, step, broken): &Failure) -> Self {
        let again = Reproduction::of(
            "decisions",
            &sequence.arguments(),
            &shrink(sequence).arguments(),
        );
        Self {
            seed: sequence.seed,
            step: *step,
            broken: broken.clone(),
            again,
        }
    }
}

fn page(reached: &Reached, failed: Option<FailedSequence>) -> DecisionsOutput {
    let (tally, decisions) = (&reached.tally, reached.tally.decisions());
    let mean = |sum: u64| sum as f64 / decisions.max(1) as f64;
    DecisionsOutput {
        decisions,
        seconds: reached.took.as_secs_f64(),
        jobs: reached.jobs,
        decisions_per_second: per_second(reached),
        mean_nodes: mean(tally.world_nodes),
        mean_gpus: mean(tally.world_gpus),
        mean_pods: mean(tally.world_pods),
        interrupted: reached.is_interrupted,
        counts: tally.counts().collect(),
        failed,
    }
}

fn per_second(reached: &Reached) -> f64 {
    reached.tally.decisions() as f64 / reached.took.as_secs_f64().max(0.001)
}

fn text(reached: &Reached, failed: Option<&FailedSequence>) -> String {
    let Reached {
        tally, took, jobs, ..
    } = reached;
    let (seconds, rate) = (took.as_secs_f64(), per_second(reached));
    let mut text =
        format!("{tally}\nin {seconds:.1} s: {rate:.0} decisions a second, {jobs} at once\n");
    if reached.is_interrupted {
        text += "interrupted\n";
    }
    match failed {
        None => text += "every answer was right\n",
        Some(FailedSequence {
            seed,
            step,
            broken,
            again,
        }) => {
            text += &format!(
                "seed {seed}, step {step} is wrong: {broken}\n{}",
                again.text()
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_sequence_is_told_with_the_command_that_plays_it_again() {
        let sequence = DecisionSequence {
            steps: 40,
            nodes: 2,
            ..DecisionSequence::of(7)
        };
        let failed = FailedSequence {
            seed: 7,
            step: 39,
            broken: "pod 3 is refused node 0, where it fits".into(),
            again: Reproduction::of(
                "decisions",
                &sequence.arguments(),
                "--seeds 7 --steps 12 --nodes 1 --without plan",
            ),
        };
        let tally = DecisionTally {
            filter: 30,
            bind: 10,
            world_nodes: 80,
            ..DecisionTally::default()
        };
        let took = Duration::from_secs(2);
        let reached = Reached {
            tally,
            took,
            jobs: 2,
            is_interrupted: false,
        };
        let text = text(&reached, Some(&failed));
        assert!(text.contains("40 decisions in"), "{text}");
        assert!(text.contains("in worlds of 2.0 nodes"), "{text}");
        assert!(text.contains("20 decisions a second, 2 at once"), "{text}");
        assert!(
            text.contains(
                "again: stowage simulate decisions --seeds 7 --steps 40 --nodes 2 --found-by '"
            ),
            "{text}"
        );
        assert!(
            text.contains("smaller: stowage simulate decisions --seeds 7 --steps 12"),
            "{text}"
        );
    }
}
