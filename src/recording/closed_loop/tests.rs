//! Loops over recordings that are made here: a few pods on two nodes of one GPU each.

use super::comparison::{Comparison, PolicyComparison};
use super::demand::RecordedDemand;
use super::policies::LoopPolicy;
use crate::entry::{Checkpoint, Entry, Gap, NumberedInput, SegmentHeader};
use crate::read::RecordingPart;
use std::sync::Arc;
use stowage_scheduling::ids::{NodeName, OwnerUid, PodUid};
use stowage_scheduling::kube_filters::{FilterNode, NodeFootprint, Requirements, ResourceList};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::{Consolidation, PackingPolicy, Policy};
use stowage_scheduling::testkit::{LedgerCluster, demand_of, key, node, uid};
use stowage_scheduling::units::{Bytes, MilliCpu, Millis, Moment, Percent};
use stowage_scheduling::verbs::Input;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked};
use stowage_scheduling::verbs::binding::{BindingAnswer, BindingAnswered, BindingStage};
use stowage_scheduling::verbs::filter::{FilterAsked, filter, offer_of, refusal_of};
use stowage_scheduling::verbs::observe::{
    FilterPod, FilterPodObserved, NodeDeleted, NodeObserved, PodDeleted, PodObserved,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::disruption_info::{DisruptionInfo, ObservedDisruptionInfo};
use stowage_scheduling::vocabulary::headroom::Headroom;
use stowage_scheduling::vocabulary::node::NodeKind;

/// A Stowage that records: what is done to it is what the recording says.
struct Recorded {
    cluster: LedgerCluster,
    parts: Vec<RecordingPart>,
    numbered: u64,
}

fn gib(gib: u64) -> Demand {
    demand_of(Bytes::gib(gib).0, 1, Sharing::Shared, 0)
}

/// What a pod takes of its node beside GPUs.
fn empty_footprint(node: NodeName) -> NodeFootprint {
    let Requirements {
        amounts,
        ports,
        repels,
        ..
    } = Requirements::default();
    NodeFootprint {
        node,
        amounts,
        ports: ports.into(),
        repels,
        volumes: 0,
        claims_devices: false,
    }
}

impl Recorded {
    /// Two nodes, `a` with one GPU and `b` with two, each of which has 72 GiB for pods.
    fn new() -> Self {
        let mut cluster =
            LedgerCluster::with_policy_and_nodes(Policy::default(), &[("a", 1), ("b", 2)]);
        for name in ["a", "b"] {
            let allocatable = ResourceList {
                cpu: MilliCpu(1 << 40),
                memory: Bytes::gib(1 << 20),
                ..ResourceList::default()
            };
            let (labels, taints) = (Arc::default(), Arc::new([]));
            let machine = FilterNode {
                name: node(name),
                labels,
                taints,
                allocatable,
                pods: 110,
            };
            cluster.apply(NodeObserved {
                machine: Some(machine),
                ..NodeObserved::new(node(name), NodeKind::Stowage)
            });
        }
        let header = SegmentHeader {
            stowage: "0".into(),
            wall_ms: 1_700_000_000_000,
            began: cluster.ledger().now(),
        };
        let checkpoint = Checkpoint {
            next: 0,
            after: Gap::Start,
            state: cluster.export(),
        };
        let parts = vec![
            RecordingPart::Segment(header),
            RecordingPart::Entry(Entry::Checkpoint(Box::new(checkpoint))),
        ];
        Self {
            cluster,
            parts,
            numbered: 0,
        }
    }

    fn note(&mut self, input: impl Into<Input>) {
        let (number, input) = (self.numbered, input.into());
        self.numbered += 1;
        self.parts
            .push(RecordingPart::Entry(Entry::Input(NumberedInput {
                number,
                input,
            })));
    }

    fn pass(&mut self, time: Millis) {
        let now = self.cluster.ledger().now() + time;
        self.cluster.apply(ClockAdvanced(now));
        self.parts.push(RecordingPart::Entry(Entry::Clock(now)));
    }

    /// The pod comes, and is bound at once if a node takes it. A controller makes it again if it is evicted.
    fn schedule_pod(&mut self, name: &str, demand: Demand) -> Option<String> {
        let owner = Some(OwnerUid::parse("batch").unwrap());
        let disruption_info = DisruptionInfo {
            owner,
            ..DisruptionInfo::default()
        };
        let wants = FilterPodObserved {
            uid: uid(name),
            pod: FilterPod::Waiting(Requirements::default()),
        };
        self.note(wants.clone());
        self.cluster.apply(wants);
        let shown = PodObserved(PodObservation {
            uid: uid(name),
            key: key(name),
            demand: demand.clone(),
            state: ObservedPhase::Waiting(ObservedWaiting::default()),
            observed: Some(ObservedDisruptionInfo {
                disruption_info,
                ..ObservedDisruptionInfo::default()
            }),
        });
        self.note(shown.clone());
        self.cluster.apply(shown);
        let asked = FilterAsked(VerbRequest {
            uid: uid(name),
            key: key(name),
            demand,
            waiting: ObservedWaiting::default(),
            disruption: None,
        });
        self.note(asked.clone());
        let view = self.cluster.apply(asked);
        let names: Vec<String> = view
            .snapshot
            .nodes()
            .iter()
            .map(|node| node.name.to_string())
            .collect();
        let mut scores =
            ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter(&view, names.iter().map(String::as_str), &mut scores);
        let Some(best) = list.best.first() else {
            let refused = refusal_of(&view, &list);
            self.note(refused.clone());
            self.cluster.apply(refused);
            return None;
        };
        let offered = offer_of(&view, best);
        self.note(offered.clone());
        self.cluster.apply(offered);
        let at = view.snapshot.nodes()[best.node_index].name.clone();
        let asked = BindAsked {
            uid: uid(name),
            key: key(name),
            node: at.clone(),
        };
        self.note(asked.clone());
        let Ok(BindAnswer::Write(decision)) = self.cluster.apply(asked) else {
            panic!("it passed filter")
        };
        let written = BindingAnswered {
            uid: uid(name),
            placement: decision.placement,
            stage: BindingStage::Request { is_new: true },
            answer: BindingAnswer::Written,
            max_commit_delay: Millis::default(),
        };
        self.note(written.clone());
        self.cluster.apply(written);
        let footprint = empty_footprint(at.clone());
        let pod = FilterPod::Bound {
            footprint,
            successor: None,
        };
        let bound = FilterPodObserved {
            uid: uid(name),
            pod,
        };
        self.note(bound.clone());
        self.cluster.apply(bound);
        Some(at.to_string())
    }

    fn end(&mut self, name: &str) {
        self.note(PodDeleted(uid(name)));
        self.cluster.apply(PodDeleted(uid(name)));
    }

    fn demand(&self) -> RecordedDemand {
        let mut demand = RecordedDemand::default();
        self.parts.iter().all(|part| demand.step(part).unwrap());
        demand
    }

    fn compare_with(&self, other: LoopPolicy) -> PolicyComparison {
        let demand = self.demand();
        let mut comparison = Comparison::new(&demand, other);
        self.parts.iter().all(|part| comparison.step(part).unwrap());
        comparison.finish().unwrap()
    }
}

/// The default policy, which keeps so many hundredths of each GPU's VRAM free.
fn with_headroom(percent: u8) -> LoopPolicy {
    let mut given = Policy::default();
    given.settings.headroom = Headroom::uniform(Percent::new(percent).unwrap());
    LoopPolicy {
        replacement: Some(given),
        packing_override: None,
    }
}

fn three_pods() -> Recorded {
    let mut recorded = Recorded::new();
    for name in ["x", "y", "z"] {
        assert!(recorded.schedule_pod(name, gib(60)).is_some());
        recorded.pass(Millis::seconds(10));
    }
    recorded
}

#[test]
fn the_recorded_policy_against_itself_differs_in_nothing_and_agrees_with_the_recording() {
    let mut recorded = three_pods();
    assert_eq!(
        recorded.schedule_pod("w", gib(60)),
        None,
        "all three GPUs are full"
    );
    recorded.pass(Millis::seconds(5));
    recorded.end("y");
    recorded.pass(Millis::seconds(20));
    let compared = recorded.compare_with(LoopPolicy::default());
    assert_eq!(compared.recorded, compared.other);
    assert!(
        compared.pods.iter().all(|pod| !pod.differs()),
        "{:#?}",
        compared.pods
    );
    assert_eq!(
        (compared.agreement.placements, compared.agreement.same_gpus),
        (3, 3)
    );
    assert_eq!(compared.lasted, Millis::seconds(55));
    let figures = &compared.recorded;
    assert_eq!(
        (figures.pods, figures.placed, figures.waiting_at_the_end),
        (4, 4, 0),
        "w follows on y: {figures:#?}"
    );
    assert!(
        figures.waits.longest >= Millis::seconds(5) && figures.waits.longest <= Millis::seconds(10),
        "{figures:#?}"
    );
}

#[test]
fn a_policy_under_which_pods_do_not_fit_leaves_them_waiting() {
    let compared = three_pods().compare_with(with_headroom(50));
    assert_eq!((compared.recorded.placed, compared.other.placed), (3, 0));
    assert_eq!(compared.other.waiting_at_the_end, 3);
    assert_eq!(
        compared.other.waits.longest,
        Millis::seconds(30),
        "until the end"
    );
    assert!(
        compared
            .pods
            .iter()
            .all(|pod| pod.differs() && pod.other.node.is_none())
    );
}

/// Nothing asked for what moved pods require of their nodes when it was recorded; they required it when they came.
#[test]
fn a_policy_that_moves_pods_moves_those_of_a_recording_of_one_that_does_not() {
    let mut recorded = Recorded::new();
    let job = |gib: u64| demand_of(Bytes::gib(gib).0, 1, Sharing::Shared, -10);
    for (name, gib) in [("ends", 50), ("beside", 22), ("y", 50), ("z", 50)] {
        assert!(recorded.schedule_pod(name, job(gib)).is_some(), "{name}");
        recorded.pass(Millis::seconds(1));
    }
    recorded.end("ends");
    let polite = Demand {
        may_preempt: false,
        ..demand_of(Bytes::gib(60).0, 1, Sharing::Shared, 100)
    };
    assert_eq!(recorded.schedule_pod("polite", polite), None);
    recorded.pass(Millis::seconds(60));

    let mut given = Policy::default();
    given.planning.consolidation = Some(Consolidation {
        gain: Millis::seconds(36_000),
    });
    let compared = recorded.compare_with(LoopPolicy {
        replacement: Some(given),
        packing_override: None,
    });
    assert_eq!(
        (
            compared.recorded.waiting_at_the_end,
            compared.recorded.evictions
        ),
        (1, 0)
    );
    assert_eq!(
        (compared.other.waiting_at_the_end, compared.other.evictions),
        (0, 1),
        "{compared:#?}"
    );
}

#[test]
fn a_pod_runs_as_long_as_it_did_wherever_it_starts() {
    let mut recorded = three_pods();
    recorded.end("x");
    recorded.pass(Millis::seconds(60));
    let demand = recorded.demand();
    assert_eq!(demand.total_runtime(&uid("x")), Some(Millis::seconds(30)));
    assert_eq!(demand.total_runtime(&uid("y")), None, "it runs on");
}

#[test]
fn a_pods_first_event_has_its_node_requirements() {
    let mut recorded = Recorded::new();
    assert!(recorded.schedule_pod("x", gib(60)).is_some());
    let demand = recorded.demand();
    let pod = &demand.pods[&uid("x")];
    assert_eq!(
        (pod.requirements.is_some(), pod.footprint.is_some()),
        (true, true)
    );
    assert_eq!(demand.pods.len(), 1);
}

#[test]
fn another_packing_policy_is_compared_without_a_policy_file() {
    let other = LoopPolicy {
        replacement: None,
        packing_override: Some(PackingPolicy::BestFit),
    };
    let compared = three_pods().compare_with(other);
    assert_eq!(compared.other.placed, 3);
}

#[test]
fn inputs_after_a_gap_are_left_out_and_the_comparison_says_so() {
    // The segments between are missing, or say that they are.
    for after in [Gap::None, Gap::Dropped(3)] {
        let mut recorded = three_pods();
        let state = recorded.cluster.export();
        let checkpoint = Checkpoint {
            next: 900,
            after,
            state,
        };
        recorded
            .parts
            .push(RecordingPart::Entry(Entry::Checkpoint(Box::new(
                checkpoint,
            ))));
        recorded.schedule_pod("w", gib(1));
        let compared = recorded.compare_with(LoopPolicy::default());
        assert!(compared.stops_at_gap, "{after:?}");
        assert_eq!(compared.recorded.pods, 3);
    }
}

#[test]
fn inputs_that_follow_from_no_decision_are_applied_as_recorded() {
    let mut recorded = Recorded::new();
    recorded.note(NodeDeleted(node("b")));
    recorded.cluster.apply(NodeDeleted(node("b")));
    recorded.pass(Millis::seconds(1));
    assert_eq!(recorded.schedule_pod("x", gib(60)).as_deref(), Some("a"));
    recorded.pass(Millis::seconds(1));
    let compared = recorded.compare_with(LoopPolicy::default());
    assert_eq!(compared.pods[0].other.node, Some(node("a")));
    let began: Moment = recorded.demand().began;
    assert_eq!(
        recorded.demand().pods[&PodUid::parse("x").unwrap()].arrived,
        began + Millis::seconds(1)
    );
}
