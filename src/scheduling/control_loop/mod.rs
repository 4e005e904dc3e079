//! The loop around the planner, sans I/O: events and the time go in, acts come out. It plans pending pods ([`start_run`]) and
//! follows each reservation ([`reservation_progress`]) until the pod is bound or the reservation ends ([`ended_reservations`]); a
//! nominated pod's gate is lifted ([`gates`]). A pod that cannot be placed gets the reason in its condition ([`waiting_pods`]). The
//! loop takes back what sleeping engines lent when they wake ([`loans`]). It evicts neighbors of engines under pressure
//! ([`relief`]), pods that use more than their grants if the policy says so ([`overuse`]), and the rest of a group that stays
//! incomplete ([`orphaned_members`]). Failed actions are retried later ([`retry`]). What a pod shows that is not so is written
//! again ([`conditions`]).
//!
//! A driver calls [`ControlLoop::tick`] with the time, carries out each [`LoopAction`] in order, and brings back its result:
//! [`ControlLoop::handle_write_outcome`], [`ControlLoop::handle_run_end`], [`ControlLoop::handle_pressure`]. `stowage serve` drives it
//! over the API server; replays, simulators and tests drive the same loop over a cluster of their own.
//!
//! ```text
//!  pending pods ─► plan (pure, on a copy of the ledger) ─► reservation, checked again under the lock
//!     no victims ───────────────────────────────────────────────────────► nominate, remove the gate or requeue
//!     victims ─► condition written ─► evict each ─► all are gone ─► nominate, remove the gate or requeue
//! ```
//!
//! Everything except the counts of attempts follows from the ledger, tick after tick: a new leader continues where the previous
//! one stopped.

mod at_once;
mod conditions;
mod ended_reservations;
mod failing_pods;
mod gates;
mod loans;
mod orphaned_members;
mod outcome;
mod overuse;
mod planning_run;
mod pod_event;
mod pod_write;
mod relief;
mod reservation_progress;
pub mod retry;
mod start_run;
mod status_change;
#[cfg(any(test, feature = "testkit"))]
mod testkit;
mod unplannable_pods;
mod waiting_pods;
mod write_queue;

pub use ended_reservations::rejected_plan_state;
pub use planning_run::{PlanningJob, RunEnd};
pub use pod_event::{ControlPlaneError, FreshPod, PodEvent, PodEventReason, reserved_text};
pub use pod_write::{EvictionTask, PodWrite, StatusPurpose, WriteOutcome};
pub use relief::{FoundPressure, PressureJob};
pub use status_change::{
    EvictionCondition, EvictionOutcome, EvictionReason, NominationChange, PlanState, RequeueMark,
    ReservationChange, StatusChange, WakeAnswer,
};
pub use unplannable_pods::UNPLANNABLE_PER_TICK;

use crate::ids::{GpuUuid, PodKey, PodUid};
use crate::ledger::ExpiryResult;
use crate::planning::{PlannedPlacement, PressureWatch, WaitReason};
use crate::policy::Mode;
use crate::units::{Millis, Moment};
use crate::verbs::tick::PartOfTick;
use crate::verbs::wait::{MayBeRefused, TakeUnknownReservations};
use crate::verbs::{Change, Cluster, Input};
use conditions::StaleConditions;
use failing_pods::FailingPods;
use loans::EndingLoans;
use orphaned_members::OrphanedMember;
use planning_run::PlanningRun;
use reservation_progress::ReservationProgress;
use retry::RetryState;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Deref;
use unplannable_pods::ReleasedPods;
use waiting_pods::RecordedReason;
use write_queue::WriteQueue;

/// Pods that are noted as refused under one lock.
const REFUSALS_PER_LOCK: usize = 32;

/// Access to the cluster that the loop works on: behind a lock that it shares with the verbs, or directly.
pub trait ClusterAccess {
    type Locked<'a>: LockedCluster
    where
        Self: 'a;

    /// The cluster, for one call or a few.
    fn lock(&mut self) -> Self::Locked<'_>;
}

/// Exclusive access to the cluster: nothing else changes it meanwhile.
pub trait LockedCluster: Deref<Target = Cluster> {
    fn apply<C: Change + Clone + Into<Input>>(&mut self, change: C) -> C::Output;

    /// Lets threads that wait for the lock have it, between two of many changes.
    fn yield_lock(&mut self) {}
}

impl ClusterAccess for Cluster {
    type Locked<'a> = &'a mut Cluster;

    fn lock(&mut self) -> &mut Cluster {
        self
    }
}

impl LockedCluster for &mut Cluster {
    fn apply<C: Change + Clone + Into<Input>>(&mut self, change: C) -> C::Output {
        Cluster::apply(self, change)
    }
}

/// An action that the loop asks its driver to carry out.
#[derive(Debug)]
pub enum LoopAction {
    /// Send it, if [`PodWrite::revalidate`] says so by then. Answered by [`ControlLoop::handle_write_outcome`].
    Write(PodWrite),
    /// Publish it, or drop it.
    Event(PodEvent),
    /// Run it beside everything else. Answered by [`ControlLoop::handle_run_end`].
    Plan(PlanningJob),
    /// The run in progress is not needed any more. It is answered all the same.
    StopPlanning,
    /// Run it beside everything else. Answered by [`ControlLoop::handle_pressure`].
    CheckPressure(PressureJob),
    /// Log and count it.
    Record(LoopNotice),
}

/// A notice for the log and the metrics.
#[derive(Debug)]
pub enum LoopNotice {
    /// A run that took this long found this, and it is reserved.
    Planned(Box<PlannedPlacement>, Millis),
    RunEnded {
        took: Millis,
        outcome: &'static str,
        left_over: usize,
    },
    /// Planning fails on the pod: a defect of ours.
    PlanningFails(PodKey),
    /// A write of this kind was put off, because too many are in progress.
    WritePostponed(&'static str),
    /// An earlier leader's reservation showed too late, and was ended.
    LateReservation(PodKey),
    /// Loans that models' load recalls, and recalls that are over.
    Recalls {
        begun: usize,
        ended: usize,
    },
    LoanEnds {
        pod: PodKey,
        /// `None` if it may be one of several.
        lender: Option<PodKey>,
        gpu: GpuUuid,
    },
    /// What became of the eviction of a pod that borrows.
    LoanEviction(&'static str),
    /// Engines that wait until they may wake.
    WakesWaiting(usize),
    MayWake(PodKey),
    OveruseEviction {
        pod: PodKey,
        outcome: EvictionOutcome,
    },
    Evicted(PodKey),
    /// The cluster or the policy changed while a run found a place for the pod.
    PlacementLost {
        pod: PodKey,
        refusal: String,
    },
    Failed {
        pod: PodKey,
        what: &'static str,
        why: String,
    },
}

/// Facts that the cluster's state does not have.
#[derive(Debug, Default)]
pub struct EdgeFacts {
    /// Pods that are evicted because their GPUs were allocated twice.
    pub over_allocation_victims: BTreeSet<PodUid>,
    /// The API server does not let volumes, claims or storage classes be read.
    pub lacks_volumes: bool,
    /// The next [`UNPLANNABLE_PER_TICK`] pods behind the planner's gate that it never places; fewer if there are no more.
    pub unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>,
}

#[derive(Debug)]
pub struct ControlLoop<B> {
    pub cluster_access: B,
    over_allocation_victims: BTreeSet<PodUid>,
    lacks_volumes: bool,
    was_leading: bool,
    actions: VecDeque<LoopAction>,
    /// Progress of each reservation, beyond what the ledger has.
    reservation_progress: BTreeMap<PodUid, ReservationProgress>,
    run: PlanningRun,
    failing_pods: FailingPods,
    orphaned_members: BTreeMap<PodUid, OrphanedMember>,
    stale: StaleConditions,
    recorded_reasons: BTreeMap<PodUid, RecordedReason>,
    /// The pod up to which recorded wait reasons have been checked.
    reasons_checked_up_to: Option<PodUid>,
    writes: WriteQueue,
    /// `None` while a check is in progress.
    pressure: Option<PressureWatch>,
    /// Whether the check in progress began in an earlier tenure.
    is_outdated_check: bool,
    /// Neighbors of engines under pressure whose eviction was ordered.
    relief_attempts: BTreeMap<PodUid, RetryState>,
    check_engine_load_at: Moment,
    loans: EndingLoans,
    released_pods: ReleasedPods,
    check_overuse_at: Moment,
}

impl<B: ClusterAccess> ControlLoop<B> {
    pub fn new(cluster_access: B) -> Self {
        Self {
            cluster_access,
            over_allocation_victims: BTreeSet::new(),
            lacks_volumes: false,
            was_leading: false,
            actions: VecDeque::new(),
            reservation_progress: BTreeMap::new(),
            run: PlanningRun::default(),
            failing_pods: FailingPods::default(),
            orphaned_members: BTreeMap::new(),
            stale: StaleConditions::default(),
            recorded_reasons: BTreeMap::new(),
            reasons_checked_up_to: None,
            writes: WriteQueue::default(),
            pressure: Some(PressureWatch::default()),
            is_outdated_check: false,
            relief_attempts: BTreeMap::new(),
            check_engine_load_at: Moment::default(),
            loans: EndingLoans::default(),
            released_pods: ReleasedPods::default(),
            check_overuse_at: Moment::default(),
        }
    }

    /// A loop over a cluster that has every refusal already: it presumes none of the pods that it finds to be refused.
    pub fn with_known_refusals(cluster_access: B) -> Self {
        Self {
            was_leading: true,
            ..Self::new(cluster_access)
        }
    }

    /// The next action, in the order in which they are to be carried out.
    pub fn next_action(&mut self) -> Option<LoopAction> {
        self.actions
            .pop_front()
            .or_else(|| self.writes.next().map(LoopAction::Write))
    }

    /// Time passes. What is due ends, and a replica that may act handles all pending pods; another one forgets its progress.
    pub fn tick(&mut self, now: Moment, is_leading: bool, facts: EdgeFacts) {
        let unplannable_pods = facts.unplannable_pods;
        self.over_allocation_victims = facts.over_allocation_victims;
        self.lacks_volumes = facts.lacks_volumes;
        let was_leading = std::mem::replace(&mut self.was_leading, is_leading);
        self.expire(now, is_leading);
        if !is_leading {
            return self.forget_progress();
        }
        // A statement of its own, so that the lock is released with it.
        let unknown = self.cluster_access.lock().apply(TakeUnknownReservations);
        self.end_unknown_reservations(unknown);
        self.release_unplannable(unplannable_pods, now);
        self.handle_pending(now);
        if !was_leading {
            self.presume_refused();
        }
    }

    fn handle_pending(&mut self, now: Moment) {
        self.rewrite_ended(now);
        self.cancel_evictions(now);
        // In shadow mode no pod is placed, and none is kept behind the gate.
        if self.cluster_access.lock().ledger().policy().mode == Mode::Shadow {
            return self.release_all_gated();
        }
        // An engine that wakes has its own VRAM lent out: that comes before what others would like to have.
        self.end_loans(now);
        self.advance_reservations(now);
        self.remove_gates(now);
        self.advance_orphaned_members(now);
        self.start_pressure_check(now);
        self.enforce_grants(now);
        self.start_planning_run(now);
    }

    /// A replica that may not act forgets its progress: another one continues.
    fn forget_progress(&mut self) {
        self.reservation_progress.clear();
        self.orphaned_members.clear();
        self.stale = StaleConditions::default();
        self.recorded_reasons.clear();
        self.relief_attempts.clear();
        self.loans = EndingLoans::default();
        self.stop_planning();
        self.failing_pods = FailingPods::default();
        for write in self.writes.drop_unsent() {
            if let PodWrite::Evict { uid, task, .. } = write
                && task.counts_each_attempt()
            {
                self.uncount_eviction(&uid);
            }
        }
        match &mut self.pressure {
            Some(pressure) => *pressure = PressureWatch::default(),
            None => self.is_outdated_check = true,
        }
    }

    /// Lets pass all deadlines up to now, a few under each lock. The leader that ends a reservation also clears its condition:
    /// standby replicas write nothing.
    pub fn expire(&mut self, now: Moment, is_leading: bool) {
        let mut all = Vec::new();
        let mut cluster = self.cluster_access.lock();
        loop {
            let ExpiryResult {
                ended_reservations: ended,
                may_be_more,
            } = cluster.apply(PartOfTick { now, is_leading });
            all.extend(ended);
            if !may_be_more {
                break;
            }
            cluster.yield_lock();
        }
        drop(cluster);
        if is_leading {
            self.end_reservations(all, now);
        }
    }

    /// A previous leader or process may have refused every pending pod.
    fn presume_refused(&mut self) {
        let copy = self.cluster_access.lock().ledger().scratch();
        let (pods, then): (Vec<PodUid>, _) = (
            copy.possibly_refused_pods().into_iter().collect(),
            copy.now(),
        );
        // What is changed while there is a copy has to be copied.
        drop(copy);
        let mut cluster = self.cluster_access.lock();
        for batch in pods.chunks(REFUSALS_PER_LOCK) {
            cluster.apply(MayBeRefused {
                pods: batch.to_vec(),
                then,
            });
            cluster.yield_lock();
        }
    }

    fn publish(&mut self, key: PodKey, uid: PodUid, kind: PodEventReason, text: String) {
        self.actions.push_back(LoopAction::Event(PodEvent {
            key,
            uid,
            kind,
            text,
        }));
    }

    fn write_status(
        &mut self,
        key: PodKey,
        uid: PodUid,
        change: StatusChange,
        purpose: StatusPurpose,
    ) {
        self.writes.add(PodWrite::Status {
            key,
            uid,
            change,
            purpose,
        });
    }

    fn write_eviction(
        &mut self,
        key: PodKey,
        uid: PodUid,
        why: EvictionReason,
        task: EvictionTask,
    ) {
        self.writes.add(PodWrite::Evict {
            key,
            uid,
            why,
            task,
        });
    }

    fn record(&mut self, notice: LoopNotice) {
        self.actions.push_back(LoopAction::Record(notice));
    }

    fn report_failure(&mut self, pod: &PodKey, what: &'static str, why: impl ToString) {
        let (pod, why) = (pod.clone(), why.to_string());
        self.record(LoopNotice::Failed { pod, what, why });
    }
}
