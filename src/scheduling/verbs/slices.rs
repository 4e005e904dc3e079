//! ResourceSlices of DRA drivers, as inputs.

use super::{Change, Cluster};
use crate::ledger::{DeviceSlice, NewlyPublished};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A slice as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceObserved {
    pub name: Arc<str>,
    pub slice: DeviceSlice,
}

/// The slice of that name is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceDeleted(pub Arc<str>);

impl Change for SliceObserved {
    type Output = NewlyPublished;

    fn apply_to(self, cluster: &mut Cluster) -> NewlyPublished {
        cluster.ledger.set_slice(&self.name, Some(self.slice))
    }
}

impl Change for SliceDeleted {
    /// An older generation of its pool may count again.
    type Output = NewlyPublished;

    fn apply_to(self, cluster: &mut Cluster) -> NewlyPublished {
        cluster.ledger.set_slice(&self.0, None)
    }
}
