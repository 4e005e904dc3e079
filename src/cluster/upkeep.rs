//! What time does to the books: hints and holds run out, readings age, refused pods that would fit now are woken, pods that
//! nobody shows any more are swept, and a replica that begins to lead says what stands.
//!
//! It serves a real cluster and a dump alike: it writes through the port and names no client.

use super::index::Index;
use crate::control_plane::{ControlPlane, Notice, NoticeKind, StatusChange};
use crate::ids::{PodKey, PodUid};
use crate::scheduling::ledger::{Refusal, whom_to_wake};
use crate::scheduling::policy::Mode;
use crate::service::Service;
use crate::units::{Millis, Moment};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;

/// A tenth of a hint's life: what has run out is gone soon enough for the next pod.
const TICK: Duration = Duration::from_millis(200);
/// Refused pods looked at in a tick. With five ticks a second a thousand of them are looked at within four seconds, and at
/// five thousand nodes a tick takes some milliseconds of one core.
const LOOKED_AT: usize = 64;
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
            // In shadow mode nothing is told but that what was held is not held any more.
            if !self.is_shadowing() {
                self.tell_of_freed_holds();
                self.wake();
            }
            ended.into_iter().for_each(|(key, uid)| self.end_hold(key, uid));
        }
        if is_open && !self.was_open {
            self.service.ledger().suppose_all_refused();
            let standing = self.index.lock().standing(&self.service);
            standing.into_iter().for_each(|notice| self.control_plane.notify(notice));
        }
        self.was_open = is_open;
        if now >= self.next_sweep && self.service.gate.is_synced() {
            self.index.lock().sweep(&self.service);
            self.next_sweep = now + SWEEP_EVERY;
        }
    }

    fn is_shadowing(&self) -> bool {
        self.service.ledger().policy().mode == Mode::Shadow
    }

    fn expire(&self, now: Moment) -> Vec<(PodKey, PodUid)> {
        let mut ledger = self.service.ledger();
        let ended = ledger.expire(now);
        ended.into_iter().filter_map(|uid| Some((ledger.entry(&uid)?.key.clone(), uid))).collect()
    }

    /// The scheduler may have asked again before this replica saw the last victim leave; it was refused then, and nothing
    /// else would wake the pod. A write of its own status does.
    fn tell_of_freed_holds(&mut self) {
        let mut ledger = self.service.ledger();
        let freed = ledger.freed_holds();
        let told =
            freed.into_iter().filter_map(|(uid, hold)| Some((ledger.entry(&uid)?.key.clone(), uid, hold)));
        let told: Vec<_> = told.collect();
        drop(ledger);
        for (key, uid, hold) in told {
            let control_plane = self.control_plane.clone();
            self.writes.spawn(async move {
                if let Err(error) = control_plane.write_status(&key, &uid, &StatusChange::hold(hold)).await {
                    tracing::warn!(pod = %key, %error, "a pod was not told that its room is free");
                }
            });
        }
    }

    /// Pods that were refused and would fit now, for a reason that no API event shows.
    fn wake(&mut self) {
        let mut ledger = self.service.ledger();
        let refusals = ledger.refusals(LOOKED_AT);
        if refusals.is_empty() {
            return;
        }
        let snapshot = ledger.snapshot();
        drop(ledger);
        let woken = whom_to_wake(refusals, &snapshot);
        for Refusal { uid, key, .. } in woken {
            self.service.ledger().note_woken(&uid);
            let control_plane = self.control_plane.clone();
            self.writes.spawn(async move {
                // Should it fail, the pod's turn comes again.
                if let Err(error) = control_plane.write_status(&key, &uid, &StatusChange::touch()).await {
                    tracing::warn!(pod = %key, %error, "a pod was not told that there is room for it");
                }
            });
        }
    }

    fn end_hold(&mut self, key: PodKey, uid: PodUid) {
        self.control_plane.notify(Notice {
            key: key.clone(),
            uid: uid.clone(),
            kind: NoticeKind::HoldEnded,
            text: "The room held for the pod was not taken before the hold's deadline; it is open to others again.".into(),
        });
        let control_plane = self.control_plane.clone();
        self.writes.spawn(async move {
            // Should it fail, the condition shows at the pod's next change, runs out at once and is cleared again.
            if let Err(error) = control_plane.write_status(&key, &uid, &StatusChange::end_hold()).await {
                tracing::warn!(pod = %key, %error, "the condition of a hold that ended was not cleared");
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control_plane::{
        BindOrder, BindOutcome, ControlPlaneError, EvictionOutcome, EvictionReason, PodOnRecord,
    };
    use crate::scheduling::policy::Policy;
    use futures::future::BoxFuture;
    use serde_json::json;

    #[derive(Default)]
    struct Recorder {
        told: Mutex<Vec<NoticeKind>>,
        cleared: Mutex<Vec<PodUid>>,
        woken: Mutex<Vec<PodUid>>,
    }

    impl ControlPlane for Recorder {
        fn bind<'a>(&'a self, _: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
            unreachable!("time binds nobody")
        }

        fn read_pod<'a>(
            &'a self,
            _: &'a PodKey,
        ) -> BoxFuture<'a, Result<Option<PodOnRecord>, ControlPlaneError>> {
            unreachable!("time reads nobody")
        }

        fn write_status<'a>(
            &'a self,
            _: &'a PodKey,
            uid: &'a PodUid,
            change: &'a StatusChange,
        ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
            match change {
                change if *change == StatusChange::end_hold() => self.cleared.lock().push(uid.clone()),
                change if *change == StatusChange::touch() => self.woken.lock().push(uid.clone()),
                other => unreachable!("time writes no {other:?}"),
            }
            Box::pin(std::future::ready(Ok(())))
        }

        fn evict<'a>(
            &'a self,
            _: &'a PodKey,
            _: &'a PodUid,
            _: &'a EvictionReason,
        ) -> BoxFuture<'a, EvictionOutcome> {
            unreachable!("time evicts nobody")
        }

        fn lift_gate<'a>(
            &'a self,
            _: &'a PodKey,
            _: &'a PodUid,
        ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
            unreachable!("time lifts no gate")
        }

        fn notify(&self, notice: Notice) {
            self.told.lock().push(notice.kind);
        }
    }

    /// A replica whose one pod holds room of which the deadline has passed, beside one that is unplaced.
    fn upkeep(recorder: &Arc<Recorder>) -> Upkeep {
        upkeep_by(recorder, Policy::default())
    }

    fn upkeep_by(recorder: &Arc<Recorder>, policy: Policy) -> Upkeep {
        let service = Service::new(policy);
        let mut index = Index::default();
        let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" } });
        let containers = json!([{ "name": "engine", "resources": resources }]);
        let message =
            json!({ "node": "a", "devices": [], "victims": [], "deadline": "2020-01-01T00:00:00Z" });
        let condition =
            json!({ "type": "stowage.dev/Hold", "status": "True", "message": message.to_string() });
        let holder = json!({
            "metadata": { "name": "holder", "uid": "1" },
            "spec": { "containers": containers },
            "status": { "conditions": [condition] },
        });
        let stray = json!({
            "metadata": { "name": "stray", "uid": "2" },
            "spec": { "containers": containers, "nodeName": "a" },
        });
        let pods = [holder, stray].map(|pod| serde_json::from_value(pod).unwrap());
        index.reset_pods(&service, &pods);
        service.gate.set_synced();
        Upkeep {
            next_sweep: service.now() + SWEEP_EVERY,
            index: Arc::new(Mutex::new(index)),
            control_plane: recorder.clone(),
            service,
            was_open: false,
            writes: JoinSet::new(),
        }
    }

    #[tokio::test]
    async fn who_leads_tells_and_clears_a_hold_that_ended_and_says_once_what_stands() {
        let recorder = Arc::new(Recorder::default());
        let mut upkeep = upkeep(&recorder);
        upkeep.service.gate.set_leading(true);
        upkeep.service.gate.set_synced();
        let now = upkeep.service.now();
        upkeep.tick(now);
        upkeep.tick(now);
        upkeep.writes.join_next().await;
        assert_eq!(*recorder.told.lock(), [NoticeKind::HoldEnded, NoticeKind::Unplaced]);
        assert_eq!(recorder.cleared.lock().len(), 1);
    }

    #[tokio::test]
    async fn in_shadow_mode_a_hold_of_before_is_cleared_and_nobody_is_woken() {
        for (mode, woken) in [(Mode::Enforce, 1), (Mode::Shadow, 0)] {
            let recorder = Arc::new(Recorder::default());
            let mut policy = Policy::default();
            policy.mode = mode;
            let mut upkeep = upkeep_by(&recorder, policy);
            upkeep.service.gate.set_leading(true);
            upkeep.service.gate.set_synced();
            let labels = json!({
                "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
            });
            let node = json!({ "metadata": { "name": "b", "labels": labels } });
            let node = serde_json::from_value(node).unwrap();
            upkeep.index.lock().reset_nodes(&upkeep.service, &[node]);
            let now = upkeep.service.now();
            upkeep.tick(now);
            upkeep.service.ledger().set_now(now + Millis::seconds(10));
            upkeep.tick(now + Millis::seconds(10));
            while upkeep.writes.join_next().await.is_some() {}
            assert_eq!((recorder.cleared.lock().len(), recorder.woken.lock().len()), (1, woken), "{mode:?}");
        }
    }

    #[tokio::test]
    async fn who_does_not_lead_lets_the_hold_go_and_says_and_writes_nothing() {
        let recorder = Arc::new(Recorder::default());
        let mut upkeep = upkeep(&recorder);
        upkeep.tick(upkeep.service.now());
        assert!(recorder.told.lock().is_empty() && upkeep.writes.is_empty());
        assert_eq!(upkeep.service.ledger().totals().holds, 0);
    }
}
