//! What `serve` does beside the requests: updates the nodes' free CPU and memory, and relearns the packing model when enough
//! pods have arrived.

use super::ledger;
use crate::simulate::packing::cluster::SimulatedCluster;
use crate::simulate::packing::trace::WorkloadTrace;
use std::sync::Arc;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::placing::learned::{
    DemandHistory, DemandShape, LEARN_INTERVAL, PackingModel,
};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::FreeHostKnown;
use stowage_scheduling::verbs::tick::PackingModelLearned;
use stowage_scheduling::vocabulary::demand::HostResources;
use stowage_scheduling::vocabulary::node::Node;

/// The known demand of pods to come.
#[derive(Debug, Clone, Default)]
pub enum DemandKnowledge {
    /// The history of earlier pods.
    #[default]
    Learned,
    /// How often each kind will arrive. The packing model depends on the nodes too, and so is computed again after some
    /// arrivals.
    Known {
        demand_history: Arc<DemandHistory>,
        next_at: u64,
    },
}

impl DemandKnowledge {
    /// Counts each pod of the trace, as if all had arrived already.
    pub fn of_full_trace(setting: &WorkloadTrace) -> Self {
        let window = u16::try_from(setting.pods.len()).unwrap_or(u16::MAX);
        let policy = Policy::default();
        let demand_shapes: Vec<Option<DemandShape>> = setting
            .kinds
            .iter()
            .map(|kind| DemandShape::from_demand(&ledger::demands(setting, kind, &policy)?[0]))
            .collect();
        let mut demand_history = DemandHistory::with_window(window);
        setting
            .pods
            .iter()
            .filter_map(|pod| demand_shapes[pod.kind].clone())
            .for_each(|demand_shape| demand_history.record_arrival(demand_shape));
        Self::Known {
            demand_history: Arc::new(demand_history),
            next_at: 0,
        }
    }
}

/// Keeps a ledger up to date beside its pods.
#[derive(Debug, Default)]
pub struct CoreUpkeep {
    knowledge: DemandKnowledge,
    /// By rank: the version of each node for which the ledger has its free CPU and memory. No node has version 0.
    versions: Vec<u32>,
}

impl CoreUpkeep {
    pub fn new(knowledge: DemandKnowledge) -> Self {
        Self {
            knowledge,
            versions: Vec::new(),
        }
    }

    /// As often as `serve` does, which is before each pod: updates changed nodes, and learns if it is due.
    pub fn tick(&mut self, ledger: &mut Cluster, cluster: &SimulatedCluster, names: &[NodeName]) {
        self.update_nodes(ledger, cluster, names);
        self.learn(ledger);
    }

    fn update_nodes(
        &mut self,
        ledger: &mut Cluster,
        cluster: &SimulatedCluster,
        names: &[NodeName],
    ) {
        self.versions.resize(names.len(), 0);
        for (rank, node) in cluster.nodes().iter().enumerate() {
            if self.versions[rank] != node.version {
                self.versions[rank] = node.version;
                let free_host = HostResources {
                    cpu: MilliCpu(node.cpu),
                    memory: Bytes(node.memory),
                };
                ledger.apply(FreeHostKnown {
                    node: names[rank].clone(),
                    free_host: Some(free_host),
                });
            }
        }
    }

    fn learn(&mut self, ledger: &mut Cluster) {
        let demand_history = match &mut self.knowledge {
            DemandKnowledge::Learned => match ledger.ledger().demand_to_learn() {
                Some(demand_history) => Arc::new(demand_history),
                None => return,
            },
            DemandKnowledge::Known {
                demand_history,
                next_at,
            } if *next_at <= ledger.ledger().demand_history().arrivals() => {
                *next_at = ledger.ledger().demand_history().arrivals() + LEARN_INTERVAL;
                demand_history.clone()
            }
            DemandKnowledge::Known { .. } => return,
        };
        let snapshot = ledger.snapshot();
        let packing_model = PackingModel::learn(
            &demand_history,
            snapshot.nodes().iter().map(Node::node_gpus),
        );
        // The ledger copies a snapshot that is still in use.
        drop(snapshot);
        ledger.apply(PackingModelLearned(packing_model));
    }
}
