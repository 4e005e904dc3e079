//! A small cluster, brought into a state by what the watches and the agents would show of it.

use super::gpus::h100;
use super::names::{gpu_at, key, node, uid};
use crate::ids::PodUid;
use crate::ledger::{ObservedPhase, ObservedWaiting, PodObservation, PodWarning, SchedulingGate};
use crate::policy::Policy;
use crate::units::{Millis, Moment};
use crate::verbs::Cluster;
use crate::verbs::observe::{DevicesReported, NodeObserved, PodObserved};
use crate::verbs::tick::{ClockAdvanced, Tick};
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_info::ObservedDisruptionInfo;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::node::NodeKind;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The clock's first reading: late enough that pods can have run for days before it.
pub const START: Moment = Moment(1_000_000_000);

/// A cluster that a test fills. What a test does to it beyond that it does to the [`Cluster`], or to the ledger in it.
pub struct LedgerCluster(Cluster);

impl LedgerCluster {
    /// 80 GiB GPUs under the default policy, which leaves 72 GiB of each: of each node its name and their number.
    pub fn new(nodes: &[(&str, u32)]) -> Self {
        Self::with_policy_and_nodes(Policy::default(), nodes)
    }

    /// A cluster of nodes with 80 GiB GPUs under this policy. The GPUs of a node form two NVLink islands.
    pub fn with_policy_and_nodes(policy: Policy, nodes: &[(&str, u32)]) -> Self {
        nodes
            .iter()
            .fold(Self::empty(policy), |cluster, (name, gpus)| {
                let device = |index| Device {
                    island: Some((index * 2 / gpus) as u8),
                    ..h100(name, index)
                };
                cluster.with_node(name, (0..*gpus).map(device).collect())
            })
    }

    /// A cluster without nodes.
    pub fn empty(policy: Policy) -> Self {
        let mut cluster = Cluster::new(Arc::new(policy));
        cluster.apply(ClockAdvanced(START));
        Self(cluster)
    }

    /// Adds a node whose agent has reported these GPUs, and returns the cluster.
    pub fn with_node(mut self, name: &str, devices: Vec<Device>) -> Self {
        self.add_node(name, devices);
        self
    }

    pub fn add_node(&mut self, name: &str, devices: Vec<Device>) {
        self.apply(NodeObserved::new(node(name), NodeKind::Stowage));
        self.apply(DevicesReported {
            node: node(name),
            devices: devices.into(),
            are_all: true,
        })
        .unwrap();
    }

    /// The pod, whose UID is its name, as the watch shows it.
    pub fn observe(
        &mut self,
        name: &str,
        demand: Demand,
        state: ObservedPhase,
        observed: Option<ObservedDisruptionInfo>,
    ) -> PodWarning {
        self.apply(PodObserved(PodObservation {
            uid: uid(name),
            key: key(name),
            demand,
            state,
            observed,
        }))
    }

    /// A pending pod.
    pub fn add_waiting(&mut self, name: &str, demand: Demand) {
        let waiting = ObservedPhase::Waiting(ObservedWaiting::default());
        self.observe(
            name,
            demand,
            waiting,
            Some(ObservedDisruptionInfo::default()),
        );
    }

    /// A pod under the planner's scheduling gate.
    pub fn add_gated(&mut self, name: &str, demand: Demand) {
        self.add_gated_with(name, demand, ObservedDisruptionInfo::default());
    }

    pub fn add_gated_with(&mut self, name: &str, demand: Demand, observed: ObservedDisruptionInfo) {
        let waiting = ObservedWaiting {
            gate: SchedulingGate::Planned,
            ..ObservedWaiting::default()
        };
        self.observe(
            name,
            demand,
            ObservedPhase::Waiting(waiting),
            Some(observed),
        );
    }

    /// A pod on one of the testkit's GPUs that has been ready for so long; `None` if that is unknown.
    pub fn add_running(
        &mut self,
        name: &str,
        (on, gpu): (&str, u32),
        demand: Demand,
        ran: Option<Millis>,
        observed: ObservedDisruptionInfo,
    ) {
        let devices = Some(Arc::from([gpu_at(on, gpu)]));
        let state = ObservedPhase::Bound {
            node: node(on),
            devices,
            starting: false,
            ran,
        };
        self.observe(name, demand, state, Some(observed));
    }

    /// Advances the clock, and applies what expires. Returns the pods whose reservations ended.
    pub fn advance(&mut self, seconds: u64) -> Vec<PodUid> {
        let now = self.ledger().now() + Millis::seconds(seconds);
        self.apply(Tick {
            now,
            is_leading: true,
        })
    }

    /// What each GPU of the node has left, in GiB.
    pub fn free_gib(&mut self, node: &str) -> Vec<u64> {
        self.snapshot()
            .node(node)
            .unwrap()
            .gpus
            .iter()
            .map(|gpu| gpu.free().0 >> 30)
            .collect()
    }
}

impl Deref for LedgerCluster {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.0
    }
}

impl DerefMut for LedgerCluster {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.0
    }
}
