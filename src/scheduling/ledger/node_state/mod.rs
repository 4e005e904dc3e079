//! The state of one node: its devices, its readings, the pods that have something there, and the [`Node`] that follows from them.
//!
//! - [`charges`]: what pods take of it;
//! - [`device_list`]: what becomes of its list of devices when its agent reports another;
//! - [`lending`]: what its engines lend;
//! - [`reusable_engines`]: sleeping engines that new pods may wake;
//! - [`unaccounted_vram`]: what was measured, against what was allocated; pods that have ended there and may still have memory.
//!
//! Its fields are private to these files. Changes of what it shows are brought into [`Node`] by [`super::node_states`].

mod charges;
mod device_list;
mod lending;
mod neighbors;
mod reusable_engines;
mod unaccounted_vram;

pub(crate) use charges::ResidentPod;
pub(super) use device_list::DeviceReport;
pub(crate) use lending::PodLoan;
pub use lending::{LoanStage, LoansEndedUnasked, WakeStatus};

use super::pod_states::PodStates;
use super::start_gates::NodeStarts;
use super::start_times::StartSample;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::placing::fit::{check_node_admission, node_exclusion};
use crate::policy::{ExpiredRule, Policy, PoolAdmission, PoolId, TelemetryRules};
use crate::units::{Bytes, Moment};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::{Demand, HostResources};
use crate::vocabulary::device_plugin::PluginDevices;
use crate::vocabulary::gpu::{Device, Gpu, GpuSet, Health};
use crate::vocabulary::image::NodeImageSet;
use crate::vocabulary::latency::{LATENCY_WINDOW, NeighborRoom};
use crate::vocabulary::model_tier::NodeModelSet;
use crate::vocabulary::node::{Node, NodeIdentity, NodeKind};
use crate::vocabulary::node_reading::{Freshness, NodeReading};
use crate::vocabulary::node_signs::{NodeSigns, NodeWarning};
use crate::vocabulary::smoothed_load::SmoothedLoad;
use crate::vocabulary::spare::SpareCounts;
use crate::vocabulary::start_time::{StartFactors, StartKind};
use charges::NodeCharges;
use device_list::GainLimit;
use lending::NodeLending;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use unaccounted_vram::DepartedPod;
use unaccounted_vram::UnaccountedVram;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct NodeState {
    /// Whether the node exists. Pods may be seen before their node, and outlive it.
    exists: bool,
    /// What allocates its GPUs, as its Node object shows it.
    kind: NodeKind,
    /// Whether its GPUs are a DRA driver's: by the slices, or by those that were, as long as pods with claims are there.
    published: bool,
    /// Whether pods with ResourceClaims are bound here.
    claims_devices: bool,
    labels: Arc<BTreeMap<String, String>>,
    /// What its pool says, and what follows for what hands its GPUs out.
    admission: PoolAdmission,
    /// What its Node object shows of its GPUs beside their list.
    #[serde(default)]
    signs: NodeSigns,
    /// What follows from that.
    #[serde(skip)]
    warnings: Arc<[NodeWarning]>,
    /// Which Node object it is, if that is known.
    identity: Option<NodeIdentity>,
    /// Whether an agent has said what its devices are.
    reported: bool,
    /// Whether a report has listed all of them, so that others are lost.
    #[serde(default)]
    lists_all_devices: bool,
    gain_limit: GainLimit,
    devices: Arc<[Device]>,
    /// What device plugins offer, as the node shows it.
    offered: PluginDevices,
    /// The latest of its agent's readings, and how far it may be believed by now.
    reading: Option<Arc<NodeReading>>,
    freshness: Freshness,
    /// VRAM of each GPU that the last readings could not explain.
    unaccounted: Vec<(GpuUuid, UnaccountedVram)>,
    /// Its images, as far as it lists them.
    images: NodeImageSet,
    starts: Arc<NodeStarts>,
    /// Load of the engines on each GPU, smoothed over the readings.
    #[serde(default)]
    engine_loads: Vec<(GpuUuid, SmoothedLoad)>,
    /// What the pods of each GPU leave to others of their time, as decisions count it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    neighbors: Vec<(GpuUuid, NeighborRoom)>,
    /// Where classes limit latencies: GPUs that a pod has left, with the reading before. Latencies of the window after it are those
    /// beside that pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    left: Vec<(GpuSet, Moment)>,
    /// Pods that have ended here, until a reading sampled later shows nothing of them.
    departed: Vec<DepartedPod>,
    /// What readings say of the sleep of engines that lend, and what follows from it.
    #[serde(default)]
    lending: NodeLending,
    /// All pods with a placement, a reservation or a soft reservation here.
    #[serde(skip)]
    pods: BTreeSet<PodUid>,
    /// What they take, as the last change left it.
    #[serde(skip)]
    charges: NodeCharges,
    /// It is cordoned, or its kubelet does not answer: no new pod goes there.
    #[serde(default)]
    cordoned: bool,
    #[serde(skip)]
    contribution: NodeContribution,
    /// CPU and memory that no pod that is bound here has, as far as that is known.
    unbound: Option<HostResources>,
    /// Follows from all the rest; only its name and generation are stored.
    #[serde(with = "view_version")]
    view: Node,
}

/// A node's contribution to the sums over all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NodeContribution {
    /// Its free GPUs, for the rules of `planning.spare`.
    pub spare: SpareCounts,
    /// VRAM and GPUs that it has.
    pub total: TenantUsage,
}

impl NodeState {
    pub(super) fn new(name: NodeName) -> Self {
        let view = Node::from_name(name);
        Self {
            exists: false,
            kind: NodeKind::default(),
            published: false,
            claims_devices: false,
            labels: Arc::default(),
            admission: PoolAdmission::default(),
            signs: NodeSigns::default(),
            warnings: Arc::default(),
            identity: None,
            reported: false,
            lists_all_devices: false,
            gain_limit: GainLimit::default(),
            devices: Arc::new([]),
            offered: PluginDevices::new(),
            reading: None,
            freshness: Freshness::default(),
            unaccounted: Vec::new(),
            images: NodeImageSet::default(),
            starts: Arc::default(),
            engine_loads: Vec::new(),
            neighbors: Vec::new(),
            left: Vec::new(),
            departed: Vec::new(),
            lending: NodeLending::default(),
            pods: BTreeSet::new(),
            charges: NodeCharges::default(),
            cordoned: false,
            contribution: NodeContribution::default(),
            unbound: None,
            view,
        }
    }

    pub(crate) fn exists(&self) -> bool {
        self.exists
    }

    /// The node as decisions see it.
    pub(crate) fn view(&self) -> &Node {
        &self.view
    }

    pub(super) fn devices(&self) -> &Arc<[Device]> {
        &self.devices
    }

    /// All pods with a placement, a reservation or a soft reservation here, in order of UID.
    pub(crate) fn pods(&self) -> &BTreeSet<PodUid> {
        &self.pods
    }

    /// Whether an agent has said what its devices are.
    pub(super) fn is_reported(&self) -> bool {
        self.reported
    }

    pub(super) fn reading(&self) -> Option<&NodeReading> {
        self.reading.as_deref()
    }

    /// The latest reading, as long as it may be believed.
    pub(crate) fn believed_reading(&self) -> Option<&NodeReading> {
        let is_believed = matches!(self.freshness, Freshness::Fresh | Freshness::Stale);
        self.reading.as_deref().filter(|_| is_believed)
    }

    pub(super) fn identity(&self) -> Option<&NodeIdentity> {
        self.identity.as_ref()
    }

    pub(super) fn pool(&self) -> Option<PoolId> {
        self.admission.pool
    }

    /// The indices of these devices, or `None` unless the node has each of them, once. A lost device is not found by its index:
    /// that may belong to a device of a new machine under the same name.
    pub(super) fn resolve(&self, devices: &[GpuUuid]) -> Option<GpuSet> {
        let mut set = GpuSet::EMPTY;
        for uuid in devices {
            let is_same_device = |device: &Device| match uuid.index() {
                Some(index) => {
                    device.index == index
                        && device.parent.is_none()
                        && device.health != Health::Lost
                }
                None => device.uuid == *uuid,
            };
            let index = self.devices.iter().position(is_same_device)?;
            if set.contains(index) {
                return None;
            }
            set.insert(index);
        }
        (!set.is_empty()).then_some(set)
    }

    /// Whether it makes sense to evict pods from the node for such a demand. Where an agent has fallen silent nothing shows that
    /// their memory is free, and the reservation would expire.
    pub(crate) fn can_be_emptied_for(&self, demand: &Demand) -> bool {
        self.exists
            && self.freshness != Freshness::Expired
            && check_node_admission(&self.view, demand).is_ok()
    }

    /// The node exists, as one of that kind. Returns whether that is new.
    pub(super) fn create(&mut self, kind: NodeKind, policy: &Policy) -> bool {
        let is_new = !self.exists || self.kind != kind;
        if is_new {
            (self.exists, self.kind) = (true, kind);
            // A pool may take every node, those without labels too.
            self.apply_policy(policy);
        }
        is_new
    }

    pub(super) fn remove(&mut self) {
        self.exists = false;
        self.forget_starts();
    }

    pub(super) fn images(&self) -> &NodeImageSet {
        &self.images
    }

    /// Returns whether they are others than before.
    pub(super) fn set_images(&mut self, images: NodeImageSet) -> bool {
        let is_new = self.images != images;
        self.images = images;
        is_new
    }

    /// An engine has started here; `cluster_factors` is what the cluster knows of such starts.
    pub(super) fn learn_start(
        &mut self,
        kind: StartKind,
        sample: StartSample,
        cluster_factors: StartFactors,
    ) {
        self.starts_mut().learn(kind, sample, cluster_factors);
    }

    pub(super) fn starts(&self) -> &NodeStarts {
        &self.starts
    }

    pub(super) fn starts_mut(&mut self) -> &mut NodeStarts {
        Arc::make_mut(&mut self.starts)
    }

    /// Forgets how long engines took to start here.
    pub(super) fn forget_starts(&mut self) {
        self.starts = Arc::default();
    }

    /// Returns whether another machine bears the name now.
    pub(super) fn identify(&mut self, identity: NodeIdentity) -> bool {
        let is_other = self
            .identity
            .as_ref()
            .is_some_and(|previous| !previous.is_same_machine(&identity));
        self.identity = Some(identity);
        is_other
    }

    /// Returns whether the labels are others than before.
    pub(super) fn set_labels(
        &mut self,
        labels: Arc<BTreeMap<String, String>>,
        policy: &Policy,
    ) -> bool {
        let is_new = self.labels != labels;
        if is_new {
            self.labels = labels;
            self.apply_policy(policy);
        }
        is_new
    }

    /// Updates the node's pool and warnings from the policy.
    pub(super) fn apply_policy(&mut self, policy: &Policy) {
        self.admission = policy.admission(&self.labels);
        self.update_warnings(policy);
    }

    /// Returns whether the Node object shows something else of its GPUs than before.
    pub(super) fn set_signs(&mut self, signs: NodeSigns, policy: &Policy) -> bool {
        let is_new = self.signs != signs;
        self.signs = signs;
        self.update_warnings(policy);
        is_new
    }

    /// Recomputes its warnings from its signs, its devices and the policy.
    pub(super) fn update_warnings(&mut self, policy: &Policy) {
        let warnings = policy
            .nodes
            .warnings(&self.signs, &self.devices, self.reported);
        if warnings != self.warnings {
            self.warnings = warnings;
        }
    }

    pub(super) fn labels(&self) -> &BTreeMap<String, String> {
        &self.labels
    }

    /// Whether a DRA driver publishes its GPUs.
    pub(super) fn is_published(&self) -> bool {
        self.published
    }

    pub(super) fn has_device_claims(&self) -> bool {
        self.claims_devices
    }

    pub(super) fn set_device_claims(&mut self, claims_devices: bool) {
        self.claims_devices = claims_devices;
    }

    pub(super) fn set_published(&mut self, published: bool) {
        self.published = published;
    }

    /// Returns whether device plugins offer something else than before.
    pub(super) fn set_offered(&mut self, offered: PluginDevices) -> bool {
        let is_new = self.offered != offered;
        self.offered = offered;
        is_new
    }

    /// What the node advertises as `stowage.dev/vram`, if it does: engines lend no more than kube-scheduler can see.
    pub(super) fn set_advertised(&mut self, advertised: Option<Bytes>) -> bool {
        self.lending.set_advertised(advertised)
    }

    pub(super) fn add_pod(&mut self, uid: &PodUid) {
        self.pods.insert(uid.clone());
    }

    pub(super) fn remove_pod(&mut self, uid: &PodUid, policy: &Policy) {
        let sampled = self.reading.as_ref().map(|reading| reading.sampled);
        let sampled = sampled.filter(|_| policy.has_latency_limits());
        if let Some((resident, sampled)) = self.resident_of(uid).zip(sampled) {
            let gpus = resident.gpus;
            self.left.retain(|(_, at)| *at + LATENCY_WINDOW > sampled);
            self.left.push((gpus, sampled));
        }
        self.pods.remove(uid);
    }

    /// Updates the freshness to the age of the reading.
    pub(super) fn update_freshness(&mut self, now: Moment, rules: &TelemetryRules) {
        self.freshness = self.freshness_at(now, rules);
    }

    /// Builds the node as decisions see it, with the generation of the current view.
    pub(super) fn build_view(&self, pods: &PodStates, policy: &Policy) -> Node {
        let (current, gpus) = (&self.view, self.gpus(pods, policy));
        let is_silent = matches!(self.freshness, Freshness::Unreported | Freshness::Expired);
        let replicas = if policy.scoring.weights.spread > 0 {
            self.replicas(pods)
        } else {
            Vec::new()
        };
        Node {
            name: current.name.clone(),
            kind: self.effective_kind(policy),
            generation: current.generation,
            // What decisions read again and again is shared as long as it stays the same.
            gpus: reuse_if_equal(&current.gpus, gpus),
            devices: self.devices.clone(),
            plugin: match *current.plugin == *self.plugin() {
                true => current.plugin.clone(),
                false => self.plugin().into(),
            },
            freshness: self.freshness,
            closed: is_silent && policy.telemetry.expired == ExpiredRule::Refuse,
            miscut: self.is_miscut(policy),
            keeps_vram_limits: self.keeps_vram_limits(),
            warnings: self.warnings.clone(),
            classes: self.admission.classes,
            holdings: self.holdings(),
            reusable: current
                .reusable
                .reuse_or_replace(self.reusable_engines(pods, policy, None)),
            images: self.images.clone(),
            start_factors: self.starts.factors().clone(),
            replicas: reuse_if_equal(&current.replicas, replicas),
            free_host: self.free_host(pods),
        }
    }

    /// What allocates its GPUs.
    fn effective_kind(&self, policy: &Policy) -> NodeKind {
        let is_allocated_by_others = self.warnings.iter().any(|warning| warning.entry());
        match policy.allocator_of(self.kind, self.admission) {
            _ if self.published => NodeKind::Dra,
            NodeKind::Stowage if is_allocated_by_others => NodeKind::DevicePlugin,
            kind => kind,
        }
    }

    /// Sets what decisions see from that generation on.
    pub(super) fn set_view(&mut self, view: Node, generation: u64) {
        self.view = Node { generation, ..view };
    }

    /// CPU and memory without the pods that are bound here. Returns whether decisions see that.
    pub(super) fn set_free_host(
        &mut self,
        unbound: Option<HostResources>,
        pods: &PodStates,
    ) -> bool {
        self.unbound = unbound;
        let free_host = self.free_host(pods);
        let is_new = self.view.free_host != free_host;
        self.view.free_host = free_host;
        is_new
    }

    /// Recomputes its contribution to the sums over all nodes. Returns the one before and the one now. On a node on which Stowage
    /// places no pod, no GPU is free for the rules of `planning.spare`.
    pub(super) fn update_contribution(&mut self) -> (NodeContribution, NodeContribution) {
        let Node {
            kind,
            closed,
            miscut,
            ..
        } = self.view;
        let mut now = NodeContribution::default();
        if self.exists {
            now.total = self.view.quota_capacity();
        }
        let is_open = node_exclusion(&self.view).is_none() && !closed && !miscut && !self.cordoned;
        if self.exists && kind == NodeKind::Stowage && is_open {
            let free = self.view.gpus.iter().filter(|gpu| !gpu.spare.is_empty());
            free.for_each(|gpu| now.spare.add(gpu.spare));
        }
        (std::mem::replace(&mut self.contribution, now), now)
    }

    /// Its contribution to the sums over all nodes, as last computed.
    pub(super) fn contribution(&self) -> &NodeContribution {
        &self.contribution
    }

    fn clear_contribution(&mut self) {
        self.contribution = NodeContribution::default();
    }

    pub(super) fn set_takes_new_pods(&mut self, takes_new_pods: bool) {
        self.cordoned = !takes_new_pods;
    }

    /// Marks the GPUs that count as free for the rules of `planning.spare`.
    fn mark_spare(&self, policy: &Policy, gpus: &mut [Gpu]) {
        if policy.planning.spare.is_empty() {
            return;
        }
        for (gpu, device) in gpus.iter_mut().zip(self.devices.iter()) {
            if gpu.is_wholly_free(policy.telemetry.margin.share_of(device.total)) {
                gpu.spare = policy.spare_rules_for(self.admission.pool, &device.model);
            }
        }
    }

    pub(super) fn set_generation(&mut self, generation: u64) {
        self.view.generation = generation;
    }

    /// What its agent found of models, as long as it may be believed at all.
    fn holdings(&self) -> NodeModelSet {
        self.believed_reading()
            .map(|reading| reading.holdings.clone())
            .unwrap_or_default()
    }

    /// Whether the driver keeps limits on all its GPUs: it keeps none on MIG slices, and they are set by UUID.
    fn keeps_vram_limits(&self) -> bool {
        let uuids = || self.devices.iter().map(|device| &device.uuid);
        let is_ruled_out = |reading: &Arc<NodeReading>| reading.rules_out_vram_limits();
        self.signs.keeps_vram_limits
            && !self.reading.as_ref().is_some_and(is_ruled_out)
            && uuids().all(|uuid| !uuid.is_slice() && uuid.index().is_none())
    }

    /// Whether its GPUs are cut otherwise than its pool expects. Only an agent sees how they are cut.
    fn is_miscut(&self, policy: &Policy) -> bool {
        let pool = self
            .admission
            .pool
            .and_then(|id| policy.pool(id))
            .filter(|_| self.reported);
        pool.is_some_and(|pool| !pool.has_expected_mig_layout(&self.devices))
    }
}

/// The name and generation of a view, from which the rest of it is not read.
mod view_version {
    use super::{Node, NodeName};
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(view: &Node, serializer: S) -> Result<S::Ok, S::Error> {
        (&view.name, view.generation).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Node, D::Error> {
        let (name, generation) = <(NodeName, u64)>::deserialize(deserializer)?;
        Ok(Node {
            generation,
            ..Node::from_name(name)
        })
    }
}

fn reuse_if_equal<T: PartialEq>(previous: &Arc<[T]>, new: Vec<T>) -> Arc<[T]> {
    if **previous == *new {
        previous.clone()
    } else {
        new.into()
    }
}
