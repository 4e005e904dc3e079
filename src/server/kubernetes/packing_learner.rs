//! Relearns the packing model when enough pods have arrived, in the background so that no request waits for it.

use crate::service::{ServerState, WorkKind};
use std::sync::Arc;
use stowage_scheduling::placing::learned::PackingModel;
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::node::Node;
use tokio::task::JoinHandle;

/// Rest after a run, as a multiple of the run's time, so that learning takes a tenth of a core at most. With tens of thousands of
/// nodes and a hundred new pods a second it would otherwise run all the time.
const REST_FACTOR: u64 = 9;
/// Longest rest after a run, because a machine may have been suspended during the run.
const MAX_REST: Millis = Millis::seconds(60);

pub(crate) struct PackingLearner {
    state: Arc<ServerState>,
    task: Option<JoinHandle<()>>,
    started_at: Moment,
    /// The earliest start of the next run.
    rests_until: Moment,
}

impl PackingLearner {
    pub fn new(state: Arc<ServerState>) -> Self {
        Self {
            state,
            task: None,
            started_at: Moment::default(),
            rests_until: Moment::default(),
        }
    }

    /// Starts learning if it is due, and the previous run has ended and is some time ago.
    pub fn tick(&mut self) {
        let now = self.state.now();
        match &self.task {
            Some(at_work) if !at_work.is_finished() => return,
            Some(_) => {
                self.task = None;
                let rest_time = Millis(now.since(self.started_at).0.saturating_mul(REST_FACTOR));
                self.rests_until = now + rest_time.min(MAX_REST);
            }
            None => {}
        }
        if now < self.rests_until {
            return;
        }
        self.started_at = now;
        let state = &self.state;
        let (demand_history, snapshot, policy) = {
            let mut cluster = state.cluster();
            let Some(demand_history) = cluster.ledger().demand_to_learn() else {
                return;
            };
            (
                demand_history,
                cluster.snapshot(),
                cluster.ledger().policy().clone(),
            )
        };
        let state = state.clone();
        self.task = Some(self.state.heavy_work.spawn_in_background(
            WorkKind::PackingModel,
            move || {
                let packing_model = PackingModel::learn(
                    &demand_history,
                    snapshot.nodes().iter().map(Node::node_gpus),
                );
                state.set_packing_model(snapshot, &policy, packing_model);
            },
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::index::ClusterIndex;
    use serde_json::json;
    use stowage_scheduling::policy::Policy;

    /// A node with one GPU.
    fn watched(state: &ServerState) -> ClusterIndex {
        let mut index = ClusterIndex::default();
        let labels = json!({ "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100" });
        let node = json!({ "metadata": { "name": "a", "labels": labels }, "status": { "allocatable": { "cpu": "8", "memory": "8Gi" } } });
        index.apply_node(state, &serde_json::from_value(node).unwrap());
        index
    }

    fn arrive(index: &mut ClusterIndex, state: &ServerState, n: usize) {
        let containers = json!([{ "name": "engine", "resources": { "limits": { "stowage.dev/vram": "20Gi" } } }]);
        let pod = json!({ "metadata": { "name": format!("p-{n}"), "uid": format!("{n}") }, "spec": { "containers": containers } });
        index.apply_pod(state, &serde_json::from_value(pod).unwrap());
    }

    #[tokio::test]
    async fn the_packing_model_is_learned_once_enough_pods_have_come() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let (mut index, mut learning) = (watched(&state), PackingLearner::new(state.clone()));
        for n in 0..10 {
            learning.tick();
            assert!(learning.task.is_none(), "{n} pods are too few");
            arrive(&mut index, &state, n);
        }
        learning.tick();
        learning
            .task
            .as_mut()
            .expect("ten pods are enough")
            .await
            .unwrap();
        assert!(state.cluster().snapshot().packing_model().is_learned());
        learning.tick();
        learning.rests_until = state.now();
        learning.tick();
        assert!(learning.task.is_none(), "nobody came since");
    }

    #[tokio::test]
    async fn after_a_long_run_learning_rests() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let (mut index, mut learning) = (watched(&state), PackingLearner::new(state.clone()));
        (0..10).for_each(|n| arrive(&mut index, &state, n));
        learning.tick();
        learning
            .task
            .as_mut()
            .expect("ten pods are enough")
            .await
            .unwrap();
        learning.started_at = learning.started_at.before(Millis::seconds(2));
        (10..100).for_each(|n| arrive(&mut index, &state, n));
        learning.tick();
        assert!(
            learning.task.is_none(),
            "it took two seconds, and is due again at once"
        );
        assert!(learning.rests_until.since(state.now()) > Millis::seconds(15));
        assert!(learning.rests_until.since(state.now()) <= MAX_REST);
        learning.rests_until = state.now();
        learning.tick();
        assert!(learning.task.is_some());
    }
}
