//! Finds places for pods that wait, one after the other, on a scratch ledger: what is free now, or who has to leave.
//!
//! The order is the queue's, and each pod is placed beside those before it: of ten that wait for one GPU, one gets it. The
//! steps are data; nothing is in force before the ledger itself has taken the hold of each, checking it again.
//!
//! [`ranking`] keeps the nodes in order for pods of one kind, [`scratch`] is the state between one pod and the next, [`evict`]
//! finds who has to leave, [`consolidate`] who moves, [`group`] places pods that are of use only together; [`relief`] finds who leaves an engine under
//! pressure.

mod consolidate;
mod evict;
mod group;
mod ranking;
mod relief;
mod scratch;

#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

pub use relief::{PressureWatch, Relief};

use super::decision::Hold;
use super::fit::Misfit;
use super::ledger::{Conflict, Ledger, Pending};
use super::preempt::Price;
use super::snapshot::Snapshot;
use super::stock::{StockSnapshot, Unjudged};
use crate::ids::{PodKey, PodUid};
use crate::units::Bytes;
use serde::Serialize;

/// What is to be done about one pod of the queue, or about a group of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Room for one pod, or for all of a group: all of it is held, or none.
    Place(Vec<Place>),
    /// A device plugin has what the pod asks for; the scheduler must find it itself.
    Wake { uid: PodUid, key: PodKey },
    /// There is no place for it now.
    Wait { uid: PodUid, key: PodKey, why: Why },
}

/// Room for one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub uid: PodUid,
    pub key: PodKey,
    /// Its victims are those whose leaving the pod waits for, whether they are evicted for it or leave anyway.
    pub hold: Hold,
    pub price: Price,
    /// False if the search for victims ended early: cheaper ones may exist.
    pub exact: bool,
    pub by: Means,
}

/// By what right others leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// The pod's own: its priority, and its tenant's share.
    Preemption,
    /// The policy's: they have room elsewhere.
    Moves,
}

/// Why there is no place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "code")]
pub enum Why {
    #[error("what the pod asks of its node cannot be judged by Stowage: {0}")]
    CannotJudge(Unjudged),
    #[error("the pod asks a device plugin for its GPUs, and the kubelet picks them")]
    ByPlugin,
    #[error("in shadow mode Stowage places nobody")]
    Shadowing,
    #[error("the pod asks for no GPU, and the planner places nobody else")]
    AsksForNoGpu,
    #[error("what the pod asks for cannot be understood; the answer to its filter request says why")]
    NotUnderstood,
    #[error("no node is one that the pod could go to, whatever is free there")]
    NoNode,
    #[error("of {nodes} node(s) that the pod could go to, none has room; on one of them {nearest}")]
    NoRoom { nodes: u32, nearest: Misfit },
    #[error("the pod wants {vram}, and its tenant has reached its limit")]
    BeyondLimit { vram: Bytes },
    #[error("{here} of the group's {wanted} pods are there")]
    GroupIncomplete { here: u32, wanted: u32 },
    #[error("for {placed} of the group's {wanted} pods there is room, and a group is placed whole")]
    GroupTooLarge { placed: u32, wanted: u32 },
}

impl Place {
    /// Takes the hold in a ledger, which checks it again.
    pub fn take(&self, ledger: &mut Ledger) -> Result<(), Conflict> {
        match self.by {
            Means::Preemption => ledger.hold(&self.uid, self.hold.clone()),
            Means::Moves => ledger.hold_by_moving(&self.uid, self.hold.clone()),
        }
    }
}

/// What a look at a node goes by.
struct Seeing<'a> {
    ledger: &'a Ledger,
    snapshot: &'a Snapshot,
}

impl Why {
    /// Without figures: what is written to a pod must not change with each look.
    pub fn said(&self) -> String {
        match self {
            Self::CannotJudge(_)
            | Self::ByPlugin
            | Self::Shadowing
            | Self::AsksForNoGpu
            | Self::NotUnderstood
            | Self::NoNode
            | Self::BeyondLimit { .. } => self.to_string(),
            Self::NoRoom { nearest, .. } => {
                format!("no node that the pod could go to has room: {}", nearest.phrase())
            }
            Self::GroupIncomplete { .. } => "not all pods of its group are there".into(),
            Self::GroupTooLarge { .. } => "there is no room for all of its group".into(),
        }
    }

    /// A short name for conditions and metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::CannotJudge(_) => "cannot-judge",
            Self::ByPlugin => "by-plugin",
            Self::Shadowing => "shadowing",
            Self::AsksForNoGpu => "asks-for-no-gpu",
            Self::NotUnderstood => "not-understood",
            Self::NoNode => "no-node",
            Self::NoRoom { .. } => "no-room",
            Self::BeyondLimit { .. } => "beyond-limit",
            Self::GroupIncomplete { .. } => "group-incomplete",
            Self::GroupTooLarge { .. } => "group-too-large",
        }
    }
}

/// Places the queue in its order. `scratch` is a copy of the ledger that the pods wait in.
pub fn plan(scratch: Ledger, stock: &StockSnapshot, queue: &[Pending]) -> Vec<Step> {
    let mut scratch = scratch::Scratch::new(scratch, stock);
    queue.iter().flat_map(|pod| scratch.step(pod)).collect()
}
