//! The entry point of the core. Everything from kube-scheduler, the watches, the agents and the planner enters as an [`Input`],
//! and a decision leaves as a value.
//!
//! A [`Cluster`] is everything that decisions are made on: the ledger and the view of kube-scheduler's filters. It changes in one
//! way, [`Cluster::apply`], and each change is a value of its own ([`Input`]). The order of the inputs and the snapshot that a
//! decision was made on determine everything; a recorder or a replayer can stand here.
//!
//! A verb is two steps. `apply(…Asked)` takes the view that the decision is made on, under the lock; the decision itself
//! ([`filter`], [`prioritize`], [`preempt`]) is a pure function of that view and runs outside the lock; `apply(…Decided)` records
//! it, and checks again what may have changed in between. `bind` decides under the lock, because it allocates.
//!
//! - [`observe`], [`namespaces`]: what the watches and the agents show. [`tick`]: time, leadership, the
//!   policy and the packing model.
//! - [`request`]: the pod of a request, and the one constructor of a scheduling attempt.
//! - [`filter`], [`prioritize`], [`preempt`], [`preempt_device_plugin`], [`bind`]: kube-scheduler's four verbs; [`shadow`]: what
//!   shadow mode reports of them; [`binding`] and [`open_bindings`]: what follows from the write of a Binding.
//! - [`attempt`]: one scheduling attempt with nothing in between, for replays and simulators.
//! - [`state`]: the whole state as one value. [`input`]: every change as one value.
//! - [`wait`]: pending pods, their reservations and the evictions for them, as the planner works them off.

mod attempt;
pub mod bind;
pub mod binding;
pub mod filter;
mod input;
pub mod namespaces;
pub mod observe;
mod open_bindings;
pub mod preempt;
pub mod preempt_device_plugin;
pub mod prioritize;
pub mod request;
pub mod shadow;
mod state;
pub mod tick;
pub mod wait;

pub use input::Input;
pub use state::{ClusterCopy, ClusterState};

use super::kube_filters::ClusterFilters;
use super::ledger::Ledger;
use super::placing::snapshot::Snapshot;
use super::policy::Policy;
use open_bindings::OpenBindings;
use std::sync::Arc;

/// All state that decisions are made on. It is read through its ledger; every change is an input.
#[derive(Debug, Default)]
pub struct Cluster {
    ledger: Ledger,
    kube_filters: ClusterFilters,
    bindings: OpenBindings,
}

/// One kind of change of a [`Cluster`].
pub trait Change {
    /// What follows from it for the caller.
    type Output;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output;
}

impl Cluster {
    pub fn new(policy: Arc<Policy>) -> Self {
        Self {
            ledger: Ledger::new(policy),
            ..Self::default()
        }
    }

    /// An empty cluster under the same policy, of which no namespace is known, with the Bindings that may still land.
    pub fn emptied(&self) -> Self {
        let policy = Policy::clone(self.ledger.policy()).with_namespace_labels(&Default::default());
        let ledger = self.ledger.emptied(Arc::new(policy));
        Self {
            ledger,
            bindings: self.bindings.clone(),
            ..Self::default()
        }
    }

    /// Who holds what, to read.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The only way in which a cluster changes.
    pub fn apply<C: Change>(&mut self, change: C) -> C::Output {
        change.apply_to(self)
    }

    /// The cluster as it stands, to decide on outside the lock. It changes nothing that a decision depends on.
    pub fn snapshot(&mut self) -> Arc<Snapshot> {
        self.ledger.snapshot()
    }

    /// Pods with a Binding whose result is unknown.
    pub fn unsettled_bindings(&self) -> usize {
        self.bindings.unsettled_count()
    }

    /// The cluster as kube-scheduler's default filters see it.
    pub fn kube_filters(&self) -> &ClusterFilters {
        &self.kube_filters
    }
}

/// Tests of the core bring a ledger into any state, without the inputs that lead there.
#[cfg(any(test, feature = "testkit"))]
impl Cluster {
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }
}

#[cfg(test)]
mod proptests;
