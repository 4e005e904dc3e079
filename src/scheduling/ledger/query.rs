//! Queries of the ledger. Nothing here changes it.
//!
//! Decisions read snapshots, which have numbers and no names. [`Occupant`] explains a node to people and decides nothing.

use super::Ledger;
use super::copy_on_write::NodeMap;
use super::disruption_budgets::BudgetIndex;
use super::node_state::{LoanStage, NodeState};
use super::overuse::Overuse;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::placing::fit::fit;
use crate::policy::{Policy, Pool};
use crate::units::{Bytes, Micros, Millis, Moment};
use crate::vocabulary::classification::ClassId;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::gpu::{ClassExclusion, Gpu, GpuSet};
use crate::vocabulary::latency::EngineLatency;
use crate::vocabulary::node::{Node, NodeKind};
use crate::vocabulary::node_reading::NodeReading;
use crate::vocabulary::smoothed_load::SmoothedLoad;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Sums over the cluster, for gauges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    pub waiting: u64,
    pub assumed: u64,
    pub bound: u64,
    pub unplaced: u64,
    pub reservations: u64,
    pub soft_reservations: u64,
    pub nodes: u64,
    /// Those of the nodes whose GPUs a DRA driver publishes.
    pub dra_nodes: u64,
    pub gpus: u64,
    /// Sleeping engines that new pods may wake.
    pub reusable_engines: u64,
    pub capacity: Bytes,
    pub charged: Bytes,
    /// What engines lend, used or not, and the pods that borrow.
    pub lent: Bytes,
    pub borrowing: u64,
}

/// The figures from which a node's advertised capacity follows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CapacityBasis {
    pub kind: NodeKind,
    /// VRAM of all its GPUs, healthy or not.
    pub gpus: Bytes,
    /// VRAM that its engines lend, used or not: the node advertises that much more than its GPUs have.
    pub lent: Bytes,
    /// What pods that are bound or assumed there ask for.
    pub requested: Bytes,
}

/// The nodes at one moment, to find later changes by. It is cheap to keep, because it holds nothing of the pods.
#[derive(Debug, Clone)]
pub struct NodesBaseline(NodeMap);

impl Ledger {
    /// The state of a pod that the ledger knows.
    pub(crate) fn expect_pod(&self, uid: &PodUid) -> &PodState {
        &self.pod_states[uid]
    }

    /// The state of a node that exists, or on which pods are.
    pub(crate) fn node_state(&self, name: &NodeName) -> Option<&NodeState> {
        self.node_states.get(name)
    }

    /// In order of name.
    pub(crate) fn all_node_states(&self) -> impl Iterator<Item = &NodeState> {
        self.node_states.iter().map(|(_, node_state)| node_state)
    }

    /// The GPUs of a node if this pod had nothing there.
    pub(crate) fn gpus_without(&self, node_state: &NodeState, uid: &PodUid) -> Vec<Gpu> {
        node_state.gpus_without(uid, &self.pod_states, &self.policy)
    }

    /// The class exclusions by all pods of a node but this one.
    pub(crate) fn class_exclusions_without(
        &self,
        node_state: &NodeState,
        uid: &PodUid,
    ) -> Vec<ClassExclusion> {
        node_state.class_exclusions(uid, &self.pod_states)
    }

    /// Which budgets cover which pods.
    pub(crate) fn budget_index(&self) -> BudgetIndex<'_> {
        BudgetIndex::new(self.budgets.all())
    }

    pub fn pod_state(&self, uid: &PodUid) -> Option<&PodState> {
        self.pod_states.get(uid)
    }

    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// All pods, in no order: for sums, and for what is put into an order afterwards.
    pub fn pods_in_no_order(&self) -> impl Iterator<Item = (&PodUid, &PodState)> {
        self.pod_states.in_no_order()
    }

    /// All pods, in order of UID.
    pub fn pod_states(&self) -> BTreeMap<&PodUid, &PodState> {
        self.pod_states.in_no_order().collect()
    }

    /// The pods that are bound or assumed on a node, in order of UID. Only pods of that node are read.
    pub fn pods_on_node(&self, node: &NodeName) -> impl Iterator<Item = (&PodUid, &PodState)> {
        let here = self
            .node_states
            .get(node)
            .into_iter()
            .flat_map(|node_state| node_state.pods());
        here.map(|uid| (uid, &self.pod_states[uid]))
            .filter(move |(_, pod_state)| pod_state.node() == Some(node))
    }

    /// Whether a Node object of this name exists.
    pub fn has_node(&self, name: &NodeName) -> bool {
        self.node_states.existing(name).is_some()
    }

    /// The nodes as they are now, for [`Self::nodes_changed_since`].
    pub fn nodes_baseline(&self) -> NodesBaseline {
        NodesBaseline(self.node_states.nodes().clone())
    }

    /// Nodes that have changed, or come, since then, in no order.
    pub fn nodes_changed_since<'a>(
        &'a self,
        baseline: &'a NodesBaseline,
    ) -> impl Iterator<Item = &'a NodeName> {
        self.node_states.nodes().changed_since(&baseline.0)
    }

    /// A node as decisions see it; also one that does not exist, as long as pods are there.
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        self.node_states.get(name).map(NodeState::view)
    }

    /// The latest that was measured on a node, if anything was.
    pub fn reading(&self, name: &NodeName) -> Option<&NodeReading> {
        self.node_states.get(name)?.reading()
    }

    /// How busy the engines on a GPU are, over its readings.
    pub(crate) fn smoothed_load(&self, name: &NodeName, gpu: &GpuUuid) -> Option<&SmoothedLoad> {
        let node_state = self.node_states.get(name)?;
        let index = node_state
            .devices()
            .iter()
            .position(|device| device.uuid == *gpu)?;
        node_state.smoothed_load(gpu, index)
    }

    /// Bound pods that are known to be on this GPU, in order of UID.
    pub(crate) fn pods_on_gpu(&self, node: &NodeName, gpu: &GpuUuid) -> Vec<PodUid> {
        let Some(node_state) = self.node_states.get(node) else {
            return Vec::new();
        };
        let Some(index) = node_state
            .devices()
            .iter()
            .position(|device| device.uuid == *gpu)
        else {
            return Vec::new();
        };
        let is_there = |uid: &&PodUid| {
            let pod_state = &self.pod_states[*uid];
            let charge = node_state
                .charge_of(pod_state)
                .filter(|charge| charge.is_placed && charge.gpus.contains(index));
            charge.is_some() && pod_state.bound().is_some()
        };
        node_state.pods().iter().filter(is_there).cloned().collect()
    }

    /// Whether the pod is being deleted.
    pub fn is_leaving(&self, uid: &PodUid) -> bool {
        self.pod_states.get(uid).is_some_and(PodState::is_leaving)
    }

    pub fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for (_, pod_state) in self.pod_states.in_no_order() {
            match &pod_state.phase {
                PodPhase::Waiting(_) => totals.waiting += 1,
                PodPhase::Assumed(_) => totals.assumed += 1,
                PodPhase::Bound(_) if self.is_placed(pod_state) => totals.bound += 1,
                PodPhase::Bound(_) => totals.unplaced += 1,
            }
            totals.reservations += u64::from(pod_state.reservation().is_some());
            totals.soft_reservations += u64::from(pod_state.soft_reservation().is_some());
            totals.borrowing += u64::from(pod_state.borrows());
        }
        for node_state in self.node_states.all_existing() {
            totals.nodes += 1;
            totals.gpus += node_state.devices().len() as u64;
            let is_dra = node_state.view().kind == NodeKind::Dra;
            totals.dra_nodes += u64::from(is_dra);
            totals.reusable_engines += node_state.view().reusable.iter().count() as u64;
            totals.capacity += if is_dra {
                Bytes::ZERO
            } else {
                node_state.view().capacity()
            };
            totals.charged += node_state.view().charged();
            totals.lent += node_state.lent();
        }
        totals
    }

    /// Whether it is known on which GPUs a pod is.
    fn is_placed(&self, pod_state: &PodState) -> bool {
        let charge = || {
            self.node_states
                .get(pod_state.node()?)?
                .charge_of(pod_state)
        };
        charge().is_some_and(|charge| charge.is_placed)
    }

    /// What remains of the VRAM that a node advertises, as kube-scheduler counts it: minus all requests, reservations included.
    pub(crate) fn remaining_capacity_on(&self, name: &NodeName) -> Bytes {
        let Some(node_state) = self.node_states.get(name) else {
            return Bytes::ZERO;
        };
        let here = node_state.pods().iter().map(|uid| &self.pod_states[uid]);
        let reserved = here
            .filter(|pod_state| {
                pod_state
                    .reservation()
                    .is_some_and(|reservation| reservation.node == *name)
            })
            .map(|pod_state| pod_state.demand.vram())
            .sum();
        (node_state.view().capacity() + node_state.lent())
            .minus(self.requested_on(name))
            .minus(reserved)
    }

    /// The figures for a node's advertised capacity, also of a node that does not exist as long as pods are there.
    pub fn capacity_basis(&self, name: &NodeName) -> Option<CapacityBasis> {
        let node_state = self.node_states.get(name)?;
        Some(CapacityBasis {
            kind: node_state.view().kind,
            gpus: node_state.view().capacity(),
            lent: node_state.lent(),
            requested: node_state.requested(),
        })
    }

    /// VRAM that pods that are bound or assumed on a node ask for, as the node's sum would show it.
    pub fn requested_on(&self, name: &NodeName) -> Bytes {
        self.node_states
            .get(name)
            .map_or(Bytes::ZERO, NodeState::requested)
    }

    pub(crate) fn node_views(&self) -> impl Iterator<Item = (&NodeName, &Node)> {
        self.node_states
            .iter()
            .map(|(name, node_state)| (name, node_state.view()))
    }
}

/// A pod with a placement, a reservation or a soft reservation on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupant {
    pub uid: PodUid,
    pub key: PodKey,
    pub class: ClassId,
    pub priority: i32,
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// GPUs by their indices in the node's list of devices.
    pub gpus: GpuSet,
    pub phase: OccupantPhase,
    /// While its engine starts, until when no other may start beside it.
    pub starting_until: Option<Moment>,
    /// It runs an engine, or will once it is bound.
    pub has_engine: bool,
    /// VRAM that its processes use beyond its grant, over all its GPUs.
    pub over_grant: Bytes,
    /// It may run an engine, and none can be read: that makes the load of its GPUs unknown.
    pub is_unread: bool,
    /// `None` if it has nothing to do with VRAM that is lent.
    pub loan: Option<LoanStage>,
    /// How long the requests of its engines take, as its agent last said; `None` if it does not.
    pub latency: Option<EngineLatency>,
    /// What a token is expected to take beside those that have work now.
    pub expected_time_per_token: Option<Micros>,
}

/// How an occupant occupies GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OccupantPhase {
    Bound,
    /// It is on the node, and it is unknown on which GPUs: it counts on each.
    Somewhere,
    /// Its Binding is on its way.
    Assumed,
    /// It has a reservation until its victims have left.
    Reserved,
    /// It has a soft reservation.
    SoftlyReserved,
}

impl Ledger {
    /// The pod of that name; of two that have had it, the one with the lower UID.
    pub fn uid_of(&self, key: &PodKey) -> Option<PodUid> {
        let named = self
            .pod_states
            .in_no_order()
            .filter(|(_, pod_state)| pod_state.key == *key);
        named.map(|(uid, _)| uid).min().cloned()
    }

    /// How long ago the latest reading of a node was sampled.
    pub(crate) fn reading_age(&self, node: &NodeName) -> Option<Millis> {
        Some(self.now.since(self.reading(node)?.sampled))
    }

    /// The pool that a node is in.
    pub(crate) fn pool_of(&self, node: &NodeName) -> Option<&Pool> {
        self.policy.pool(self.node_states.get(node)?.pool()?)
    }

    /// The node as the pod itself sees it: without its own charge, reservation or soft reservation.
    pub(crate) fn node_without(&self, uid: &PodUid, node: &NodeName) -> Option<Node> {
        let node_state = self.node_states.existing(node)?;
        let gpus = node_state.gpus_without(uid, &self.pod_states, &self.policy);
        let view = node_state.view();
        let reusable = node_state.reusable_engines(&self.pod_states, &self.policy, Some(uid));
        Some(Node {
            gpus: gpus.into(),
            reusable: view.reusable.reuse_or_replace(reusable),
            ..view.clone()
        })
    }

    /// All pods with anything on a node, in order of UID; one with a reservation and a soft reservation is there twice.
    pub(crate) fn occupants_of(&self, node: &NodeName) -> Vec<Occupant> {
        let Some(node_state) = self.node_states.get(node) else {
            return Vec::new();
        };
        let here = node_state
            .pods()
            .iter()
            .map(|uid| (uid, &self.pod_states[uid]));
        let presences = |pod_state: &PodState| {
            let charge = node_state.charge_of(pod_state).map(|charge| {
                match (&pod_state.phase, charge.is_placed) {
                    (PodPhase::Assumed(_), _) => (charge.gpus, OccupantPhase::Assumed),
                    (_, true) => (charge.gpus, OccupantPhase::Bound),
                    (_, false) => (charge.gpus, OccupantPhase::Somewhere),
                }
            });
            let reservation = pod_state
                .reservation()
                .filter(|reservation| reservation.node == *node);
            let reserved = reservation
                .and_then(|reservation| node_state.resolve(&reservation.devices))
                .map(|gpus| (gpus, OccupantPhase::Reserved));
            let soft_reservation = pod_state
                .soft_reservation()
                .filter(|soft_reservation| soft_reservation.node == *node);
            [
                charge,
                reserved,
                soft_reservation
                    .map(|soft_reservation| (soft_reservation.gpus, OccupantPhase::SoftlyReserved)),
            ]
            .into_iter()
            .flatten()
        };
        let unread = || {
            node_state
                .believed_reading()
                .into_iter()
                .flat_map(|reading| &reading.unread)
        };
        here.flat_map(|(uid, pod_state)| {
            let is_unread = unread().any(|unread| unread.pod == *uid);
            let over_grant = self
                .overuse_of(uid)
                .map(Overuse::excess)
                .unwrap_or_default();
            let loan = self.loan_stage(node_state, pod_state, uid);
            let reading = node_state.believed_reading();
            let latency = reading.and_then(|reading| reading.latency_of(uid)).cloned();
            let expected_time_per_token =
                self.expected_time_per_token(node_state, uid, &pod_state.demand);
            presences(pod_state).map(move |presence| Occupant {
                over_grant,
                is_unread,
                loan,
                latency: latency.clone(),
                expected_time_per_token,
                ..occupant(uid, pod_state, presence)
            })
        })
        .collect()
    }

    /// How many victims of the pod's reservation are still in its way.
    pub(crate) fn remaining_victims(&self, uid: &PodUid) -> u32 {
        let left = || {
            let reservation = self.pod_states.reservation(uid)?;
            Some(
                self.count_remaining_victims(reservation, self.node_states.get(&reservation.node)?),
            )
        };
        left().unwrap_or(0)
    }
}

fn occupant(
    uid: &PodUid,
    pod_state: &PodState,
    (gpus, phase): (GpuSet, OccupantPhase),
) -> Occupant {
    let demand = &pod_state.demand;
    Occupant {
        uid: uid.clone(),
        key: pod_state.key.clone(),
        class: demand.class,
        priority: demand.priority,
        per_gpu: demand.per_gpu,
        sharing: demand.sharing,
        gpus,
        phase,
        starting_until: pod_state.starting,
        has_engine: demand.terms.engine,
        over_grant: Bytes::ZERO,
        is_unread: false,
        loan: None,
        latency: None,
        expected_time_per_token: None,
    }
}

/// Labels by which controllers tell the pods of one template from those of the next.
const TEMPLATE_HASHES: [&str; 2] = ["pod-template-hash", "rollouts-pod-template-hash"];

/// In a ledger with more pods no predecessor is searched for, because the search reads each pod.
const MAX_PODS_FOR_PREDECESSORS: usize = 10_000;

/// The most predecessors that are tried.
const MAX_PREDECESSORS: usize = 8;

/// Whether a controller made the pod from a template: no other has a predecessor.
pub fn is_made_from_template(key: &PodKey, demand: &Demand) -> bool {
    workload_and_hash(key, demand).is_some()
}

impl Ledger {
    /// The pod of an earlier template that has what this pending pod needs, and its node: without it, the pod would fit there.
    pub fn blocking_predecessor(&self, uid: &PodUid) -> Option<(&PodKey, &NodeName)> {
        let pod = self
            .pod_states
            .get(uid)
            .filter(|pod| pod.waiting().is_some() && !pod.demand.is_allocated_externally())?;
        let (name, hash) = workload_and_hash(&pod.key, &pod.demand)?;
        if self
            .pod_states
            .in_no_order()
            .nth(MAX_PODS_FOR_PREDECESSORS)
            .is_some()
        {
            return None;
        }
        let is_predecessor = |other: &PodState| {
            other.key.namespace == pod.key.namespace
                && other.key.name.starts_with(name)
                && workload_and_hash(&other.key, &other.demand)
                    .is_some_and(|(other, of)| other == name && of != hash)
        };
        let bound = self
            .pod_states
            .in_no_order()
            .filter(|(_, other)| matches!(other.phase, PodPhase::Bound(_)));
        let mut predecessors: Vec<_> = bound.filter(|(_, other)| is_predecessor(other)).collect();
        predecessors.sort_by_key(|(uid, _)| *uid);
        let is_blocking = |(uid, other): &(&PodUid, &PodState)| {
            let without = other.node().and_then(|node| self.node_without(uid, node));
            without.is_some_and(|node| fit(&node, &pod.demand).is_ok())
        };
        predecessors
            .into_iter()
            .take(MAX_PREDECESSORS)
            .find(is_blocking)
            .and_then(|(_, other)| Some((&other.key, other.node()?)))
    }
}

/// The name that a pod's controller has under every template, and the hash of this one. A ReplicaSet names its pods
/// `WORKLOAD-HASH-RANDOM`.
fn workload_and_hash<'a>(key: &'a PodKey, demand: &'a Demand) -> Option<(&'a str, &'a str)> {
    let labels = &demand.traits.labels;
    let hash = TEMPLATE_HASHES
        .iter()
        .find_map(|key| labels.get(*key))
        .filter(|hash| !hash.is_empty())?;
    let (replica_set, _) = key.name.rsplit_once('-')?;
    let workload = replica_set.strip_suffix(hash.as_str())?.strip_suffix('-')?;
    (!workload.is_empty()).then_some((workload, hash))
}

#[cfg(test)]
mod rollout_tests {
    use crate::ledger::ObservedPhase;
    use crate::policy::Policy;
    use crate::testkit::{LedgerCluster, demand_of, gpu, gpu_pair, node, reclassified, uid};
    use crate::units::Bytes;
    use crate::vocabulary::classification::PodTraits;
    use crate::vocabulary::demand::{Demand, Sharing};

    fn demand(gib: u64, label: &str, hash: &str) -> Demand {
        let labels = [(label.to_owned(), hash.to_owned())].into();
        let traits = PodTraits {
            labels,
            ..PodTraits::default()
        };
        reclassified(
            demand_of(gib << 30, 1, Sharing::Shared, 0),
            traits,
            &Policy::default(),
        )
    }

    /// Two GPUs of 72 GiB: one has 60 GiB of a pod with this name and hash, the other 70 GiB of some pod.
    fn predecessor(old: (&str, &str), new: (&str, &str, &str), gib: u64) -> Option<String> {
        let mut ledger =
            LedgerCluster::empty(Policy::default()).with_node("n", gpu_pair(Bytes::gib(80)));
        for (name, demand, device) in [
            (old.0, demand(60, "pod-template-hash", old.1), "GPU-0"),
            (
                "some-6f7-abcde",
                demand(70, "pod-template-hash", "6f7"),
                "GPU-1",
            ),
        ] {
            let devices = Some([gpu(device)].into());
            let state = ObservedPhase::Bound {
                node: node("n"),
                devices,
                starting: false,
                ran: None,
            };
            ledger.observe(name, demand, state, None);
        }
        ledger.add_waiting(new.0, demand(gib, new.1, new.2));
        ledger
            .ledger()
            .blocking_predecessor(&uid(new.0))
            .map(|(pod, _)| pod.name.to_string())
    }

    #[test]
    fn a_new_pod_of_a_deployment_waits_for_its_own_predecessor() {
        let old = ("llama-6f7-abcde", "6f7");
        let hash = "pod-template-hash";
        assert_eq!(
            predecessor(old, ("llama-99c-fghij", hash, "99c"), 60).as_deref(),
            Some("llama-6f7-abcde")
        );
        assert_eq!(
            predecessor(("a-b-1-x", "1"), ("a-b-2-y", hash, "2"), 72).as_deref(),
            Some("a-b-1-x")
        );
        assert_eq!(
            predecessor(
                old,
                ("llama-99c-fghij", "rollouts-pod-template-hash", "99c"),
                60
            )
            .as_deref(),
            Some("llama-6f7-abcde")
        );
    }

    #[test]
    fn other_pods_are_no_predecessors() {
        let (old, hash) = (("llama-6f7-abcde", "6f7"), "pod-template-hash");
        for (new, gib) in [
            // Of the same template, of another workload, without a hash, with a name that no ReplicaSet gives.
            (("llama-6f7-fghij", hash, "6f7"), 60),
            (("llama-2-99c-fghij", hash, "99c"), 60),
            (("llam-99c-fghij", hash, "99c"), 60),
            (("llama-99c-fghij", "other", "99c"), 60),
            (("llama", hash, "99c"), 60),
            // It would not fit without it either.
            (("llama-99c-fghij", hash, "99c"), 73),
        ] {
            assert_eq!(predecessor(old, new, gib), None, "{new:?} {gib}");
        }
    }
}
