//! What the planner does about pods that wait: it has them planned ([`seek`]), and sees each hold through ([`course`]) until the
//! pod is bound or its room is given up ([`ended`]). It has others leave engines under pressure ([`relieve`]).
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

mod course;
mod ended;
mod outcome;
mod relieve;
mod run;
mod seek;

#[cfg(test)]
mod tests;

use crate::control_plane::ControlPlane;
use crate::ids::PodUid;
use crate::scheduling::plan::PressureWatch;
use crate::scheduling::policy::Mode;
use crate::service::Service;
use crate::units::Moment;
use course::Course;
use outcome::Outcome;
use run::Run;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::task::JoinSet;

/// Writes that are under way at once. An API server with its usual limits serves some hundreds.
const WRITES_AT_ONCE: usize = 128;

pub struct Planner {
    service: Arc<Service>,
    control_plane: Arc<dyn ControlPlane>,
    /// How far each hold is, beyond what the ledger says.
    courses: BTreeMap<PodUid, Course>,
    run: Run,
    writes: JoinSet<Option<Outcome>>,
    places: Arc<tokio::sync::Semaphore>,
    pressure: PressureWatch,
    look_at_pressure: Moment,
}

impl Planner {
    pub fn new(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            service,
            control_plane,
            courses: BTreeMap::new(),
            run: Run::default(),
            writes: JoinSet::new(),
            places: Arc::new(tokio::sync::Semaphore::new(WRITES_AT_ONCE)),
            pressure: PressureWatch::default(),
            look_at_pressure: Moment::default(),
        }
    }

    /// Looks at everyone who waits. Only for a replica that may act.
    pub fn tick(&mut self) {
        // In shadow mode nobody is placed, and nobody kept.
        if self.service.ledger().policy().mode == Mode::Shadow {
            return self.release_all();
        }
        self.see_holds_through();
        self.relieve();
        self.seek();
    }

    /// A replica that may not act forgets how far it was: another goes on.
    pub fn rest(&mut self) {
        self.courses.clear();
        self.run.give_up();
        self.pressure = PressureWatch::default();
    }

    /// Waits for a write or the planning run to end, and goes on from what came of it. Never ends while none is under way.
    pub async fn go_on(&mut self) {
        tokio::select! {
            Some(done) = self.writes.join_next() => self.note(done.ok().flatten()),
            planned = self.run.end() => self.put_into_force(planned),
        }
    }

    #[cfg(test)]
    fn is_idle(&self) -> bool {
        self.writes.is_empty() && self.run.is_idle()
    }

    /// Does a write beside the ticks, and notes what came of it.
    fn write(&mut self, act: impl Future<Output = Option<Outcome>> + Send + 'static) {
        let places = self.places.clone();
        self.writes.spawn(async move {
            let _place = places.acquire_owned().await.ok()?;
            act.await
        });
    }
}
