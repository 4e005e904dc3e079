//! The whole state of a cluster as one value, to be stored and loaded again.

use super::Cluster;
use super::open_bindings::OpenBindings;
use crate::kube_filters::{ClusterFilters, ClusterFiltersState, FilterSnapshot};
use crate::ledger::{Ledger, LedgerState, LoadError};
use crate::placing::snapshot::Snapshot;
use crate::policy::Policy;
use crate::units::Moment;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Everything that a cluster was told, and everything it has decided.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClusterState {
    policy: Arc<Policy>,
    ledger: LedgerState,
    kube_filters: ClusterFiltersState,
    bindings: OpenBindings,
}

/// A copy of a cluster, to be exported or explained outside its lock. It is made at once: it shares what neither side changes.
#[derive(Debug, Clone)]
pub struct ClusterCopy {
    ledger: Ledger,
    kube_filters: FilterSnapshot,
    bindings: OpenBindings,
}

impl Cluster {
    pub fn export(&self) -> ClusterState {
        self.copy().export()
    }

    pub fn copy(&self) -> ClusterCopy {
        ClusterCopy {
            ledger: self.ledger.read_copy(),
            kube_filters: self.kube_filters.snapshot(),
            bindings: self.bindings.clone(),
        }
    }

    /// The cluster that was exported: it answers everything as that one does.
    pub fn load(state: ClusterState) -> Result<Self, LoadError> {
        let ClusterState {
            policy,
            ledger,
            kube_filters,
            bindings,
        } = state;
        Ok(Self {
            ledger: Ledger::load(policy, ledger)?,
            kube_filters: ClusterFilters::from_state(kube_filters),
            bindings,
        })
    }
}

impl ClusterCopy {
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(crate) fn snapshot(&mut self) -> Arc<Snapshot> {
        self.ledger.snapshot()
    }

    pub(crate) fn kube_filters(&self) -> &FilterSnapshot {
        &self.kube_filters
    }

    pub fn export(&self) -> ClusterState {
        ClusterState {
            policy: self.ledger.policy().clone(),
            ledger: self.ledger.export(),
            kube_filters: self.kube_filters.export(),
            bindings: self.bindings.clone(),
        }
    }
}

impl ClusterState {
    /// The present when it was exported.
    pub fn now(&self) -> Moment {
        self.ledger.now()
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The state under a policy that says the same by other names.
    pub fn with_policy(self, policy: Policy) -> Self {
        Self {
            policy: Arc::new(policy),
            ..self
        }
    }
}
