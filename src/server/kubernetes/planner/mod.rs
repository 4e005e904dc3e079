//! The planner's driver. It plans pending pods ([`start_run`]) and follows each reservation ([`reservation_progress`]) until the
//! pod is bound or the reservation ends ([`ended_reservations`]); a nominated pod's gate is lifted ([`gates`]). A pod that cannot
//! be placed gets the reason in its condition ([`waiting_pods`]). The driver takes back what sleeping engines lent when they wake
//! ([`loans`]). It evicts neighbors of engines under pressure ([`relief`]), pods that use more than their grants if the policy
//! says so ([`overuse`]), and the rest of a group that stays incomplete ([`orphaned_members`]). Failed actions are retried later
//! ([`retry`](crate::kubernetes::retry)). What a pod shows that is not so is written again ([`conditions`]).
//!
//! Each decision is a function of the planner's state, the ledger, and the time that the caller passes: [`Planner::tick`], and
//! [`Planner::go_on`] for the result of a write ([`outcome`]) or of a planning run. The writes are values ([`mod@write`]); those
//! of one pod are sent in the order in which they were requested ([`writes`]), and async code only carries them.
//!
//! ```text
//!  pending pods ─► plan (pure, on a copy of the ledger) ─► reservation, checked again under the lock
//!     no victims ─────────────────────────────────────────────────────► nominate, lift the gate or touch
//!     victims ─► condition written ─► evict each ─► all are gone ─► nominate, lift the gate or touch
//! ```
//!
//! Plans run beside the ticks ([`run`]), so nothing else waits for them.
//!
//! Everything except the counts of attempts follows from the ledger, tick after tick: a new leader continues where the previous
//! one stopped. The planner writes through the port and knows no client.

mod conditions;
mod ended_reservations;
mod failing_pods;
mod gates;
mod loans;
mod orphaned_members;
mod outcome;
mod overuse;
mod relief;
mod reservation_progress;
mod run;
mod start_run;
mod unplannable_pods;
mod waiting_pods;
mod write;
mod writes;

#[cfg(test)]
mod tests;

use crate::kubernetes::retry::RetryState;
use crate::service::Service;
use conditions::StaleConditions;
use failing_pods::FailingPods;
use loans::EndingLoans;
use orphaned_members::OrphanedMember;
use relief::PressureLook;
use reservation_progress::ReservationProgress;
use run::PlanningRun;
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::planning::PressureWatch;
use stowage_scheduling::policy::Mode;
use stowage_scheduling::units::Moment;
use unplannable_pods::ReleasedPods;
pub(crate) use unplannable_pods::UNPLANNABLE_AT_ONCE;
use waiting_pods::ToldReason;
use writes::Writes;

pub struct Planner {
    service: Arc<Service>,
    control_plane: Arc<dyn ControlPlane>,
    /// Progress of each reservation, beyond what the ledger has.
    progress_of: BTreeMap<PodUid, ReservationProgress>,
    run: PlanningRun,
    failing_pods: FailingPods,
    /// Planning fails on the pod of this name.
    #[cfg(test)]
    poison: Option<&'static str>,
    orphaned_members: BTreeMap<PodUid, OrphanedMember>,
    stale: StaleConditions,
    said: BTreeMap<PodUid, ToldReason>,
    /// The pod up to which recorded wait reasons have been checked.
    said_after: Option<PodUid>,
    writes: Writes,
    pressure: PressureWatch,
    pressure_look: PressureLook,
    /// Neighbors of engines under pressure whose eviction was ordered.
    staying: BTreeMap<PodUid, RetryState>,
    check_engine_load_at: Moment,
    loans: EndingLoans,
    released: ReleasedPods,
    check_overuse_at: Moment,
}

impl Planner {
    pub fn new(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            writes: Writes::new(service.clone(), control_plane.clone()),
            run: PlanningRun::new(service.heavy_work.clone()),
            failing_pods: FailingPods::default(),
            #[cfg(test)]
            poison: None,
            service,
            control_plane,
            progress_of: BTreeMap::new(),
            orphaned_members: BTreeMap::new(),
            stale: StaleConditions::default(),
            said: BTreeMap::new(),
            said_after: None,
            pressure: PressureWatch::default(),
            pressure_look: PressureLook::default(),
            staying: BTreeMap::new(),
            check_engine_load_at: Moment::default(),
            loans: EndingLoans::default(),
            released: ReleasedPods::default(),
            check_overuse_at: Moment::default(),
        }
    }

    /// Handles all pending pods. Only for a replica that may act.
    pub fn tick(&mut self, now: Moment) {
        self.end_again(now);
        self.cancel_evictions(now);
        // In shadow mode no pod is placed, and none is kept behind the gate.
        if self.service.cluster().policy().mode == Mode::Shadow {
            return self.release_all();
        }
        // An engine that wakes has its own VRAM lent out: that comes before what others would like to have.
        self.end_loans(now);
        self.advance_reservations(now);
        self.lift_gates(now);
        self.advance_orphaned_members(now);
        self.look_for_pressure(now);
        self.enforce_grants(now);
        self.seek(now);
    }

    /// A replica that may not act forgets its progress: another one continues.
    pub fn rest(&mut self) {
        self.progress_of.clear();
        self.orphaned_members.clear();
        self.stale = StaleConditions::default();
        self.said.clear();
        self.staying.clear();
        self.loans = EndingLoans::default();
        self.run.give_up();
        self.failing_pods = FailingPods::default();
        self.writes.forget_what_is_to_come();
        (self.pressure, self.pressure_look) = Default::default();
    }

    /// Waits until a write, the planning run or a look for pressure ends, and handles its result. Never ends while none is in
    /// progress.
    pub async fn go_on(&mut self) {
        tokio::select! {
            biased;
            outcome = self.writes.next() => self.note(outcome, self.now()),
            ended = self.run.end() => self.put_into_force(ended, self.now()),
            found = self.pressure_look.end() => self.relieve(found),
        }
    }

    /// Handles what is in progress until nothing is.
    #[cfg(test)]
    pub async fn settle(&mut self) {
        while !self.is_idle() {
            self.go_on().await;
        }
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.writes.is_empty() && self.run.is_idle() && self.pressure_look.is_idle()
    }

    /// The ledger's present: what is due by it is due here.
    fn now(&self) -> Moment {
        self.service.cluster().now()
    }
}
