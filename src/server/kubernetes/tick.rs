//! The ledger's periodic upkeep: tells the control loop the time, sweeps pods that no watch shows, and reports current warnings when
//! a replica becomes leader.
//!
//! It serves a real cluster and a dump alike: it writes through the port and knows no client.

use super::index::ClusterIndex;
use super::loop_driver::LoopDriver;
use super::packing_learner::PackingLearner;
use crate::service::ServerState;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::control_loop::UNPLANNABLE_PER_TICK;
use stowage_scheduling::units::{Millis, Moment};

/// A tenth of a soft reservation's lifetime: an expired one is soon gone for the next pod.
const TICK_INTERVAL: Duration = Duration::from_millis(200);
/// Interval of the sweep of unwatched pods: far longer than a watch lags behind a request.
const SWEEP_INTERVAL: Millis = Millis::seconds(60);

/// Runs until it is dropped.
pub async fn run(
    state: Arc<ServerState>,
    index: Arc<Mutex<ClusterIndex>>,
    control_plane: Arc<dyn ControlPlane>,
) {
    let mut upkeep = LedgerUpkeep {
        next_sweep: state.now() + SWEEP_INTERVAL,
        driver: LoopDriver::new(state.clone(), control_plane.clone()),
        state,
        index,
        control_plane,
        was_open: false,
    };
    let mut learner = PackingLearner::new(upkeep.state.clone());
    let mut ticks = tokio::time::interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            // In this order, so that a simulation is reproducible; ticks are rare beside the results of writes.
            biased;
            _ = ticks.tick() => {
                learner.tick();
                upkeep.tick(upkeep.state.now());
            }
            () = upkeep.driver.handle_next_result() => {}
        }
    }
}

struct LedgerUpkeep {
    state: Arc<ServerState>,
    index: Arc<Mutex<ClusterIndex>>,
    control_plane: Arc<dyn ControlPlane>,
    driver: LoopDriver,
    was_open: bool,
    next_sweep: Moment,
}

impl LedgerUpkeep {
    fn tick(&mut self, now: Moment) {
        let is_open = self.state.leadership.is_open();
        let unplannable_pods = match is_open {
            true => self.index.lock().unplannable_pods_after(
                self.driver.control_loop.unplannable_pods_after(),
                UNPLANNABLE_PER_TICK,
            ),
            false => Vec::new(),
        };
        self.driver.tick(now, is_open, unplannable_pods);
        if is_open && !self.was_open {
            let warning_events = self.index.lock().current_warning_events(&self.state);
            warning_events
                .into_iter()
                .for_each(|event| self.control_plane.record_event(event));
        }
        self.was_open = is_open;
        if now >= self.next_sweep && self.state.leadership.is_synced() {
            ClusterIndex::sweep(&self.index, &self.state);
            self.next_sweep = now + SWEEP_INTERVAL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::testing::Recorder;
    use crate::service::PODS_VISITED_UNDER_LOCK;
    use serde_json::json;
    use stowage_scheduling::ids::PodUid;
    use stowage_scheduling::policy::{Mode, Policy};

    /// A replica with one pod whose reservation has passed its deadline, and one unplaced pod.
    fn upkeep(recorder: &Arc<Recorder>, policy: Policy) -> LedgerUpkeep {
        let state = ServerState::new(policy);
        let mut index = ClusterIndex::default();
        let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" } });
        let containers = json!([{ "name": "engine", "resources": resources }]);
        let message = json!({ "node": "a", "devices": [], "victims": [], "deadline": "2020-01-01T00:00:00Z" });
        let condition = json!({ "type": "stowage.dev/Reserved", "status": "True", "message": message.to_string() });
        let holder = json!({
            "metadata": { "name": "holder", "uid": "1" },
            "spec": { "containers": containers },
            "status": { "conditions": [condition] },
        });
        let unplannable_pod = json!({
            "metadata": { "name": "unmanaged", "uid": "2" },
            "spec": { "containers": containers, "nodeName": "a" },
        });
        let pods = [holder, unplannable_pod].map(|pod| serde_json::from_value(pod).unwrap());
        index.replace_pods(&state, &pods);
        state.record_synced(0, 0);
        LedgerUpkeep {
            next_sweep: state.now() + SWEEP_INTERVAL,
            driver: LoopDriver::new(state.clone(), recorder.clone()),
            index: Arc::new(Mutex::new(index)),
            control_plane: recorder.clone(),
            state,
            was_open: false,
        }
    }

    #[tokio::test]
    async fn the_leader_clears_an_ended_reservation_and_reports_current_warnings_once() {
        let recorder = Arc::new(Recorder::default());
        let mut upkeep = upkeep(&recorder, Policy::default());
        upkeep.state.lead_from_the_start();
        let now = upkeep.state.now();
        upkeep.tick(now);
        upkeep.tick(now);
        upkeep.driver.settle().await;
        assert_eq!(
            recorder.event_reasons(),
            ["StowageReservationEnded", "StowageUnplaced"]
        );
        assert_eq!(recorder.written(), ["holder: end hold"]);
    }

    /// There may be a million pods, and filters are answered from now on.
    #[tokio::test]
    async fn a_new_leader_finds_possibly_refused_pods_without_holding_the_lock() {
        let recorder = Arc::new(Recorder::default());
        let mut upkeep = upkeep(&recorder, Policy::default());
        let bound = 1000;
        let pods = (0..bound).map(|nth| {
            let resources = json!({ "limits": { "stowage.dev/vram": "1Gi" } });
            let annotations = json!({ "stowage.dev/devices": "index-0", "stowage.dev/vram-granted": "1Gi" });
            let pod = json!({
                "metadata": { "name": format!("bound-{nth}"), "uid": format!("bound-{nth}"), "annotations": annotations },
                "spec": {
                    "nodeName": "a", "containers": [{ "name": "engine", "resources": resources }],
                },
            });
            serde_json::from_value(pod).unwrap()
        });
        let more_than_one_part = 0..=32;
        let waiting = more_than_one_part.clone().map(|nth| {
            let resources = json!({ "limits": { "stowage.dev/vram": "40Gi" } });
            let pod = json!({
                "metadata": { "name": format!("waiting-{nth}"), "uid": format!("waiting-{nth}") },
                "spec": { "containers": [{ "name": "engine", "resources": resources }] },
            });
            serde_json::from_value(pod).unwrap()
        });
        let pods: Vec<_> = pods.chain(waiting).collect();
        upkeep.index.lock().replace_pods(&upkeep.state, &pods);
        upkeep.state.lead_from_the_start();
        let looked_at = || PODS_VISITED_UNDER_LOCK.get();
        let before = looked_at();
        upkeep.tick(upkeep.state.now());
        assert!(
            looked_at() - before < bound,
            "{} pods",
            looked_at() - before
        );
        let cluster = upkeep.state.cluster();
        for nth in more_than_one_part {
            let waiting = PodUid::parse(&format!("waiting-{nth}")).unwrap();
            assert!(
                cluster
                    .ledger()
                    .pod_state(&waiting)
                    .unwrap()
                    .refusal()
                    .is_some(),
                "{waiting}"
            );
        }
    }

    /// A panic under the lock, or a Lease that is renewed late, ends a tenure within one process.
    #[tokio::test]
    async fn each_new_tenure_treats_pending_pods_as_refused() {
        let recorder = Arc::new(Recorder::default());
        let mut upkeep = upkeep(&recorder, Policy::default());
        let waiting = json!({
            "metadata": { "name": "later", "uid": "later" },
            "spec": { "containers": [{
                "name": "engine", "resources": { "limits": { "stowage.dev/vram": "40Gi" } },
            }] },
        });
        let tick = |upkeep: &mut LedgerUpkeep| upkeep.tick(upkeep.state.now());
        upkeep.state.lead_from_the_start();
        tick(&mut upkeep);
        upkeep.state.set_tenure(crate::service::Tenure::Standby);
        tick(&mut upkeep);
        let pod = serde_json::from_value(waiting).unwrap();
        upkeep.index.lock().apply_pod(&upkeep.state, &pod);
        upkeep.state.lead_from_the_start();
        tick(&mut upkeep);
        let later = PodUid::parse("later").unwrap();
        let cluster = upkeep.state.cluster();
        let pod = cluster.ledger().pod_state(&later).unwrap();
        assert!(pod.refusal().is_some());
    }

    #[tokio::test]
    async fn in_shadow_mode_an_earlier_reservation_is_cleared_all_the_same() {
        let recorder = Arc::new(Recorder::default());
        let mut policy = Policy::default();
        policy.mode = Mode::Shadow;
        let mut upkeep = upkeep(&recorder, policy);
        upkeep.state.lead_from_the_start();
        upkeep.tick(upkeep.state.now());
        upkeep.driver.settle().await;
        assert_eq!(recorder.written(), ["holder: end hold"]);
    }

    #[tokio::test]
    async fn an_expired_reservation_is_cleared_only_once_this_replica_leads() {
        let recorder = Arc::new(Recorder::default());
        let mut upkeep = upkeep(&recorder, Policy::default());
        (0..3).for_each(|_| upkeep.tick(upkeep.state.now()));
        assert!(recorder.event_reasons().is_empty() && recorder.written().is_empty());
        assert_eq!(upkeep.state.cluster().ledger().totals().reservations, 1);
        upkeep.state.lead_from_the_start();
        upkeep.tick(upkeep.state.now());
        upkeep.driver.settle().await;
        assert_eq!(upkeep.state.cluster().ledger().totals().reservations, 0);
        assert_eq!(
            recorder.event_reasons(),
            ["StowageReservationEnded", "StowageUnplaced"]
        );
        assert_eq!(recorder.written(), ["holder: end hold"]);
    }
}
