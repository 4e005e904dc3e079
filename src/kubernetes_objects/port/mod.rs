//! The control plane port: what Stowage asks of a control plane, which is a real API server or a dump in memory.
//!
//! The edge that decides (`extender`) and the edges that write (`kubernetes`) meet here and nowhere else.

mod write_times;

pub use write_times::WriteTimes;

use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::coded::coded;
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, PodEvent, StatusChange,
};
use stowage_scheduling::ids::{LeaderEpoch, NodeName, PodKey, PodUid};
use stowage_scheduling::policy::Digest;
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::placement::Placement;

pub trait ControlPlane: Send + Sync + 'static {
    /// The longest time from the start of a write whose answer was lost to its commit.
    fn max_commit_delay(&self) -> Duration {
        WriteTimes::default().max_commit_delay()
    }

    /// Writes the Binding, with everything that Stowage records, in one request.
    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome>;

    /// Reads one pod by name, past every cache. `None` if there is none. Only to settle the result of an unanswered write.
    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<FreshPod>, ControlPlaneError>>;

    /// Changes the pod's status in one request. A pod of another UID is left alone.
    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        change: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>>;

    /// Evicts through the Eviction API, subject to disruption budgets. Writes the reason into the pod's condition before, and
    /// records an Event after it. Writing the condition may take long: the pod is evicted if `is_due` still says so then. A pod
    /// of another UID is left alone. Until the eviction is retried the pod keeps its condition; the planner cancels what nobody
    /// wants any more.
    fn evict<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        why: &'a EvictionReason,
        is_due: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome>;

    /// Removes the gate `stowage.dev/plan` from the pod, and no other. A pod without it is no error. A pod of another UID is
    /// left alone.
    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>>;

    /// Records an Event on the pod. Never waits; drops the Event instead.
    fn record_event(&self, event: PodEvent);
}

/// Whether what a pod is to be evicted for still holds.
pub type IsDue<'a> = dyn Fn() -> bool + Sync + 'a;

/// One pod to bind.
#[derive(Debug, Clone)]
pub struct BindOrder {
    pub key: PodKey,
    pub uid: PodUid,
    pub demand: Demand,
    pub placement: Placement,
    /// Whether its condition shows a reservation, or may.
    pub shows_reservation: bool,
    /// The policy that chose the placement.
    pub policy: Digest,
    /// The epoch in which the placement was chosen. In another one the Binding is refused.
    pub epoch: Option<LeaderEpoch>,
    /// Whether NVIDIA's container runtime is in legacy mode on the node, and takes bare UUIDs only.
    pub legacy_runtime: bool,
}

/// The result of a Binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BindOutcome {
    Written,
    /// 409: the pod has a node already, or another UID.
    Conflict,
    /// It was refused permanently, and nothing was written.
    Refused {
        message: String,
    },
    /// No answer, or an inconclusive one: it may have been written.
    Unknown {
        message: String,
    },
}

impl BindOutcome {
    pub fn code(&self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Conflict => "conflict",
            Self::Refused { .. } => "refused",
            Self::Unknown { .. } => "unknown",
        }
    }
}

/// Reviews agents' tokens: the API server, in one request.
pub trait AgentAuthority: Send + Sync + 'static {
    /// Rejects a token by its own claims, before the API server is asked. The claims are not verified: they can reject a token,
    /// and never admit one.
    fn reject_without_review(&self, _token: &str) -> Option<AuthError> {
        None
    }

    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<AgentIdentity, AuthError>>;
}

/// An agent, as its token identifies it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentIdentity {
    pub node: AgentNode,
    /// How much longer the token is valid; `None` if it does not say.
    pub remaining: Option<Millis>,
}

/// The node of the pod that an agent's token was issued for: the only one that the agent may report for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentNode {
    pub name: NodeName,
    /// The UID of the Node object that had the name when the token was issued; `None` if there was none.
    pub uid: Option<Arc<str>>,
    /// When the token was issued, in seconds since 1970 by the API server's clock, if it says.
    pub issued: Option<i64>,
}

/// A page of the operators' address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorPage {
    /// A page about the whole cluster: its path.
    Cluster(&'static str),
    /// Pages about pods: of this namespace, or of all.
    Pods(Option<Arc<str>>),
    /// A page about this pod.
    Pod(PodKey),
}

impl std::fmt::Display for OperatorPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cluster(path) => write!(f, "get the non-resource URL {path}"),
            Self::Pods(None) => f.write_str("get pods in all namespaces"),
            Self::Pods(Some(namespace)) => write!(f, "get pods in namespace {namespace}"),
            Self::Pod(pod) => write!(f, "get the pod {pod}"),
        }
    }
}

/// Reviews access to a page: the API server, in two requests.
pub trait PageAuthority: Send + Sync + 'static {
    /// If access is allowed, how much longer the token is valid; `None` if it does not say.
    fn may_see<'a>(
        &'a self,
        token: &'a str,
        operator_page: &'a OperatorPage,
    ) -> BoxFuture<'a, Result<Option<Millis>, AuthError>>;
}

coded! {
    /// Why a token is rejected. No text contains the token.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum AuthError {
        "invalid-token" Invalid(answer: String), "the API server does not accept the token: {answer}";
        "wrong-audience" WrongAudience { expected: String, actual: Vec<String> },
            "the token is for {actual:?}, and reports need one for audience {expected:?}: see the projected token in the \
             agent's manifest, and --agents-audience";
        "wrong-account" WrongAccount { expected: String, actual: String },
            "the token is of {actual}, and reports come from {expected} (--agents-service-account)";
        "no-node-in-token" NoNode,
            "the token names no node: give the agent the projected token of its own pod, on Kubernetes 1.30 or newer";
        "malformed-token" Malformed(flaw: &'static str), "the token is no service account token: {flaw}";
        "expired-token" Expired, "the token says of itself that it has expired";
        "not-allowed" NotAllowed { user: String, what: String },
            "{user:?} may not {what}: a role of the cluster has to allow it";
        /// The API server did not answer; the token is unknown.
        "token-unchecked" Unavailable(reason: String), "the token cannot be checked now: {reason}";
        /// The token is unknown, and a limit allows no further review.
        "token-crowded" Crowded,
            "the token cannot be checked now: too many new tokens are shown, here or from this source; try again in a second";
    }
}
