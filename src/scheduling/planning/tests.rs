//! The planner's rules, one by one, on clusters small enough to see what is right.

use super::testing::{placed, roomy, steps};
use super::*;
use crate::ids::{GpuUuid, NodeName, OwnerUid};
use crate::scheduling::kube_filters::{ClusterFilters, Requirements};
use crate::scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use crate::scheduling::policy::{Consolidation, GroupPlacement, Policy};
use crate::scheduling::proptests::demand_of;
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::disruption_budget::DisruptionBudget;
use crate::scheduling::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo,
};
use crate::scheduling::vocabulary::gpu::{Device, Health};
use crate::scheduling::vocabulary::label_selector::Selector;
use crate::scheduling::vocabulary::node::NodeKind;
use crate::scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use crate::units::{Millis, Moment, Percent};
use std::collections::BTreeSet;
use std::sync::Arc;

mod allowance;
mod undone;

struct LedgerCluster {
    ledger: Ledger,
}

fn uid(name: &str) -> PodUid {
    PodUid::parse(name).unwrap()
}

fn node(name: &str) -> NodeName {
    NodeName::parse(name).unwrap()
}

fn shared(gib: u64, priority: i32) -> Demand {
    demand_of(gib << 30, 1, Sharing::Shared, priority)
}

/// Of a class whose start excludes no pod.
fn job(gib: u64) -> Demand {
    shared(gib, -10)
}

impl LedgerCluster {
    /// Nodes of 80 GiB GPUs, of which 72 GiB each are allocatable; the GPUs of a node form two islands.
    fn new(nodes: &[(&str, u32)]) -> Self {
        Self::by(Policy::default(), nodes)
    }

    fn by(policy: Policy, nodes: &[(&str, u32)]) -> Self {
        let mut ledger = Ledger::new(Arc::new(policy));
        ledger.set_now(Moment(1_000_000));
        for (name, gpus) in nodes {
            ledger.set_node(&node(name), NodeKind::Stowage, None);
            let device = |index: u32| Device {
                uuid: GpuUuid::parse(&format!("GPU-{name}-{index}")).unwrap(),
                index,
                model: crate::ids::GpuModel::parse("H100").unwrap(),
                parent: None,
                total: Bytes::gib(80),
                reserved: Bytes::ZERO,
                health: Health::Healthy,
                island: Some((index * 2 / gpus) as u8),
            };
            ledger.report_devices(&node(name), (0..*gpus).map(device).collect()).unwrap();
        }
        Self { ledger }
    }

    fn see(&mut self, name: &str, demand: Demand, state: ObservedPhase, disruption_info: DisruptionInfo) {
        let shown = Some(ObservedDisruptionInfo { disruption_info, ..ObservedDisruptionInfo::default() });
        let key = PodKey::parse("default", name).unwrap();
        self.ledger.see(PodObservation { uid: uid(name), key, demand, state, observed: shown });
    }

    fn gated(&mut self, name: &str, demand: Demand) {
        self.member(name, demand, DisruptionInfo::default());
    }

    fn member(&mut self, name: &str, demand: Demand, disruption_info: DisruptionInfo) {
        let waiting = ObservedWaiting { gate: SchedulingGate::Planned, ..ObservedWaiting::default() };
        self.see(name, demand, ObservedPhase::Waiting(waiting), disruption_info);
    }

    fn refused(&mut self, name: &str, demand: Demand, asked: &[&str]) {
        self.see(name, demand, ObservedPhase::Waiting(ObservedWaiting::default()), DisruptionInfo::default());
        let snapshot = self.ledger.snapshot();
        let asked = snapshot.set_of(asked.iter().map(|name| snapshot.place_of(name).unwrap()));
        self.ledger.note_refused(&uid(name), Some(asked));
    }

    fn bound(&mut self, name: &str, on: &str, gpu: u32, demand: Demand) {
        let devices = Some(Arc::from([GpuUuid::parse(&format!("GPU-{on}-{gpu}")).unwrap()]));
        let ran = Some(Millis::seconds(600));
        let state = ObservedPhase::Bound { node: node(on), devices, starting: false, ran };
        let owner = OwnerUid::parse(&format!("owner-of-{name}")).ok();
        self.see(name, demand, state, DisruptionInfo { owner, ..DisruptionInfo::default() });
    }

    fn pass(&mut self, seconds: u64) {
        let now = self.ledger.now() + Millis::seconds(seconds);
        self.ledger.expire(now);
    }

    /// Each step in words: `a on n`, `a on n after b c`, `a waits: insufficient-vram`.
    fn plan(&mut self) -> Vec<String> {
        steps(&mut self.ledger, 64).into_iter().map(describe).collect()
    }

    fn plan_by(&mut self, kube_filters: &FilterSnapshot) -> Vec<String> {
        let pending = self.ledger.pending(64);
        plan(self.ledger.clone(), kube_filters, &pending).into_iter().map(describe).collect()
    }
}

fn describe(step: PlanStep) -> String {
    let place = |PlannedPlacement { uid, reservation, .. }: &PlannedPlacement| {
        let victims: Vec<&str> = reservation.victims.iter().map(PodUid::as_str).collect();
        let after = if victims.is_empty() { String::new() } else { format!(" after {}", victims.join(" ")) };
        format!("{uid} on {}{after}", reservation.node)
    };
    match step {
        PlanStep::Place(places) => places.iter().map(place).collect::<Vec<_>>().join(", "),
        PlanStep::Wake { uid, .. } => format!("{uid} asks again"),
        PlanStep::Wait { uid, why, .. } => format!("{uid} waits: {}", why.code()),
    }
}

fn group(name: &str, size: Option<u32>) -> DisruptionInfo {
    let key = GroupKey { namespace: "default".into(), kind: GroupKind::Stowage, name: name.into() };
    DisruptionInfo { group: Some(key), group_size: size, ..DisruptionInfo::default() }
}

fn with_placement(placement: GroupPlacement) -> Policy {
    let mut policy = Policy::default();
    policy.planning.groups.placement = placement;
    policy
}

#[test]
fn gated_pods_are_placed_in_one_run_each_beside_the_earlier_ones() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    for name in ["a", "b", "c"] {
        cluster.gated(name, job(40));
    }
    assert_eq!(cluster.plan(), ["a on m", "b on n", "c waits: insufficient-vram"]);
}

#[test]
fn a_higher_priority_is_placed_first_whatever_the_arrival_order() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.gated("early", job(60));
    cluster.pass(5);
    cluster.gated("late", shared(60, 100));
    assert_eq!(cluster.plan(), ["late on n", "early waits: insufficient-vram"]);
}

#[test]
fn if_the_nodes_sum_suffices_but_no_gpu_does_only_the_cheapest_pods_are_evicted() {
    let mut cluster = LedgerCluster::new(&[("n", 2)]);
    cluster.bound("a", "n", 0, job(40));
    cluster.bound("b", "n", 1, job(30));
    cluster.bound("c", "n", 1, job(20));
    cluster.refused("serving", shared(50, 100), &["n"]);
    assert!(cluster.plan().is_empty(), "the scheduler has its turn first");
    cluster.pass(2);
    assert_eq!(cluster.plan(), ["serving on n after b"]);
}

#[test]
fn no_pod_is_evicted_on_a_node_that_the_scheduler_did_not_name() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("cheap", "m", 0, job(72));
    cluster.bound("dear", "n", 0, job(72));
    cluster.bound("dearer", "n", 0, job(0));
    cluster.refused("serving", shared(50, 100), &["n"]);
    cluster.pass(2);
    assert_eq!(cluster.plan(), ["serving on n after dear"]);
}

#[test]
fn no_pod_is_evicted_where_the_kube_filters_refuse_with_any_victims() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("on-n", "n", 0, job(72));
    cluster.bound("on-m", "m", 0, job(72));
    cluster.gated("serving", shared(50, 100));
    let mut view = ClusterFilters::default();
    let wants =
        Requirements { node_selector: [("zone".into(), "a".into())].into(), ..Requirements::default() };
    view.set_waiting(uid("serving"), wants);
    let machine = |name: &str, zone: &str| crate::scheduling::kube_filters::FilterNode {
        name: node(name),
        labels: Arc::new([("zone".into(), zone.into())].into()),
        taints: Arc::new([]),
        allocatable: Default::default(),
        pods: 110,
    };
    view.set_machine(machine("n", "b"));
    view.set_machine(machine("m", "a"));
    assert_eq!(cluster.plan_by(&view.snapshot()), ["serving on m after on-m"]);
    view.set_machine(machine("m", "b"));
    cluster.pass(5);
    assert_eq!(cluster.plan_by(&view.snapshot()), ["serving waits: no-node"]);
}

#[test]
fn with_unknown_kube_filters_no_pod_is_evicted_and_none_nominated() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.gated("a", shared(50, 100));
    let mut kube_filters = ClusterFilters::default();
    let roomy = roomy(&cluster.ledger);
    assert_eq!(cluster.plan_by(&roomy), ["a on n"]);
    kube_filters.set_waiting(
        uid("a"),
        Requirements { unjudged: Some(UnsupportedRule::TopologySpread), ..Requirements::default() },
    );
    kube_filters.set_machine(crate::scheduling::kube_filters::FilterNode {
        name: node("n"),
        labels: Arc::default(),
        taints: Arc::new([]),
        allocatable: Default::default(),
        pods: 110,
    });
    assert_eq!(cluster.plan_by(&kube_filters.snapshot()), ["a waits: unsupported-filter"]);
}

#[test]
fn a_pod_that_may_not_preempt_waits() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.bound("job", "n", 0, job(72));
    cluster.gated("polite", Demand { may_preempt: false, ..shared(50, 100) });
    assert_eq!(cluster.plan(), ["polite waits: insufficient-vram"]);
}

#[test]
fn vram_reserved_for_one_pod_is_not_planned_for_another() {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.bound("job", "n", 0, job(72));
    cluster.gated("first", shared(50, 100));
    assert_eq!(placed(&mut cluster.ledger), [uid("first")]);
    cluster.gated("second", shared(50, 100));
    cluster.pass(1);
    assert_eq!(cluster.plan(), ["second waits: insufficient-vram"]);
}

#[test]
fn a_group_is_placed_whole_or_not_at_all() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(
        cluster.plan(),
        ["a waits: group-too-large", "b waits: group-too-large", "c waits: group-too-large"]
    );
    cluster.gated("single", job(60));
    assert_eq!(cluster.plan()[0], "single on m", "the group holds nothing");
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 2)]);
    for name in ["a", "b"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(cluster.plan(), ["a waits: group-incomplete", "b waits: group-incomplete"]);
    cluster.member("c", job(60), group("trio", Some(3)));
    cluster.pass(5);
    assert_eq!(cluster.plan(), ["a on n, b on m, c on m"]);
}

#[test]
fn a_group_without_a_declared_size_is_the_pods_that_exist_for_a_while() {
    let mut cluster = LedgerCluster::new(&[("n", 4)]);
    cluster.member("a", job(60), group("g", None));
    assert!(cluster.plan().is_empty());
    cluster.member("b", job(60), group("g", None));
    cluster.pass(3);
    assert_eq!(cluster.plan(), ["a on n, b on n"]);
}

#[test]
fn a_group_is_packed_on_the_fewest_nodes_when_the_policy_says_so() {
    let nodes = [("k", 1), ("l", 1), ("m", 1), ("n", 3)];
    let mut cluster = LedgerCluster::by(with_placement(GroupPlacement::FewestNodes), &nodes);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert_eq!(cluster.plan(), ["a on n, b on n, c on n"]);
}

#[test]
fn a_group_is_placed_in_one_island_or_waits_when_the_policy_says_so() {
    let mut cluster = LedgerCluster::by(with_placement(GroupPlacement::OneIsland), &[("n", 4), ("m", 8)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    let steps = steps(&mut cluster.ledger, 64);
    let [PlanStep::Place(places)] = &steps[..] else { panic!("{steps:?}") };
    let gpus: Vec<&str> = places.iter().map(|place| place.reservation.devices[0].as_str()).collect();
    assert_eq!(gpus, ["GPU-m-0", "GPU-m-1", "GPU-m-2"], "an island of n has two GPUs");
    let mut cluster = LedgerCluster::by(with_placement(GroupPlacement::OneIsland), &[("n", 4)]);
    for name in ["a", "b", "c"] {
        cluster.member(name, job(60), group("trio", Some(3)));
    }
    assert!(cluster.plan().iter().all(|step| step.ends_with("waits: group-too-large")));
}

#[test]
fn a_group_evicts_for_all_its_members_or_for_none() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(60));
    cluster.bound("k", "m", 0, shared(60, 0));
    for name in ["a", "b"] {
        cluster.member(name, shared(50, 100), group("pair", Some(2)));
    }
    assert_eq!(cluster.plan(), ["a waits: group-too-large", "b waits: group-too-large"], "serving stays");
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(60));
    cluster.bound("k", "m", 0, job(60));
    for name in ["a", "b"] {
        cluster.member(name, shared(50, 100), group("pair", Some(2)));
    }
    assert_eq!(cluster.plan(), ["a on m after k, b on n after j"]);
}

#[test]
fn the_same_ledger_gives_the_same_plan() {
    let mut cluster = LedgerCluster::new(&[("n", 2), ("m", 2)]);
    for name in ["a", "b", "c", "d", "e"] {
        cluster.gated(name, job(50));
    }
    let once = steps(&mut cluster.ledger, 64);
    assert_eq!(steps(&mut cluster.ledger, 64), once);
    assert_eq!(once.len(), 5);
}

fn consolidating(gain: Millis) -> Policy {
    let mut policy = Policy::default();
    policy.planning.consolidation = Some(Consolidation { gain });
    policy
}

/// Two nodes, each half full of a job; neither has free VRAM for a pod that never preempts.
fn halves(policy: Policy) -> LedgerCluster {
    let mut cluster = LedgerCluster::by(policy, &[("n", 1), ("m", 1)]);
    cluster.bound("j", "n", 0, job(30));
    cluster.bound("k", "m", 0, job(40));
    cluster.gated("polite", Demand { may_preempt: false, ..shared(60, 100) });
    cluster
}

#[test]
fn consolidation_moves_pods_that_fit_elsewhere_for_a_pod_that_fits_nowhere() {
    assert_eq!(halves(Policy::default()).plan(), ["polite waits: insufficient-vram"], "off by default");
    let mut cluster = halves(consolidating(Millis::seconds(36_000)));
    let steps = steps(&mut cluster.ledger, 64);
    let [PlanStep::Place(places)] = &steps[..] else { panic!("{steps:?}") };
    let place = &places[0];
    assert_eq!(
        (place.by, place.reservation.node.as_str()),
        (EvictionRight::Moves, "n"),
        "the smaller job moves"
    );
    assert!(
        cluster.ledger.clone().reserve(&place.uid, place.reservation.clone()).is_err(),
        "by no other right"
    );
    assert_eq!(place.take(&mut cluster.ledger), Ok(()));
}

#[test]
fn consolidation_moves_no_pod_at_a_loss_or_without_another_place() {
    assert_eq!(halves(consolidating(Millis::seconds(60))).plan(), ["polite waits: insufficient-vram"]);
    let mut cluster = halves(consolidating(Millis::seconds(36_000)));
    cluster.bound("l", "n", 0, job(20));
    cluster.bound("o", "m", 0, job(20));
    assert_eq!(cluster.plan(), ["polite waits: insufficient-vram"], "a moved pod would have no place");
}

/// A serving engine and two jobs on one GPU.
fn pressed(cluster: &mut LedgerCluster, kv_percent: u8, queue: u32) {
    let pressure = EngineLoad::of(Percent::new(kv_percent), Some(queue));
    let uuid = GpuUuid::parse("GPU-n-0").unwrap();
    let gpu = GpuReading { uuid, used: Some(Bytes::ZERO), attributed: Vec::new(), engine_load: pressure };
    let sampled = cluster.ledger.now();
    cluster.ledger.read(&node("n"), NodeReading { sampled, gpus: vec![gpu], ..NodeReading::default() });
}

fn shares_a_gpu() -> LedgerCluster {
    let mut cluster = LedgerCluster::new(&[("n", 1)]);
    cluster.bound("engine", "n", 0, shared(30, 100));
    cluster.bound("small", "n", 0, job(10));
    cluster.bound("large", "n", 0, job(20));
    cluster
}

fn who_leaves(cluster: &LedgerCluster, watch: &mut PressureWatch) -> Vec<String> {
    watch.look(&cluster.ledger, &BTreeSet::new()).into_iter().map(|relief| relief.uid.to_string()).collect()
}

#[test]
fn lasting_pressure_evicts_an_engines_neighbours_one_by_one_cheapest_first() {
    let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    let nobody: [&str; 0] = [];
    pressed(&mut cluster, 97, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), nobody, "a spike evicts nobody");
    for _ in 0..9 {
        cluster.pass(1);
        pressed(&mut cluster, 97, 0);
        assert_eq!(who_leaves(&cluster, &mut watch), nobody);
    }
    cluster.pass(1);
    pressed(&mut cluster, 85, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), ["small"], "it is not over at 85 %");
    cluster.ledger.release(&uid("small"));
    assert_eq!(who_leaves(&cluster, &mut watch), nobody, "that has time to help");
    cluster.pass(10);
    pressed(&mut cluster, 85, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), ["large"]);
    cluster.ledger.release(&uid("large"));
    cluster.pass(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), nobody, "the engine itself stays");
}

#[test]
fn pressure_that_falls_below_its_end_is_timed_anew() {
    let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    for (seconds, kv, queue) in [(0, 97, 0), (9, 70, 0), (1, 97, 0), (9, 97, 0), (5, 20, 5)] {
        cluster.pass(seconds);
        pressed(&mut cluster, kv, queue);
        assert_eq!(who_leaves(&cluster, &mut watch), Vec::<String>::new(), "{seconds} {kv}");
    }
    pressed(&mut cluster, 20, 80);
    who_leaves(&cluster, &mut watch);
    cluster.pass(10);
    pressed(&mut cluster, 20, 80);
    assert_eq!(who_leaves(&cluster, &mut watch), ["small"], "a queue presses as well");
}

#[test]
fn an_unmeasured_engine_evicts_no_neighbour() {
    let (cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    assert!(watch.look(&cluster.ledger, &BTreeSet::new()).is_empty());
}

#[test]
fn pressure_evicts_no_group_member_and_no_pod_with_an_exhausted_budget() {
    let (mut cluster, mut watch) = (shares_a_gpu(), PressureWatch::default());
    let on_n = || ObservedPhase::Bound {
        node: node("n"),
        devices: Some(Arc::from([GpuUuid::parse("GPU-n-0").unwrap()])),
        starting: false,
        ran: Some(Millis::seconds(600)),
    };
    cluster.see("small", job(10), on_n(), group("g", None));
    cluster.see("smaller", job(5), on_n(), group("g", None));
    pressed(&mut cluster, 97, 0);
    who_leaves(&cluster, &mut watch);
    cluster.pass(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), ["large"], "a group leaves whole or not at all");
    let namespace = cluster.ledger.pod_state(&uid("large")).unwrap().demand.traits.namespace.clone();
    let budget = |allowed| DisruptionBudget {
        namespace: namespace.clone(),
        name: "one".into(),
        selector: Selector::EVERYTHING,
        allowed,
    };
    cluster.ledger.set_budget(budget(0));
    cluster.pass(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), Vec::<String>::new());
    cluster.ledger.set_budget(budget(1));
    cluster.pass(10);
    pressed(&mut cluster, 97, 0);
    assert_eq!(who_leaves(&cluster, &mut watch), ["large"]);
}

#[test]
fn nodes_named_by_the_scheduler_allow_a_free_placement_and_no_eviction() {
    let mut cluster = LedgerCluster::new(&[("n", 1), ("m", 1)]);
    cluster.refused("a", shared(50, 100), &["n"]);
    let mut kube_filters = ClusterFilters::default();
    let spreads =
        || Requirements { unjudged: Some(UnsupportedRule::TopologySpread), ..Requirements::default() };
    kube_filters.set_waiting(uid("a"), spreads());
    for name in ["n", "m"] {
        kube_filters.set_machine(crate::scheduling::kube_filters::FilterNode {
            name: node(name),
            labels: Arc::default(),
            taints: Arc::new([]),
            allocatable: Default::default(),
            pods: 110,
        });
    }
    cluster.pass(2);
    assert_eq!(cluster.plan_by(&kube_filters.snapshot()), ["a on n"], "m was not asked about");
    cluster.bound("job", "n", 0, job(60));
    assert_eq!(
        cluster.plan_by(&kube_filters.snapshot()),
        ["a waits: insufficient-vram"],
        "who leaves may be what it came for"
    );
}
