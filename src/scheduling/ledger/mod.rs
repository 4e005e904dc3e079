//! Who holds what: the one truth about promised VRAM.
//!
//! What is durable is read back from the API server (bound pods, holds); hints may be lost. The ledger knows no
//! clock: whoever takes it says what time it is ([`Ledger::set_now`]). It takes one lock outside, held for single calls and
//! never across an await.
//!
//! A pod is charged from [`Ledger::assume`], before its Binding is written, to [`Ledger::release`]. What it is charged
//! on each GPU is what it asked for, or the whole GPU if it wants it to itself, or, if nobody knows on which GPUs it
//! runs, that much on every GPU of its node.
//!
//! [`plugin`] is about pods and nodes of which the kubelet picks the GPUs, [`reload`] changes the policy under it, [`tenancy`] says whose share is whose,
//! [`sight`] takes in what is seen, [`devices`] what a node has, [`measured`] holds it against what was promised, [`promise`] makes and settles promises,
//! [`budgets`] keeps what may be disrupted, [`query`] answers, [`claim`] and [`room`] say who could leave for whom,
//! [`cleared`] what a node is without all who could, [`loss`] what it costs and [`cost_bounds`] at least how much on each node, [`coverage`] which budgets it concerns, [`groups`] who belongs together, [`evictions`] who was evicted lately and
//! [`rates`] how many, [`queue`] knows who waits for a place and [`turns`] whose turn it is, [`held`] how far each hold is, [`demanded`] what was asked for lately,
//! [`shared`] keeps it all so that a copy costs next to nothing; here is how an entry changes.

mod adopt;
mod book;
mod budgets;
mod claim;
mod cleared;
mod cost_bounds;
mod coverage;
mod demanded;
mod devices;
mod entry;
mod evictions;
mod groups;
mod held;
mod holding;
mod loss;
mod measured;
mod occupants;
mod plugin;
mod promise;
mod query;
mod queue;
mod rates;
mod reload;
mod room;
mod shared;
mod sight;
mod tenancy;
mod turns;

pub use claim::{KeepReason, NearestModels, Preemptor};
pub use cleared::WithoutEvictable;
pub use devices::DevicesRefused;
pub use entry::{
    AssumedPod, BoundPod, FailedAttempt, FilterRefusal, PodPhase, PodState, SchedulingGate, SoftReservation,
    WaitingPod,
};
pub use held::{RemainingVictim, ReservationStatus};
pub use occupants::{Occupant, OccupantPhase};
pub use promise::{AssumeConflict, AssumeResult};
pub use query::Totals;
pub use queue::{PendingPod, PodGroup, WaitKind};
pub use reload::Classifications;
pub use room::CandidateSurvey;
pub use sight::{ObservedPhase, ObservedWaiting, PodObservation, PodWarning};
pub use tenancy::TenantShares;
pub(super) use tenancy::is_allowed;

use super::budget::{BudgetVisibility, DisruptionBudget};
use super::decision::Reservation;
use super::node::Node;
use super::policy::{ExpiredRule, Policy, TenantUsage};
use super::preempt::ScopeKey;
use super::reading::Freshness;
use super::snapshot::Snapshot;
use super::stake::GroupKey;
use super::worth::{DemandHistory, PackingModel};
use crate::ids::{LeaderEpoch, NodeName, PodUid};
use crate::units::Moment;
pub(super) use book::used_on;
use evictions::OwnerEvictions;
#[cfg(test)]
pub(crate) use shared::PODS_PER_RUN;
use shared::{NodeStates, PodStates};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use turns::WaitingQueue;

#[derive(Debug, Default, Clone)]
pub struct Ledger {
    policy: Arc<Policy>,
    /// What whoever holds the lock takes for the present.
    now: Moment,
    entries: PodStates,
    books: NodeStates,
    /// When hints, holds and start gates run out.
    deadlines: BTreeSet<(Moment, PodUid)>,
    /// Pods that were refused and have not asked again since.
    refused: BTreeSet<PodUid>,
    /// Who is due for a look of the planner.
    turns: WaitingQueue,
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
    ordered: rates::RecentEvictions,
    /// Scopes of evictions that are kept for pods that need a whole minute's.
    reserved: BTreeMap<ScopeKey, rates::ScopeReservation>,
    /// In order of namespace and name.
    budgets: Arc<Vec<DisruptionBudget>>,
    budget_visibility: BudgetVisibility,
    /// What was asked for lately, and what free VRAM is worth by that. Shared with copies of the ledger and with whoever learns.
    mix: Arc<DemandHistory>,
    worth: Arc<PackingModel>,
    /// As whom this replica leads, if it does.
    leader: Option<LeaderEpoch>,
    /// Pods that showed a hold which this leader did not make.
    unknown_reservations: BTreeSet<PodUid>,
}

impl Ledger {
    pub fn new(policy: Arc<Policy>) -> Self {
        let mix = Arc::new(DemandHistory::of_last(policy.packing.window));
        Self { policy, mix, ..Self::default() }
    }

    /// What it takes for the present.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// What time it is. The present never goes back.
    pub fn set_now(&mut self, now: Moment) {
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
            let nodes =
                self.books.values().filter(|book| book.exists).map(|book| book.view.clone()).collect();
            let snapshot = Snapshot::new(self.generation, self.epoch, nodes);
            self.published = Arc::new(snapshot.with_packing_model(self.worth.clone()));
        } else if self.published.generation() != self.generation || !self.changed.is_empty() {
            let changed = self.changed.iter().map(|name| &self.books[name]).filter(|book| book.exists);
            Arc::make_mut(&mut self.published).update(self.generation, changed.map(|book| book.view.clone()));
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
            entries: self.entries.clone(),
            books: self.books.clone(),
            // Who holds room is found by them.
            deadlines: self.deadlines.clone(),
            refused: BTreeSet::new(),
            turns: WaitingQueue::default(),
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
            mix: Arc::default(),
            worth: self.worth.clone(),
            leader: None,
            unknown_reservations: BTreeSet::new(),
        }
    }

    fn set_soft_reservation(&mut self, uid: &PodUid, hint: Option<SoftReservation>) {
        let Some(PodPhase::Waiting(waiting)) = self.entries.get(uid).map(|entry| &entry.phase) else {
            return;
        };
        if waiting.hint == hint {
            return;
        }
        self.change(uid, |entries| {
            if let Some(PodPhase::Waiting(waiting)) = entries.get_mut(uid).map(|entry| &mut entry.phase) {
                waiting.hint = hint;
            }
        });
    }

    fn set_reservation(&mut self, uid: &PodUid, hold: Option<Reservation>) {
        self.change(uid, |entries| {
            if let Some(PodPhase::Waiting(waiting)) = entries.get_mut(uid).map(|entry| &mut entry.phase) {
                waiting.hold = hold;
            }
        });
    }

    fn drop_soft_reservations_on(&mut self, node: &NodeName) {
        let Some(book) = self.books.get(node) else { return };
        let hinted = |uid: &&PodUid| self.entries[*uid].hint().is_some_and(|hint| hint.node == *node);
        let uids: Vec<PodUid> = book.pods.iter().filter(hinted).cloned().collect();
        uids.iter().for_each(|uid| self.set_soft_reservation(uid, None));
    }

    /// Every change of an entry goes through here: the pages it stood on and the pages it stands on now are
    /// brought up to date, and so are its deadlines.
    fn change(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodStates)) {
        let before = self.entries.get(uid).map(footprint).unwrap_or_default();
        edit(&mut self.entries);
        let after = self.entries.get(uid).map(footprint).unwrap_or_default();
        for deadline in &before.deadlines {
            self.deadlines.remove(&(*deadline, uid.clone()));
        }
        self.deadlines.extend(after.deadlines.iter().map(|deadline| (*deadline, uid.clone())));
        for node in before.nodes.iter().filter(|node| !after.nodes.contains(*node)) {
            self.books.get_mut(node).expect("a page with a pod stays").pods.remove(uid);
        }
        for node in &after.nodes {
            self.books.open(node).pods.insert(uid.clone());
        }
        for node in before.nodes.union(&after.nodes) {
            self.refresh(node);
            self.forget_empty_node_state(node);
        }
        self.requeue(uid);
    }

    /// Brings a node's page to its entries and devices.
    fn refresh(&mut self, name: &NodeName) {
        if let Some(book) = self.books.get_mut(name) {
            let before = std::mem::take(&mut book.usage);
            book.recount(&self.entries, &self.policy);
            self.settle_usage(&before, name);
            self.refresh_view(name);
        }
    }

    /// Brings the view of a node to its page.
    fn refresh_view(&mut self, name: &NodeName) {
        let Some(book) = self.books.get_mut(name) else { return };
        let gpus = book.gpus(&self.policy);
        let unseen = matches!(book.freshness, Freshness::Unreported | Freshness::Expired);
        let replicas = if self.policy.weights.spread > 0 { book.replicas(&self.entries) } else { Vec::new() };
        let view = Node {
            name: name.clone(),
            kind: self.policy.kind_of(book.kind, book.admission),
            generation: book.view.generation,
            // What decisions read again and again is shared as long as it stays the same.
            gpus: if *book.view.gpus == *gpus { book.view.gpus.clone() } else { gpus.into() },
            devices: book.devices.clone(),
            plugin: if *book.view.plugin == *book.plugin {
                book.view.plugin.clone()
            } else {
                book.plugin.as_slice().into()
            },
            freshness: book.freshness,
            closed: unseen && self.policy.telemetry.expired == ExpiredRule::Refuse,
            miscut: book.is_miscut(&self.policy),
            classes: book.admission.classes,
            holdings: book.holdings(),
            replicas: if *book.view.replicas == *replicas {
                book.view.replicas.clone()
            } else {
                replicas.into()
            },
            spare: book.spare(&self.entries),
        };
        if view != book.view {
            self.generation += 1;
            book.view = Node { generation: self.generation, ..view };
            self.publish(name);
        }
    }

    /// Brings a changed view to the next reader: at once if nobody reads the snapshot now, so that no reader finds five
    /// thousand changes to wait for.
    fn publish(&mut self, name: &NodeName) {
        let view = &self.books[name].view;
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
        if self.books.get(name).is_some_and(|book| !book.exists && book.pods.is_empty()) {
            self.books.remove(name);
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

fn footprint(entry: &PodState) -> PodFootprint {
    let hint = entry.hint();
    let hold = entry.hold();
    let nodes = [entry.node(), hint.map(|hint| &hint.node), hold.map(|hold| &hold.node)];
    PodFootprint {
        nodes: nodes.into_iter().flatten().cloned().collect(),
        deadlines: [hint.map(|hint| hint.expires), hold.map(|hold| hold.deadline), entry.starting]
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
mod room_tests;
#[cfg(test)]
mod tests;
