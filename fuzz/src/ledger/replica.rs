//! One process of Stowage in the race: its ledger, and what its watches have still to bring.

use super::ApiPod;
use std::collections::VecDeque;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{DevicesReported, NodeObserved, PodObserved};
use stowage_scheduling::vocabulary::gpu::Device;
use stowage_scheduling::vocabulary::node::{NodeIdentity, NodeKind};
use stowage_scheduling::vocabulary::placement::Reservation;

/// Event of a watch.
#[derive(Clone)]
pub enum FuzzedEvent {
    Pod(Box<ApiPod>, Option<Reservation>),
    Gone(PodUid),
}

/// One process of Stowage.
pub struct FuzzedReplica {
    pub ledger: Cluster,
    pub events: VecDeque<FuzzedEvent>,
}

impl FuzzedReplica {
    pub fn observe_pod(&mut self, pod: &ApiPod, reservation: Option<Reservation>) {
        let seen = objects::observation(
            pod,
            self.ledger.ledger().policy(),
            reservation,
            jiff::Timestamp::UNIX_EPOCH,
        );
        if let Some(seen) = seen {
            self.ledger.apply(PodObserved(seen));
        }
    }

    pub fn observe_node(&mut self, name: &NodeName, identity: NodeIdentity, devices: Vec<Device>) {
        self.ledger.apply(NodeObserved {
            identity: Some(identity),
            ..NodeObserved::new(name.clone(), NodeKind::Stowage)
        });
        // A node has at most so many, those that it has lost among them.
        let _ = self.ledger.apply(DevicesReported {
            node: name.clone(),
            devices: devices.into(),
            are_all: true,
        });
    }
}
