//! Nodes of eight GPUs with an engine on each, and the pods that join them.

use crate::gpu::h100;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, PodObservation};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{
    DevicesReported, NodeObserved, PodObserved, PodReleased, ReadingReported,
};
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::vocabulary::demand::{ContainerRequest, Demand, PodRequest};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};

pub const GPUS: usize = 8;

pub struct Fleet {
    pub cluster: Cluster,
    pub policy: Arc<Policy>,
    pub nodes: Vec<NodeName>,
}

impl Fleet {
    /// `engine`: the VRAM of the engine on a GPU of a node, in GiB.
    pub fn new(policy: Policy, nodes: usize, mut engine: impl FnMut(usize, usize) -> u64) -> Self {
        let policy = Arc::new(policy);
        let mut cluster = Cluster::new(policy.clone());
        let nodes: Vec<NodeName> = (0..nodes)
            .map(|n| NodeName::parse(&format!("node-{n:04}")).expect("a name"))
            .collect();
        for (n, name) in nodes.iter().enumerate() {
            cluster.apply(NodeObserved::new(name.clone(), NodeKind::Stowage));
            let devices = (0..GPUS).map(|gpu| h100(uuid(n, gpu), gpu, None)).collect();
            cluster
                .apply(DevicesReported {
                    node: name.clone(),
                    devices,
                    are_all: true,
                })
                .expect("the node exists");
        }
        let mut fleet = Self {
            cluster,
            policy,
            nodes,
        };
        for n in 0..fleet.nodes.len() {
            for gpu in 0..GPUS {
                let demand = fleet.demand(engine(n, gpu), 0);
                fleet.bind(&format!("engine-{n}-{gpu}"), demand, n, &[gpu]);
            }
        }
        fleet
    }

    /// A pod of one GPU: `serving`, or `opportunistic` if its priority is negative.
    pub fn demand(&self, gib: u64, priority: i32) -> Demand {
        let vram = format!("{gib}Gi");
        let containers = [ContainerRequest {
            vram: Some(&vram),
            ..ContainerRequest::plain("main")
        }];
        let request = PodRequest {
            priority,
            ..PodRequest::plain("llm", &containers)
        };
        Demand::from_pod(&request, &self.policy).expect("a pod that can be understood")
    }

    pub fn bind(&mut self, name: &str, demand: Demand, node: usize, gpus: &[usize]) {
        let devices = gpus.iter().map(|gpu| uuid(node, *gpu)).collect();
        let state = ObservedPhase::Bound {
            node: self.nodes[node].clone(),
            devices: Some(devices),
            starting: false,
            ran: None,
        };
        let (uid, key) = (uid(name), PodKey::parse("llm", name).expect("a name"));
        self.cluster.apply(PodObserved(PodObservation {
            uid,
            key,
            demand,
            state,
            observed: None,
        }));
    }

    pub fn release(&mut self, name: &str) {
        self.cluster.apply(PodReleased(uid(name)));
    }

    pub fn advance_to_second(&mut self, second: u64) {
        self.cluster
            .apply(ClockAdvanced(Moment::default() + Millis::seconds(second)));
    }

    /// The node's agent reports; each GPU's processes use what they were granted.
    pub fn report(&mut self, node: usize, loads: &[EngineLoad; GPUS]) {
        let gpu = |(gpu, load): (usize, &EngineLoad)| GpuReading {
            uuid: uuid(node, gpu),
            used: Some(Bytes::ZERO),
            attributed: Vec::new(),
            engine_load: *load,
        };
        let reading = NodeReading {
            sampled: self.cluster.ledger().now(),
            gpus: loads.iter().enumerate().map(gpu).collect(),
            ..NodeReading::default()
        };
        self.cluster.apply(ReadingReported {
            node: self.nodes[node].clone(),
            reading: reading.into(),
        });
    }
}

pub fn uid(name: &str) -> PodUid {
    PodUid::parse(name).expect("a UID")
}

fn uuid(node: usize, gpu: usize) -> GpuUuid {
    GpuUuid::parse(&format!("GPU-{node}-{gpu}")).expect("a UUID")
}
