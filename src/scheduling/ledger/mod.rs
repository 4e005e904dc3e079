//! Who holds what: the one truth about promised VRAM.
//!
//! What is durable is read back from the API server (bound pods, holds); hints may be lost. The ledger knows no
//! clock: the caller sets the time first ([`Ledger::set_now`]). It takes one lock outside, held for single calls and
//! never across an await.
//!
//! A pod is charged from [`Ledger::assume`], before its Binding is written, to [`Ledger::release`]. What it is charged
//! on each GPU is what it asked for, or the whole GPU if it wants it to itself, or, if nobody knows on which GPUs it
//! runs, that much on every GPU of its node.
//!
//! By file:
//!
//! - state: [`node_state`], [`pod_state`], [`copy_on_write`] (a copy of the ledger costs next to nothing), [`waiting_queue`],
//!   [`eviction_rates`], [`owner_evictions`], [`demand_history`];
//! - in: [`observe`] (what watches and requests show), [`node_devices`], [`device_plugin`], [`unaccounted_vram`] (readings against
//!   grants), [`disruption_budgets`], [`pod_groups`], [`set_policy`];
//! - acts: [`assume`], [`reservations`], [`adopt_reservations`];
//! - out: [`query`], [`occupants`], [`waiting_pods`], [`reservation_status`], [`preemptor`], [`potential_victim`],
//!   [`tenant_usage`], [`eviction_allowance`], [`budget_index`].
//!
//! Here is how the state of a pod changes, and what follows for its node.

mod adopt_reservations;
mod assume;
mod budget_index;
mod copy_on_write;
mod demand_history;
mod device_plugin;
mod disruption_budgets;
pub mod eviction_allowance;
mod eviction_rates;
mod node_devices;
mod node_state;
mod observe;
mod occupants;
mod owner_evictions;
mod pod_groups;
mod pod_state;
mod potential_victim;
mod preemptor;
mod query;
mod reservation_status;
mod reservations;
mod set_policy;
mod tenant_usage;
mod unaccounted_vram;
mod waiting_pods;
mod waiting_queue;

pub use assume::{AssumeConflict, AssumeResult};
pub use node_devices::DevicesRefused;
pub use observe::{ObservedPhase, ObservedWaiting, PodObservation, PodWarning};
pub use occupants::{Occupant, OccupantPhase};
pub use pod_state::{
    AssumedPod, BoundPod, FailedAttempt, FilterRefusal, PodPhase, PodState, SchedulingGate, SoftReservation,
    WaitingPod,
};
pub use potential_victim::{PodEvictionCost, PotentialVictim, discharge, settle_class_exclusions};
pub use preemptor::{KeepReason, NearestModels, Preemptor};
pub use query::Totals;
pub use reservation_status::{RemainingVictim, ReservationStatus};
pub use set_policy::Classifications;
pub use tenant_usage::{QuotaStatus, TenantQuota, TenantShares};
pub use waiting_pods::{PendingPod, PodGroup, WaitKind};

pub(in crate::scheduling) use budget_index::BudgetIndex;
use eviction_allowance::ScopeKey;
pub(in crate::scheduling) use node_state::{NodeState, ResidentPod};
pub(in crate::scheduling) use potential_victim::given_back;
pub(in crate::scheduling) use preemptor::Departure;
pub(in crate::scheduling) use tenant_usage::TenantHold;

use super::placing::learned::{DemandHistory, PackingModel};
use super::placing::snapshot::Snapshot;
use super::policy::{ExpiredRule, Policy};
use super::vocabulary::disruption_budget::{BudgetVisibility, DisruptionBudget};
use super::vocabulary::disruption_info::GroupKey;
use super::vocabulary::node::Node;
use super::vocabulary::node_reading::Freshness;
use super::vocabulary::placement::Reservation;
use crate::ids::{LeaderEpoch, NodeName, PodUid};
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::units::Moment;
#[cfg(test)]
pub(crate) use copy_on_write::PODS_PER_RUN;
use copy_on_write::{NodeStates, PodStates};
use owner_evictions::OwnerEvictions;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use waiting_queue::WaitingQueue;

#[derive(Debug, Default, Clone)]
pub struct Ledger {
    policy: Arc<Policy>,
    /// The time that the caller has set.
    now: Moment,
    pod_states: PodStates,
    node_states: NodeStates,
    /// When hints, holds and start gates run out.
    deadlines: BTreeSet<(Moment, PodUid)>,
    /// Pods that were refused and have not asked again since.
    refused: BTreeSet<PodUid>,
    /// Who is due for a look of the planner.
    waiting_queue: WaitingQueue,
    /// When nodes' readings go stale or expire.
    aging: BTreeSet<(Moment, NodeName)>,
    generation: u64,
    /// The latest view handed out, and the nodes that changed since.
    published: Arc<Snapshot>,
    changed: BTreeSet<NodeName>,
    /// A node came or went since.
    nodes_changed: bool,
    /// How often that happened.
    epoch: u64,
    /// What each tenant uses, by its place in the policy.
    usage: Vec<TenantUsage>,
    /// Pods that belong together.
    groups: Arc<BTreeMap<GroupKey, BTreeSet<PodUid>>>,
    /// Who lost pods to eviction lately.
    evictions: Arc<OwnerEvictions>,
    /// Whom Stowage had evicted within the last minute.
    ordered: eviction_rates::RecentEvictions,
    /// Scopes of evictions that are kept for pods that need a whole minute's.
    reserved: BTreeMap<ScopeKey, eviction_rates::ScopeReservation>,
    /// In order of namespace and name.
    budgets: Arc<Vec<DisruptionBudget>>,
    budget_visibility: BudgetVisibility,
    /// Recent demand, from which the packing model is learned. Shared with copies of the ledger and with the learning thread.
    demand_history: Arc<DemandHistory>,
    packing_model: Arc<PackingModel>,
    /// As whom this replica leads, if it does.
    leader: Option<LeaderEpoch>,
    /// Pods that showed a hold which this leader did not make.
    unknown_reservations: BTreeSet<PodUid>,
}

impl Ledger {
    pub fn new(policy: Arc<Policy>) -> Self {
        let demand_history = Arc::new(DemandHistory::of_last(policy.packing.window));
        Self { policy, demand_history, ..Self::default() }
    }

    /// What it takes for the present.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// What time it is. The present never goes back.
    pub(in crate::scheduling) fn set_now(&mut self, now: Moment) {
        self.now = self.now.max(now);
        self.ordered.forget_until(self.now);
    }

    /// Rises with every change of what anyone could be promised.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The cluster as it stands. Cheap: most changes are in it already, and of the others only what changed is copied.
    pub fn snapshot(&mut self) -> Arc<Snapshot> {
        if self.nodes_changed {
            let nodes = self
                .node_states
                .values()
                .filter(|node_state| node_state.exists)
                .map(|node_state| node_state.view.clone())
                .collect();
            let snapshot = Snapshot::new(self.generation, self.epoch, nodes);
            self.published = Arc::new(snapshot.with_packing_model(self.packing_model.clone()));
        } else if self.published.generation() != self.generation || !self.changed.is_empty() {
            let changed = self
                .changed
                .iter()
                .map(|name| &self.node_states[name])
                .filter(|node_state| node_state.exists);
            Arc::make_mut(&mut self.published)
                .update(self.generation, changed.map(|node_state| node_state.view.clone()));
        }
        self.nodes_changed = false;
        self.changed.clear();
        self.published.clone()
    }

    /// A copy to plan on, made at once: it shares what neither side changes. The clocks and the queues stay behind, because
    /// nobody runs out of time and nobody is due on a copy; its view of the cluster it makes itself.
    pub fn scratch(&self) -> Self {
        Self {
            policy: self.policy.clone(),
            now: self.now,
            pod_states: self.pod_states.clone(),
            node_states: self.node_states.clone(),
            // Who holds room is found by them.
            deadlines: self.deadlines.clone(),
            refused: BTreeSet::new(),
            waiting_queue: WaitingQueue::default(),
            aging: BTreeSet::new(),
            generation: self.generation,
            published: Arc::default(),
            changed: BTreeSet::new(),
            nodes_changed: true,
            epoch: self.epoch,
            usage: self.usage.clone(),
            groups: self.groups.clone(),
            evictions: self.evictions.clone(),
            ordered: self.ordered.clone(),
            reserved: self.reserved.clone(),
            budgets: self.budgets.clone(),
            budget_visibility: self.budget_visibility,
            // Who comes on a copy is nobody's demand.
            demand_history: Arc::default(),
            packing_model: self.packing_model.clone(),
            leader: None,
            unknown_reservations: BTreeSet::new(),
        }
    }

    fn set_soft_reservation(&mut self, uid: &PodUid, soft_reservation: Option<SoftReservation>) {
        let Some(PodPhase::Waiting(waiting)) = self.pod_states.get(uid).map(|pod_state| &pod_state.phase)
        else {
            return;
        };
        if waiting.soft_reservation == soft_reservation {
            return;
        }
        self.change(uid, |pod_states| {
            if let Some(PodPhase::Waiting(waiting)) =
                pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
            {
                waiting.soft_reservation = soft_reservation;
            }
        });
    }

    fn set_reservation(&mut self, uid: &PodUid, reservation: Option<Reservation>) {
        self.change(uid, |pod_states| {
            if let Some(PodPhase::Waiting(waiting)) =
                pod_states.get_mut(uid).map(|pod_state| &mut pod_state.phase)
            {
                waiting.reservation = reservation;
            }
        });
    }

    fn drop_soft_reservations_on(&mut self, node: &NodeName) {
        let Some(node_state) = self.node_states.get(node) else { return };
        let softly_reserved = |uid: &&PodUid| {
            self.pod_states[*uid]
                .soft_reservation()
                .is_some_and(|soft_reservation| soft_reservation.node == *node)
        };
        let uids: Vec<PodUid> = node_state.pods.iter().filter(softly_reserved).cloned().collect();
        uids.iter().for_each(|uid| self.set_soft_reservation(uid, None));
    }

    /// Every change of an entry goes through here: the pages it stood on and the pages it stands on now are
    /// brought up to date, and so are its deadlines.
    fn change(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodStates)) {
        let before = self.pod_states.get(uid).map(footprint).unwrap_or_default();
        edit(&mut self.pod_states);
        let after = self.pod_states.get(uid).map(footprint).unwrap_or_default();
        for deadline in &before.deadlines {
            self.deadlines.remove(&(*deadline, uid.clone()));
        }
        self.deadlines.extend(after.deadlines.iter().map(|deadline| (*deadline, uid.clone())));
        for node in before.nodes.iter().filter(|node| !after.nodes.contains(*node)) {
            self.node_states.get_mut(node).expect("a page with a pod stays").pods.remove(uid);
        }
        for node in &after.nodes {
            self.node_states.open(node).pods.insert(uid.clone());
        }
        for node in before.nodes.union(&after.nodes) {
            self.refresh(node);
            self.forget_empty_node_state(node);
        }
        self.requeue(uid);
    }

    /// Brings a node's page to its entries and devices.
    fn refresh(&mut self, name: &NodeName) {
        if let Some(node_state) = self.node_states.get_mut(name) {
            let before = std::mem::take(&mut node_state.usage);
            node_state.recount(&self.pod_states, &self.policy);
            self.settle_usage(&before, name);
            self.refresh_view(name);
        }
    }

    /// Brings the view of a node to its page.
    fn refresh_view(&mut self, name: &NodeName) {
        let Some(node_state) = self.node_states.get_mut(name) else { return };
        let gpus = node_state.gpus(&self.policy);
        let unseen = matches!(node_state.freshness, Freshness::Unreported | Freshness::Expired);
        let replicas =
            if self.policy.weights.spread > 0 { node_state.replicas(&self.pod_states) } else { Vec::new() };
        let view = Node {
            name: name.clone(),
            kind: self.policy.kind_of(node_state.kind, node_state.admission),
            generation: node_state.view.generation,
            // What decisions read again and again is shared as long as it stays the same.
            gpus: if *node_state.view.gpus == *gpus { node_state.view.gpus.clone() } else { gpus.into() },
            devices: node_state.devices.clone(),
            plugin: if *node_state.view.plugin == *node_state.plugin {
                node_state.view.plugin.clone()
            } else {
                node_state.plugin.as_slice().into()
            },
            freshness: node_state.freshness,
            closed: unseen && self.policy.telemetry.expired == ExpiredRule::Refuse,
            miscut: node_state.is_miscut(&self.policy),
            classes: node_state.admission.classes,
            holdings: node_state.holdings(),
            replicas: if *node_state.view.replicas == *replicas {
                node_state.view.replicas.clone()
            } else {
                replicas.into()
            },
            free_host: node_state.free_host(&self.pod_states),
        };
        if view != node_state.view {
            self.generation += 1;
            node_state.view = Node { generation: self.generation, ..view };
            self.publish(name);
        }
    }

    /// Brings a changed view to the next reader: at once if nobody reads the snapshot now, so that no reader finds five
    /// thousand changes to wait for.
    fn publish(&mut self, name: &NodeName) {
        let view = &self.node_states[name].view;
        match Arc::get_mut(&mut self.published) {
            Some(published) if !self.nodes_changed && published.node(name.as_str()).is_some() => {
                published.update(self.generation, [view.clone()]);
            }
            _ => {
                self.changed.insert(name.clone());
            }
        }
    }

    fn forget_empty_node_state(&mut self, name: &NodeName) {
        if self
            .node_states
            .get(name)
            .is_some_and(|node_state| !node_state.exists && node_state.pods.is_empty())
        {
            self.node_states.remove(name);
            self.changed.remove(name);
        }
    }
}

/// Where an entry stands in the books.
#[derive(Default)]
struct PodFootprint {
    nodes: BTreeSet<NodeName>,
    deadlines: Vec<Moment>,
}

fn footprint(pod_state: &PodState) -> PodFootprint {
    let soft_reservation = pod_state.soft_reservation();
    let reservation = pod_state.reservation();
    let nodes = [
        pod_state.node(),
        soft_reservation.map(|soft_reservation| &soft_reservation.node),
        reservation.map(|reservation| &reservation.node),
    ];
    PodFootprint {
        nodes: nodes.into_iter().flatten().cloned().collect(),
        deadlines: [
            soft_reservation.map(|soft_reservation| soft_reservation.expires),
            reservation.map(|reservation| reservation.deadline),
            pod_state.starting,
        ]
        .into_iter()
        .flatten()
        .collect(),
    }
}

#[cfg(test)]
mod order_tests;
#[cfg(test)]
mod policy_tests;
#[cfg(test)]
mod tests;
