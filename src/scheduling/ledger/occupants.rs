//! What the ledger tells a person that asks why: the pods on a node, the age of its figures, the node without one pod.
//!
//! Decisions read snapshots, which have numbers and no names; nothing that decides should come here.

use super::Ledger;
use super::node_state::LoanStage;
use super::overuse::Overuse;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::policy::Pool;
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::classification::ClassId;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::node::Node;
use serde::{Deserialize, Serialize};

/// A pod with a placement, a reservation or a soft reservation on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occupant {
    pub uid: PodUid,
    pub key: PodKey,
    pub class: ClassId,
    pub priority: i32,
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// By their places in the node's list.
    pub gpus: GpuSet,
    pub presence: OccupantPhase,
    /// While its engine starts, until when no other may start beside it.
    pub starting: Option<Moment>,
    /// It has an engine that starts, or that will when it comes.
    pub engine: bool,
    /// VRAM that its processes use beyond its grant, over all its GPUs.
    pub over_grant: Bytes,
    /// It may run an engine, and none can be read: that makes the load of its GPUs unknown.
    pub is_unread: bool,
    /// `None` if it has nothing to do with VRAM that is lent.
    pub loan: Option<LoanStage>,
}

/// How an occupant is there.
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
            reusable: view.reusable.kept_or_new(reusable),
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
        let gpu_candidates = |pod_state: &PodState| {
            let charge = node_state.charge_of(pod_state).map(|charge| {
                match (&pod_state.phase, charge.placed) {
                    (PodPhase::Assumed(_), _) => (charge.gpus, OccupantPhase::Assumed),
                    (_, true) => (charge.gpus, OccupantPhase::Bound),
                    (_, false) => (charge.gpus, OccupantPhase::Somewhere),
                }
            });
            let reservation = pod_state
                .reservation()
                .filter(|reservation| reservation.node == *node);
            let held = reservation
                .and_then(|reservation| node_state.resolve(&reservation.devices))
                .map(|gpus| (gpus, OccupantPhase::Reserved));
            let soft_reservation = pod_state
                .soft_reservation()
                .filter(|soft_reservation| soft_reservation.node == *node);
            [
                charge,
                held,
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
            gpu_candidates(pod_state).map(move |gpu_candidate| Occupant {
                over_grant,
                is_unread,
                loan,
                ..occupant(uid, pod_state, gpu_candidate)
            })
        })
        .collect()
    }

    /// How many victims of the pod's reservation are still in its way.
    pub(crate) fn victims_left(&self, uid: &PodUid) -> u32 {
        let left = || {
            let reservation = self.pod_states.reservation(uid)?;
            Some(self.victims_on(reservation, self.node_states.get(&reservation.node)?))
        };
        left().unwrap_or(0)
    }
}

fn occupant(
    uid: &PodUid,
    pod_state: &PodState,
    (gpus, presence): (GpuSet, OccupantPhase),
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
        presence,
        starting: pod_state.starting,
        engine: demand.terms.engine,
        over_grant: Bytes::ZERO,
        is_unread: false,
        loan: None,
    }
}
