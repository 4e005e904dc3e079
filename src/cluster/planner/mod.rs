//! What the planner does about pods that wait: it has them planned ([`seek`]), and sees each hold through ([`course`]) until the
//! pod is bound or its room is given up ([`ended`]). It has others leave engines under pressure ([`relieve`]).
//!
//! ```text
//!  pending pods ─► plan (pure, on a copy of the books) ─► hold, checked again under the lock
//!     nobody leaves for it ───────────────────────────────────────────► nominate + touch, lift the gate
//!     others leave ─► condition written ─► evict each ─► all are gone ─► nominate + touch, lift the gate
//! ```
//!
//! Everything but the counts of attempts follows from the ledger, tick after tick: a replica that begins to lead goes on where
//! the last one stopped. It writes through the port and names no client.

mod course;
mod ended;
mod outcome;
mod relieve;
mod seek;
mod strays;

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
use std::collections::BTreeMap;
use std::sync::Arc;
use strays::LetThrough;
use tokio::task::JoinSet;

/// Writes that are under way at once: as many as keep an API server at work, and few beside what others ask of it.
const WRITES_AT_ONCE: usize = 32;

pub struct Planner {
    service: Arc<Service>,
    control_plane: Arc<dyn ControlPlane>,
    /// How far each hold is, beyond what the ledger says.
    courses: BTreeMap<PodUid, Course>,
    writes: JoinSet<Option<Outcome>>,
    places: Arc<tokio::sync::Semaphore>,
    pressure: PressureWatch,
    look_at_pressure: Moment,
    let_through: LetThrough,
}

impl Planner {
    pub fn new(service: Arc<Service>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            service,
            control_plane,
            courses: BTreeMap::new(),
            writes: JoinSet::new(),
            places: Arc::new(tokio::sync::Semaphore::new(WRITES_AT_ONCE)),
            pressure: PressureWatch::default(),
            look_at_pressure: Moment::default(),
            let_through: LetThrough::default(),
        }
    }

    /// Looks at everyone who waits. Only for a replica that may act.
    pub async fn tick(&mut self) {
        // In shadow mode nobody is placed, and nobody kept.
        if self.service.ledger().policy().mode == Mode::Shadow {
            return self.release_all();
        }
        self.see_holds_through();
        self.relieve();
        self.seek().await;
    }

    /// A replica that may not act forgets how far it was: another goes on.
    pub fn rest(&mut self) {
        self.courses.clear();
        self.pressure = PressureWatch::default();
    }

    /// Waits for the next of its writes to end, and notes what came of it. Never ends while none is under way.
    pub async fn next_write(&mut self) {
        match self.writes.join_next().await {
            Some(done) => self.note(done.ok().flatten()),
            None => std::future::pending().await,
        }
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
