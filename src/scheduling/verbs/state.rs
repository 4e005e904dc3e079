//! The whole state of a cluster as one value, to be stored and loaded again.

use super::Cluster;
use super::open_bindings::OpenBindings;
use crate::scheduling::kube_filters::{ClusterFilters, ClusterFiltersState};
use crate::scheduling::ledger::{Ledger, LedgerState, LoadError};
use crate::scheduling::policy::Policy;
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

impl Cluster {
    pub fn export(&self) -> ClusterState {
        ClusterState {
            policy: self.ledger.policy().clone(),
            ledger: self.ledger.export(),
            kube_filters: self.kube_filters.export(),
            bindings: self.bindings.clone(),
        }
    }

    /// The cluster that was exported: it answers everything as that one does.
    pub fn load(state: ClusterState) -> Result<Self, LoadError> {
        let ClusterState { policy, ledger, kube_filters, bindings } = state;
        Ok(Self {
            ledger: Ledger::load(policy, ledger)?,
            kube_filters: ClusterFilters::load(kube_filters),
            bindings,
        })
    }
}
