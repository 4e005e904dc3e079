//! `bind`: this pod on this node, on GPUs that are still free, written once.
//!
//! ```text
//!  assume ──► write Binding ──┬─ written ─────────────────────────► confirm, answer OK
//!  (under the lock)           ├─ refused ─────────────────────────► forget, answer an error
//!                             ├─ 409 ──► read the pod ──┬─ here ──► settle, answer OK
//!                             │                         ├─ else ──► settle or forget, answer an error
//!                             └─ no answer ─────────────┴─ unread ► the assume stays until a read settles it
//! ```
//!
//! Answering OK for a pod that is not bound would strand it until the scheduler restarts: that never happens here.

use super::Extender;
use super::request::BadRequest;
use super::wire::{BindingArgs, BindingResult};
use crate::control_plane::{BindOrder, BindOutcome, PodOnRecord};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::scheduling::decision::Placement;
use crate::scheduling::ledger::{Assumption, Conflict};
use std::time::Duration;
use tracing::{info, warn};

/// How often a read that should settle a Binding is tried again, at first and at most.
const SETTLE_DELAY: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// Why a pod was not bound. The text goes into the pod's condition, so it never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Unbound {
    Conflict(Conflict),
    OnAnotherNode,
    Gone,
    Refused,
    Unsettled,
}

impl Unbound {
    fn code(&self) -> &'static str {
        match self {
            Self::Conflict(conflict) => conflict.code(),
            Self::OnAnotherNode => "bound-elsewhere",
            Self::Gone => "pod-gone",
            Self::Refused => "refused",
            Self::Unsettled => "unsettled",
        }
    }

    fn phrase(&self) -> &'static str {
        match self {
            Self::Conflict(conflict) => conflict.phrase(),
            Self::OnAnotherNode => "conflict: pod is bound to another node",
            Self::Gone => "conflict: pod is gone",
            Self::Refused => "the API server refused the binding",
            Self::Unsettled => "the API server did not say whether the pod is bound; it is being read",
        }
    }
}

/// Binds, whatever becomes of the connection that asked for it.
pub async fn bind(extender: &Extender, args: &BindingArgs) -> Result<BindingResult, BadRequest> {
    let uid = PodUid::parse(&args.pod_uid).map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let key = PodKey::parse(&args.pod_namespace, &args.pod_name)
        .map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let node = NodeName::parse(&args.node).map_err(|e| BadRequest::unprocessable("bad-node-name", e))?;
    let task = Task { extender: extender.clone(), uid, key, node };
    let answers = extender.service.metrics.answers.clone();
    let bound = extender.writes.spawn(async move { task.run().await }).await;
    let (outcome, result) = match bound.unwrap_or(Err(Unbound::Unsettled)) {
        Ok(()) => (("bound", ""), BindingResult { error: "" }),
        Err(unbound) => (("unbound", unbound.code()), BindingResult { error: unbound.phrase() }),
    };
    answers.with_label_values(&["bind", outcome.0, outcome.1]).inc();
    Ok(result)
}

struct Task {
    extender: Extender,
    uid: PodUid,
    key: PodKey,
    node: NodeName,
}

impl Task {
    async fn run(&self) -> Result<(), Unbound> {
        let placement = match self.assume().map_err(Unbound::Conflict)? {
            Assumption::Bound => return Ok(()),
            Assumption::New(placement) | Assumption::InFlight(placement) => placement,
        };
        let Some(order) = self.order(placement) else { return Err(Unbound::Gone) };
        match self.extender.control_plane.bind(&order).await {
            BindOutcome::Written => {
                self.extender.service.ledger().confirm(&self.uid);
                info!(pod = %self.key, node = %self.node, devices = ?order.placement.devices, "bound");
                Ok(())
            }
            BindOutcome::Refused { message } => {
                warn!(pod = %self.key, node = %self.node, message, "binding refused");
                self.extender.service.ledger().forget(&self.uid);
                Err(Unbound::Refused)
            }
            BindOutcome::Conflict => self.settle_now().await,
            BindOutcome::Unknown { message } => {
                warn!(pod = %self.key, node = %self.node, message, "binding unanswered");
                self.settle_later();
                Err(Unbound::Unsettled)
            }
        }
    }

    fn assume(&self) -> Result<Assumption, Conflict> {
        let mut ledger = self.extender.service.ledger();
        match ledger.entry(&self.uid) {
            Some(entry) if entry.key == self.key => ledger.assume(&self.uid, &self.node),
            _ => Err(Conflict::UnknownPod),
        }
    }

    fn order(&self, placement: Placement) -> Option<BindOrder> {
        let demand = self.extender.service.ledger().entry(&self.uid)?.demand.clone();
        Some(BindOrder { key: self.key.clone(), uid: self.uid.clone(), demand, placement })
    }

    async fn settle_now(&self) -> Result<(), Unbound> {
        match self.extender.control_plane.read_pod(&self.key).await {
            Ok(record) => self.settle(record),
            Err(error) => {
                warn!(pod = %self.key, %error, "could not read the pod after a conflict");
                self.settle_later();
                Err(Unbound::Unsettled)
            }
        }
    }

    /// Brings the ledger to what a fresh read of the pod says.
    fn settle(&self, record: Option<PodOnRecord>) -> Result<(), Unbound> {
        let mut ledger = self.extender.service.ledger();
        let Some(record) = record.filter(|record| record.uid == self.uid) else {
            ledger.release(&self.uid);
            return Err(Unbound::Gone);
        };
        let Some(node) = record.node else {
            ledger.forget(&self.uid);
            return Err(Unbound::Refused);
        };
        ledger.settle(&self.uid, &node, record.devices);
        if node == self.node { Ok(()) } else { Err(Unbound::OnAnotherNode) }
    }

    /// The assume stays; reads go on until one tells what it became.
    fn settle_later(&self) {
        let Self { extender, uid, key, node } = self;
        let task =
            Self { extender: extender.clone(), uid: uid.clone(), key: key.clone(), node: node.clone() };
        extender.writes.spawn(async move {
            let (mut delay, longest) = SETTLE_DELAY;
            while !task.extender.service.gate.is_stopping() {
                tokio::time::sleep(delay).await;
                if !task.is_open() {
                    return;
                }
                if let Ok(record) = task.extender.control_plane.read_pod(&task.key).await {
                    let settled = task.settle(record);
                    info!(pod = %task.key, ?settled, "binding settled");
                    return;
                }
                delay = (delay * 2).min(longest);
            }
        });
    }

    /// Whether the assume is still unsettled: a watch or a later bind may have been faster.
    fn is_open(&self) -> bool {
        let ledger = self.extender.service.ledger();
        ledger.entry(&self.uid).is_some_and(|entry| entry.is_assumed())
    }
}
