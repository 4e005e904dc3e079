//! A pod that waits for a node: what was asked and answered about it, and its reservation.

use crate::ids::NodeName;
use crate::placing::snapshot::NodeSet;
use crate::units::Moment;
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::placement::Reservation;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What is remembered of a pod that has no node yet. All but the reservation may be lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// On how many nodes the scheduler last asked for victims for it.
    pub offered_to_preempt: Option<u32>,
    /// What keeps it from the scheduler.
    pub gate: SchedulingGate,
    /// Since when it waits behind that gate, or without one, as far as this ledger knows.
    pub since: Moment,
    /// When it was first refused, or first seen behind the planner's gate; `None` for one that may get a place at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unplaced_since: Option<Moment>,
    /// Since when GPUs of its node are reserved for it, as far as this ledger knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserved_since: Option<Moment>,
    /// Its `status.nominatedNodeName`.
    pub nominated: Option<NodeName>,
    /// When the planner last looked for a place for it, and how often in a row it found none.
    pub failed_attempt: Option<FailedAttempt>,
    /// When it last did not take the place of evicted victims, and how often that has happened.
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
    /// Another scheduling gate keeps the pod, with or without ours.
    Others,
}

/// Something that came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedAttempt {
    pub at: Moment,
    /// How often in a row, with this one. Recordings call it something else.
    #[serde(rename = "unanswered_wakes")]
    pub times: u32,
    /// The ledger's generation then: as long as nothing changes, the result is the same.
    pub generation: u64,
}

/// A filter that passed no node: the pod is woken when one would pass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterRefusal {
    /// When the pod was last refused, or woken.
    pub at: Moment,
    /// The nodes it asked about; `None` if they are not known.
    pub asked: Option<Arc<NodeSet>>,
    /// How often it was woken since it last asked. Recordings call it something else.
    #[serde(rename = "unanswered")]
    pub woken: u32,
    /// Nothing of it was seen: an earlier leader or process may have refused the pod.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_supposed: bool,
}

/// GPUs that were just offered to a pod, so that the next pod looks elsewhere first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoftReservation {
    pub node: NodeName,
    pub gpus: GpuSet,
    pub expires: Moment,
}

impl WaitingPod {
    /// The pod asks for a node (again). Answers how often an attempt came to nothing, and the node that was ranked first in the
    /// latest attempt if that was such a one.
    pub(super) fn begin_attempt(&mut self) -> (u32, Option<NodeName>) {
        if self.refused.take().is_some_and(|refused| refused.woken > 0) {
            self.unanswered_wakes = self.unanswered_wakes.saturating_add(1);
        }
        let failed = self.offered.take();
        self.tries += u32::from(failed.is_some());
        (self.tries, failed)
    }

    pub(super) fn note_offered(&mut self, node: &NodeName) {
        self.offered = Some(node.clone());
        self.unanswered_wakes = 0;
    }

    pub(super) fn note_offered_to_preempt(&mut self, nodes: usize) {
        self.offered_to_preempt = Some(u32::try_from(nodes).unwrap_or(u32::MAX));
    }

    pub(super) fn note_refused(&mut self, at: Moment, asked: Option<NodeSet>) {
        self.unplaced_since.get_or_insert(at);
        let asked = asked.map(Arc::new);
        self.refused = Some(FilterRefusal {
            at,
            asked,
            woken: 0,
            is_supposed: false,
        });
    }

    pub(super) fn suppose_refused(&mut self, at: Moment) {
        self.note_refused(at, None);
        self.refused
            .iter_mut()
            .for_each(|refused| refused.is_supposed = true);
    }

    pub(super) fn note_woken(&mut self, at: Moment) {
        if let Some(refused) = &mut self.refused {
            (refused.at, refused.woken) = (at, refused.woken + 1);
        }
    }

    pub(super) fn note_no_placement(&mut self, at: Moment, generation: u64) {
        self.failed_attempt = Some(FailedAttempt::after(self.failed_attempt, at, generation));
    }

    pub(super) fn note_failed_eviction(&mut self, at: Moment, generation: u64) {
        self.failed_eviction = Some(FailedAttempt::after(self.failed_eviction, at, generation));
    }

    pub(super) fn observe_gate(
        &mut self,
        gate: SchedulingGate,
        nominated: Option<NodeName>,
        now: Moment,
    ) {
        if self.gate != gate {
            (self.since, self.failed_attempt) = (now, None);
        }
        if gate == SchedulingGate::Planned {
            self.unplaced_since.get_or_insert(now);
        }
        (self.gate, self.nominated) = (gate, nominated);
    }

    /// A reservation on the same node is the same one, with another deadline or fewer victims.
    pub(super) fn replace_reservation(&mut self, reservation: Option<Reservation>, now: Moment) {
        let stays = self.reservation.as_ref().map(|known| &known.node)
            == reservation.as_ref().map(|new| &new.node);
        if !stays {
            self.reserved_since = reservation.as_ref().map(|_| now);
        }
        self.reservation = reservation;
    }

    /// Whether a reservation that the pod shows is another than the one that is known.
    pub(super) fn is_news(&self, observed: &Reservation) -> bool {
        !self
            .reservation
            .as_ref()
            .is_some_and(|known| known.is_same(observed))
    }
}

impl FailedAttempt {
    /// One more, after the last one.
    fn after(last: Option<Self>, at: Moment, generation: u64) -> Self {
        let times = last.map_or(0, |last| last.times).saturating_add(1);
        Self {
            at,
            times,
            generation,
        }
    }
}
