//! What the planner does about pods that wait: it has them planned ([`seek`]), and sees each hold through ([`progress`]) until the
//! pod is bound or its room is given up ([`ended`]); for whom there is no place is told so ([`waits`]). It has others leave engines under pressure ([`relieve`]), and what is left of
//! a group that will not be whole ([`orphaned_members`]). What did not work is tried again later ([`attempt`]); of one pod nothing is
//! written before what was asked for earlier ([`writes`]).
//!
//! ```text
//!  pending pods ─► plan (pure, on a copy of the books) ─► hold, checked again under the lock
//!     nobody leaves for it ───────────────────────────────────────────► nominate + touch, lift the gate
//!     others leave ─► condition written ─► evict each ─► all are gone ─► nominate + touch, lift the gate
//! ```
//!
//! A plan is made beside the ticks ([`run`]): whatever else is to be seen to does not wait for it.
//!
//! Everything but the counts of attempts follows from the ledger, tick after tick: a replica that begins to lead goes on where
//! the last one stopped. It writes through the port and names no client.

mod ended_reservations;
mod orphaned_members;
mod outcome;
mod relief;
mod reservation_progress;
mod retry;
mod run;
mod start_run;
mod unplannable_pods;
mod waiting_pods;
mod writes;

#[cfg(test)]
mod tests;

use super::port::ControlPlane;
use crate::ids::PodUid;
use crate::scheduling::planning::PressureWatch;
use crate::scheduling::policy::Mode;
use crate::service::Service;
use crate::units::Moment;
use orphaned_members::OrphanedMember;
use reservation_progress::ReservationProgress;
use retry::RetryState;
use run::PlanningRun;
use std::collections::BTreeMap;
use std::sync::Arc;
use unplannable_pods::ReleasedPods;
pub use unplannable_pods::UNPLANNABLE_AT_ONCE;
use waiting_pods::ToldReason;
use writes::Writes;

pub struct Planner {
    service: Arc<Service>,
    control_plane: Arc<dyn ControlPlane>,
    /// How far each hold is, beyond what the ledger says.
    progress_of: BTreeMap<PodUid, ReservationProgress>,
    run: PlanningRun,
    orphaned_members: BTreeMap<PodUid, OrphanedMember>,
    said: BTreeMap<PodUid, ToldReason>,
    /// How far what was said has been looked through.
    said_after: Option<PodUid>,
    writes: Writes,
    pressure: PressureWatch,
    /// Neighbours of engines under pressure whose eviction came to nothing.
    staying: BTreeMap<PodUid, RetryState>,
    check_engine_load_at: Moment,
    released: ReleasedPods,
}

impl Planner {
    pub fn new(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            service,
            control_plane,
            progress_of: BTreeMap::new(),
            run: PlanningRun::default(),
            orphaned_members: BTreeMap::new(),
            said: BTreeMap::new(),
            said_after: None,
            writes: Writes::default(),
            pressure: PressureWatch::default(),
            staying: BTreeMap::new(),
            check_engine_load_at: Moment::default(),
            released: ReleasedPods::default(),
        }
    }

    /// Looks at everyone who waits. Only for a replica that may act.
    pub fn tick(&mut self) {
        // In shadow mode nobody is placed, and nobody kept.
        if self.service.ledger().policy().mode == Mode::Shadow {
            return self.release_all();
        }
        self.advance_reservations();
        self.advance_orphaned_members();
        self.relieve();
        self.seek();
    }

    /// A replica that may not act forgets how far it was: another goes on.
    pub fn rest(&mut self) {
        self.progress_of.clear();
        self.orphaned_members.clear();
        self.said.clear();
        self.staying.clear();
        self.run.give_up();
        self.writes.forget_what_is_to_come();
        self.pressure = PressureWatch::default();
    }

    /// Waits for a write or the planning run to end, and goes on from what came of it. Never ends while none is under way.
    pub async fn go_on(&mut self) {
        tokio::select! {
            biased;
            outcome = self.writes.next() => self.note(outcome),
            planned = self.run.end() => self.put_into_force(planned),
        }
    }

    #[cfg(test)]
    fn is_idle(&self) -> bool {
        self.writes.is_empty() && self.run.is_idle()
    }

    /// The ledger's present: what is due by it is due here.
    fn now(&self) -> Moment {
        self.service.ledger().now()
    }
}
