//! What time does to the books: hints and holds run out, pods that nobody shows any more are swept, and a replica that
//! begins to lead says what stands.
//!
//! It serves a real cluster and a dump alike: it writes through the port and names no client.

use super::index::Index;
use crate::control_plane::{ControlPlane, Notice, NoticeKind};
use crate::ids::{PodKey, PodUid};
use crate::service::Service;
use crate::units::{Millis, Moment};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// A tenth of a hint's life: what has run out is gone soon enough for the next pod.
const TICK: Duration = Duration::from_millis(200);
/// Far longer than a watch lags behind a request.
const SWEEP_EVERY: Millis = Millis::seconds(60);

/// Runs until it is dropped.
pub async fn run(service: Arc<Service>, index: Arc<Mutex<Index>>, control_plane: Arc<dyn ControlPlane>) {
    let mut upkeep = Upkeep {
        next_sweep: service.now() + SWEEP_EVERY,
        service,
        index,
        control_plane,
        was_open: false,
        writes: JoinSet::new(),
    };
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        upkeep.tick(upkeep.service.now());
    }
}

struct Upkeep {
    service: Arc<Service>,
    index: Arc<Mutex<Index>>,
    control_plane: Arc<dyn ControlPlane>,
    was_open: bool,
    next_sweep: Moment,
    /// Conditions being cleared. Beside the ticks: a slow API server must not keep hints alive.
    writes: JoinSet<()>,
}

impl Upkeep {
    fn tick(&mut self, now: Moment) {
        while self.writes.try_join_next().is_some() {}
        let ended = self.expire(now);
        let is_open = self.service.gate.is_open();
        if is_open {
            ended.into_iter().for_each(|(key, uid)| self.end_hold(key, uid));
        }
        if is_open && !self.was_open {
            let standing = self.index.lock().standing(&self.service);
            standing.into_iter().for_each(|notice| self.control_plane.notify(notice));
        }
        self.was_open = is_open;
        if now >= self.next_sweep && self.service.gate.is_synced() {
            self.index.lock().sweep(&self.service);
            self.next_sweep = now + SWEEP_EVERY;
        }
    }

    fn expire(&self, now: Moment) -> Vec<(PodKey, PodUid)> {
        let mut ledger = self.service.ledger();
        let ended = ledger.expire(now);
        ended.into_iter().filter_map(|uid| Some((ledger.entry(&uid)?.key.clone(), uid))).collect()
    }

    fn end_hold(&mut self, key: PodKey, uid: PodUid) {
        self.control_plane.notify(Notice {
            key: key.clone(),
            uid: uid.clone(),
            kind: NoticeKind::HoldEnded,
            text: "The room held for the pod is open to others again: it did not become free, or was not taken, before the hold's deadline.".into(),
        });
        let control_plane = self.control_plane.clone();
        self.writes.spawn(async move {
            // Should it fail, the condition shows at the pod's next change, runs out at once and is cleared again.
            if let Err(error) = control_plane.write_hold(&key, &uid, None).await {
                tracing::warn!(pod = %key, %error, "the condition of a hold that ended was not cleared");
            }
        });
    }
}
