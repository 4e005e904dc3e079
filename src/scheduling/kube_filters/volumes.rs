//! Persistent volumes, claims and storage classes, and what they say of the nodes on which a pod may run.
//!
//! A bound claim is evaluated by its volume's node affinity and zone labels (VolumeBinding, VolumeZone), an unbound one whose
//! class waits for the first consumer by the class's topologies. Not supported, and reported as such: volumes that exist already
//! and wait for a claim, claims of one pod at a time, claims that are not bound although their class does not wait, and nodes
//! that may have no attachment left. Storage capacity (CSIStorageCapacity) is not looked at.
//!
//! There may be a hundred thousand claims, and few of them are of pods that wait: what is kept of each is small, and in shards,
//! so that a change while a plan reads the view copies one shard.

use super::node::{FilterNode, NodeTerm, select_single_node};
use super::requirements::{Requirements, UnsupportedRule};
use crate::ids::NodeName;
use rustc_hash::FxBuildHasher;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::sync::Arc;

/// So many that a shard of eighty thousand claims has some hundreds.
const SHARDS: usize = 128;
/// The number of recent topologies that a new volume is compared with: nearly all volumes of a cluster are in a few zones.
const MAX_RECENT_TOPOLOGIES: usize = 32;
/// Every machine with GPUs that the large clouds rent out attaches as many volumes. How many more it does is not known here.
pub(super) const MIN_ATTACH_LIMIT: usize = 8;

/// A PersistentVolumeClaim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeClaim {
    pub binding: ClaimBinding,
    /// `ReadWriteOncePod`: one pod at a time.
    pub of_one_pod: bool,
}

/// Whether a claim is bound to a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClaimBinding {
    Bound {
        volume: Arc<str>,
    },
    Unbound {
        /// Its storage class.
        class: Option<Arc<str>>,
        /// For this node its volume is being provisioned.
        selected_node: Option<NodeName>,
    },
    /// It is being deleted, has lost its volume, or is bound by hand and not yet completely: kube-scheduler waits.
    Unusable,
}

/// Where a PersistentVolume can be used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeTopology {
    /// Terms of which a node must match one; `None` without a node affinity.
    pub terms: Option<Vec<NodeTerm>>,
    /// The zone and region labels of the volume, and the values that a node may have.
    pub zones: BTreeMap<TopologyLabel, BTreeSet<String>>,
    /// Its node affinity cannot be read.
    pub unreadable: bool,
}

/// A label of nodes and volumes that names a part of a cloud.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TopologyLabel {
    Zone,
    Region,
}

/// A StorageClass.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageClass {
    /// `WaitForFirstConsumer`.
    pub waits: bool,
    /// Whether it makes volumes; `kubernetes.io/no-provisioner` does not.
    pub provisions: bool,
    /// Terms of which a node must match one; `None` for every node.
    pub topologies: Option<Vec<NodeTerm>>,
}

/// Everything known of volumes.
#[derive(Debug, Clone, Default)]
pub struct VolumeIndex {
    /// By `namespace/name`.
    claims: Shards<VolumeClaim>,
    volumes: Shards<Arc<VolumeTopology>>,
    classes: BTreeMap<Arc<str>, StorageClass>,
    recent_topologies: Vec<Arc<VolumeTopology>>,
}

/// Stored form of [`VolumeIndex`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct VolumeIndexState {
    claims: BTreeMap<Arc<str>, VolumeClaim>,
    volumes: BTreeMap<Arc<str>, Arc<VolumeTopology>>,
    classes: BTreeMap<Arc<str>, StorageClass>,
}

/// One kind of object of storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum StorageKind {
    Claim,
    Volume,
    Class,
}

/// An object of storage, as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum StorageObject {
    Claim(VolumeClaim),
    Volume(VolumeTopology),
    Class(StorageClass),
}

/// Objects by name. A copy of the view shares those that do not change meanwhile.
type Shard<V> = Arc<BTreeMap<Arc<str>, V>>;

#[derive(Debug, Clone)]
struct Shards<V>(Box<[Shard<V>]>);

/// The rules that a pod's volumes set for its node.
#[derive(Debug, Default)]
pub(super) struct VolumeRules<'a> {
    rules: Vec<VolumeRule<'a>>,
    /// A rule of one of the volumes that is not supported.
    unsupported: Option<UnsupportedRule>,
}

#[derive(Debug)]
enum VolumeRule<'a> {
    Topology(&'a VolumeTopology),
    OneOf(&'a [NodeTerm]),
    Node(&'a NodeName),
}

impl StorageObject {
    pub fn kind(&self) -> StorageKind {
        match self {
            Self::Claim(_) => StorageKind::Claim,
            Self::Volume(_) => StorageKind::Volume,
            Self::Class(_) => StorageKind::Class,
        }
    }
}

impl TopologyLabel {
    /// The label's name, and the one it had before Kubernetes 1.17.
    pub fn names(self) -> [&'static str; 2] {
        match self {
            Self::Zone => [
                "topology.kubernetes.io/zone",
                "failure-domain.beta.kubernetes.io/zone",
            ],
            Self::Region => [
                "topology.kubernetes.io/region",
                "failure-domain.beta.kubernetes.io/region",
            ],
        }
    }

    fn value_on(self, machine: &FilterNode) -> Option<&str> {
        self.names()
            .iter()
            .find_map(|name| machine.labels.get(*name))
            .map(String::as_str)
    }
}

impl VolumeTopology {
    fn accepts(&self, machine: &FilterNode) -> bool {
        let is_matched =
            |terms: &Vec<NodeTerm>| terms.iter().any(|term| term.matches_node(machine));
        // A node without any such label is in no zone, and no volume's zone excludes it.
        let has_zones = [TopologyLabel::Zone, TopologyLabel::Region]
            .iter()
            .any(|label| label.value_on(machine).is_some());
        let mut zones = self.zones.iter();
        self.terms.as_ref().is_none_or(is_matched)
            && (!has_zones
                || zones.all(|(label, values)| {
                    label
                        .value_on(machine)
                        .is_some_and(|value| values.contains(value))
                }))
    }
}

impl VolumeRule<'_> {
    fn accepts(&self, machine: &FilterNode) -> bool {
        match self {
            Self::Topology(topology) => topology.accepts(machine),
            Self::OneOf(terms) => terms.iter().any(|term| term.matches_node(machine)),
            Self::Node(name) => **name == machine.name,
        }
    }
}

impl VolumeRules<'_> {
    pub fn accept(&self, machine: &FilterNode) -> bool {
        self.rules.iter().all(|rule| rule.accepts(machine))
    }

    pub fn unsupported(&self) -> Option<UnsupportedRule> {
        self.unsupported
    }
}

impl VolumeIndex {
    pub(super) fn set(&mut self, name: Arc<str>, object: StorageObject) {
        match object {
            StorageObject::Claim(claim) => self.claims.insert(name, claim),
            StorageObject::Volume(topology) => {
                let topology = self.intern(topology);
                self.volumes.insert(name, topology);
            }
            StorageObject::Class(class) => drop(self.classes.insert(name, class)),
        }
    }

    pub(super) fn remove(&mut self, kind: StorageKind, name: &str) {
        match kind {
            StorageKind::Claim => self.claims.remove(name),
            StorageKind::Volume => self.volumes.remove(name),
            StorageKind::Class => drop(self.classes.remove(name)),
        }
    }

    pub(super) fn names(&self, kind: StorageKind) -> Vec<Arc<str>> {
        match kind {
            StorageKind::Claim => self.claims.names(),
            StorageKind::Volume => self.volumes.names(),
            StorageKind::Class => self.classes.keys().cloned().collect(),
        }
    }

    pub(super) fn export(&self) -> VolumeIndexState {
        VolumeIndexState {
            claims: self.claims.to_map(),
            volumes: self.volumes.to_map(),
            classes: self.classes.clone(),
        }
    }

    pub(super) fn from_state(state: VolumeIndexState) -> Self {
        let mut index = Self {
            classes: state.classes,
            ..Self::default()
        };
        state
            .claims
            .into_iter()
            .for_each(|(name, claim)| index.claims.insert(name, claim));
        for (name, topology) in state.volumes {
            index.set(name, StorageObject::Volume(Arc::unwrap_or_clone(topology)));
        }
        index
    }

    /// A claim of the pod that does not exist; `None` as well if no claim at all is known.
    pub(crate) fn missing_claim<'p>(&self, pod: &'p Requirements) -> Option<&'p Arc<str>> {
        let mut claims = pod.claims.iter();
        let missing = claims.find(|claim| self.claim(&pod.namespace, claim).is_none());
        missing.filter(|_| self.claims.0.iter().any(|shard| !shard.is_empty()))
    }

    fn claim(&self, namespace: &str, name: &str) -> Option<&VolumeClaim> {
        self.claims.get(&format!("{namespace}/{name}"))
    }

    /// The rules that the volumes of a pod with these requirements set for its node.
    pub(super) fn rules_for<'a>(&'a self, pod: &Requirements) -> VolumeRules<'a> {
        let mut found = VolumeRules::default();
        for claim in pod.claims.iter() {
            match self.add_rules_for_claim(&pod.namespace, claim, &mut found.rules) {
                Ok(()) => {}
                Err(unsupported) => found.unsupported = found.unsupported.or(Some(unsupported)),
            }
        }
        found
    }

    fn add_rules_for_claim<'a>(
        &'a self,
        namespace: &str,
        name: &str,
        rules: &mut Vec<VolumeRule<'a>>,
    ) -> Result<(), UnsupportedRule> {
        let claim = self
            .claim(namespace, name)
            .ok_or(UnsupportedRule::VolumeUnknown)?;
        match &claim.binding {
            ClaimBinding::Unusable => return Err(UnsupportedRule::VolumeUnbound),
            ClaimBinding::Bound { volume } => {
                let topology = self
                    .volumes
                    .get(volume)
                    .ok_or(UnsupportedRule::VolumeUnknown)?;
                rules.push(VolumeRule::Topology(topology));
                if topology.unreadable {
                    return Err(UnsupportedRule::Unreadable);
                }
            }
            ClaimBinding::Unbound {
                class,
                selected_node,
            } => {
                let class = class.as_ref().ok_or(UnsupportedRule::VolumeUnbound)?;
                let class = self
                    .classes
                    .get(class)
                    .ok_or(UnsupportedRule::VolumeUnknown)?;
                if !class.waits {
                    return Err(UnsupportedRule::VolumeUnbound);
                }
                if !class.provisions {
                    return Err(UnsupportedRule::VolumeNotProvisioned);
                }
                rules.extend(class.topologies.as_deref().map(VolumeRule::OneOf));
                rules.extend(selected_node.as_ref().map(VolumeRule::Node));
            }
        }
        if claim.of_one_pod {
            Err(UnsupportedRule::ReadWriteOncePod)
        } else {
            Ok(())
        }
    }

    /// Whether the volume of one of these claims is known to be on a single node.
    pub(crate) fn has_single_node_volume(&self, namespace: &str, claims: &[Arc<str>]) -> bool {
        claims.iter().any(|name| {
            let Some(VolumeClaim {
                binding: ClaimBinding::Bound { volume },
                ..
            }) = self.claim(namespace, name)
            else {
                return false;
            };
            let terms = self
                .volumes
                .get(volume)
                .and_then(|topology| topology.terms.as_deref());
            terms.is_some_and(select_single_node)
        })
    }

    fn intern(&mut self, topology: VolumeTopology) -> Arc<VolumeTopology> {
        if let Some(shared) = self
            .recent_topologies
            .iter()
            .find(|shared| ***shared == topology)
        {
            return shared.clone();
        }
        let topology = Arc::new(topology);
        if self.recent_topologies.len() == MAX_RECENT_TOPOLOGIES {
            self.recent_topologies.remove(0);
        }
        self.recent_topologies.push(topology.clone());
        topology
    }
}

impl<V> Default for Shards<V> {
    fn default() -> Self {
        Self(std::iter::repeat_with(Arc::default).take(SHARDS).collect())
    }
}

impl<V: Clone + PartialEq> Shards<V> {
    fn get(&self, name: &str) -> Option<&V> {
        self.0[shard_of(name)].get(name)
    }

    fn insert(&mut self, name: Arc<str>, value: V) {
        let shard = &mut self.0[shard_of(&name)];
        // Most events change what is not kept.
        if shard.get(&name) != Some(&value) {
            Arc::make_mut(shard).insert(name, value);
        }
    }

    fn remove(&mut self, name: &str) {
        let shard = &mut self.0[shard_of(name)];
        if shard.contains_key(name) {
            Arc::make_mut(shard).remove(name);
        }
    }

    fn names(&self) -> Vec<Arc<str>> {
        self.0
            .iter()
            .flat_map(|shard| shard.keys().cloned())
            .collect()
    }

    fn to_map(&self) -> BTreeMap<Arc<str>, V> {
        let all = self.0.iter().flat_map(|shard| shard.iter());
        all.map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}

fn shard_of(name: &str) -> usize {
    FxBuildHasher.hash_one(name) as usize % SHARDS
}

#[cfg(test)]
mod tests;
