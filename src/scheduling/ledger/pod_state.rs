//! One pod in the books, and the state it is in.
//!
//! ```text
//!            assume                  confirm
//!  Waiting ─────────► Assumed ─────────────────► Bound ───► (released)
//!     ▲                  │                         ▲
//!     └──────────────────┘                         │ seen bound by someone else
//!            forget                             Waiting
//! ```

use crate::ids::{GpuUuid, NodeName, PodKey};
use crate::scheduling::placing::snapshot::NodeSet;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::disruption_info::{Checkpoint, DisruptionInfo};
use crate::scheduling::vocabulary::gpu::GpuSet;
use crate::scheduling::vocabulary::placement::{Placement, Reservation};
use crate::units::Moment;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodState {
    pub key: PodKey,
    pub demand: Demand,
    /// What its eviction would depend on, as it was last seen.
    pub disruption_info: Arc<DisruptionInfo>,
    pub phase: PodPhase,
    /// While its engine starts, until when no other may start on its GPUs.
    pub starting: Option<Moment>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PodPhase {
    Waiting(WaitingPod),
    /// Promised, and the Binding is on its way.
    Assumed(AssumedPod),
    Bound(BoundPod),
}

/// What is remembered of a pod that has no node yet. All but the hold may be lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct WaitingPod {
    /// Filters that passed without a bind after them.
    pub tries: u32,
    /// The node that was ranked first in the latest of them.
    pub offered: Option<NodeName>,
    pub soft_reservation: Option<SoftReservation>,
    pub reservation: Option<Reservation>,
    pub refused: Option<FilterRefusal>,
    /// How often in a row it was woken, asked, and was refused again.
    pub unanswered_wakes: u32,
    /// On how many nodes the scheduler last asked who could leave for it.
    pub offered_to_preempt: Option<u32>,
    /// What keeps it from the scheduler.
    pub gate: SchedulingGate,
    /// Since when it waits behind that gate, or without one, as far as this ledger knows.
    pub since: Moment,
    /// Where the API server says that it is to go.
    pub nominated: Option<NodeName>,
    /// When the planner last looked for a place for it, and how often in a row it found none.
    pub failed_attempt: Option<FailedAttempt>,
    /// The API server has shown its hold: it would survive a restart.
    pub reservation_observed: bool,
    /// Its latest hold that was given up. What shows it is older than that.
    pub given_up: Option<Box<Reservation>>,
    /// When room that others left for it was last not taken, and how often that has happened.
    pub failed_eviction: Option<FailedAttempt>,
}

/// The scheduler does not look at a pod behind a gate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SchedulingGate {
    #[default]
    Open,
    /// The planner's alone: it is placed first, and let through then.
    Planned,
    /// Another scheduling gate holds the pod, with or without ours.
    Others,
}

/// Something that came to nothing, and how often it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct FailedAttempt {
    pub at: Moment,
    pub unanswered_wakes: u32,
    /// The ledger's generation then: as long as nothing changes, nothing else comes of it.
    pub generation: u64,
}

/// A filter that passed no node: whom to wake when one would pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FilterRefusal {
    /// When the pod was last refused, or woken.
    pub at: Moment,
    /// The nodes it asked about; `None` if nobody knows.
    pub asked: Option<Arc<NodeSet>>,
    /// How often it was woken since it last asked.
    pub unanswered: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AssumedPod {
    pub placement: Placement,
    /// What it goes back to if the Binding fails.
    pub before: WaitingPod,
}

/// GPUs that were just offered to a pod, so that the next pod looks elsewhere first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SoftReservation {
    pub node: NodeName,
    pub gpus: GpuSet,
    pub expires: Moment,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BoundPod {
    pub node: NodeName,
    /// What its Binding recorded; `None` if someone else bound it.
    pub devices: Option<Arc<[GpuUuid]>>,
    /// Where an agent found it, if nothing is recorded, or only indices are.
    pub located: Option<Arc<[GpuUuid]>>,
    /// When this ledger learned of it. A reading sampled earlier says nothing about it.
    pub since: Moment,
    /// Since when it runs, as far as anyone knows.
    pub started: Moment,
    /// It is being deleted: when its grace ends.
    pub leaving: Option<Moment>,
}

impl BoundPod {
    pub fn new(node: NodeName, devices: Option<Arc<[GpuUuid]>>, since: Moment) -> Self {
        Self { node, devices, located: None, since, started: since, leaving: None }
    }

    /// Whether its record names GPUs by their UUID: then nothing but the record counts.
    pub fn is_recorded(&self) -> bool {
        self.devices.as_ref().is_some_and(|devices| devices.iter().all(|uuid| uuid.index().is_none()))
    }
}

impl PodState {
    /// Where it is or is about to be.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.phase {
            PodPhase::Waiting(_) => None,
            PodPhase::Assumed(assumed) => Some(&assumed.placement.node),
            PodPhase::Bound(bound) => Some(&bound.node),
        }
    }

    /// Whether it is to come to a node and is not bound yet.
    pub fn comes_to(&self, node: &NodeName) -> bool {
        match &self.phase {
            PodPhase::Waiting(waiting) => {
                waiting.reservation.as_ref().is_some_and(|reservation| reservation.node == *node)
            }
            PodPhase::Assumed(assumed) => assumed.placement.node == *node,
            PodPhase::Bound(_) => false,
        }
    }

    /// Since when what it does would be lost: its last checkpoint, or its start.
    pub fn unsaved_since(&self) -> Option<Moment> {
        let PodPhase::Bound(bound) = &self.phase else { return None };
        Some(match self.disruption_info.checkpoint {
            Checkpoint::At(moment) => bound.started.max(moment),
            Checkpoint::Never => bound.started,
        })
    }

    pub fn is_assumed(&self) -> bool {
        matches!(self.phase, PodPhase::Assumed(_))
    }

    pub fn reservation(&self) -> Option<&Reservation> {
        match &self.phase {
            PodPhase::Waiting(waiting) => waiting.reservation.as_ref(),
            _ => None,
        }
    }

    pub fn soft_reservation(&self) -> Option<&SoftReservation> {
        match &self.phase {
            PodPhase::Waiting(waiting) => waiting.soft_reservation.as_ref(),
            _ => None,
        }
    }

    /// The devices it counts on: what its placement names, or where it was found.
    pub fn devices(&self) -> Option<&Arc<[GpuUuid]>> {
        match &self.phase {
            PodPhase::Waiting(_) => None,
            PodPhase::Assumed(assumed) => Some(&assumed.placement.devices),
            PodPhase::Bound(bound) => bound.located.as_ref().or(bound.devices.as_ref()),
        }
    }

    /// The devices its placement names, if it has one that names any.
    pub fn recorded_devices(&self) -> Option<&Arc<[GpuUuid]>> {
        match &self.phase {
            PodPhase::Bound(bound) => bound.devices.as_ref(),
            _ => self.devices(),
        }
    }

    pub fn refused(&self) -> Option<&FilterRefusal> {
        match &self.phase {
            PodPhase::Waiting(waiting) => waiting.refused.as_ref(),
            _ => None,
        }
    }
}
