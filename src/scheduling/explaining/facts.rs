//! What an explanation reads from the ledger, in a few short reads: first the pod and the snapshot, then, for the nodes to be
//! shown, the pods on them. Nothing is evaluated here, and nothing that blocks the ledger is kept.

use super::explanation::LimitsPart;
use super::vram_limits::limits_in_force;
use super::{PodAccess, ShownNodes};
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::kube_filters::{AssumedNodeChange, FilterReason, FilterVerdict};
use crate::ledger::{
    KeepReason, Ledger, Occupant, OccupantPhase, PodLoan, PodPhase, PodState, Preemptor,
};
use crate::placing::fit::Misfit;
use crate::placing::rank::ScheduleAttempt;
use crate::placing::snapshot::Snapshot;
use crate::policy::{Policy, SpareRule};
use crate::units::{Millis, Moment};
use crate::verbs::ClusterCopy;
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::PodHealth;
use crate::vocabulary::gpu::{Device, GpuSet, Health};
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::{
    EngineLoad, Freshness, GpuActivity, NodeIsolation, NodeReading,
};
use crate::vocabulary::smoothed_load::SmoothedLoad;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The pod and the cluster at one moment.
pub struct Facts {
    pub now: Moment,
    /// Who reads the explanation.
    pub reader: PodAccess,
    pub uid: PodUid,
    pub entry: PodState,
    pub policy: Arc<Policy>,
    pub snapshot: Arc<Snapshot>,
    /// The indices of the nodes that the scheduler asked about when the pod was last refused; `None` if it was not, or that is
    /// unknown.
    queried_nodes: Option<BTreeSet<usize>>,
    /// What kube-scheduler's own filters say of the nodes that they do not accept; empty unless the pod waits.
    pub filter_verdicts: BTreeMap<usize, FilterVerdict>,
    /// The nodes with a reservation of the pod, without that reservation: it is no obstacle for the pod itself.
    nodes_without_pod: Vec<Node>,
    /// The placement reserved for the pod.
    pub reserved_placement: Option<(NodeName, Result<GpuSet, Misfit>)>,
    /// What its tenant may still use.
    pub allowance: TenantLimit,
    /// The rules of `planning.spare`, with the GPUs that are free for each; `None` for one that does not hold now.
    pub spare: Vec<(SpareRule, Option<u32>)>,
    /// What its tenant has taken of the time for which its starts keep others from its GPUs.
    pub gate_time_taken: Millis,
    /// What it has to do with VRAM that is lent, if it is bound.
    pub loan: Option<PodLoan>,
    /// What the driver keeps it within, if it is bound.
    pub limits: Option<LimitsPart>,
    /// What keeps it from borrowing, if anything does; `None` if its class may not.
    pub borrowing: Option<Option<KeepReason>>,
    /// What its tenant uses.
    pub used: TenantUsage,
    /// The capacity of the cluster, as tenants have shares of it.
    pub cluster_capacity: TenantUsage,
    /// The remaining victims of its reservation.
    pub victims: Vec<PodKey>,
    pub victims_left: u32,
    /// The preemptor, with the tenants' shares; needed for a pending pod only.
    pub preemptor: Preemptor,
}

impl Facts {
    /// `None` if the ledger has no such pod.
    pub fn collect(reader: PodAccess, cluster: &mut ClusterCopy, uid: &PodUid) -> Option<Self> {
        let snapshot = cluster.snapshot();
        let ledger: &Ledger = cluster.ledger();
        let mut entry = ledger.pod_state(uid)?.clone();
        let waits = matches!(entry.phase, PodPhase::Waiting(_));
        if waits {
            entry.demand.kept = ledger.spare_rules_against(&entry.demand);
        }
        let borrowing = ledger.borrowing_of(&entry);
        // As it may be placed.
        entry.demand.resolve_model_name(&snapshot);
        entry.demand = ledger.for_placing(uid, entry.demand);
        let reservation = entry.reservation();
        let victims = reservation
            .iter()
            .flat_map(|reservation| reservation.victims.iter())
            .filter_map(|uid| ledger.pod_state(uid));
        Some(Self {
            now: ledger.now(),
            reader,
            uid: uid.clone(),
            policy: ledger.policy().clone(),
            filter_verdicts: filter_verdicts(cluster, uid, &entry, &snapshot),
            snapshot,
            queried_nodes: None,
            nodes_without_pod: nodes_without_pod(ledger, uid, &entry),
            reserved_placement: ledger.reserved_placement(uid),
            allowance: ledger.tenant_allowance(uid, &entry.demand),
            spare: ledger
                .spare_status()
                .map(|(rule, free)| (rule.clone(), free))
                .collect(),
            gate_time_taken: match &entry.phase {
                PodPhase::Bound(bound) if entry.disruption_info.health != PodHealth::Ready => {
                    let gpus = bound.devices.as_deref().unwrap_or_default();
                    ledger.gate_time_taken(&entry.demand, &bound.node, gpus)
                }
                _ => Millis::default(),
            },
            loan: ledger.loan_of(uid),
            limits: limits_in_force(ledger, uid, &entry),
            borrowing,
            cluster_capacity: ledger.cluster_total(),
            used: entry
                .demand
                .tenant
                .map(|tenant| ledger.tenant_usage(tenant))
                .unwrap_or_default(),
            victims: victims.map(|victim| victim.key.clone()).collect(),
            victims_left: ledger.remaining_victims(uid),
            preemptor: match waits {
                true => ledger.preemptor(uid).with_volumes(cluster.kube_filters()),
                false => Preemptor::default(),
            },
            entry,
        })
    }

    /// Makes the snapshot the one that the pod itself sees.
    pub(crate) fn without_own_reservation(mut self) -> Self {
        let own = std::mem::take(&mut self.nodes_without_pod);
        if !own.is_empty() {
            let generation = self.snapshot.generation();
            Arc::make_mut(&mut self.snapshot).update(generation, own);
        }
        self.queried_nodes = self
            .entry
            .refusal()
            .and_then(|refused| refused.queried_nodes.as_ref())
            .map(|node_set| {
                let nodes = self.snapshot.nodes_in(node_set);
                nodes
                    .filter_map(|node| self.snapshot.index_of(node.name.as_str()))
                    .collect()
            });
        self
    }

    /// Whether the scheduler asked about the node at `index`: nodes that it does not ask about were ruled out by another plugin.
    pub fn was_queried(&self, index: usize) -> Option<bool> {
        self.queried_nodes
            .as_ref()
            .map(|queried| queried.contains(&index))
    }

    /// On how many nodes the scheduler asked when the pod was last refused; all, where that is unknown.
    pub(crate) fn queried_count(&self) -> u32 {
        let queried = self.queried_nodes.as_ref().map(BTreeSet::len);
        queried.unwrap_or(self.snapshot.nodes().len()) as u32
    }

    /// The indices of the nodes that the scheduler would accept, as far as that is known.
    pub(crate) fn queried_indices(&self) -> impl Iterator<Item = usize> {
        (0..self.snapshot.nodes().len()).filter(|node_index| self.may_be_queried(*node_index))
    }

    /// Whether the scheduler accepts the node at `index`, as far as that is known.
    pub(crate) fn may_be_queried(&self, index: usize) -> bool {
        self.was_queried(index) != Some(false) && self.filter_reason(index).is_none()
    }

    /// Why kube-scheduler's own filters refuse the node at `index`; `None` if they do not, or that is unknown.
    pub fn filter_reason(&self, index: usize) -> Option<&FilterReason> {
        match self.filter_verdicts.get(&index)? {
            FilterVerdict::Rejects(reason) => Some(reason),
            FilterVerdict::Accepts | FilterVerdict::Unsupported(_) => None,
        }
    }

    /// Whether the reader may see this pod.
    pub fn may_see(&self, pod: &PodKey) -> bool {
        self.reader.may_see(&self.entry.key, pod)
    }

    /// What the reader may call these pods.
    pub fn names<'a>(&self, pods: impl IntoIterator<Item = &'a PodKey>) -> Vec<String> {
        self.reader.names(&self.entry.key, pods)
    }

    pub fn demand(&self) -> &Demand {
        &self.entry.demand
    }

    /// The attempt that the filter would make for the pod, with `limit` candidates.
    pub fn attempt(&self, limit: usize) -> ScheduleAttempt<'_> {
        let first = ScheduleAttempt::new(
            &self.policy,
            self.reserved_placement.as_ref(),
            self.allowance,
        );
        ScheduleAttempt { limit, ..first }
    }
}

fn filter_verdicts(
    cluster: &ClusterCopy,
    uid: &PodUid,
    entry: &PodState,
    snapshot: &Snapshot,
) -> BTreeMap<usize, FilterVerdict> {
    let filters = cluster.kube_filters();
    let waiting = entry.waiting();
    let Some(wants) = waiting.and_then(|_| filters.requirements_of(uid)) else {
        return BTreeMap::new();
    };
    let query = filters.query(Some(uid), wants);
    let leaving = entry.reservation().map_or(&[][..], |own| &*own.victims);
    let missing_claim = filters.volumes().missing_claim(wants);
    let verdict = |node: &NodeName| match missing_claim {
        Some(claim) => FilterVerdict::Rejects(FilterReason::NoClaim {
            claim: claim.clone(),
        }),
        None => {
            let coming = cluster.ledger().incoming_pods(node);
            query.verdict(node, &AssumedNodeChange { leaving, coming })
        }
    };
    let nodes = snapshot.nodes().iter().enumerate();
    nodes
        .map(|(index, node)| (index, verdict(&node.name)))
        .filter(|(_, verdict)| *verdict != FilterVerdict::Accepts)
        .collect()
}

fn nodes_without_pod(ledger: &Ledger, uid: &PodUid, entry: &PodState) -> Vec<Node> {
    let own = [
        entry
            .soft_reservation()
            .map(|soft_reservation| &soft_reservation.node),
        entry.reservation().map(|reservation| &reservation.node),
    ];
    own.into_iter()
        .flatten()
        .filter_map(|node| ledger.node_without(uid, node))
        .collect()
}

/// Facts about one node that the snapshot does not have.
#[derive(Default)]
pub struct NodeDetails {
    pub pool: Option<String>,
    pub report_age: Option<Millis>,
    pub isolation: Option<NodeIsolation>,
    pub occupants: Vec<Occupant>,
    /// What was last read of the engines on each GPU, and what counts of it.
    engine_loads: Vec<(GpuUuid, EngineLoad, SmoothedLoad)>,
    /// How busy GPUs are; none without a fresh report.
    pub activities: BTreeMap<GpuUuid, GpuActivity>,
    /// Why pods may not be evicted for the pod; a pod that is not listed may.
    keep_reasons: BTreeMap<PodUid, KeepReason>,
    devices: Arc<[Device]>,
    /// What the agent's last report lists; `None` without one.
    reported: Option<BTreeSet<GpuUuid>>,
}

impl NodeDetails {
    pub fn collect(ledger: &Ledger, node: &NodeName) -> Self {
        Self {
            pool: ledger.pool_of(node).map(|pool| pool.name.clone()),
            report_age: ledger.reading_age(node),
            isolation: ledger
                .node_state(node)
                .and_then(|node_state| node_state.believed_reading()?.isolation),
            occupants: ledger.occupants_of(node),
            engine_loads: engine_loads(ledger, node),
            activities: fresh_reading(ledger, node)
                .map(|reading| reading.activities.clone())
                .unwrap_or_default(),
            keep_reasons: BTreeMap::new(),
            devices: ledger
                .node(node)
                .map(|node| node.devices.clone())
                .unwrap_or_default(),
            reported: ledger
                .reading(node)
                .map(|reading| reading.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()),
        }
    }

    /// Whether the agent's last report lacks a device, so that only the pods that were on it keep it in the list.
    pub fn is_gone(&self, device: &Device) -> bool {
        let is_unlisted = self
            .reported
            .as_ref()
            .is_some_and(|reported| !reported.contains(&device.uuid));
        device.health == Health::Lost && is_unlisted
    }

    /// Adds the reasons why pods may not be evicted, for a pending pod.
    pub(crate) fn with_reasons(self, ledger: &Ledger, facts: &Facts) -> Self {
        if !matches!(facts.entry.phase, PodPhase::Waiting(_)) {
            return self;
        }
        let here = self
            .occupants
            .iter()
            .filter(|gpu_occupant| gpu_occupant.uid != facts.uid);
        let why = |gpu_occupant: &Occupant| {
            Some((
                gpu_occupant.uid.clone(),
                ledger.keep_reason_of(&facts.preemptor, facts.demand(), &gpu_occupant.uid)?,
            ))
        };
        Self {
            keep_reasons: here.filter_map(why).collect(),
            ..self
        }
    }

    /// What was last read of the engines on a GPU, and what counts of it; `None` without a fresh report.
    pub fn engine_load(&self, gpu: &GpuUuid) -> Option<(EngineLoad, SmoothedLoad)> {
        let found = self.engine_loads.iter().find(|(uuid, ..)| uuid == gpu);
        found.map(|(_, reading, smoothed)| (*reading, *smoothed))
    }

    /// The pods on these `gpus` of `devices`; none, if the node has other devices by now.
    pub fn occupants_of<'a>(
        &'a self,
        devices: &[Device],
        gpus: GpuSet,
        facts: &'a Facts,
    ) -> GpuOccupants<'a> {
        let occupants = if *self.devices == *devices {
            &self.occupants[..]
        } else {
            &[]
        };
        GpuOccupants {
            occupants,
            keep_reasons: Some(&self.keep_reasons),
            gpus,
            facts,
        }
    }
}

fn fresh_reading<'l>(ledger: &'l Ledger, node: &NodeName) -> Option<&'l NodeReading> {
    let is_fresh = ledger.node(node)?.freshness == Freshness::Fresh;
    ledger.reading(node).filter(|_| is_fresh)
}

fn engine_loads(ledger: &Ledger, node: &NodeName) -> Vec<(GpuUuid, EngineLoad, SmoothedLoad)> {
    let gpus = fresh_reading(ledger, node)
        .into_iter()
        .flat_map(|reading| &reading.gpus);
    gpus.filter_map(|gpu| {
        Some((
            gpu.uuid.clone(),
            gpu.engine_load,
            *ledger.smoothed_load(node, &gpu.uuid)?,
        ))
    })
    .collect()
}

/// The pods on some GPUs, for sentences that name them.
#[derive(Clone, Copy)]
pub struct GpuOccupants<'a> {
    occupants: &'a [Occupant],
    keep_reasons: Option<&'a BTreeMap<PodUid, KeepReason>>,
    gpus: GpuSet,
    facts: &'a Facts,
}

impl<'a> GpuOccupants<'a> {
    pub fn none(facts: &'a Facts) -> Self {
        Self {
            occupants: &[],
            keep_reasons: None,
            gpus: GpuSet::default(),
            facts,
        }
    }

    pub fn iter(self) -> impl Iterator<Item = &'a Occupant> {
        self.occupants
            .iter()
            .filter(move |gpu_occupant| gpu_occupant.gpus.intersects(self.gpus))
    }

    /// Why one of these pods may not be evicted for the pod, as text.
    pub fn keep_reason(self, gpu_occupant: &Occupant) -> Option<String> {
        match self.keep_reasons?.get(&gpu_occupant.uid)? {
            // The API server's message may name more than that pod.
            KeepReason::EvictionRefused { again, .. }
                if gpu_occupant.key.namespace != self.facts.entry.key.namespace =>
            {
                let why = "Stowage's log says why".into();
                Some(KeepReason::EvictionRefused { why, again: *again }.to_string())
            }
            keep_reason => Some(keep_reason.to_string()),
        }
    }

    /// The names that the reader may see of the pods that `is_included` selects, without the explained pod.
    pub fn names_where(self, is_included: impl Fn(&Occupant) -> bool) -> Vec<String> {
        let others = self
            .iter()
            .filter(|gpu_occupant| gpu_occupant.uid != self.facts.uid);
        let meant = others.filter(|gpu_occupant| is_included(gpu_occupant));
        self.facts
            .names(meant.map(|gpu_occupant| &gpu_occupant.key))
    }

    pub fn exclusive_pods(self) -> Vec<String> {
        self.names_where(|gpu_occupant| {
            gpu_occupant.sharing == Sharing::Exclusive
                && gpu_occupant.phase != OccupantPhase::SoftlyReserved
        })
    }

    /// The pods whose engines start, and when the last start gate opens at the latest; unknown for an engine that has not begun.
    pub fn starting_pods(self) -> (Vec<String>, Option<Millis>) {
        let is_to_start = |gpu_occupant: &Occupant| match gpu_occupant.phase {
            OccupantPhase::Reserved => gpu_occupant.has_engine,
            // It begins when its Binding lands.
            OccupantPhase::Assumed => gpu_occupant.starting_until.is_some(),
            _ => false,
        };
        let names = self.names_where(|gpu_occupant| {
            gpu_occupant.starting_until.is_some() || is_to_start(gpu_occupant)
        });
        let gates = self
            .iter()
            .filter_map(|gpu_occupant| gpu_occupant.starting_until)
            .max();
        let opens_in = gates
            .filter(|_| !self.iter().any(is_to_start))
            .map(|gate| gate.since(self.facts.now));
        (names, opens_in)
    }

    pub(crate) fn pods_excluding(self, demand: &Demand) -> Vec<String> {
        let policy = &self.facts.policy;
        let class_of_pod = policy.class(demand.class);
        self.names_where(|gpu_occupant| {
            let class = policy.class(gpu_occupant.class);
            let agree =
                class.shares_with(&class_of_pod.name) && class_of_pod.shares_with(&class.name);
            !agree && gpu_occupant.phase != OccupantPhase::SoftlyReserved
        })
    }
}

/// The number of nodes, nearest to fitting first, that are searched for victims.
pub(crate) const MAX_NODES_SEARCHED_FOR_VICTIMS: usize = 64;

/// The number of nodes that are shown in detail, at least 1.
pub(crate) fn max_shown_nodes(options: &ShownNodes, nodes: usize) -> usize {
    match options {
        ShownNodes::Best(best) => (*best).min(nodes).max(1),
        ShownNodes::All | ShownNodes::Node(_) => nodes.max(1),
    }
}
