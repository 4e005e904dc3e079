//! One pod in the books, and the state it is in.
//!
//! ```text
//!            assume                  confirm
//!  Waiting ─────────► Assumed ─────────────────► Bound ───► (released)
//!     ▲                  │                         ▲
//!     └──────────────────┘                         │ seen bound by someone else
//!            forget                             Waiting
//! ```

use crate::ids::{GpuUuid, NodeName, PodKey};
use crate::scheduling::decision::{Hold, Placement};
use crate::scheduling::device::GpuSet;
use crate::scheduling::request::Demand;
use crate::units::Moment;
use serde::Serialize;
use std::sync::Arc;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodEntry {
    pub key: PodKey,
    pub demand: Demand,
    pub phase: Phase,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    Waiting(Waiting),
    /// Promised, and the Binding is on its way.
    Assumed(Assumed),
    Bound(Bound),
}

/// What is remembered of a pod that has no node yet. All but the hold may be lost.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// Filters that passed without a bind after them.
    pub tries: u32,
    /// The node that was ranked first in the latest of them.
    pub offered: Option<NodeName>,
    pub hint: Option<Hint>,
    pub hold: Option<Hold>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Assumed {
    pub placement: Placement,
    /// What it goes back to if the Binding fails.
    pub before: Waiting,
}

/// GPUs that were just offered to a pod, so that the next pod looks elsewhere first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Hint {
    pub node: NodeName,
    pub gpus: GpuSet,
    pub expires: Moment,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bound {
    pub node: NodeName,
    /// What its Binding recorded; `None` if someone else bound it.
    pub devices: Option<Arc<[GpuUuid]>>,
}

impl PodEntry {
    /// Where it is or is about to be.
    pub fn node(&self) -> Option<&NodeName> {
        match &self.phase {
            Phase::Waiting(_) => None,
            Phase::Assumed(assumed) => Some(&assumed.placement.node),
            Phase::Bound(bound) => Some(&bound.node),
        }
    }

    pub fn is_assumed(&self) -> bool {
        matches!(self.phase, Phase::Assumed(_))
    }

    pub fn hold(&self) -> Option<&Hold> {
        match &self.phase {
            Phase::Waiting(waiting) => waiting.hold.as_ref(),
            _ => None,
        }
    }

    pub fn hint(&self) -> Option<&Hint> {
        match &self.phase {
            Phase::Waiting(waiting) => waiting.hint.as_ref(),
            _ => None,
        }
    }

    /// The devices its placement names, if it has one that names any.
    pub fn devices(&self) -> Option<&Arc<[GpuUuid]>> {
        match &self.phase {
            Phase::Waiting(_) => None,
            Phase::Assumed(assumed) => Some(&assumed.placement.devices),
            Phase::Bound(bound) => bound.devices.as_ref(),
        }
    }
}
