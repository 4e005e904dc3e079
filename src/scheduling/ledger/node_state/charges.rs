//! What pods take of a node: allocations, reservations and soft reservations by GPU, and what of it counts for which tenant.
//!
//! It is added up again from the pods whenever one of them changes. A node has a handful of pods, and sums that are never
//! adjusted cannot drift. Reports come far more often than pods do: what only pods change is kept for them.

use super::NodeState;
use super::lending::may_borrow;
use crate::ids::{ModelId, PodUid};
use crate::ledger::pod_state::{PodPhase, PodState};
use crate::ledger::pod_states::PodStates;
use crate::ledger::quotas::{BoundPodOfTenant, TenantsOnNode};
use crate::placing::fit::{is_usable, tenant_usage_on};
use crate::policy::{Policy, SleepingRule, UnusedRule};
use crate::units::{Bytes, MilliCpu, Millis, Moment};
use crate::vocabulary::classification::{ClassId, TenantId};
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::device_plugin::{GpuRequest, PluginDevices, PluginShare};
use crate::vocabulary::gpu::{ClassExclusion, Gpu, GpuSet};
use crate::vocabulary::gpu_wish::GpuTraits;
use crate::vocabulary::placement::Reservation;
use std::collections::BTreeMap;

/// What the pods of a node take, as the last change of a pod or a device left it.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeCharges {
    /// Pods that are charged here, in order of UID.
    residents: Vec<ResidentPod>,
    /// Pods that are assumed or have a reservation here and are not bound yet, in order of UID.
    incoming_pods: Vec<PodUid>,
    /// GPUs that are reserved here for pods that are not charged, in order of UID.
    reservations: Vec<(PodUid, GpuSet)>,
    /// What allocations and reservations leave of each GPU.
    charged_gpus: Vec<Gpu>,
    /// What device plugins offer, beside what pods use of it.
    plugin: Vec<PluginShare>,
    tenants: TenantsOnNode,
    /// VRAM that pods that are bound or assumed here ask for.
    requested: Bytes,
}

/// The GPUs on which a pod is charged.
#[derive(Debug, Clone, Copy)]
pub(in crate::ledger) struct PodCharge {
    pub gpus: GpuSet,
    /// False if it is unknown on which GPUs it really is, so that all of them are charged. Where a device plugin picks them,
    /// that need not be known: it is charged on none.
    pub is_placed: bool,
}

/// A charged pod, with what is read of it when a report comes in or a preemptor searches for victims.
#[derive(Debug, Clone)]
pub(crate) struct ResidentPod {
    pub uid: PodUid,
    pub gpus: GpuSet,
    /// Whether it is known on which GPUs it is.
    pub is_placed: bool,
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// When it was observed to be bound; `None` while its Binding is pending.
    pub bound_since: Option<Moment>,
    /// How many GPUs a reading must show it on to locate it; `None` if its GPUs are recorded or located already.
    pub gpus_to_locate: Option<u32>,
    pub priority: i32,
    pub class: ClassId,
    /// The grace period with which it is evicted.
    pub grace: Millis,
    /// What it uses of the node's GPUs, in thousandths of one.
    pub milli_gpus: u64,
    /// Since when what it does would be lost; `None` if it is not bound.
    pub unsaved_since: Option<Moment>,
    pub is_leaving: bool,
    /// Its VRAM is lent by engines.
    pub borrows: bool,
    /// The driver keeps it within its VRAM.
    pub has_vram_limits: bool,
    /// Its engine is starting.
    pub is_starting: bool,
    /// VRAM of its model's weights on each of its GPUs, at most.
    pub weights_per_gpu: Bytes,
    /// It lends what it does not use while it sleeps, and asks before it wakes.
    pub lends_asleep: bool,
    /// It lends what it does not use, and takes it back by allocating it.
    pub lends_unused: bool,
    /// Its engine is to wake, or may.
    pub is_waking: bool,
    /// Its condition does not answer its latest wake request yet, or the end of it.
    pub has_unanswered_wake: bool,
    /// Readings sampled before this moment do not show that it sleeps.
    pub sleep_counts_from: Moment,
}

impl ResidentPod {
    pub(super) fn lends(&self) -> bool {
        self.lends_asleep || self.lends_unused
    }
}

impl NodeCharges {
    /// VRAM that pods may be allocated on a GPU, all together.
    pub(super) fn capacity_of(&self, index: usize) -> Bytes {
        self.charged_gpus[index].capacity
    }
}

impl NodeState {
    /// Where `pod_state` counts on this node, if it is here. For a GPU that is lost nothing else is charged.
    pub(in crate::ledger) fn charge_of(&self, pod_state: &PodState) -> Option<PodCharge> {
        if pod_state.node() != Some(&self.view.name) {
            return None;
        }
        if pod_state.demand.is_allocated_externally() {
            return Some(PodCharge {
                gpus: GpuSet::EMPTY,
                is_placed: true,
            });
        }
        let gpus = pod_state
            .devices()
            .and_then(|devices| self.resolve_without_lost(devices));
        let all_gpus = GpuSet::first(self.devices.len());
        Some(PodCharge {
            gpus: gpus.unwrap_or(all_gpus),
            is_placed: gpus.is_some(),
        })
    }

    /// Adds up again what pods take, after any change of a pod or a device here. Returns what tenants used before.
    pub(in crate::ledger) fn recount(
        &mut self,
        pod_states: &PodStates,
        policy: &Policy,
    ) -> TenantsOnNode {
        self.charges.charged_gpus = self.charged_gpus(pod_states, policy, None);
        self.charges.residents = self
            .pods
            .iter()
            .filter_map(|uid| self.resident(uid, &pod_states[uid], policy))
            .collect();
        self.forget_former_lenders();
        self.charges.incoming_pods = self
            .pods
            .iter()
            .filter(|uid| pod_states[*uid].is_coming_to(&self.view.name))
            .cloned()
            .collect();
        let reserved = |uid: &PodUid| {
            let pod_state = &pod_states[uid];
            let reservation = self.reservation_here(pod_state)?;
            let is_charged = self.charge_of(pod_state).is_some();
            let gpus = self.resolve(&reservation.devices).filter(|_| !is_charged)?;
            Some((uid.clone(), gpus))
        };
        self.charges.reservations = self.pods.iter().filter_map(reserved).collect();
        self.charges.plugin = self.plugin_shares(pod_states);
        self.charges.requested = self.requested_by_pods(pod_states);
        let tenants = self.count_tenants(pod_states, policy);
        std::mem::replace(&mut self.charges.tenants, tenants)
    }

    /// Pods that are charged here, in order of UID.
    pub(crate) fn residents(&self) -> &[ResidentPod] {
        &self.charges.residents
    }

    /// GPUs that are reserved here for pods that are not charged.
    pub(super) fn reservations(&self) -> &[(PodUid, GpuSet)] {
        &self.charges.reservations
    }

    pub(super) fn has_reservation_of(&self, uid: &PodUid) -> bool {
        let reservations = &self.charges.reservations;
        reservations
            .binary_search_by(|(reserved, _)| reserved.cmp(uid))
            .is_ok()
    }

    /// Whether the pod is on the node.
    pub(crate) fn has_resident(&self, uid: &PodUid) -> bool {
        self.resident_of(uid).is_some()
    }

    pub(in crate::ledger) fn resident_of(&self, uid: &PodUid) -> Option<&ResidentPod> {
        let found = self
            .charges
            .residents
            .binary_search_by(|resident| resident.uid.cmp(uid))
            .ok()?;
        Some(&self.charges.residents[found])
    }

    /// Pods that are assumed or have a reservation here and are not bound yet, in order of UID.
    pub(in crate::ledger) fn incoming_pods(&self) -> &[PodUid] {
        &self.charges.incoming_pods
    }

    /// What device plugins offer, beside what pods use of it.
    pub(super) fn plugin(&self) -> &[PluginShare] {
        &self.charges.plugin
    }

    /// What tenants use here.
    pub(in crate::ledger) fn tenants(&self) -> &TenantsOnNode {
        &self.charges.tenants
    }

    /// VRAM that pods that are bound or assumed here ask for, as the node's sum would show it.
    pub(in crate::ledger) fn requested(&self) -> Bytes {
        self.charges.requested
    }

    /// What it adds to sums over nodes is not in them any more.
    pub(in crate::ledger) fn forget_sums(&mut self) {
        self.charges.tenants = TenantsOnNode::default();
        self.clear_contribution();
    }

    /// What is left of each GPU.
    pub(super) fn gpus(&self, pod_states: &PodStates, policy: &Policy) -> Vec<Gpu> {
        let mut gpus = self.charges.charged_gpus.clone();
        self.apply_measurements(&policy.telemetry, &mut gpus);
        self.add_neighbors(&mut gpus, policy, None);
        self.add_lendable(&mut gpus, pod_states, policy, None);
        self.mark_spare(policy, &mut gpus);
        gpus
    }

    /// What is left of each GPU if the pod had nothing here.
    pub(in crate::ledger) fn gpus_without(
        &self,
        except: &PodUid,
        pod_states: &PodStates,
        policy: &Policy,
    ) -> Vec<Gpu> {
        let mut gpus = self.charged_gpus(pod_states, policy, Some(except));
        self.apply_measurements(&policy.telemetry, &mut gpus);
        self.add_neighbors(&mut gpus, policy, Some(except));
        self.add_lendable(&mut gpus, pod_states, policy, Some(except));
        self.mark_spare(policy, &mut gpus);
        gpus
    }

    /// Pods of each model that are here or on their way, in order of model.
    pub(super) fn replicas(&self, pod_states: &PodStates) -> Vec<(ModelId, u16)> {
        let mut counts: BTreeMap<&ModelId, u16> = BTreeMap::new();
        let here = self.pods.iter().map(|uid| &pod_states[uid]);
        for model in here.filter_map(|pod_state| {
            self.charge_of(pod_state)
                .and(pod_state.demand.model.as_ref())
        }) {
            *counts.entry(model).or_default() += 1;
        }
        counts
            .into_iter()
            .map(|(model, count)| (model.clone(), count))
            .collect()
    }

    /// CPU and memory that pods may still have, once those that are on their way have come.
    pub(super) fn free_host(&self, pod_states: &PodStates) -> Option<HostResources> {
        let here = self.pods.iter().map(|uid| &pod_states[uid]);
        let coming = here.filter(|pod_state| {
            pod_state.is_assumed() && pod_state.node() == Some(&self.view.name)
        });
        let less = |free_host: HostResources, pod_state: &PodState| HostResources {
            cpu: MilliCpu(
                free_host
                    .cpu
                    .0
                    .saturating_sub(pod_state.demand.host_resources.cpu.0),
            ),
            memory: free_host
                .memory
                .minus(pod_state.demand.host_resources.memory),
        };
        self.unbound.map(|unbound| coming.fold(unbound, less))
    }

    /// Which pods but `except` exclude classes from which GPUs.
    pub(in crate::ledger) fn class_exclusions(
        &self,
        except: &PodUid,
        pod_states: &PodStates,
    ) -> Vec<ClassExclusion> {
        let others = self.pods.iter().filter(|uid| *uid != except);
        others
            .filter_map(|uid| self.class_exclusion(uid, &pod_states[uid]))
            .collect()
    }

    /// The classes that a pod excludes from the GPUs that it has or that are reserved for it here, if there are any.
    fn class_exclusion(&self, uid: &PodUid, pod_state: &PodState) -> Option<ClassExclusion> {
        let classes = pod_state.demand.terms.class_exclusions;
        if classes.is_empty() {
            return None;
        }
        let reserved = || self.resolve(&self.reservation_here(pod_state)?.devices);
        let gpus = self
            .charge_of(pod_state)
            .map(|charge| charge.gpus)
            .or_else(reserved)?;
        Some(ClassExclusion {
            uid: uid.clone(),
            gpus,
            classes,
        })
    }

    fn requested_by_pods(&self, pod_states: &PodStates) -> Bytes {
        let here = self.pods.iter().map(|uid| &pod_states[uid]);
        here.filter(|pod_state| pod_state.node() == Some(&self.view.name))
            .map(|pod| pod.demand.vram())
            .sum()
    }

    fn count_tenants(&self, pod_states: &PodStates, policy: &Policy) -> TenantsOnNode {
        if policy.tenants().is_empty() {
            return TenantsOnNode::default();
        }
        let (mut usage, mut bound_pods) = (BTreeMap::<TenantId, TenantUsage>::new(), Vec::new());
        for (uid, pod_state) in self.pods.iter().map(|uid| (uid, &pod_states[uid])) {
            let demand = &pod_state.demand;
            let Some((tenant, used)) = demand.tenant.zip(self.usage_of(pod_state)) else {
                continue;
            };
            *usage.entry(tenant).or_default() += used;
            if let Some(bound) = pod_state
                .bound()
                .filter(|bound| bound.node == self.view.name)
            {
                let (uid, priority, started) = (uid.clone(), demand.priority, bound.started);
                bound_pods.push(BoundPodOfTenant {
                    tenant,
                    uid,
                    priority,
                    started,
                    used,
                });
            }
        }
        TenantsOnNode {
            usage: usage.into_iter().collect(),
            bound: bound_pods,
        }
    }

    /// What a pod takes or has reserved of this node; `None` if it is not here.
    pub(crate) fn usage_of(&self, pod_state: &PodState) -> Option<TenantUsage> {
        let demand = &pod_state.demand;
        let gpus = match self.charge_of(pod_state) {
            Some(charge) if charge.is_placed => charge.gpus,
            // A pod that could be anywhere is charged everywhere, and uses what it asks for.
            Some(_) => GpuSet::first(self.devices.len().min(demand.gpus as usize)),
            None => self
                .resolve(&self.reservation_here(pod_state)?.devices)
                .unwrap_or_default(),
        };
        // Beside the GPUs that are left it uses what it asked for on those that are lost.
        let lost = if gpus.is_empty() {
            0
        } else {
            demand.gpus.saturating_sub(gpus.iter().count() as u32)
        };
        let on_lost = TenantUsage {
            vram: demand.per_gpu.times(u64::from(lost)),
            milli_gpus: 1000 * u64::from(lost),
        };
        Some(
            [
                tenant_usage_on(&self.charges.charged_gpus, demand, gpus),
                on_lost,
            ]
            .into_iter()
            .sum(),
        )
    }

    /// What a pod takes of this node that is placed on these GPUs.
    pub(crate) fn usage_on(&self, pod_state: &PodState, gpus: GpuSet) -> TenantUsage {
        tenant_usage_on(&self.charges.charged_gpus, &pod_state.demand, gpus)
    }

    /// The most that a demand may use here, on any of the GPUs.
    pub(crate) fn max_usage_of(&self, demand: &Demand) -> TenantUsage {
        if demand.is_allocated_externally() {
            return tenant_usage_on(&self.charges.charged_gpus, demand, GpuSet::EMPTY);
        }
        let could_fit = |gpu: &&Gpu| is_usable(gpu, demand) && gpu.capacity >= demand.per_gpu;
        let parts = self
            .charges
            .charged_gpus
            .iter()
            .filter(could_fit)
            .map(|gpu| gpu.usage_of(demand));
        let on_one = parts.fold(TenantUsage::default(), TenantUsage::max_of_each);
        (0..demand.gpus).map(|_| on_one).sum()
    }

    fn resident(&self, uid: &PodUid, pod_state: &PodState, policy: &Policy) -> Option<ResidentPod> {
        let bound = match &pod_state.phase {
            PodPhase::Bound(bound) => Some(bound),
            _ => None,
        };
        let is_unlocated = !pod_state.demand.is_allocated_externally()
            && bound.is_some_and(|bound| !bound.has_recorded_uuids() && bound.located.is_none());
        let PodCharge {
            gpus,
            is_placed: placed,
        } = self.charge_of(pod_state)?;
        let class = policy.class(pod_state.demand.class);
        // A GPU that was promised to one pod alone is not shared, and what is borrowed is not lent on.
        let may_lend = pod_state.demand.sharing == Sharing::Shared
            && placed
            && bound.is_some_and(|bound| bound.has_recorded_uuids() && !bound.borrows);
        Some(ResidentPod {
            uid: uid.clone(),
            gpus,
            is_placed: placed,
            per_gpu: pod_state.demand.per_gpu,
            sharing: pod_state.demand.sharing,
            bound_since: bound.map(|bound| bound.since),
            gpus_to_locate: is_unlocated.then_some(pod_state.demand.gpus),
            priority: pod_state.demand.priority,
            class: pod_state.demand.class,
            grace: class.eviction_grace_period(pod_state.demand.grace),
            milli_gpus: self.usage_on(pod_state, gpus).milli_gpus,
            unsaved_since: pod_state.unsaved_since(),
            is_leaving: pod_state.is_leaving(),
            borrows: pod_state.borrows(),
            has_vram_limits: pod_state.has_vram_limits(),
            is_starting: pod_state.starting.is_some(),
            weights_per_gpu: pod_state.demand.weights_per_gpu(),
            lends_asleep: may_lend && class.sleeping == SleepingRule::Lend,
            lends_unused: may_lend
                && class.unused == UnusedRule::Lend
                && pod_state.has_vram_limits(),
            is_waking: bound.is_some_and(|bound| bound.wake.is_waking()),
            has_unanswered_wake: bound
                .is_some_and(|bound| bound.wake.request != bound.wake.answered_request),
            sleep_counts_from: bound
                .map(|bound| bound.wake.over.max(bound.since))
                .unwrap_or_default(),
        })
    }

    /// What the pod's disruption depends on has changed, and nothing that it takes. Returns whether it begins to leave, or stays
    /// after all: an engine that leaves lends nothing more, and serves no other pod.
    pub(in crate::ledger) fn update_disruption_info(
        &mut self,
        uid: &PodUid,
        pod_state: &PodState,
    ) -> bool {
        if let Some(bound) = pod_state.bound() {
            self.charges.tenants.set_started(uid, bound.started);
        }
        let residents = &mut self.charges.residents;
        let Ok(found) = residents.binary_search_by(|resident| resident.uid.cmp(uid)) else {
            return false;
        };
        let resident = &mut residents[found];
        resident.unsaved_since = pod_state.unsaved_since();
        std::mem::replace(&mut resident.is_leaving, pod_state.is_leaving())
            != pod_state.is_leaving()
    }

    /// What device plugins offer here, beside what pods that are here or on their way use.
    fn plugin_shares(&self, pod_states: &PodStates) -> Vec<PluginShare> {
        let mut used = PluginDevices::new();
        for pod_state in self.pods.iter().map(|uid| &pod_states[uid]) {
            if let (GpuRequest::Plugin { resource, count }, Some(_)) =
                (&pod_state.demand.ask, self.charge_of(pod_state))
            {
                let sum = used.entry(resource.clone()).or_default();
                *sum = sum.saturating_add(*count);
            }
        }
        PluginShare::for_node(&self.offered, &used)
    }

    /// What allocations, reservations and soft reservations leave of each GPU.
    fn charged_gpus(
        &self,
        pod_states: &PodStates,
        policy: &Policy,
        except: Option<&PodUid>,
    ) -> Vec<Gpu> {
        let mut gpus: Vec<Gpu> = self
            .devices
            .iter()
            .map(|device| Gpu::from_device(device, &policy.headroom))
            .collect();
        GpuTraits::assign_if_unlike(&self.devices, &mut gpus);
        let here = || {
            self.pods
                .iter()
                .filter(|uid| Some(*uid) != except)
                .map(|uid| &pod_states[uid])
        };
        for pod_state in here() {
            if let Some(charge) = self.charge_of(pod_state) {
                charge.gpus.iter().for_each(|g| {
                    gpus[g].charge(pod_state.demand.per_gpu, pod_state.demand.sharing);
                    gpus[g].starting |= pod_state.starting.is_some();
                    gpus[g].excluded_classes = gpus[g]
                        .excluded_classes
                        .union(pod_state.demand.terms.class_exclusions);
                });
            }
        }
        for pod_state in here() {
            self.charge_reservation(pod_state, pod_states, &mut gpus);
            self.add_soft_reservation(pod_state, &mut gpus);
        }
        gpus
    }

    /// A reservation takes what its victims do not take already: their VRAM becomes its own as they leave.
    fn charge_reservation(&self, preemptor: &PodState, pod_states: &PodStates, gpus: &mut [Gpu]) {
        let Some(reservation) = self.reservation_here(preemptor) else {
            return;
        };
        let Some(reserved) = self.resolve(&reservation.devices) else {
            return;
        };
        for index in reserved.iter() {
            let gpu = &mut gpus[index];
            let is_on_this_gpu = |victim: &&PodState| {
                self.charge_of(victim)
                    .is_some_and(|c| c.gpus.contains(index))
            };
            let victims: Bytes = (reservation
                .victims
                .iter()
                .filter_map(|uid| pod_states.get(uid))
                .filter(is_on_this_gpu))
            .map(|victim| gpu.charge_for(victim.demand.per_gpu, victim.demand.sharing))
            .sum();
            let needed = gpu.charge_for(preemptor.demand.per_gpu, preemptor.demand.sharing);
            gpu.charged += needed.minus(victims);
            gpu.residents += 1;
            gpu.exclusive |= preemptor.demand.sharing == Sharing::Exclusive;
            gpu.excluded_classes = gpu
                .excluded_classes
                .union(preemptor.demand.terms.class_exclusions);
            // It will start as soon as the last victim has left: an engine that began to start now would be in its way.
            gpu.starting |= preemptor.demand.terms.engine;
        }
    }

    /// The GPUs that are reserved here for pods but `except`, each with the pod's priority if it may borrow.
    pub(super) fn reserved_gpus(
        &self,
        pod_states: &PodStates,
        policy: &Policy,
        except: Option<&PodUid>,
    ) -> Vec<(GpuSet, Option<i32>)> {
        let others = self
            .pods
            .iter()
            .filter(|uid| Some(*uid) != except)
            .map(|uid| &pod_states[uid]);
        let reserved = others.filter_map(|pod_state| {
            let gpus = self.resolve(&self.reservation_here(pod_state)?.devices)?;
            // Where limits hold, engines may lend to pods with limits alone.
            let borrows = may_borrow(&pod_state.demand, Some(pod_state), policy)
                && (!self.keeps_vram_limits() || pod_state.demand.can_have_vram_limits());
            Some((gpus, borrows.then_some(pod_state.demand.priority)))
        });
        reserved.collect()
    }

    fn reservation_here<'p>(&self, pod_state: &'p PodState) -> Option<&'p Reservation> {
        pod_state
            .reservation()
            .filter(|reservation| reservation.node == self.view.name)
    }

    fn add_soft_reservation(&self, preemptor: &PodState, gpus: &mut [Gpu]) {
        let Some(soft_reservation) = preemptor
            .soft_reservation()
            .filter(|soft_reservation| soft_reservation.node == self.view.name)
        else {
            return;
        };
        for index in soft_reservation.gpus.iter() {
            let gpu = &mut gpus[index];
            gpu.softly_reserved +=
                gpu.charge_for(preemptor.demand.per_gpu, preemptor.demand.sharing);
            gpu.engine_softly_reserved |= preemptor.demand.terms.engine;
            gpu.excluded_by_soft_reservations = gpu
                .excluded_by_soft_reservations
                .union(preemptor.demand.terms.class_exclusions);
        }
    }
}
