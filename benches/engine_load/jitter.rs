//! `filter` over nodes that report every second, in process: with the same figures every time, with jittering ones, and with
//! jittering ones that count as they are read. The three take turns, so that other load on the machine affects all.

use super::fleet::{Fleet, GPUS, uid};
use std::time::{Duration, Instant};
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Millis, Percent};
use stowage_scheduling::verbs::filter::{FilterAsked, filter};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::node_reading::EngineLoad;

const NODES: usize = 1000;
const MEASURED_SECONDS: u64 = 120;
/// Seconds until the averages have settled; not measured.
const WARM_UP_SECONDS: u64 = 60;
/// Filters per second, evenly spread among the reports.
const FILTERS_PER_SECOND: usize = 20;
/// The most nodes that jitter may change in a second: what a filter costs beyond steady figures follows from it.
const MAX_CHANGED_NODES: f64 = NODES as f64 / 40.0;

struct Arm {
    name: &'static str,
    fleet: Fleet,
    scores: ScoreCache,
    demands: Vec<Demand>,
    /// Maximum difference between readings, in percentage points.
    jitter: usize,
    dice: Random,
    requests: usize,
    took: Vec<Duration>,
    /// Nodes that were changed by a report.
    changed: usize,
}

pub fn print() {
    let mut raw = Policy::default();
    raw.telemetry.smoothing = Millis(0);
    let mut arms = [
        Arm::new("steady", Policy::default(), 0),
        Arm::new("jittering by ±6 points", Policy::default(), 12),
        Arm::new("the same, as it is read", raw, 12),
    ];
    for second in 0..MEASURED_SECONDS {
        arms.iter_mut().for_each(|arm| arm.advance_to(second));
    }
    println!(
        "\nfilter over {NODES} nodes that report once a second; {FILTERS_PER_SECOND} filters a second"
    );
    println!("| figures | p50 µs | × steady | nodes changed a second |\n|---|---|---|---|");
    let steady = arms[0].p50();
    for arm in &mut arms {
        let (p50, changed) = (
            arm.p50(),
            arm.changed as f64 / (MEASURED_SECONDS - WARM_UP_SECONDS) as f64,
        );
        println!(
            "| {} | {p50:.0} | {:.2} | {changed:.1} |",
            arm.name,
            p50 / steady
        );
    }
    let changed = arms[1].changed as f64 / (MEASURED_SECONDS - WARM_UP_SECONDS) as f64;
    assert!(
        changed <= MAX_CHANGED_NODES,
        "jitter changes {changed} nodes a second"
    );
}

impl Arm {
    fn new(name: &'static str, policy: Policy, jitter: usize) -> Self {
        let fleet = Fleet::new(policy, NODES, |node, gpu| {
            16 + 8 * ((node + gpu) % 5) as u64
        });
        let demands =
            [(8, 0), (16, 0), (24, 0), (8, -10)].map(|(gib, priority)| fleet.demand(gib, priority));
        let dice = Random::seeded(42, 0);
        let (scores, demands) = (ScoreCache::default(), demands.to_vec());
        Self {
            name,
            fleet,
            scores,
            demands,
            jitter,
            dice,
            requests: 0,
            took: Vec::new(),
            changed: 0,
        }
    }

    fn advance_to(&mut self, second: u64) {
        self.fleet.advance_to_second(second);
        for node in 0..NODES {
            let loads: [EngineLoad; GPUS] = std::array::from_fn(|gpu| self.next_load(node, gpu));
            let name = &self.fleet.nodes[node];
            let before = self
                .fleet
                .cluster
                .ledger()
                .node(name)
                .map(|node| node.generation);
            self.fleet.report(node, &loads);
            let name = &self.fleet.nodes[node];
            let is_changed = self
                .fleet
                .cluster
                .ledger()
                .node(name)
                .map(|node| node.generation)
                != before;
            if second >= WARM_UP_SECONDS {
                self.changed += usize::from(is_changed);
            }
            if (node + 1) % (NODES / FILTERS_PER_SECOND) == 0 {
                self.filter_once(second);
            }
        }
    }

    /// Next load of an engine, each around its own mean from idle to nearly full.
    fn next_load(&mut self, node: usize, gpu: usize) -> EngineLoad {
        let mean = 6 + (node * GPUS + gpu) * 37 % 80;
        let off = if self.jitter > 0 {
            self.dice.below(self.jitter + 1)
        } else {
            6
        };
        let queue = if self.jitter > 0 {
            self.dice.below(3) as u32
        } else {
            1
        };
        EngineLoad::new(Percent::new((mean + off - 6) as u8), Some(queue))
    }

    fn filter_once(&mut self, second: u64) {
        let kind = self.requests % self.demands.len();
        self.requests += 1;
        let name = format!("asks-{kind}");
        let request = VerbRequest {
            uid: uid(&name),
            key: PodKey::parse("llm", &name).expect("a name"),
            demand: self.demands[kind].clone(),
            waiting: ObservedWaiting::default(),
            disruption: None,
        };
        let names: Vec<&str> = self.fleet.nodes.iter().map(|name| name.as_str()).collect();
        let began = Instant::now();
        let view = self.fleet.cluster.apply(FilterAsked(request));
        let mut scores = self
            .scores
            .take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter(&view, names.into_iter(), &mut scores);
        self.scores.put(scores);
        let took = began.elapsed();
        assert!(!list.best.is_empty());
        if second >= WARM_UP_SECONDS {
            self.took.push(took);
        }
    }

    /// Median filter time in microseconds.
    fn p50(&mut self) -> f64 {
        self.took.sort_unstable();
        self.took[self.took.len() / 2].as_secs_f64() * 1e6
    }
}
