//! What Stowage asks of a control plane, whichever it is: a real API server or a dump in memory.
//!
//! The edge that decides (`extender`) and the edges that write (`cluster`) meet here and nowhere else.

mod status_change;
mod write_times;

pub use write_times::{DEFAULT_DEADLINE, WriteTimes};

pub use status_change::{
    EvictionCondition, EvictionOutcome, EvictionReason, NominationChange, PlanState, ReservationChange,
    StatusChange, Touch,
};

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::scheduling::policy::Digest;
use crate::scheduling::vocabulary::demand::Demand;
use crate::scheduling::vocabulary::placement::Placement;
use crate::units::Millis;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;

pub trait ControlPlane: Send + Sync + 'static {
    /// How long after it was begun a write whose answer was lost may still land.
    fn latest_landing(&self) -> Duration {
        WriteTimes::default().latest_landing()
    }

    /// Writes the Binding, with everything Stowage records, in one request.
    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome>;

    /// Reads one pod by name, past every cache. `None` if there is none. Only for settling what a write left open.
    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<PodOnRecord>, ControlPlaneError>>;

    /// Writes some of the pod's status, all of it in one request. A pod of another UID is left alone.
    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        change: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>>;

    /// Evicts through the Eviction API, disruption budgets and all. Before it, the pod is told why in its status; after
    /// it, in an Event. A pod of another UID is left alone. Until it is tried again the pod keeps what it was told; whoever
    /// gives up writes [`EvictionCondition::CalledOff`].
    fn evict<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        why: &'a EvictionReason,
    ) -> BoxFuture<'a, EvictionOutcome>;

    /// Takes the gate `stowage.dev/plan` off the pod, and no other. It is no error where there is none. A pod of another
    /// UID is left alone.
    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>>;

    /// Tells whoever looks at the pod (an Event). Never waits; drops the notice rather than hold anyone up.
    fn record_event(&self, event: PodEvent);
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
    /// The policy that chose the placement.
    pub policy: Digest,
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
    /// What the scheduler last said of why it does not bind the pod.
    pub refusal: Option<Arc<str>>,
}

/// Why a read or a write came to nothing, or may have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ControlPlaneError {
    #[error("the pod is gone, or another one has its name now")]
    Gone,
    /// Nothing was written.
    #[error("{0}")]
    Refused(String),
    /// No answer, or one that does not say: it may have been written.
    #[error("{0}")]
    Unknown(String),
}

/// Something a person who looks at the pod should read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodEvent {
    pub key: PodKey,
    pub uid: PodUid,
    pub kind: PodEventReason,
    /// With figures; may differ from one notice to the next of the same kind.
    pub text: String,
}

/// One Event is published per pod and kind in a while, of most kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PodEventReason {
    Refused,
    NotUnderstood,
    RoomHeld,
    HoldEnded,
    /// Told to the one who leaves.
    Evicted,
    /// No place was found while it was gated.
    PlanFailed,
    /// Its group could not be placed whole.
    GroupFailed,
    /// Others could leave for it, but no more may be evicted within the minute.
    EvictionLimit,
    Unplaced,
    EditIgnored,
    /// Its processes run on other GPUs than were recorded.
    Drift,
    /// Its processes use more VRAM than it was granted.
    OverGrant,
    /// A GPU it is on is gone, out of order, smaller or cut into slices.
    GpuLost,
    /// What it was promised of a GPU was promised to another pod as well.
    Conflict,
    /// Told to Stowage's own pod.
    PolicyInForce,
    /// Told to Stowage's own pod.
    PolicyRefused,
}

impl PodEventReason {
    /// The Event's reason.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Refused => "StowageNoRoom",
            Self::NotUnderstood => "StowageNotUnderstood",
            Self::RoomHeld => "StowageRoomHeld",
            Self::HoldEnded => "StowageHoldEnded",
            Self::Evicted => "StowageEvicted",
            Self::PlanFailed => "StowagePlanFailed",
            Self::GroupFailed => "StowageGroupFailed",
            Self::EvictionLimit => "StowageEvictionLimit",
            Self::Unplaced => "StowageUnplaced",
            Self::EditIgnored => "StowageEditIgnored",
            Self::Drift => "StowageDrift",
            Self::OverGrant => "StowageOverGrant",
            Self::GpuLost => "StowageGpuLost",
            Self::Conflict => "StowageConflict",
            Self::PolicyInForce => "StowagePolicyInForce",
            Self::PolicyRefused => "StowagePolicyRefused",
        }
    }

    pub fn is_warning(self) -> bool {
        !matches!(self, Self::RoomHeld | Self::PolicyInForce | Self::EvictionLimit)
    }

    /// Whether two of the kind soon after each other may be about the same. Each change of a policy is news of its own.
    pub fn repeats(self) -> bool {
        !matches!(self, Self::PolicyInForce | Self::PolicyRefused)
    }
}

/// Who says whose a token is: the API server, in one question.
pub trait AgentAuthority: Send + Sync + 'static {
    /// What a token says of itself that rules it out, before anyone is asked. Nobody has verified it: it can refuse a token,
    /// and lets none in.
    fn refuses_unasked(&self, _token: &str) -> Option<AuthError> {
        None
    }

    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<AgentIdentity, AuthError>>;
}

/// An agent, as its token shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentIdentity {
    /// The node of the pod that the token was made for: the only one it may speak for.
    pub node: NodeName,
    /// How much longer the token is good; `None` if it does not say.
    pub remaining: Option<Millis>,
}

/// Something operators look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorPage {
    /// It shows the whole cluster: its path.
    OfCluster(&'static str),
    /// It is about this pod.
    OfPod(PodKey),
}

impl std::fmt::Display for OperatorPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OfCluster(path) => write!(f, "get the non-resource URL {path}"),
            Self::OfPod(pod) => write!(f, "get pods in namespace {}", pod.namespace),
        }
    }
}

/// Who says whether the holder of a token may see a page: the API server, in two questions.
pub trait PageAuthority: Send + Sync + 'static {
    /// If so, how much longer the token is good; `None` if it does not say.
    fn may_see<'a>(
        &'a self,
        token: &'a str,
        page: &'a OperatorPage,
    ) -> BoxFuture<'a, Result<Option<Millis>, AuthError>>;
}

/// Why a token opens nothing. No text has the token in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error("the API server does not accept the token: {0}")]
    Invalid(String),
    #[error(
        "the token is for {actual:?}, and reports need one for audience {expected:?}: see the projected token in the \
         agent's manifest, and --agent-audience"
    )]
    WrongAudience { expected: String, actual: Vec<String> },
    #[error("the token is of {actual}, and reports come from {expected} (--agent-service-account)")]
    WrongAccount { expected: String, actual: String },
    #[error(
        "the token names no node: give the agent the projected token of its own pod, on Kubernetes 1.30 or newer"
    )]
    NoNode,
    #[error("the token is no service account token: {0}")]
    Malformed(&'static str),
    #[error("the token says of itself that it has expired")]
    Expired,
    #[error("{user:?} may not {what}: a role of the cluster has to allow it")]
    NotAllowed { user: String, what: String },
    /// Nothing is known of the token.
    #[error("the token cannot be checked now: {0}")]
    Unavailable(String),
    /// Nothing is known of the token, and nobody is asked.
    #[error(
        "the token cannot be checked now: too many new tokens are shown, here or from this source; try again in a second"
    )]
    Crowded,
}

impl AuthError {
    /// A short name for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "invalid-token",
            Self::WrongAudience { .. } => "wrong-audience",
            Self::WrongAccount { .. } => "wrong-account",
            Self::NoNode => "no-node-in-token",
            Self::Malformed(_) => "malformed-token",
            Self::Expired => "expired-token",
            Self::NotAllowed { .. } => "not-allowed",
            Self::Unavailable(_) => "token-unchecked",
            Self::Crowded => "token-crowded",
        }
    }
}
