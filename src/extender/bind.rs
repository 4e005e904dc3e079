//! The `bind` verb: puts this pod on this node, on GPUs that are still free, with one write.
//!
//! ```text
//!  assume ──► write Binding ──┬─ written ─────────────────────────► confirm, answer OK
//!  (under the lock)           ├─ refused ─────────────────────────► forget, answer an error
//!                             ├─ 409 ──► read the pod ──┬─ here ──► confirm, answer OK
//!                             │                         ├─ else ──► confirm or release, answer an error
//!                             └─ no answer ─────────────┴─ unread ► answer an error; the assume stays
//! ```
//!
//! An assumed pod whose Binding may have been written stays assumed until a read shows it bound or gone. A read that shows it
//! unbound settles nothing, because the write may still land. The same Binding is then written again, which can only succeed or
//! show that the first one had succeeded. One loop per pod does that ([`open_bindings`]).
//!
//! Answering OK for a pod that is not bound would strand it until kube-scheduler restarts; that never happens here.

use super::request::BadRequest;
use super::wire::{BindingArgs, BindingResult};
use super::{Extender, open_bindings, shadow};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::kubernetes::port::{BindOrder, BindOutcome, PodOnRecord, StatusChange};
use crate::scheduling::ledger::{AssumeConflict, AssumeResult};
use crate::scheduling::policy::Mode;
use crate::units::Millis;
use std::time::Duration;
use tracing::{info, warn};

/// Why a pod was not bound. The text goes into the pod's condition, so it never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Unbound {
    Conflict(AssumeConflict),
    OnAnotherNode,
    Gone,
    Refused,
    Unsettled,
    /// It requests VRAM in shadow mode.
    InShadow,
}

impl Unbound {
    fn code(&self) -> &'static str {
        match self {
            Self::Conflict(conflict) => conflict.code(),
            Self::OnAnotherNode => "bound-elsewhere",
            Self::Gone => "pod-gone",
            Self::Refused => "refused",
            Self::Unsettled => "unsettled",
            Self::InShadow => "shadow",
        }
    }

    fn phrase(&self) -> &'static str {
        match self {
            Self::Conflict(conflict) => conflict.phrase(),
            Self::OnAnotherNode => "conflict: pod is bound to another node",
            Self::Gone => "conflict: pod is gone",
            Self::Refused => "the API server refused the binding",
            Self::InShadow => shadow::NO_VRAM_IN_SHADOW,
            Self::Unsettled => "the API server did not say whether the pod is bound; it is being read",
        }
    }
}

/// Binds, even if the client's connection closes meanwhile.
pub async fn bind(extender: &Extender, args: &BindingArgs) -> Result<BindingResult, BadRequest> {
    let uid = PodUid::parse(&args.pod_uid).map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let key = PodKey::parse(&args.pod_namespace, &args.pod_name)
        .map_err(|e| BadRequest::unprocessable("unidentified-pod", e))?;
    let node = NodeName::parse(&args.node).map_err(|e| BadRequest::unprocessable("bad-node-name", e))?;
    let task = BindTask { extender: extender.clone(), uid, key, node };
    let answers = extender.service.metrics.answers.clone();
    let bound = extender.writes.spawn(async move { task.run().await }).await;
    let (outcome, result) = match bound.unwrap_or(Err(Unbound::Unsettled)) {
        Ok(()) => (("bound", ""), BindingResult { error: "" }),
        Err(unbound) => (("unbound", unbound.code()), BindingResult { error: unbound.phrase() }),
    };
    answers.with_label_values(&["bind", outcome.0, outcome.1]).inc();
    Ok(result)
}

#[derive(Clone)]
struct BindTask {
    extender: Extender,
    uid: PodUid,
    key: PodKey,
    node: NodeName,
}

/// The state of an assume before this bind.
enum BindPhase {
    New(BindOrder),
    /// Assumed by an earlier bind whose Binding may have been written.
    InFlight(BindOrder),
    AlreadyBound,
}

impl BindTask {
    async fn run(&self) -> Result<(), Unbound> {
        let expected = shadow::expected(&self.extender.service.ledger(), &self.uid);
        self.bind().await?;
        if let Some(expected) = expected {
            shadow::bound(&self.extender, &self.uid, &self.key, &self.node, &expected);
        }
        Ok(())
    }

    async fn bind(&self) -> Result<(), Unbound> {
        let (order, is_new) = match self.assume()? {
            BindPhase::AlreadyBound => return Ok(()),
            BindPhase::New(order) => (order, true),
            BindPhase::InFlight(order) => (order, false),
        };
        match self.write(&order).await {
            BindOutcome::Written => {
                self.written(&order);
                Ok(())
            }
            BindOutcome::Refused { message } => {
                warn!(pod = %self.key, node = %self.node, message, "binding refused");
                if is_new {
                    self.forget();
                }
                Err(Unbound::Refused)
            }
            BindOutcome::Conflict => self.settle_now(order).await,
            BindOutcome::Unknown { message } => {
                warn!(pod = %self.key, node = %self.node, message, "binding unanswered");
                self.settle_later(order);
                Err(Unbound::Unsettled)
            }
        }
    }

    /// Writes the Binding, and records until when it may land whatever the answer is.
    async fn write(&self, order: &BindOrder) -> BindOutcome {
        let Extender { service, control_plane, bindings, .. } = &self.extender;
        let begun = service.now();
        bindings.begin(&self.uid);
        let outcome = control_plane.bind(order).await;
        let is_open = matches!(outcome, BindOutcome::Conflict | BindOutcome::Unknown { .. });
        bindings.end(&self.uid, begun, is_open);
        outcome
    }

    /// The pod is pending again, unless one of its Bindings can still land.
    fn forget(&self) {
        let Extender { service, control_plane, bindings, .. } = &self.extender;
        let landing = Millis(control_plane.latest_landing().as_millis() as u64);
        let mut ledger = service.ledger();
        if bindings.have_landed(&self.uid, ledger.now(), landing) {
            ledger.forget(&self.uid);
        }
    }

    fn assume(&self) -> Result<BindPhase, Unbound> {
        let mut ledger = self.extender.service.ledger();
        let entry = ledger.pod_state(&self.uid).filter(|entry| entry.key == self.key);
        let entry = entry.ok_or(Unbound::Conflict(AssumeConflict::UnknownPod))?;
        if ledger.policy().mode == Mode::Shadow && entry.node().is_none() && !entry.demand.asks_plugin() {
            return Err(Unbound::InShadow);
        }
        let (demand, held) = (entry.demand.clone(), entry.reservation().is_some());
        let policy = ledger.policy().digest;
        let (key, uid) = (self.key.clone(), self.uid.clone());
        let order = |placement| BindOrder { key, uid, demand, placement, held, policy };
        Ok(match ledger.assume(&self.uid, &self.node).map_err(Unbound::Conflict)? {
            AssumeResult::Bound => BindPhase::AlreadyBound,
            AssumeResult::New(placement) => BindPhase::New(order(placement)),
            AssumeResult::InFlight(placement) => BindPhase::InFlight(order(placement)),
        })
    }

    /// The pod is bound as requested.
    fn written(&self, order: &BindOrder) {
        let devices = order.placement.recorded();
        info!(pod = %self.key, node = %self.node, ?devices, policy = %order.policy, "bound");
        self.extender.service.ledger().confirm(&self.uid, &self.node, devices);
        if order.held {
            let Self { extender, uid, key, .. } = self.clone();
            // Clears the reservation's condition. If this fails, the reservation expires before any reader relies on it.
            extender.writes.clone().spawn(async move {
                extender.control_plane.write_status(&key, &uid, &StatusChange::end_reservation()).await
            });
        }
    }

    async fn settle_now(&self, order: BindOrder) -> Result<(), Unbound> {
        match self.extender.control_plane.read_pod(&self.key).await {
            Ok(record) if is_settled(record.as_ref(), &self.uid) => self.settle(record),
            outcome => {
                warn!(pod = %self.key, ?outcome, "the Binding conflicts, and the pod shows no other node");
                self.settle_later(order);
                Err(Unbound::Unsettled)
            }
        }
    }

    /// Updates the ledger to what a fresh read of a bound or deleted pod shows.
    fn settle(&self, record: Option<PodOnRecord>) -> Result<(), Unbound> {
        let mut ledger = self.extender.service.ledger();
        match record
            .filter(|record| record.uid == self.uid)
            .and_then(|record| Some((record.node?, record.devices)))
        {
            None => {
                ledger.release(&self.uid);
                Err(Unbound::Gone)
            }
            Some((node, devices)) => {
                ledger.confirm(&self.uid, &node, devices);
                if node == self.node { Ok(()) } else { Err(Unbound::OnAnotherNode) }
            }
        }
    }

    /// Starts the pod's settling loop unless one runs.
    fn settle_later(&self, order: BindOrder) {
        if self.extender.bindings.settle(&self.uid) {
            let task = self.clone();
            self.extender.writes.spawn(async move {
                task.settle_in_time(order).await;
                task.extender.bindings.settled(&task.uid);
            });
        }
    }

    async fn settle_in_time(&self, order: BindOrder) {
        let mut reads = 0;
        while !self.extender.service.gate.is_stopping() {
            tokio::time::sleep(Duration::from_millis(open_bindings::pause(&self.uid, reads).0)).await;
            reads = reads.saturating_add(1);
            if !self.is_open() {
                return;
            }
            match self.extender.control_plane.read_pod(&self.key).await {
                Err(_) => {}
                Ok(record) if is_settled(record.as_ref(), &self.uid) => {
                    let settled = self.settle(record);
                    return info!(pod = %self.key, ?settled, "binding settled");
                }
                Ok(_) => match self.write(&order).await {
                    BindOutcome::Written => return self.written(&order),
                    BindOutcome::Refused { .. } => self.forget(),
                    BindOutcome::Conflict | BindOutcome::Unknown { .. } => {}
                },
            }
        }
    }

    /// Whether the assume is still unsettled: a watch or a later bind may have been faster.
    fn is_open(&self) -> bool {
        let ledger = self.extender.service.ledger();
        ledger.pod_state(&self.uid).is_some_and(|entry| entry.is_assumed())
    }
}

/// Whether a read settles a Binding: the pod is bound, gone, or another pod of that name.
fn is_settled(record: Option<&PodOnRecord>, uid: &PodUid) -> bool {
    record.is_none_or(|record| record.uid != *uid || record.node.is_some())
}
