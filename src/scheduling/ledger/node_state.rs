//! One node's page: its devices, who is on them, and the view that follows from the two.
//!
//! What pods take is added up anew from the entries whenever one of them changes, and the view from that and what was
//! measured. A node has a handful of pods, and sums that are never adjusted cannot drift. Reports come far more often than
//! pods do: what only pods change is kept for them.

use super::copy_on_write::PodStates;
use super::node_devices::GainLimit;
use super::pod_state::{PodPhase, PodState};
use super::unaccounted_vram::UnaccountedVram;
use crate::ids::{GpuUuid, ModelId, NodeName, PodUid};
use crate::scheduling::placing::fit::used_on;
use crate::scheduling::placing::fit::{check_node_admission, usable};
use crate::scheduling::policy::{Policy, PoolAdmission};
use crate::scheduling::vocabulary::classification::{ClassId, TenantId};
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::scheduling::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::scheduling::vocabulary::device_plugin::{PluginDevices, PluginShare};
use crate::scheduling::vocabulary::gpu::ClassExclusion;
use crate::scheduling::vocabulary::gpu::{Device, Gpu, GpuSet, Health};
use crate::scheduling::vocabulary::model_tier::NodeModelSet;
use crate::scheduling::vocabulary::node::{Node, NodeIdentity, NodeKind};
use crate::scheduling::vocabulary::node_reading::{Freshness, NodeReading};
use crate::units::{Bytes, MilliCpu, Millis, Moment};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Pods of a node that may end between two reports.
const MAX_DEPARTED: usize = 256;

/// Agents report every second: one that has not by then is not there.
const FIRST_REPORT_WITHIN: Millis = Millis::seconds(10);

/// The card a device is, or is a slice of.
fn card(device: &Device) -> &GpuUuid {
    device.parent.as_ref().unwrap_or(&device.uuid)
}

#[derive(Debug, Clone)]
pub(in crate::scheduling) struct NodeState {
    /// Whether the node exists. Pods may be seen before their node, and outlive it.
    pub exists: bool,
    /// Who hands its GPUs out, as the node shows it.
    pub kind: NodeKind,
    pub labels: Arc<BTreeMap<String, String>>,
    /// What its pool says, and what follows for who hands its GPUs out.
    pub admission: PoolAdmission,
    /// Which Node object it is, if anybody said.
    pub identity: Option<NodeIdentity>,
    /// Whether an agent has said what its devices are.
    pub reported: bool,
    pub(super) gain_limit: GainLimit,
    pub devices: Arc<[Device]>,
    /// What device plugins offer, as the node shows it; and that beside what pods here use, as the last change left it.
    pub offered: PluginDevices,
    pub plugin: Vec<PluginShare>,
    /// The latest of its agent's readings, and how far it may be believed by now.
    pub reading: Option<NodeReading>,
    pub freshness: Freshness,
    /// Of each GPU, what the last readings could not explain.
    pub(super) unaccounted: Vec<(GpuUuid, UnaccountedVram)>,
    /// Pods that have ended here, and when, until a reading sampled later shows nothing of them.
    departed: Vec<(PodUid, Moment)>,
    /// Everyone with anything here: pods, holds and hints.
    pub pods: BTreeSet<PodUid>,
    /// Those of them that are charged here, in order of UID, as the last change left them.
    pub tenants: Vec<ResidentPod>,
    /// Pods that are to come here and are not bound yet, as the last change left them: assumed, or with room held.
    pub coming: Vec<PodUid>,
    /// What promises leave of each GPU, as the last change left it.
    reserved: Vec<Gpu>,
    /// What each tenant's pods and holds use here, as the last change left it.
    pub usage: Vec<(TenantId, TenantUsage)>,
    /// CPU and memory that nobody who is bound here has, as far as anybody said.
    pub unbound: Option<HostResources>,
    pub view: Node,
}

/// What one placed pod takes, and where.
#[derive(Debug, Clone, Copy)]
pub(in crate::scheduling) struct PodCharge {
    pub gpus: GpuSet,
    /// False if nobody knows on which GPUs it really is, so that all of them are charged. Where a device plugin picks them,
    /// nobody needs to know: it is charged on none.
    pub placed: bool,
}

/// What there is to know of a charged pod when a report comes in, or when room is sought.
#[derive(Debug, Clone)]
pub(in crate::scheduling) struct ResidentPod {
    pub uid: PodUid,
    pub gpus: GpuSet,
    /// Whether anybody knows on which GPUs it is.
    pub placed: bool,
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// Since when it is known to be bound; `None` while its Binding is on its way.
    pub bound: Option<Moment>,
    /// On how many GPUs a reading must show it to say where it is, if no record does.
    pub wanted_on: Option<u32>,
    pub priority: i32,
    pub class: ClassId,
    pub grace: Millis,
    /// What it uses of the node's GPUs, in thousandths of one.
    pub milli_gpus: u64,
    /// Since when what it does would be lost; `None` if it is not bound.
    pub unsaved_since: Option<Moment>,
    pub is_leaving: bool,
}

impl NodeState {
    pub fn new(name: NodeName) -> Self {
        let view = Node::named(name);
        Self {
            exists: false,
            kind: NodeKind::default(),
            labels: Arc::default(),
            admission: PoolAdmission::default(),
            identity: None,
            reported: false,
            gain_limit: GainLimit::default(),
            devices: Arc::new([]),
            offered: PluginDevices::new(),
            plugin: Vec::new(),
            reading: None,
            freshness: Freshness::default(),
            unaccounted: Vec::new(),
            departed: Vec::new(),
            pods: BTreeSet::new(),
            tenants: Vec::new(),
            coming: Vec::new(),
            reserved: Vec::new(),
            usage: Vec::new(),
            unbound: None,
            view,
        }
    }

    /// What its agent found of models, as long as it may be believed at all.
    pub fn holdings(&self) -> NodeModelSet {
        match (self.freshness, &self.reading) {
            (Freshness::Fresh | Freshness::Stale, Some(reading)) => reading.holdings.clone(),
            _ => NodeModelSet::default(),
        }
    }

    /// Whether its GPUs are cut otherwise than its pool expects. Only an agent sees how they are cut.
    pub fn is_miscut(&self, policy: &Policy) -> bool {
        let pool = self.admission.pool.and_then(|id| policy.pool(id)).filter(|_| self.reported);
        pool.is_some_and(|pool| !pool.is_cut_as_expected(&self.devices))
    }

    /// The places of these devices, or `None` unless the node has each of them, once.
    pub fn resolve(&self, devices: &[GpuUuid]) -> Option<GpuSet> {
        let mut set = GpuSet::EMPTY;
        for uuid in devices {
            let is_it = |device: &Device| match uuid.index() {
                Some(index) => device.index == index && device.parent.is_none(),
                None => device.uuid == *uuid,
            };
            let place = self.devices.iter().position(is_it)?;
            if set.contains(place) {
                return None;
            }
            set.insert(place);
        }
        (!set.is_empty()).then_some(set)
    }

    /// Where `pod_state` counts on this node, if it is here.
    pub fn charge_of(&self, pod_state: &PodState) -> Option<PodCharge> {
        if pod_state.node() != Some(&self.view.name) {
            return None;
        }
        if pod_state.demand.asks_plugin() {
            return Some(PodCharge { gpus: GpuSet::EMPTY, placed: true });
        }
        let gpus = pod_state.devices().and_then(|devices| self.resolve(devices));
        let everywhere = GpuSet::first(self.devices.len());
        Some(PodCharge { gpus: gpus.unwrap_or(everywhere), placed: gpus.is_some() })
    }

    /// Whether it makes sense that pods leave the node for such a one. Where an agent has fallen silent nobody would say that
    /// their memory is free, and the room would be given up in the end.
    pub fn can_be_emptied_for(&self, demand: &Demand) -> bool {
        self.exists
            && self.freshness != Freshness::Expired
            && check_node_admission(&self.view, demand).is_ok()
    }

    /// A pod has ended here. Where no agent has ever spoken, nobody will say that its memory is free: then its end has to do.
    pub fn note_departed(&mut self, uid: &PodUid, at: Moment) {
        if self.freshness != Freshness::Unreported {
            self.add_departed(uid, at);
        }
    }

    /// A pod had ended here before anybody looked. If there is an agent, it will speak soon.
    pub fn note_missed(&mut self, uid: &PodUid, at: Moment) {
        self.add_departed(uid, at);
    }

    /// Another machine has the name now.
    pub fn forget_departed(&mut self) {
        self.departed.clear();
    }

    fn add_departed(&mut self, uid: &PodUid, at: Moment) {
        self.departed.truncate(MAX_DEPARTED - 1);
        self.departed.insert(0, (uid.clone(), at));
    }

    /// Forgets whom a reading shows to be gone.
    pub fn look_after_departed(&mut self, reading: &NodeReading) {
        self.departed.retain(|(uid, at)| reading.sampled < *at || reading.shows(uid));
    }

    /// Whether a pod that has ended here may still have memory: nothing that was sampled since says otherwise, or it is seen
    /// there still.
    pub fn may_have_memory(&self, uid: &PodUid, now: Moment) -> bool {
        let is_seen = || {
            let is_believed = matches!(self.freshness, Freshness::Fresh | Freshness::Stale);
            is_believed && self.reading.as_ref().is_some_and(|reading| reading.shows(uid))
        };
        let awaits_a_reading =
            |at: Moment| self.freshness != Freshness::Unreported || now < at + FIRST_REPORT_WITHIN;
        let departed = self.departed.iter().find(|(departed, _)| departed == uid);
        departed.is_some_and(|(_, at)| awaits_a_reading(*at)) || is_seen()
    }

    /// Adds up anew what pods take. To be called after every change of an entry or a device here.
    pub(super) fn recount(&mut self, pod_states: &PodStates, policy: &Policy) {
        self.reserved = self.reserved(pod_states, policy, None);
        self.tenants = self.pods.iter().filter_map(|uid| self.tenant(uid, &pod_states[uid])).collect();
        self.coming =
            self.pods.iter().filter(|uid| pod_states[*uid].comes_to(&self.view.name)).cloned().collect();
        self.plugin = self.plugin_shares(pod_states);
        self.usage = self.usage(pod_states, policy);
    }

    /// What is left of each GPU.
    pub fn gpus(&self, policy: &Policy) -> Vec<Gpu> {
        let mut gpus = self.reserved.clone();
        self.add_measured(&policy.telemetry, &mut gpus);
        gpus
    }

    /// What is left of each GPU, as everyone but `except` sees it.
    pub(super) fn gpus_without(&self, except: &PodUid, pod_states: &PodStates, policy: &Policy) -> Vec<Gpu> {
        let mut gpus = self.reserved(pod_states, policy, Some(except));
        self.add_measured(&policy.telemetry, &mut gpus);
        gpus
    }

    /// Pods of each model that are here or on their way, in order of model.
    pub(super) fn replicas(&self, pod_states: &PodStates) -> Vec<(ModelId, u16)> {
        let mut counts: BTreeMap<&ModelId, u16> = BTreeMap::new();
        let here = self.pods.iter().map(|uid| &pod_states[uid]);
        for model in
            here.filter_map(|pod_state| self.charge_of(pod_state).and(pod_state.demand.model.as_ref()))
        {
            *counts.entry(model).or_default() += 1;
        }
        counts.into_iter().map(|(model, count)| (model.clone(), count)).collect()
    }

    /// CPU and memory that pods may still have, once those that are on their way have come.
    pub(super) fn free_host(&self, pod_states: &PodStates) -> Option<HostResources> {
        let here = self.pods.iter().map(|uid| &pod_states[uid]);
        let coming =
            here.filter(|pod_state| pod_state.is_assumed() && pod_state.node() == Some(&self.view.name));
        let less = |free_host: HostResources, pod_state: &PodState| HostResources {
            cpu: MilliCpu(free_host.cpu.0.saturating_sub(pod_state.demand.host_resources.cpu.0)),
            memory: free_host.memory.minus(pod_state.demand.host_resources.memory),
        };
        self.unbound.map(|unbound| coming.fold(unbound, less))
    }

    /// Who keeps classes off which GPUs, as `except` sees it.
    pub(super) fn class_exclusions(&self, except: &PodUid, pod_states: &PodStates) -> Vec<ClassExclusion> {
        let others = self.pods.iter().filter(|uid| *uid != except);
        others.filter_map(|uid| self.class_exclusion(uid, &pod_states[uid])).collect()
    }

    /// The classes that a pod, or one that room is held for, keeps off its GPUs here, if there are any.
    pub fn class_exclusion(&self, uid: &PodUid, pod_state: &PodState) -> Option<ClassExclusion> {
        let classes = pod_state.demand.terms.class_exclusions;
        if classes.is_empty() {
            return None;
        }
        let held = || {
            self.resolve(
                &pod_state.reservation().filter(|reservation| reservation.node == self.view.name)?.devices,
            )
        };
        let gpus = self.charge_of(pod_state).map(|charge| charge.gpus).or_else(held)?;
        Some(ClassExclusion { uid: uid.clone(), gpus, classes })
    }

    /// What each tenant's pods and holds use here.
    fn usage(&self, pod_states: &PodStates, policy: &Policy) -> Vec<(TenantId, TenantUsage)> {
        if policy.tenants().is_empty() {
            return Vec::new();
        }
        let mut usage: BTreeMap<TenantId, TenantUsage> = BTreeMap::new();
        for pod_state in self.pods.iter().map(|uid| &pod_states[uid]) {
            if let Some((tenant, used)) = pod_state.demand.tenant.zip(self.use_of(pod_state)) {
                *usage.entry(tenant).or_default() += used;
            }
        }
        usage.into_iter().collect()
    }

    /// What a pod, or the room held for one, takes of this node; `None` if it is not here.
    pub fn use_of(&self, pod_state: &PodState) -> Option<TenantUsage> {
        let held = || pod_state.reservation().filter(|reservation| reservation.node == self.view.name);
        let gpus = match self.charge_of(pod_state) {
            // One that could be anywhere is somewhere: it is charged everywhere, and uses what it asked for.
            Some(charge) if charge.placed => charge.gpus,
            Some(_) => GpuSet::first(self.devices.len().min(pod_state.demand.gpus as usize)),
            None => self.resolve(&held()?.devices).unwrap_or_default(),
        };
        Some(used_on(&self.reserved, &pod_state.demand, gpus))
    }

    /// What a pod takes of this node that is placed on these GPUs.
    pub fn use_on(&self, pod_state: &PodState, gpus: GpuSet) -> TenantUsage {
        used_on(&self.reserved, &pod_state.demand, gpus)
    }

    /// The most that a demand may use here, on whichever GPUs.
    pub fn most_used_by(&self, demand: &Demand) -> TenantUsage {
        if demand.asks_plugin() {
            return used_on(&self.reserved, demand, GpuSet::EMPTY);
        }
        let could_fit = |gpu: &&Gpu| usable(gpu, demand) && gpu.capacity >= demand.per_gpu;
        let parts = self.reserved.iter().filter(could_fit).map(|gpu| gpu.part_of(demand));
        let on_one = parts.fold(TenantUsage::default(), TenantUsage::most);
        (0..demand.gpus).map(|_| on_one).sum()
    }

    fn tenant(&self, uid: &PodUid, pod_state: &PodState) -> Option<ResidentPod> {
        let bound = match &pod_state.phase {
            PodPhase::Bound(bound) => Some(bound),
            _ => None,
        };
        let is_sought = !pod_state.demand.asks_plugin()
            && bound.is_some_and(|bound| !bound.is_recorded() && bound.located.is_none());
        let PodCharge { gpus, placed } = self.charge_of(pod_state)?;
        Some(ResidentPod {
            uid: uid.clone(),
            gpus,
            placed,
            per_gpu: pod_state.demand.per_gpu,
            sharing: pod_state.demand.sharing,
            bound: bound.map(|bound| bound.since),
            wanted_on: is_sought.then_some(pod_state.demand.gpus),
            priority: pod_state.demand.priority,
            class: pod_state.demand.class,
            grace: pod_state.demand.grace,
            milli_gpus: self.use_on(pod_state, gpus).milli_gpus,
            unsaved_since: pod_state.unsaved_since(),
            is_leaving: bound.is_some_and(|bound| bound.leaving.is_some()),
        })
    }

    /// What its stake says has changed, and nothing that takes room.
    pub fn note_disruption_info(&mut self, uid: &PodUid, pod_state: &PodState) {
        if let Ok(found) = self.tenants.binary_search_by(|tenant| tenant.uid.cmp(uid)) {
            let is_leaving = matches!(&pod_state.phase, PodPhase::Bound(bound) if bound.leaving.is_some());
            let tenant = &mut self.tenants[found];
            (tenant.unsaved_since, tenant.is_leaving) = (pod_state.unsaved_since(), is_leaving);
        }
    }

    /// What promises leave of each GPU.
    fn reserved(&self, pod_states: &PodStates, policy: &Policy, except: Option<&PodUid>) -> Vec<Gpu> {
        let mut gpus: Vec<Gpu> =
            self.devices.iter().map(|device| Gpu::of(device, &policy.headroom)).collect();
        let here = || self.pods.iter().filter(|uid| Some(*uid) != except).map(|uid| &pod_states[uid]);
        for pod_state in here() {
            if let Some(charge) = self.charge_of(pod_state) {
                charge.gpus.iter().for_each(|g| {
                    gpus[g].charge(pod_state.demand.per_gpu, pod_state.demand.sharing);
                    gpus[g].starting |= pod_state.starting.is_some();
                    gpus[g].excluded_classes =
                        gpus[g].excluded_classes.with(pod_state.demand.terms.class_exclusions);
                });
            }
        }
        for pod_state in here() {
            self.charge_reservation(pod_state, pod_states, &mut gpus);
            self.add_soft_reservation(pod_state, &mut gpus);
        }
        gpus
    }

    /// A hold takes what its victims do not take already: their room is its room as they leave.
    fn charge_reservation(&self, preemptor: &PodState, pod_states: &PodStates, gpus: &mut [Gpu]) {
        let Some(reservation) =
            preemptor.reservation().filter(|reservation| reservation.node == self.view.name)
        else {
            return;
        };
        let Some(held) = self.resolve(&reservation.devices) else { return };
        for place in held.iter() {
            let gpu = &mut gpus[place];
            let on_this = |victim: &&PodState| self.charge_of(victim).is_some_and(|c| c.gpus.contains(place));
            let victims: Bytes =
                (reservation.victims.iter().filter_map(|uid| pod_states.get(uid)).filter(on_this))
                    .map(|victim| gpu.charge_for(victim.demand.per_gpu, victim.demand.sharing))
                    .sum();
            let wanted = gpu.charge_for(preemptor.demand.per_gpu, preemptor.demand.sharing);
            gpu.charged += wanted.minus(victims);
            gpu.tenants += 1;
            gpu.exclusive |= preemptor.demand.sharing == Sharing::Exclusive;
            gpu.excluded_classes = gpu.excluded_classes.with(preemptor.demand.terms.class_exclusions);
            // It will start as soon as the last victim has left: who began now would be in its way.
            gpu.starting |= preemptor.demand.terms.engine;
        }
    }

    fn add_soft_reservation(&self, preemptor: &PodState, gpus: &mut [Gpu]) {
        let Some(soft_reservation) =
            preemptor.soft_reservation().filter(|soft_reservation| soft_reservation.node == self.view.name)
        else {
            return;
        };
        for place in soft_reservation.gpus.iter() {
            let gpu = &mut gpus[place];
            gpu.softly_reserved += gpu.charge_for(preemptor.demand.per_gpu, preemptor.demand.sharing);
            gpu.engine_softly_reserved |= preemptor.demand.terms.engine;
            gpu.excluded_by_soft_reservations =
                gpu.excluded_by_soft_reservations.with(preemptor.demand.terms.class_exclusions);
        }
    }

    /// The devices to keep after a report that lists `reported`: those, and the missing ones that still have pods, as
    /// lost. Devices of which only the index was known become the reported ones of that index.
    pub(super) fn merge_devices(&self, mut reported: Vec<Device>, pod_states: &PodStates) -> Vec<Device> {
        let missing = self.devices.iter().enumerate().filter(|(_, device)| {
            device.uuid.index().is_none() && !reported.iter().any(|new| new.uuid == device.uuid)
        });
        let lost: Vec<Device> = missing
            .filter(|(place, _)| self.is_recorded_on(*place, pod_states))
            .map(|(_, device)| Device { health: Health::Lost, ..device.clone() })
            .collect();
        // A GPU that was cut anew while pods have parts of it is one card still: what they have cannot be given again.
        let cards: BTreeSet<GpuUuid> = lost.iter().map(card).cloned().collect();
        for device in reported.iter_mut().filter(|device| cards.contains(card(device))) {
            if device.health == Health::Healthy {
                device.health = Health::Draining;
            }
        }
        reported.extend(lost);
        reported.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        reported
    }

    fn is_recorded_on(&self, place: usize, pod_states: &PodStates) -> bool {
        self.pods
            .iter()
            .filter_map(|uid| self.charge_of(&pod_states[uid]))
            .any(|c| c.placed && c.gpus.contains(place))
    }
}
