//! What the loop says to the world and hears from it, besides [status changes](super::status_change): Events about pods, a pod as a
//! fresh read shows it, and how a read or a write fails. Values and their texts; nothing here sends a request or decides.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid, comma_separated};
use crate::units::plural;
use crate::vocabulary::placement::Reservation;
use std::sync::Arc;

/// A pod as a fresh read shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreshPod {
    pub uid: PodUid,
    pub node: Option<NodeName>,
    pub devices: Option<Arc<[GpuUuid]>>,
    /// A container of it runs or has run.
    pub has_started: bool,
    /// It has ended, or is being deleted.
    pub is_over: bool,
    /// Its VRAM is lent by engines.
    pub borrows: bool,
    /// kube-scheduler's latest reason for not binding the pod.
    pub refusal: Option<Arc<str>>,
}

/// Why a read or a write failed, or may have failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlPlaneError {
    #[error("the pod is gone, or another one has its name now")]
    Gone,
    /// Nothing was written.
    #[error("{0}")]
    Refused(String),
    /// No answer, or an inconclusive one: it may have been written.
    #[error("{0}")]
    Unknown(String),
}

/// An Event about a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    pub key: PodKey,
    pub uid: PodUid,
    pub kind: PodEventReason,
    /// With figures; may differ between Events of the same kind.
    pub text: String,
}

/// The kind of an Event. For most kinds one Event per pod is published in a while.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(prefix = "Stowage", const_into_str)]
pub enum PodEventReason {
    Unschedulable,
    InvalidRequest,
    Reserved,
    ReservationEnded,
    /// Recorded on the victim.
    Evicted,
    /// No placement was found while it was gated.
    PlanFailed,
    /// Its group could not be placed as a whole.
    GroupFailed,
    /// Victims exist, but no more may be evicted within the minute.
    EvictionLimit,
    Unplaced,
    EditIgnored,
    /// Its processes run on other GPUs than recorded.
    Drift,
    /// Its processes use GPUs of a node of Stowage's, and it was granted none.
    Ungranted,
    /// Its processes use more VRAM than it was granted.
    OverGrant,
    /// The driver lets its containers have more VRAM of a GPU than its Binding wrote as their limits.
    LimitNotKept,
    /// Its engine takes longer for a token than its class allows, beside nobody.
    LatencyLimitTooLow,
    /// What it was granted is another part of one GPU than of another, and its engine is told the smallest.
    UnevenGpus,
    /// A container's name is too long for the annotation that names its GPUs to NVIDIA's NRI plugin.
    NoNriAnnotation,
    /// It will be evicted because its processes use more VRAM than it was granted.
    Overuse,
    /// A GPU of the pod is gone, unhealthy, smaller or partitioned.
    GpuLost,
    /// Its engine woke while other pods had the VRAM that it lent.
    WokeUnasked,
    /// VRAM allocated to it on a GPU was also allocated to another pod.
    GpuConflict,
    /// A DRA driver publishes the GPUs of its node, which it got from Stowage.
    PublishedByDra,
    /// Recorded on Stowage's own pod.
    PolicyApplied,
    /// Recorded on Stowage's own pod.
    PolicyRejected,
}

/// The text of the Event [`PodEventReason::Reserved`].
pub fn reserved_text(reservation: &Reservation) -> String {
    let gpus = comma_separated(reservation.devices.iter());
    let victims = plural(reservation.victims.len(), "pod");
    format!(
        "Reserved {gpus} on node {}; evicting {victims}.",
        reservation.node
    )
}

impl PodEventReason {
    pub fn is_warning(self) -> bool {
        !matches!(
            self,
            Self::Reserved | Self::UnevenGpus | Self::PolicyApplied | Self::EvictionLimit
        )
    }

    /// Whether each Event of this kind has something new to say: each change of a policy does.
    pub fn is_new_each_time(self) -> bool {
        matches!(self, Self::PolicyApplied | Self::PolicyRejected)
    }
}
