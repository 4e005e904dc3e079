//! Clusters to which things happen at random, for property tests: here, and of recordings.

mod recorded_cluster;

use crate::ids::{LeaderEpoch, ModelId, PodUid};
use crate::kube_filters::volumes::{ClaimBinding, VolumeClaim, VolumeTopology};
use crate::kube_filters::{
    FilterNode, NodeFootprint, Requirements, ResourceList, StorageKind, StorageObject,
};
use crate::ledger::{DeviceSlice, DeviceUuids, Ledger, PreparedPolicy, PublishedDevices};
use crate::ledger::{ObservedPhase, ObservedWaiting, PodObservation, PodPhase, StartProgress};
use crate::placing::score_cache::ScoreCache;
use crate::planning::{PlanBounds, PlanStep, plan_within};
use crate::policy::namespaces::Labels;
use crate::policy::{
    Class, Match, NamespaceSelector, OveruseRule, Policy, Preemptibility, SpareRule, Tenant,
    Window, built_in_classes,
};
use crate::testkit::numbered::{key, node_name, uid};
use crate::testkit::random::Random;
use crate::testkit::{demand_of, lending_policy, unit_gpu};
use crate::units::{Bytes, Millis, Moment, Percent};
use crate::verbs::bind::{BindAnswer, BindAsked};
use crate::verbs::binding::{
    BindingAnswer, BindingAnswered, BindingRead, BindingStage, PodRead, SettlingAsked,
};
use crate::verbs::filter::{FilterAsked, decision_of, filter};
use crate::verbs::namespaces::{
    NamespaceChange, NamespaceDeleted, NamespaceObserved, NamespacesListed, NamespacesPrepared,
};
use crate::verbs::observe::{
    DevicesReported, EngineStartObserved, FilterPod, FilterPodObserved, NodeDeleted,
    NodeImagesObserved, NodeObserved, PodDeleted, PodObserved, ReadingReported,
};
use crate::verbs::observe::{SliceDeleted, SliceObserved};
use crate::verbs::observe::{StorageDeleted, StorageObserved};
use crate::verbs::preempt::{
    LeftToPlanner, OfferedNode, PreemptAsked, PreemptDecided, PreemptDecision, preempt,
    preempt_examining_all,
};
use crate::verbs::prioritize::{PrioritizeAsked, prioritize};
use crate::verbs::request::VerbRequest;
use crate::verbs::tick::{LeadershipBegan, LeadershipEnded, PolicySet, TakeOveruse, Tick};
use crate::verbs::wait::{
    LoansRecalled, NoPlacementFound, PodRequeued, PutBack, ReservePlaces, TakePending,
};
use crate::verbs::{Change, Cluster, Input};
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::vocabulary::image::{ImageId, NodeImage};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading, OverGrant, SleepState};
pub use recorded_cluster::RecordedCluster;
use std::sync::Arc;

/// What happens to a cluster from outside.
#[derive(Debug, Clone)]
pub enum OutsideEvent {
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
    /// Another leader begins where this one ended.
    Lead,
    Pass(u64),
}

/// Pods are in the first of them.
fn namespace(name: u8) -> String {
    if name == 0 {
        "default".into()
    } else {
        format!("other-{name}")
    }
}

fn labelled(label: u8) -> Arc<Labels> {
    Arc::new([("team".to_owned(), label.to_string())].into())
}

/// A policy under which the pods of a namespace are what its labels say.
fn policy_with_namespace_selectors() -> Policy {
    let selector = |label: &str| NamespaceSelector {
        match_labels: [("team".into(), label.into())].into(),
        ..Default::default()
    };
    let own = |label: &str, eviction| Class {
        matches: Match {
            namespace_selector: Some(selector(label)),
            ..Match::default()
        },
        eviction,
        shares_with: Some(Vec::new()),
        ..Class::new(&format!("own-{label}"))
    };
    let mut classes = vec![
        own("1", Preemptibility::ForHigherPriority),
        own("2", Preemptibility::Never),
    ];
    classes.extend(built_in_classes());
    let tenant = Tenant {
        namespace_selector: Some(selector("1")),
        ..Tenant::new("one", &[])
    };
    Policy::default()
        .with_classes(classes)
        .unwrap()
        .with_tenants(vec![tenant])
        .unwrap()
}

impl OutsideEvent {
    /// The event that a random word chooses: over all words, each kind of event comes with all its values.
    pub fn from_word(word: u64) -> Self {
        let mut random = Random::seeded(word, 0);
        let mut below = |bound: u8| u8::try_from(random.below(bound.into())).expect("below a u8");
        let (kind, pod, node) = (below(50), below(8), below(3));
        match kind {
            0..4 => Self::Arrive(pod, 1 + u64::from(below(89)), i32::from(below(6)) - 3),
            4..10 => Self::Schedule(pod),
            10..13 => Self::Preempt(pod),
            13..19 => Self::Bind(
                pod,
                node,
                match below(6) {
                    0 => BindingAnswer::Refused,
                    1 => BindingAnswer::Conflict,
                    2 => BindingAnswer::Unknown,
                    _ => BindingAnswer::Written,
                },
            ),
            19..21 => Self::Read(pod, below(4)),
            21..23 => Self::Delete(pod),
            23..27 => Self::Start(pod, below(5)),
            27..29 => Self::Images(node, below(9).checked_sub(1)),
            29..31 => Self::Report(node, below(100).into()),
            31 => Self::NodeGone(node),
            32..34 => Self::Slice(
                node,
                1 + i64::from(below(2)),
                1 + i64::from(below(2)),
                below(2) == 1,
            ),
            34..36 => Self::SliceGone(node),
            36 => Self::Claim(below(2) == 1),
            37 => Self::ClaimGone,
            38..40 => Self::Plan,
            40..42 => Self::Recall(below(8), below(8)),
            42 => Self::Copy,
            43 => Self::SetPolicy(1 + u16::from(below(8))),
            44..46 => Self::Label(below(2), below(4).checked_sub(1)),
            46 => Self::ListNamespaces(below(3)),
            47 => Self::Lead,
            _ => Self::Pass(1 + u64::from(below(200)) * u64::from(below(200))),
        }
    }
}

/// An engine that sleeps on one GPU and may be woken for a new pod.
fn sleeping(node: u8, index: u32) -> EngineReading {
    EngineReading {
        pod: uid(200),
        model: ModelId::parse("m").unwrap(),
        gpus: [unit_gpu(node, index).uuid].into(),
        state: EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
        reusable_in: Some(PodTraits::default().namespace.into()),
        observed_at: Moment(u64::MAX),
    }
}

fn image(n: u8) -> ImageId {
    ImageId::from_reference(&format!("engine:{n}")).unwrap()
}

/// The inputs, as text, of a cluster under [`lending_policy()`] to which the events that these words choose were applied.
pub fn recorded_inputs(words: &[u64]) -> Vec<String> {
    let mut recorded = RecordedCluster::with_three_nodes();
    words
        .iter()
        .for_each(|word| recorded.apply_event(&OutsideEvent::from_word(*word)));
    recorded.inputs
}
