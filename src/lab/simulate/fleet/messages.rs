//! What goes between the fleet and its scheduler, and what becomes of it on the way.
//!
//! A scheduler that is honest about what it can know reads messages alone. In these simulations they all arrive at once;
//! [`Delivery`] is where faults come in.

use super::pods::{Image, PodSpec};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::ledger::StartProgress;
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::node_reading::NodeReading;

/// A message from the fleet to its scheduler.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// A pod as the API server shows it.
    Pod(PodSnapshot),
    /// The pod is gone.
    PodDeleted(PodUid),
    /// How far a bound pod has come with its start.
    Start {
        uid: PodUid,
        progress: StartProgress,
    },
    /// What the agent of a node measured.
    Reading {
        node: NodeName,
        reading: Arc<NodeReading>,
    },
    /// The images that a node has.
    Images { node: NodeName, images: Vec<Image> },
    /// The Binding was written.
    Bound {
        uid: PodUid,
        node: NodeName,
        devices: Arc<[GpuUuid]>,
    },
    /// The Binding was refused: the pod is gone, or bound.
    BindingRefused(PodUid),
}

/// A pod as the API server shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct PodSnapshot {
    pub uid: PodUid,
    pub spec: Arc<PodSpec>,
    /// Where it runs; `None` while it is pending.
    pub bound: Option<PodBinding>,
    /// Its last checkpoint.
    pub checkpoint: Option<Moment>,
    /// When its deletion began; `None` if it is not terminating.
    pub terminating_since: Option<Moment>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodBinding {
    pub node: NodeName,
    pub devices: Arc<[GpuUuid]>,
    /// Its engine does not answer yet.
    pub is_starting: bool,
    pub since: Moment,
    pub loan: BindingLoan,
}

/// What a Binding says of VRAM limits and of VRAM that engines lend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BindingLoan {
    pub borrows: bool,
    pub has_vram_limits: bool,
}

/// What a scheduler does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedulerAction {
    Bind {
        uid: PodUid,
        node: NodeName,
        devices: Arc<[GpuUuid]>,
        loan: BindingLoan,
    },
    /// `preemptor` is the pod that it makes room for.
    Evict {
        uid: PodUid,
        preemptor: Option<PodUid>,
    },
}

/// The direction of a message.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "what doubles messages is a test")
)]
pub(crate) enum MessageDirection<'a> {
    ToScheduler(&'a Message),
    FromScheduler,
}

/// What becomes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "what doubles messages is a test")
)]
pub(crate) enum DeliveryOutcome {
    Arrives { after: Millis },
    Twice { after: Millis, again_after: Millis },
}

/// Decides what becomes of messages.
pub(crate) trait Delivery {
    fn outcome_of(&mut self, now: Moment, envelope: MessageDirection<'_>) -> DeliveryOutcome;
}

/// Every message arrives at once.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ReliableDelivery;

impl Delivery for ReliableDelivery {
    fn outcome_of(&mut self, _: Moment, _: MessageDirection<'_>) -> DeliveryOutcome {
        DeliveryOutcome::Arrives { after: Millis(0) }
    }
}
