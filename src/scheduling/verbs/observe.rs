//! What the watches and the node agents show, as inputs: nodes, pods, disruption budgets, device reports and readings, ResourceSlices
//! of DRA drivers, and the volumes, claims and storage classes by which the planner evaluates where a pod with volumes may run.

use super::input::changes;
use super::{Change, Cluster};
use crate::ids::{NodeName, PodUid};
use crate::kube_filters::{FilterNode, NodeFootprint, Requirements, StorageKind, StorageObject};
use crate::ledger::{
    DeviceReportError, DeviceSlice, LoansEndedUnasked, NewlyPublished, PodObservation, PodWarning,
    StartProgress, TimedStart,
};
use crate::units::Bytes;
use crate::vocabulary::device_plugin::PluginDevices;
use crate::vocabulary::disruption_budget::{BudgetVisibility, DisruptionBudget};
use crate::vocabulary::disruption_info::PlacelessMember;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::image::NodeImage;
use crate::vocabulary::node::{NodeIdentity, NodeKind};
use crate::vocabulary::node_reading::{NodeReading, OverGrant};
use crate::vocabulary::node_signs::NodeSigns;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A node as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeObserved {
    pub name: NodeName,
    pub kind: NodeKind,
    /// `None` if the node does not show which machine it is.
    pub identity: Option<NodeIdentity>,
    /// Its GPUs by its labels, until an agent reports; `None` if the labels do not say.
    pub labelled: Option<Vec<Device>>,
    pub plugin_devices: PluginDevices,
    /// What else it shows of its GPUs.
    #[serde(default)]
    pub signs: NodeSigns,
    /// `stowage.dev/vram` in its capacity; `None` if it advertises none.
    #[serde(default)]
    pub advertised: Option<Bytes>,
    pub labels: Arc<BTreeMap<String, String>>,
    /// As kube-scheduler's filters see it; `None` leaves that as it was.
    pub machine: Option<FilterNode>,
}

/// The node is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDeleted(pub NodeName);

/// A pod that requests GPUs, as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodObserved(pub PodObservation);

/// Any pod, as kube-scheduler's filters see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilterPodObserved {
    pub uid: PodUid,
    pub pod: FilterPod,
}

/// What a pod means to the filters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FilterPod {
    Bound {
        footprint: NodeFootprint,
        /// The requirements of the pod that replaces it if it is evicted; `None` if it is never moved.
        successor: Option<Requirements>,
    },
    Waiting(Requirements),
    /// Neither uses nor waits for anything.
    Irrelevant,
}

/// A pod as a member of a group that needs no GPUs; `None` if it is no such member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacelessMemberObserved {
    pub uid: PodUid,
    pub member: Option<PlacelessMember>,
}

/// The pod is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodDeleted(pub PodUid);

/// The pod no longer requests what the ledger has of it, or no watch shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodReleased(pub PodUid);

/// The pod does not show its reservation any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservationGone(pub PodUid);

/// A node agent's list of its node's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicesReported {
    pub node: NodeName,
    pub devices: Arc<[Device]>,
    /// No GPU is left out because it could not be read: one that is not among them is lost.
    #[serde(default)]
    pub are_all: bool,
}

/// A node agent's measurements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadingReported {
    pub node: NodeName,
    /// Shared with a recorder, which keeps it for a moment.
    pub reading: Arc<NodeReading>,
}

/// The container images that a node lists; `None` if it lists none. Of many the largest count, as many as
/// [`MAX_NODE_IMAGES`](crate::vocabulary::image::MAX_NODE_IMAGES) says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeImagesObserved {
    pub node: NodeName,
    pub images: Option<Vec<NodeImage>>,
}

/// How far a bound pod has come with its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStartObserved {
    pub uid: PodUid,
    pub progress: StartProgress,
}

/// A disruption budget as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetObserved(pub DisruptionBudget);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetDeleted {
    pub namespace: String,
    pub name: String,
}

/// How much of the disruption budgets can be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetsVisible(pub BudgetVisibility);

/// The CPU and memory that bound pods leave free, where nothing observes nodes and pods: in a simulation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreeHostKnown {
    pub node: NodeName,
    pub free_host: Option<crate::vocabulary::demand::HostResources>,
}

impl NodeObserved {
    /// A node that shows nothing but its kind.
    pub fn new(name: NodeName, kind: NodeKind) -> Self {
        Self {
            name,
            kind,
            identity: None,
            labelled: None,
            plugin_devices: PluginDevices::default(),
            signs: NodeSigns::default(),
            advertised: None,
            labels: Arc::default(),
            machine: None,
        }
    }
}

impl Change for NodeObserved {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        let ledger = &mut cluster.ledger;
        if let Some(identity) = self.identity {
            ledger.identify_node(&self.name, identity);
        }
        ledger.set_node(&self.name, self.kind, self.labelled);
        ledger.set_plugin_devices(&self.name, self.plugin_devices);
        ledger.set_signs(&self.name, self.signs);
        ledger.set_shared_labels(&self.name, self.labels);
        ledger.set_advertised(&self.name, self.advertised);
        if let Some(machine) = self.machine {
            ledger.set_takes_new_pods(&self.name, machine.accepts_new_pods());
            cluster.kube_filters.set_node(machine);
            cluster.update_free_host(&self.name);
        }
    }
}

changes! { cluster,
    NodeDeleted(name) -> () {
        cluster.ledger.remove_node(&name);
        cluster.kube_filters.remove_node(&name);
    }
    PodObserved(observation) -> PodWarning { cluster.ledger.observe_pod(observation) }
    PlacelessMemberObserved { uid, member } -> () { cluster.ledger.set_placeless_member(&uid, member) }
    PodDeleted(uid) -> () {
        cluster.ledger.release(&uid);
        let before = cluster.kube_filters.node_of(&uid).cloned();
        cluster.kube_filters.remove_pod(&uid);
        before.iter().for_each(|node| cluster.update_free_host(node));
    }
    PodReleased(uid) -> () { drop(cluster.ledger.release(&uid)) }
    ReservationGone(uid) -> () { cluster.ledger.forget_ended_reservation(&uid) }
    /// How many GPUs the node has that it did not have before.
    DevicesReported { node, devices, are_all } -> Result<usize, DeviceReportError> {
        match are_all {
            true => cluster.ledger.report_all_devices(&node, devices),
            false => cluster.ledger.report_devices(&node, devices),
        }
    }
    NodeImagesObserved { node, images } -> () { cluster.ledger.observe_images(&node, images) }
    /// The start, if it is over by that.
    EngineStartObserved { uid, progress } -> Option<TimedStart> { cluster.ledger.observe_start(&uid, progress) }
    BudgetObserved(budget) -> () { cluster.ledger.set_budget(budget) }
    BudgetDeleted { namespace, name } -> () { cluster.ledger.remove_budget(&namespace, &name) }
    BudgetsVisible(visibility) -> () { cluster.ledger.set_budget_visibility(visibility) }
    FreeHostKnown { node, free_host } -> () { cluster.ledger.set_free_host(&node, free_host) }
    SliceObserved { name, slice } -> NewlyPublished { cluster.ledger.set_slice(&name, Some(slice)) }
    /// An older generation of its pool may count again.
    SliceDeleted(name) -> NewlyPublished { cluster.ledger.set_slice(&name, None) }
    StorageObserved { name, object } -> () { cluster.kube_filters.set_storage(name, object) }
    StorageDeleted { kind, name } -> () { cluster.kube_filters.remove_storage(kind, &name) }
}

impl Change for FilterPodObserved {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        let Self { uid, pod } = self;
        let before = cluster.kube_filters.node_of(&uid).cloned();
        let after = match pod {
            FilterPod::Bound {
                footprint,
                successor,
            } => {
                let node = footprint.node.clone();
                cluster.kube_filters.set_pod(uid.clone(), footprint);
                if let Some(wants) = successor {
                    cluster.kube_filters.set_successor(uid.clone(), wants);
                }
                Some(node)
            }
            FilterPod::Waiting(wants) => {
                cluster.kube_filters.set_pending(uid, wants);
                None
            }
            FilterPod::Irrelevant => {
                cluster.kube_filters.remove_pod(&uid);
                None
            }
        };
        after.iter().for_each(|node| cluster.update_free_host(node));
        before
            .iter()
            .filter(|node| Some(*node) != after.as_ref())
            .for_each(|node| cluster.update_free_host(node));
    }
}

impl Change for ReadingReported {
    type Output = LoansEndedUnasked;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        let Self { node, mut reading } = self;
        // The ledger does not have them, and an agent is believed of its own node only.
        let is_on_node = |over: &OverGrant| {
            over.ungranted.is_none() || cluster.kube_filters.node_of(&over.pod) == Some(&node)
        };
        if !reading.over_grant.iter().all(is_on_node) {
            Arc::make_mut(&mut reading).over_grant.retain(is_on_node);
        }
        cluster.ledger.take_reading(&node, reading)
    }
}

impl Cluster {
    /// Brings what the filters know of a node's CPU and memory, and of claims there, to the ledger.
    fn update_free_host(&mut self, node: &NodeName) {
        let free_host = self.kube_filters.free_host(node);
        self.ledger.set_free_host(node, free_host);
        self.ledger
            .set_device_claims(node, self.kube_filters.claims_devices(node));
    }
}

/// A slice as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceObserved {
    pub name: Arc<str>,
    pub slice: DeviceSlice,
}

/// The slice of that name is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceDeleted(pub Arc<str>);

/// An object of storage as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageObserved {
    /// The object's name; `namespace/name` for a PersistentVolumeClaim.
    pub name: Arc<str>,
    pub object: StorageObject,
}

/// The object is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageDeleted {
    pub kind: StorageKind,
    pub name: Arc<str>,
}
