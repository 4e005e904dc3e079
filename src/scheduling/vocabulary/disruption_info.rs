//! What a pod shows that its eviction depends on: its last checkpoint, the group it leaves with, and what asks that it be left
//! alone.
//!
//! No part of what it asks for ([`super::demand`]): it may change while the pod runs, and no VRAM is counted by it. `evicting`
//! computes the price.

use super::is_default;
use crate::ids::OwnerUid;
use crate::units::{Millis, Moment};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Wall clocks that differ by less than this are one clock: a stamp of the next minute was written now.
const CLOCK_SKEW_TOLERANCE: Millis = Millis::seconds(60);

/// Moments that are computed from wall time waver by some milliseconds each time they are read.
const MOMENT_TOLERANCE: Millis = Millis::seconds(1);

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DisruptionInfo {
    pub checkpoint: Checkpoint,
    /// `karpenter.sh/do-not-disrupt: "true"`.
    pub do_not_disrupt: bool,
    /// `controller.kubernetes.io/pod-deletion-cost`: of pods that cost the same, those with less leave.
    pub deletion_cost: i32,
    /// Pods that are placed, and leave, together.
    pub group: Option<GroupKey>,
    /// How many of them it takes, if the pod says.
    pub group_size: Option<u32>,
    /// Its controller: what makes a new pod when this one is evicted.
    pub owner: Option<OwnerUid>,
    /// Index among its owner's pods, if they are numbered: a pod that is recreated has the index of the one before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// Kueue counts its quota: Stowage does not evict it, unless the policy says so.
    pub queue_managed: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub replacement: Replacement,
    /// The persistent volume claims that its replacement will have, too.
    #[serde(default, skip_serializing_if = "is_default")]
    pub claims: Arc<[Arc<str>]>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub health: PodHealth,
}

/// What takes the pod's place once it is evicted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// A pod that may run on any node, as far as the pod itself says.
    #[default]
    Anywhere,
    /// A pod of the same node: a DaemonSet's, or one whose selector or affinity names the node.
    SameNode,
    /// The pod itself: the kubelet runs it from a file, and an eviction deletes no more than its mirror.
    Static,
}

/// What the Eviction API makes a pod's disruption budget depend on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PodHealth {
    /// It is Ready, or nothing is known.
    #[default]
    Ready,
    Unready,
    /// None of its containers has run: no budget is asked.
    Pending,
}

/// When a pod last saved its work.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Checkpoint {
    /// None is known.
    #[default]
    Never,
    At(Moment),
}

/// Pods of one namespace that belong together, by the label that says so.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupKey {
    pub namespace: Arc<str>,
    pub kind: GroupKind,
    pub name: Arc<str>,
}

/// A member of a group that needs no placement: it is there and asks for no GPU, or it has succeeded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacelessMember {
    pub group: GroupKey,
    /// Its controller, as in [`DisruptionInfo::owner`].
    pub owner: Option<OwnerUid>,
    pub index: Option<u32>,
    pub has_ended: bool,
}

/// The API that names a group: two of one name by different APIs are two groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupKind {
    /// Kubernetes' own: `spec.schedulingGroup`.
    SchedulingGroup,
    Stowage,
    PodGroup,
    LeaderWorkerSet,
    KueuePodGroup,
    Volcano,
    JobSet,
    KubeflowJob,
    RayCluster,
    /// A Workload of Kueue whose pods no other key groups.
    KueueWorkload,
}

impl GroupKind {
    /// What a person calls it.
    pub fn describe(self) -> &'static str {
        match self {
            Self::SchedulingGroup => "PodGroup",
            Self::Stowage => "group",
            Self::PodGroup => "pod group",
            Self::LeaderWorkerSet => "LeaderWorkerSet group",
            Self::KueuePodGroup => "Kueue pod group",
            Self::Volcano => "Volcano pod group",
            Self::JobSet => "JobSet",
            Self::KubeflowJob => "Kubeflow job",
            Self::RayCluster => "Ray cluster",
            Self::KueueWorkload => "Kueue Workload",
        }
    }

    /// Whether its pods are placed as a whole. Those of a Workload start one by one, inside the quota that it has.
    pub(crate) fn is_placed_together(self) -> bool {
        self != Self::KueueWorkload
    }

    /// Whether its pods are planned as a whole once the scheduler has refused them, without the planner's gate: its controller
    /// knows no gate of Stowage's, and its pods say how many they are.
    pub(crate) fn is_planned_without_gate(self) -> bool {
        self == Self::LeaderWorkerSet
    }
}

impl fmt::Display for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}/{}",
            self.kind.describe(),
            self.namespace,
            self.name
        )
    }
}

/// The disruption info as a pod shows it, with ages instead of moments: the caller, which knows the time, makes moments of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedDisruptionInfo {
    /// All but the checkpoint.
    pub disruption_info: DisruptionInfo,
    pub stamp: CheckpointAge,
    pub leaving: Option<PodDeletion>,
    #[serde(default)]
    pub loan: ObservedLoan,
    /// Its condition says that it is evicted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shows_eviction: bool,
    /// Its condition says that GPUs are reserved for it, whether or not the rest of the condition can be read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shows_reservation: bool,
}

/// What a bound pod shows of VRAM that engines lend.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObservedLoan {
    /// Its Binding says that it borrows.
    pub borrows: bool,
    /// Its Binding says how much VRAM the driver keeps for its containers and lets them have.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_vram_limits: bool,
    /// What `stowage.dev/wake-requested` says: its engine is to wake, or is awake.
    pub wake_requested: Option<Arc<str>>,
    /// The request that the condition `stowage.dev/Wakeable` answers while it is true.
    pub wakeable: Option<Arc<str>>,
}

/// What a pod writes of its last checkpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointAge {
    #[default]
    None,
    Ago(Millis),
    /// It is still to come, by so much.
    Ahead(Millis),
    /// It is no time.
    Unreadable,
}

/// A pod that is being deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodDeletion {
    pub asked_ago: Millis,
    /// What it was given to leave.
    pub grace: Millis,
}

impl ObservedDisruptionInfo {
    /// The disruption info as it stands at `now`. A stamp of the future counts as one of now, one that cannot be read as none.
    pub fn at(&self, now: Moment) -> DisruptionInfo {
        let checkpoint = match self.stamp {
            CheckpointAge::None | CheckpointAge::Unreadable => Checkpoint::Never,
            CheckpointAge::Ago(age) => Checkpoint::At(now.before(age)),
            CheckpointAge::Ahead(_) => Checkpoint::At(now),
        };
        DisruptionInfo {
            checkpoint,
            ..self.disruption_info.clone()
        }
    }
}

impl ObservedDisruptionInfo {
    /// What a pod would have to show at `now` to have this disruption info.
    pub fn from_disruption_info(
        disruption_info: &DisruptionInfo,
        leaving: Option<Moment>,
        now: Moment,
    ) -> Self {
        let stamp = match disruption_info.checkpoint {
            Checkpoint::Never => CheckpointAge::None,
            Checkpoint::At(moment) => CheckpointAge::Ago(now.since(moment)),
        };
        let leaving = leaving.map(|by| PodDeletion {
            asked_ago: now.since(by),
            grace: by.since(now),
        });
        Self {
            disruption_info: DisruptionInfo {
                checkpoint: Checkpoint::Never,
                ..disruption_info.clone()
            },
            stamp,
            leaving,
            ..Self::default()
        }
    }
}

impl CheckpointAge {
    /// Whether it is further ahead than clocks differ.
    pub(crate) fn is_ahead(self) -> bool {
        matches!(self, Self::Ahead(by) if by > CLOCK_SKEW_TOLERANCE)
    }
}

impl PodDeletion {
    /// When its grace ends.
    pub fn deadline(self, now: Moment) -> Moment {
        now.before(self.asked_ago) + self.grace
    }
}

impl DisruptionInfo {
    /// The group with which the pod is placed, if it has one.
    pub fn placement_group(&self) -> Option<&GroupKey> {
        self.group
            .as_ref()
            .filter(|group| group.kind.is_placed_together())
    }

    /// Whether an eviction would free nothing, whatever its object says of its deletion.
    pub fn is_static(&self) -> bool {
        self.replacement == Replacement::Static
    }

    /// Whether it says the same as `other`, but for the wavering of clocks.
    pub fn is_nearly_equal(&self, other: &Self) -> bool {
        let is_near = match (self.checkpoint, other.checkpoint) {
            (Checkpoint::At(a), Checkpoint::At(b)) => a.since(b).max(b.since(a)) < MOMENT_TOLERANCE,
            (one, other) => one == other,
        };
        is_near
            && *self
                == Self {
                    checkpoint: self.checkpoint,
                    ..other.clone()
                }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(stamp: CheckpointAge) -> ObservedDisruptionInfo {
        ObservedDisruptionInfo {
            stamp,
            ..ObservedDisruptionInfo::default()
        }
    }

    #[test]
    fn a_stamp_of_the_future_is_one_of_now() {
        let now = Moment(1_000_000);
        let at = |stamp| shown(stamp).at(now).checkpoint;
        assert_eq!(
            at(CheckpointAge::Ahead(Millis::seconds(3600))),
            Checkpoint::At(now)
        );
        assert_eq!(
            at(CheckpointAge::Ago(Millis::seconds(10))),
            Checkpoint::At(Moment(990_000))
        );
        assert_eq!(at(CheckpointAge::Unreadable), Checkpoint::Never);
        assert!(CheckpointAge::Ahead(Millis::seconds(3600)).is_ahead());
        assert!(!CheckpointAge::Ahead(Millis::seconds(5)).is_ahead());
    }

    #[test]
    fn disruption_info_read_again_is_nearly_equal_and_a_new_checkpoint_is_not() {
        let first = shown(CheckpointAge::Ago(Millis(5_000))).at(Moment(100_000));
        let again = shown(CheckpointAge::Ago(Millis(6_003))).at(Moment(101_000));
        let newer = shown(CheckpointAge::Ago(Millis(1_000))).at(Moment(101_000));
        assert!(first.is_nearly_equal(&again) && again.is_nearly_equal(&first));
        assert!(!first.is_nearly_equal(&newer));
        assert!(!first.is_nearly_equal(&DisruptionInfo {
            do_not_disrupt: true,
            ..first.clone()
        }));
    }
}
