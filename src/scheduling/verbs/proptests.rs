//! The order of the inputs determines everything: inputs that are stored and applied again lead to the same state, and a state
//! that is stored and loaded goes on as the one it was.

mod recorded_cluster;

use super::bind::{BindAnswer, BindAsked};
use super::binding::{BindingAnswer, BindingAnswered, BindingRead, BindingStage, PodRead, SettlingAsked};
use super::filter::{FilterAsked, decided, filter};
use super::namespaces::{
    NamespaceChange, NamespaceDeleted, NamespaceObserved, NamespacesListed, NamespacesPrepared,
};
use super::observe::{
    DevicesReported, EngineStartObserved, FilterPod, FilterPodObserved, NodeDeleted, NodeImagesObserved,
    NodeObserved, PodDeleted, PodObserved, ReadingReported,
};
use super::preempt::{
    LeftToPlanner, OfferedNode, PreemptAsked, PreemptDecided, PreemptDecision, preempt, preempt_in_full,
};
use super::prioritize::{PrioritizeAsked, prioritize};
use super::request::VerbRequest;
use super::slices::{SliceDeleted, SliceObserved};
use super::storage::{StorageDeleted, StorageObserved};
use super::tick::{LeadershipBegan, PolicySet, TakeOveruse, Tick};
use super::wait::{LoansRecalled, NoPlacementFound, PodRequeued, PutBack, ReservePlaces, TakePending};
use super::{Change, Cluster, ClusterState, Input};
use crate::ids::{LeaderEpoch, ModelId, PodUid};
use crate::scheduling::audit::ledger::audit;
use crate::scheduling::explaining::fleet::Fleet;
use crate::scheduling::explaining::fleet::history::FleetSums;
use crate::scheduling::kube_filters::volumes::{ClaimBinding, VolumeClaim, VolumePlace};
use crate::scheduling::kube_filters::{
    Amounts, FilterNode, NodeFootprint, Requirements, StorageKind, StorageObject,
};
use crate::scheduling::ledger::{DeviceSlice, DeviceUuids, Ledger, PreparedPolicy, PublishedDevices};
use crate::scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, PodPhase, StartProgress};
use crate::scheduling::placing::score_cache::ScoreCache;
use crate::scheduling::planning::{PlanBounds, PlanStep, plan_within};
use crate::scheduling::policy::namespaces::Labels;
use crate::scheduling::policy::{
    Class, Match, NamespaceSelector, OveruseRule, Policy, Preemptibility, SpareRule, Tenant, Window,
    built_in_classes,
};
use crate::scheduling::testkit::numbered::{key, node_name, uid};
use crate::scheduling::testkit::{demand_of, lending, unit_gpu};
use crate::scheduling::vocabulary::classification::PodTraits;
use crate::scheduling::vocabulary::demand::{Demand, Sharing};
use crate::scheduling::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::scheduling::vocabulary::image::{ImageId, NodeImage};
use crate::scheduling::vocabulary::node::NodeKind;
use crate::scheduling::vocabulary::node_reading::{
    EngineLoad, GpuReading, NodeReading, OverGrant, SleepState,
};
use crate::units::{Bytes, Millis, Moment, Percent};
use proptest::prelude::*;
use recorded_cluster::RecordedCluster;
use std::sync::Arc;

/// What happens to a cluster from outside.
#[derive(Debug, Clone)]
enum OutsideEvent {
    Arrive(u8, u64, i32),
    Schedule(u8),
    Preempt(u8),
    Bind(u8, u8, BindingAnswer),
    Read(u8, u8),
    Delete(u8),
    Start(u8, u8),
    Images(u8, Option<u8>),
    Report(u8, u64),
    NodeGone(u8),
    Slice(u8, i64, i64, bool),
    SliceGone(u8),
    Claim(bool),
    ClaimGone,
    Plan,
    /// Sleeping engines get back what they lent, or need not any more.
    Recall(u8, u8),
    /// The policy that is set next, or the change of labels, is prepared on the cluster as it is now.
    Copy,
    SetPolicy(u16),
    Label(u8, Option<u8>),
    ListNamespaces(u8),
    Pass(u64),
}

/// Pods are in the first of them.
fn namespace(name: u8) -> String {
    if name == 0 { "default".into() } else { format!("other-{name}") }
}

fn labelled(label: u8) -> Arc<Labels> {
    Arc::new([("team".to_owned(), label.to_string())].into())
}

/// A policy under which the pods of a namespace are what its labels say.
fn selecting() -> Policy {
    let selector = |label: &str| NamespaceSelector {
        match_labels: [("team".into(), label.into())].into(),
        ..Default::default()
    };
    let own = |label: &str, eviction| Class {
        matches: Match { namespace_selector: Some(selector(label)), ..Match::default() },
        eviction,
        shares_with: Some(Vec::new()),
        ..Class::named(&format!("own-{label}"))
    };
    let mut classes = vec![own("1", Preemptibility::ForHigherPriority), own("2", Preemptibility::Never)];
    classes.extend(built_in_classes());
    let tenant = Tenant { namespace_selector: Some(selector("1")), ..Tenant::named("one", &[]) };
    Policy::default().with_classes(classes).unwrap().with_tenants(vec![tenant]).unwrap()
}

fn event() -> impl Strategy<Value = OutsideEvent> {
    let (pod, node) = (0u8..8, 0u8..3);
    let answer = prop_oneof![
        3 => Just(BindingAnswer::Written),
        1 => Just(BindingAnswer::Refused),
        1 => Just(BindingAnswer::Conflict),
        1 => Just(BindingAnswer::Unknown),
    ];
    prop_oneof![
        4 => (pod.clone(), 1u64..90, -3i32..3).prop_map(|(pod, vram, priority)| OutsideEvent::Arrive(pod, vram, priority)),
        6 => pod.clone().prop_map(OutsideEvent::Schedule),
        3 => pod.clone().prop_map(OutsideEvent::Preempt),
        6 => (pod.clone(), node.clone(), answer).prop_map(|(pod, node, answer)| OutsideEvent::Bind(pod, node, answer)),
        2 => (pod.clone(), 0u8..4).prop_map(|(pod, what)| OutsideEvent::Read(pod, what)),
        2 => pod.clone().prop_map(OutsideEvent::Delete),
        4 => (pod, 0u8..5).prop_map(|(pod, what)| OutsideEvent::Start(pod, what)),
        2 => (node.clone(), prop::option::of(0u8..8)).prop_map(|(node, images)| OutsideEvent::Images(node, images)),
        2 => (node.clone(), 0u64..100).prop_map(|(node, used)| OutsideEvent::Report(node, used)),
        1 => node.clone().prop_map(OutsideEvent::NodeGone),
        2 => (node.clone(), 1i64..3, 1i64..3, any::<bool>())
            .prop_map(|(node, generation, of, shared)| OutsideEvent::Slice(node, generation, of, shared)),
        2 => node.prop_map(OutsideEvent::SliceGone),
        1 => any::<bool>().prop_map(OutsideEvent::Claim),
        1 => Just(OutsideEvent::ClaimGone),
        2 => Just(OutsideEvent::Plan),
        2 => (0u8..8, 0u8..8).prop_map(|(begin, end)| OutsideEvent::Recall(begin, end)),
        1 => Just(OutsideEvent::Copy),
        1 => (1u16..9).prop_map(OutsideEvent::SetPolicy),
        2 => (0u8..2, prop::option::of(0u8..3)).prop_map(|(name, label)| OutsideEvent::Label(name, label)),
        1 => (0u8..3).prop_map(OutsideEvent::ListNamespaces),
        3 => (1u64..40_000).prop_map(OutsideEvent::Pass),
    ]
}

/// An engine that sleeps on one GPU and may be woken for a new pod.
fn sleeping(node: u8, index: u32) -> EngineReading {
    EngineReading {
        pod: uid(200),
        model: ModelId::parse("m").unwrap(),
        gpus: [unit_gpu(node, index).uuid].into(),
        state: EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
        reusable_in: Some(PodTraits::default().namespace.into()),
        seen: Moment(u64::MAX),
    }
}

fn image(n: u8) -> ImageId {
    ImageId::of(&format!("engine:{n}")).unwrap()
}

/// Inputs that the core took, as text, from a cluster of [`lending`]'s policy on.
pub(crate) fn taken_inputs(most: usize) -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(event(), 1..most).prop_map(|events| {
        let mut recorded = RecordedCluster::new();
        events.iter().for_each(|event| recorded.happens(event));
        recorded.inputs
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn inputs_that_are_stored_and_applied_again_lead_to_the_same_state(
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut recorded = RecordedCluster::new();
        events.iter().for_each(|event| recorded.happens(event));
        let mut again = Cluster::new(Arc::new(lending()));
        for input in &recorded.inputs {
            again.apply(serde_json::from_str::<Input>(input).unwrap());
        }
        prop_assert_eq!(audit(&recorded.cluster), []);
        prop_assert_eq!(FleetSums::of_ledger(&recorded.cluster), FleetSums::of(&Fleet::of(&recorded.cluster, 0)));
        prop_assert_eq!(recorded.state(), RecordedCluster::of(again).state());
    }

    #[test]
    fn a_loaded_cluster_goes_on_as_the_one_that_was_stored(
        before in prop::collection::vec(event(), 1..60),
        after in prop::collection::vec(event(), 1..40),
    ) {
        let mut stored = RecordedCluster::new();
        before.iter().for_each(|event| stored.happens(event));
        let text = stored.state().to_string();
        let state: ClusterState = serde_json::from_str(&text).unwrap();
        let mut loaded = RecordedCluster::of(Cluster::load(state).unwrap());
        prop_assert_eq!(stored.state(), loaded.state());
        stored.decisions.clear();
        for event in &after {
            stored.happens(event);
            loaded.happens(event);
            prop_assert_eq!(&stored.decisions, &loaded.decisions, "after {:?}", event);
        }
        prop_assert_eq!(stored.state(), loaded.state());
    }
}
