//! What follows from the write of a Binding, step by step: the edge writes, reads and waits as it is told, and brings the
//! results here.
//!
//! ```text
//!  BindAsked ──► Write ──┬─ written ─────────────────────────► Bound
//!                        ├─ refused ─────────────────────────► Failed
//!                        ├─ 409 ───────► Read ──┬─ bound here ► Bound
//!                        │                      ├─ elsewhere,
//!                        │                      │  or gone ───► Failed
//!                        └─ no answer ──────────┴─ unbound,
//!                                                  unread ────► Settle
//! ```
//!
//! An assumed pod whose Binding may have been written stays assumed until a read shows it bound or gone. A read that shows it
//! unbound settles nothing, because the write may still land. The same Binding is then written again, which can only succeed or
//! show that the first one had succeeded. One settling loop per placement does that: pause, read, write, and so on. It ends as
//! soon as the pod is not assumed with this placement any more.
//!
//! Ten seconds after the decision, and in another epoch, nothing is written again: what the decision rests on may have changed.
//! The pod is pending again once a read shows it unbound that began when no write could land any more.
//!
//! No allocation stays assumed forever: the request that made it settles it while it runs, and its placement's loop from then on.
//! A pod that was deleted while its Binding was open, and is asked for again, has a new placement, and so another loop.

use super::input::changes;
use super::{Change, Cluster};
use crate::ids::{GpuUuid, LeaderEpoch, NodeName, PodUid};
use crate::ledger::{AllocationFailure, AssumedPod, PodPhase, PodState};
use crate::units::{Millis, Moment};
use crate::vocabulary::placement::Placement;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The next step of the caller that writes and reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BindingStep {
    /// Write the Binding.
    Write,
    /// Read the pod from the API server.
    Read,
    /// Sleep, then read.
    Pause(Millis),
    /// The pod is bound as requested.
    Bound,
    /// The pod is not bound as requested.
    Failed(AllocationFailure),
    /// The result is unknown: answer so, and start a settling loop.
    Settle,
    /// Nothing is left to settle.
    Over,
}

/// On whose behalf a Binding is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BindingStage {
    /// A bind request; `is_new` if it allocated the GPUs itself.
    Request {
        is_new: bool,
    },
    Settling,
}

/// The API server's answer to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BindingAnswer {
    Written,
    Refused,
    Conflict,
    /// None, or one that leaves open whether it was written.
    Unknown,
}

/// A write was answered, or given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingAnswered {
    pub uid: PodUid,
    pub placement: Placement,
    pub stage: BindingStage,
    pub answer: BindingAnswer,
    /// For how long after it was given up an unanswered write may still land.
    #[serde(rename = "latest_landing")]
    pub max_commit_delay: Millis,
}

/// What a read of the pod shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodRead {
    Failed,
    /// There is no pod of this UID.
    Gone,
    Unbound,
    Bound {
        node: NodeName,
        devices: Option<Arc<[GpuUuid]>>,
        /// Its VRAM is lent by engines.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        borrows: bool,
    },
}

/// The pod was read, past every cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingRead {
    pub uid: PodUid,
    pub placement: Placement,
    pub stage: BindingStage,
    pub pod: PodRead,
    /// When the read began: what it shows may be as old.
    #[serde(rename = "asked")]
    pub requested_at: Moment,
    /// For how long after it was given up an unanswered write may still land.
    #[serde(rename = "latest_landing")]
    pub max_commit_delay: Millis,
}

/// A settling loop wants to begin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettlingAsked {
    pub uid: PodUid,
    pub placement: Placement,
}

/// The pod is bound, without a request to this process: in a simulation, or in a test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingWritten {
    pub uid: PodUid,
    pub node: NodeName,
    pub devices: Option<Arc<[GpuUuid]>>,
}

/// The Binding was not written, and cannot be written any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BindingFailed(pub PodUid);

impl Change for BindingAnswered {
    type Output = BindingStep;

    fn apply_to(self, cluster: &mut Cluster) -> BindingStep {
        let Self {
            uid,
            placement,
            stage,
            answer,
            max_commit_delay,
        } = self;
        let now = cluster.ledger.now();
        let is_open = matches!(answer, BindingAnswer::Conflict | BindingAnswer::Unknown);
        cluster.bindings.end_write(&uid, now, is_open);
        match (answer, stage) {
            (BindingAnswer::Written, _) => {
                let borrows = !placement.borrowed_from.is_empty();
                cluster.confirm(
                    &uid,
                    &placement,
                    &placement.node,
                    placement.recorded_gpus(),
                    borrows,
                );
                cluster.bindings.clear_pending_writes(&uid);
                cluster.end_loop(&uid, &placement, stage, BindingStep::Bound)
            }
            (BindingAnswer::Refused, BindingStage::Request { is_new }) => {
                match is_new && !cluster.forget_if_no_write_may_commit(&uid, now, max_commit_delay)
                {
                    true => BindingStep::Settle,
                    false => BindingStep::Failed(AllocationFailure::Refused),
                }
            }
            (BindingAnswer::Refused, BindingStage::Settling) => {
                cluster.forget_if_no_write_may_commit(&uid, now, max_commit_delay);
                cluster.pause_or_end(&uid, &placement)
            }
            (BindingAnswer::Conflict, BindingStage::Request { .. }) => BindingStep::Read,
            (BindingAnswer::Unknown, BindingStage::Request { .. }) => BindingStep::Settle,
            (_, BindingStage::Settling) => cluster.pause_or_end(&uid, &placement),
        }
    }
}

impl Change for BindingRead {
    type Output = BindingStep;

    fn apply_to(self, cluster: &mut Cluster) -> BindingStep {
        let Self {
            uid,
            placement,
            stage,
            pod,
            requested_at,
            max_commit_delay,
        } = self;
        // A watch or a later request may have been faster.
        if stage == BindingStage::Settling && !cluster.is_assumed(&uid, &placement) {
            return cluster.end_loop(&uid, &placement, stage, BindingStep::Over);
        }
        if matches!(pod, PodRead::Bound { .. } | PodRead::Gone) {
            cluster.bindings.clear_pending_writes(&uid);
        }
        match (pod, stage) {
            (PodRead::Gone, _) => {
                cluster.ledger.release(&uid);
                cluster.end_loop(
                    &uid,
                    &placement,
                    stage,
                    BindingStep::Failed(AllocationFailure::PodGone),
                )
            }
            (
                PodRead::Bound {
                    node,
                    devices,
                    borrows,
                },
                _,
            ) => {
                cluster.confirm(&uid, &placement, &node, devices, borrows);
                let step = match node == placement.node {
                    true => BindingStep::Bound,
                    false => BindingStep::Failed(AllocationFailure::BoundElsewhere { node }),
                };
                cluster.end_loop(&uid, &placement, stage, step)
            }
            (_, BindingStage::Request { .. }) => BindingStep::Settle,
            (PodRead::Failed, BindingStage::Settling) => cluster.pause_or_end(&uid, &placement),
            (PodRead::Unbound, BindingStage::Settling) if !cluster.may_be_written(&uid) => {
                let is_of_another_epoch = cluster.epoch_of(&uid) != cluster.ledger.leader();
                if cluster.forget_if_no_write_may_commit(&uid, requested_at, max_commit_delay)
                    && is_of_another_epoch
                {
                    cluster.ledger.revalidate_reservation(&uid);
                }
                cluster.pause_or_end(&uid, &placement)
            }
            (PodRead::Unbound, BindingStage::Settling) => {
                cluster.bindings.begin_write(&uid);
                BindingStep::Write
            }
        }
    }
}

changes! { cluster,
    /// The first step; `None` if a loop runs for the placement.
    SettlingAsked { uid, placement } -> Option<BindingStep> {
        let begins = cluster.bindings.begin_settling(&uid, &placement);
        begins.then(|| BindingStep::Pause(cluster.bindings.next_pause(&uid)))
    }
    BindingWritten { uid, node, devices } -> () { cluster.ledger.confirm(&uid, &node, devices) }
    BindingFailed(uid) -> () { cluster.ledger.forget(&uid) }
}

impl Cluster {
    /// The pod is pending again, unless one of its Bindings could still land then. Returns whether none could.
    fn forget_if_no_write_may_commit(
        &mut self,
        uid: &PodUid,
        then: Moment,
        max_commit_delay: Millis,
    ) -> bool {
        let no_write_may_commit = self
            .bindings
            .no_write_may_commit(uid, then, max_commit_delay);
        if no_write_may_commit {
            self.ledger.forget(uid);
            self.bindings.clear_pending_writes(uid);
        }
        no_write_may_commit
    }

    fn pause_or_end(&mut self, uid: &PodUid, placement: &Placement) -> BindingStep {
        match self.is_assumed(uid, placement) {
            true => BindingStep::Pause(self.bindings.next_pause(uid)),
            false => self.end_loop(uid, placement, BindingStage::Settling, BindingStep::Over),
        }
    }

    /// The last step of a placement. What was written since its loop began, for another placement, may land still.
    fn end_loop(
        &mut self,
        uid: &PodUid,
        placement: &Placement,
        stage: BindingStage,
        last: BindingStep,
    ) -> BindingStep {
        if stage == BindingStage::Settling {
            let is_assumed_anew = self.ledger.pod_state(uid).is_some_and(PodState::is_assumed);
            if !is_assumed_anew {
                self.bindings.clear_pending_writes(uid);
            }
            self.bindings.end_settling(uid, placement);
        }
        last
    }

    /// The pod is bound, as an answer about this placement says. The answer may be older than the pod's end: if only a request of
    /// kube-scheduler has shown the pod since, and this is not its placement, no watch may ever show that it is gone.
    fn confirm(
        &mut self,
        uid: &PodUid,
        placement: &Placement,
        node: &NodeName,
        devices: Option<Arc<[GpuUuid]>>,
        borrows: bool,
    ) {
        let is_unwatched = self
            .ledger
            .pod_state(uid)
            .is_some_and(|pod| pod.is_unwatched);
        if !is_unwatched || self.is_assumed(uid, placement) {
            self.ledger.confirm_with_loan(uid, node, devices, borrows);
        }
    }

    fn may_be_written(&self, uid: &PodUid) -> bool {
        self.assumed(uid)
            .is_some_and(|assumed| self.ledger.may_be_written(assumed))
    }

    /// The epoch in which an assumed pod's GPUs were chosen.
    fn epoch_of(&self, uid: &PodUid) -> Option<&LeaderEpoch> {
        self.assumed(uid)?.epoch.as_ref()
    }

    fn assumed(&self, uid: &PodUid) -> Option<&AssumedPod> {
        match &self.ledger.pod_state(uid)?.phase {
            PodPhase::Assumed(assumed) => Some(assumed),
            _ => None,
        }
    }

    /// Whether this placement is still the pod's, and neither written nor given up.
    fn is_assumed(&self, uid: &PodUid, placement: &Placement) -> bool {
        self.assumed(uid)
            .is_some_and(|assumed| assumed.placement == *placement)
    }
}

#[cfg(test)]
mod tests;
