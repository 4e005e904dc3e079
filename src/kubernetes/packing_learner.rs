//! Relearns the packing model when enough pods have arrived, on a thread of its own so that no request waits for it.

use crate::scheduling::placing::learned::PackingModel;
use crate::scheduling::vocabulary::node::Node;
use crate::service::Service;
use std::sync::Arc;
use tokio::task::JoinHandle;

pub struct PackingLearner {
    service: Arc<Service>,
    at_work: Option<JoinHandle<()>>,
}

impl PackingLearner {
    pub fn new(service: Arc<Service>) -> Self {
        Self { service, at_work: None }
    }

    /// Starts learning if it is due and the previous run has ended.
    pub fn tick(&mut self) {
        if self.at_work.as_ref().is_some_and(|at_work| !at_work.is_finished()) {
            return;
        }
        let service = &self.service;
        let (demand_history, snapshot) = {
            let mut ledger = service.cluster();
            let Some(demand_history) = ledger.demand_to_learn() else { return };
            (demand_history, ledger.snapshot())
        };
        let service = service.clone();
        self.at_work = Some(self.service.heavy_work.begin_in_background(move || {
            let packing_model =
                PackingModel::learn(&demand_history, snapshot.nodes().iter().map(Node::node_gpus));
            service.set_packing_model(snapshot, packing_model);
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::index::ClusterIndex;
    use crate::scheduling::policy::Policy;
    use serde_json::json;

    #[tokio::test]
    async fn the_packing_model_is_learned_once_enough_pods_have_come() {
        let service = Service::new(Policy::default());
        let mut index = ClusterIndex::default();
        let labels = json!({ "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100" });
        let node = json!({ "metadata": { "name": "a", "labels": labels }, "status": { "allocatable": { "cpu": "8", "memory": "8Gi" } } });
        index.apply_node(&service, &serde_json::from_value(node).unwrap());
        let mut learning = PackingLearner::new(service.clone());
        for n in 0..10 {
            learning.tick();
            assert!(learning.at_work.is_none(), "{n} pods are too few");
            let containers =
                json!([{ "name": "engine", "resources": { "limits": { "stowage.dev/vram": "20Gi" } } }]);
            let pod = json!({ "metadata": { "name": format!("p-{n}"), "uid": format!("{n}") }, "spec": { "containers": containers } });
            index.apply_pod(&service, &serde_json::from_value(pod).unwrap());
        }
        learning.tick();
        learning.at_work.take().expect("ten pods are enough").await.unwrap();
        assert!(service.cluster().snapshot().packing_model().is_learned());
        learning.tick();
        assert!(learning.at_work.is_none(), "nobody came since");
    }
}
