//! Reproducible runs, a consistent ledger after every event, and each order on hand-made nodes.

use super::orders::VictimChoice;
use super::report::RunOutcome;
use super::run::PreemptionRun;
use super::tally::GpuTime;
use super::workload::{Job, JobRole, JobSize};
use super::*;
use crate::simulate::openb::{Trace, built_in};
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::{LedgerCluster, demand_of, gpu_at, node, uid, whole_gpu};
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::observe::BudgetsVisible;
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::disruption_budget::BudgetVisibility;
use stowage_scheduling::vocabulary::disruption_info::ObservedDisruptionInfo;
use stowage_scheduling::vocabulary::model_tier::{LoadingSpeeds, time_to_ready};

/// A fifth of the made-up cluster, for as long as it takes to fill and some hours more.
const SHORT: WorkloadExtent =
    WorkloadExtent { node_step: 5, warm_up: Millis::seconds(12 * 3600), counted: Millis::seconds(6 * 3600) };

fn outcomes(trace: &Trace, extent: WorkloadExtent, seed: u64) -> (Workload, Vec<RunOutcome>) {
    let workload = Workload::of(trace, extent, seed).unwrap();
    let run = |order| RunOutcome { order, seed, tally: play(&workload, order) };
    let outcomes = VictimOrder::ALL.into_iter().map(run).collect();
    (workload, outcomes)
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_others() {
    let report = |seed| {
        let (workload, outcomes) = outcomes(&built_in::trace(), SHORT, seed);
        serde_json::to_string(&Report::of(&[workload], &outcomes)).unwrap()
    };
    assert_eq!(report(42), report(42));
    assert_ne!(report(42), report(43));
}

#[test]
fn the_ledger_adds_up_after_every_event_under_every_victim_order() {
    let workload = Workload::of(&built_in::trace(), SHORT, 42).unwrap();
    for order in VictimOrder::ALL {
        let mut world = PreemptionRun::new(&workload, order);
        let mut evicted = 0;
        while world.step() {
            assert_eq!(audit(&world.scheduler.borrow().shipped.cluster), [], "{order:?}");
            assert_eq!(world.stage.broken, [], "{order:?}");
            evicted = world.tally().victims;
        }
        assert!(evicted > 0, "{order:?} evicted nobody: the run shows nothing");
    }
}

#[test]
fn all_orders_meet_the_same_arrivals_and_the_cluster_is_full() {
    let (_, outcomes) = outcomes(&built_in::trace(), SHORT, 42);
    let first = outcomes[0].tally;
    for RunOutcome { order, tally, .. } in &outcomes {
        assert_eq!(tally.arrivals, first.arrivals);
        assert!(tally.admitted * 10 >= tally.arrivals * 8, "{order:?}: {tally:?}");
        assert!(tally.preempted_for <= tally.victims, "{order:?}: {tally:?}");
    }
}

#[test]
fn the_real_trace_keeps_the_cluster_full_and_every_search_is_exact() {
    let Some(trace) = real_trace() else { return };
    let day = Millis::seconds(86_400);
    let extent = WorkloadExtent { node_step: 64, warm_up: Millis(day.0 / 2), counted: Millis(day.0 / 8) };
    let (workload, outcomes) = outcomes(&trace, extent, 42);
    let report = Report::of(&[workload], &outcomes);
    for line in &report.results {
        assert!((85.0..=100.0).contains(&line.used_percent.mean), "{line:?}");
        assert!(line.lost_gpu_hours.mean > 0.0 && line.cut_short == 0, "{line:?}");
    }
}

#[test]
fn a_victim_loses_what_it_has_not_saved_and_comes_back_with_the_rest() {
    let minutes = |n: u64| Millis::seconds(60 * n);
    let whole = JobSize { gpus: 1, milli: 1000 };
    let load = time_to_ready(None, Bytes::gib(72), &LoadingSpeeds::default());
    let comes = Moment::default() + load + minutes(25);
    let job = |role, comes, work| Job { comes, role, size: whole, work, saves_every: minutes(10) };
    let workload = Workload {
        seed: 0,
        extent: WorkloadExtent { node_step: 1, warm_up: Millis::default(), counted: minutes(600) },
        nodes: vec![(node("only"), 1)],
        jobs: vec![
            job(JobRole::BestEffort, Moment::default(), minutes(120)),
            job(JobRole::Arrival, comes, minutes(30)),
        ],
    };
    for order in VictimOrder::ALL {
        let tally = play(&workload, order);
        assert_eq!((tally.arrivals, tally.admitted, tally.victims), (1, 1, 1), "{order:?}");
        assert_eq!(tally.lost_work, GpuTime::of(whole, minutes(5)), "{order:?}");
        assert_eq!(tally.reload, GpuTime::of(whole, load), "{order:?}");
        // It loads and works, is evicted and takes its grace period; then the arrival; then it loads again, and repeats the
        // unsaved work.
        let first = load + minutes(25) + Millis::seconds(30);
        let used = first + minutes(30) + load + minutes(100);
        assert_eq!(tally.used, GpuTime::of(whole, used), "{order:?}");
    }
}

fn real_trace() -> Option<Trace> {
    use crate::simulate::openb::{NODES, PODS, TraceText};
    let text = |file: &str| crate::needs::trace(&format!("openb/{file}"));
    let (nodes, pods) = (text(NODES)?, text(PODS)?);
    let of = |file, text| TraceText { file, text };
    Some(Trace::read(of(NODES, &nodes), of(PODS, &pods)).unwrap())
}

/// Nodes with GPUs of 100 B, residents that started at some second, and one pending pod.
struct Scene {
    ledger: LedgerCluster,
    nodes: Vec<NodeName>,
}

/// The second in which the pod asks.
const NOW: u64 = 10_000;

impl Scene {
    fn of(nodes: &[(&str, u32)]) -> Self {
        let mut ledger = LedgerCluster::empty(Policy::default());
        ledger.apply(BudgetsVisible(BudgetVisibility::Complete));
        // Of which the built-in headroom leaves 100.
        let gpu = |name, index| whole_gpu(gpu_at(name, index), index, Bytes(112));
        for (name, gpus) in nodes {
            ledger.add_node(name, (0..*gpus).map(|index| gpu(name, index)).collect());
        }
        Self { ledger, nodes: nodes.iter().map(|(name, _)| node(name)).collect() }
    }

    /// A resident on one GPU.
    fn with(mut self, name: &str, on: (&str, u32), size: u64, priority: i32, began: u64) -> Self {
        let ran = Some(Millis::seconds(NOW - began));
        self.ledger.run(name, on, demand(size, priority), ran, ObservedDisruptionInfo::default());
        self
    }

    /// The victims that an order chooses for a pod of that size, and their node.
    fn choice(mut self, order: VictimOrder, size: u64) -> Option<(String, Vec<String>)> {
        self.ledger.wait("asks", demand(size, 1000));
        let preemptor = self.ledger.preemptor(&uid("asks"));
        let candidates = self.ledger.candidates_for(&preemptor, &self.nodes);
        let chosen = order.choose(&self.ledger, &candidates, &demand(size, 1000))?;
        let VictimChoice { node, mut evicted, .. } = chosen;
        evicted.sort();
        Some((node.to_string(), evicted.iter().map(ToString::to_string).collect()))
    }
}

fn demand(size: u64, priority: i32) -> Demand {
    demand_of(size, 1, Sharing::Shared, priority)
}

fn of(node: &str, victims: &[&str]) -> Option<(String, Vec<String>)> {
    Some((node.into(), victims.iter().map(ToString::to_string).collect()))
}

/// Two GPUs, each with an old pod and a young one.
fn two_gpus() -> Scene {
    Scene::of(&[("a", 2)])
        .with("old-0", ("a", 0), 60, -20, 1000)
        .with("young-0", ("a", 0), 40, -20, 9000)
        .with("old-1", ("a", 1), 50, -20, 2000)
        .with("young-1", ("a", 1), 50, -20, 8000)
}

#[test]
fn kube_schedulers_order_evicts_by_the_nodes_sum_and_then_until_a_gpu_fits() {
    // The old are readmitted first. The sum wants 90, and both young ones free just that; but no GPU fits 90 then, and the
    // next in its order is the younger of the old.
    assert_eq!(two_gpus().choice(VictimOrder::Stock, 90), of("a", &["old-1", "young-0", "young-1"]));
    // With the VRAM of single GPUs it spares the pods on the other.
    assert_eq!(two_gpus().choice(VictimOrder::StockOnGpus, 90), of("a", &["old-1", "young-1"]));
    // Where one is enough by either count, the least important leaves.
    assert_eq!(two_gpus().choice(VictimOrder::Stock, 40), of("a", &["young-0"]));
}

#[test]
fn kube_schedulers_order_chooses_the_fewest_and_then_the_youngest_victims() {
    let scene = || {
        Scene::of(&[("a", 1), ("b", 1), ("c", 1)])
            .with("a-1", ("a", 0), 50, -20, 9000)
            .with("a-2", ("a", 0), 50, -20, 9000)
            .with("b-1", ("b", 0), 100, -20, 3000)
            .with("c-1", ("c", 0), 100, -20, 5000)
    };
    assert_eq!(scene().choice(VictimOrder::Stock, 80), of("c", &["c-1"]));
    assert_eq!(scene().choice(VictimOrder::StockOnGpus, 80), of("c", &["c-1"]));
    // A lower priority goes before fewer victims.
    let lower = Scene::of(&[("a", 1), ("d", 1)])
        .with("a-1", ("a", 0), 100, -20, 9000)
        .with("d-1", ("d", 0), 50, -30, 10)
        .with("d-2", ("d", 0), 50, -30, 10);
    assert_eq!(lower.choice(VictimOrder::Stock, 80), of("d", &["d-1", "d-2"]));
}

#[test]
fn a_node_whose_sum_is_enough_is_the_last_resort_of_kube_schedulers_order() {
    let fragmented = |scene: Scene| scene.with("x", ("a", 0), 50, -20, 1).with("y", ("a", 1), 50, -20, 2);
    let scene = fragmented(Scene::of(&[("a", 2), ("b", 1)])).with("z", ("b", 0), 100, -10, 9000);
    assert_eq!(scene.choice(VictimOrder::Stock, 100), of("b", &["z"]));
    assert_eq!(fragmented(Scene::of(&[("a", 2)])).choice(VictimOrder::Stock, 100), of("a", &["y"]));
}

#[test]
fn youngest_first_evicts_the_youngest_and_no_unnecessary_victim() {
    // By age young-0, young-1, old-1: then GPU 1 fits 90, and young-0 may stay.
    assert_eq!(two_gpus().choice(VictimOrder::YoungestFirst, 90), of("a", &["old-1", "young-1"]));
    let scene = Scene::of(&[("a", 1), ("b", 1)])
        .with("a-1", ("a", 0), 100, -20, 3000)
        .with("b-1", ("b", 0), 50, -20, 8000)
        .with("b-2", ("b", 0), 50, -20, 7000);
    assert_eq!(scene.choice(VictimOrder::YoungestFirst, 100), of("b", &["b-1", "b-2"]));
}

#[test]
fn lowest_priority_first_evicts_the_lowest_however_old() {
    let scene = || {
        Scene::of(&[("a", 1), ("b", 1)])
            .with("a-1", ("a", 0), 60, -10, 9000)
            .with("a-2", ("a", 0), 40, -20, 9000)
            .with("b-1", ("b", 0), 50, -20, 10)
            .with("b-2", ("b", 0), 50, -20, 10)
    };
    assert_eq!(scene().choice(VictimOrder::LowestPriorityFirst, 100), of("b", &["b-1", "b-2"]));
    assert_eq!(scene().choice(VictimOrder::LowestPriorityFirst, 40), of("a", &["a-2"]));
}

#[test]
fn no_order_evicts_a_pod_where_it_would_not_help() {
    for order in VictimOrder::ALL {
        let scene = || Scene::of(&[("a", 1)]).with("x", ("a", 0), 50, -20, 1);
        assert_eq!(scene().choice(order, 101), None, "{order:?}");
        // A service stays.
        let served = scene().with("serves", ("a", 0), 40, 0, 1);
        assert_eq!(served.choice(order, 80), None, "{order:?}");
    }
}
