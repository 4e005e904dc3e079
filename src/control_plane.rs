//! What Stowage asks of a control plane, whichever it is: a real API server or a dump in memory.
//!
//! The edge that decides (`extender`) and the edges that write (`cluster`) meet here and nowhere else.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::decision::{Hold, Placement};
use crate::scheduling::request::Demand;
use futures::future::BoxFuture;
use std::sync::Arc;

pub trait ControlPlane: Send + Sync + 'static {
    /// Writes the Binding, with everything Stowage records, in one request.
    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome>;

    /// Reads one pod by name, past every cache. `None` if there is none. Only for settling what a write left open.
    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<PodOnRecord>, ControlPlaneError>>;

    /// Writes the pod's hold condition: the hold, or that it has ended.
    fn write_hold<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        hold: Option<&'a Hold>,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>>;

    /// Changes something about a waiting pod that nobody reads, so that the scheduler looks at it again.
    fn wake<'a>(&'a self, key: &'a PodKey, uid: &'a PodUid) -> BoxFuture<'a, Result<(), ControlPlaneError>>;

    /// Tells whoever looks at the pod (an Event). Never waits; drops the notice rather than hold anyone up.
    fn notify(&self, notice: Notice);
}

/// One pod, to be bound.
#[derive(Debug, Clone)]
pub struct BindOrder {
    pub key: PodKey,
    pub uid: PodUid,
    pub demand: Demand,
    pub placement: Placement,
    /// Whether the room was held for it.
    pub held: bool,
}

/// What became of a Binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BindOutcome {
    Written,
    /// 409: the pod has a node already, or is not the pod that was meant.
    Conflict,
    /// It was refused for good, and nothing was written.
    Refused {
        message: String,
    },
    /// No answer, or one that does not say: it may have been written.
    Unknown {
        message: String,
    },
}

/// A pod as a fresh read shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodOnRecord {
    pub uid: PodUid,
    pub node: Option<NodeName>,
    pub devices: Option<Arc<[GpuUuid]>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ControlPlaneError(pub String);

/// Something a person who looks at the pod should read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub key: PodKey,
    pub uid: PodUid,
    pub kind: NoticeKind,
    /// With figures; may differ from one notice to the next of the same kind.
    pub text: String,
}

/// One Event is published per pod and kind in a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NoticeKind {
    Refused,
    NotUnderstood,
    RoomHeld,
    HoldEnded,
    Unplaced,
    EditIgnored,
}

impl NoticeKind {
    /// The Event's reason.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Refused => "StowageNoRoom",
            Self::NotUnderstood => "StowageNotUnderstood",
            Self::RoomHeld => "StowageRoomHeld",
            Self::HoldEnded => "StowageHoldEnded",
            Self::Unplaced => "StowageUnplaced",
            Self::EditIgnored => "StowageEditIgnored",
        }
    }

    pub fn is_warning(self) -> bool {
        self != Self::RoomHeld
    }
}
