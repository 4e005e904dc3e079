//! Announces changes of the policy's files: in the log, the metrics, `/readyz`, and as an Event on Stowage's own pod, which the
//! author of the change checks first.
//!
//! Nothing is decided here, and nothing is repeated: the caller announces each change once. A refusal is in `/readyz` before the
//! log has it. The metric's counter is increased last, so a counted change has been announced.

use super::Problems;
use crate::service::{RejectedPolicy, ServerState};
use std::sync::Arc;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::policy::{Digest, Policy};
use tracing::{error, info, warn};

/// The pod that this process runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPod {
    pub key: PodKey,
    pub uid: PodUid,
}

pub(super) struct Announcer {
    state: Arc<ServerState>,
    control_plane: Arc<dyn ControlPlane>,
    own_pod: Option<OwnPod>,
}

impl Announcer {
    pub fn new(
        state: Arc<ServerState>,
        control_plane: Arc<dyn ControlPlane>,
        own_pod: Option<OwnPod>,
    ) -> Self {
        Self {
            state,
            control_plane,
            own_pod,
        }
    }

    /// Announces that a policy replaced `before`.
    pub fn applied(&self, before: &Policy, warnings: Option<&str>) {
        let digest = self.digest();
        info!(policy = %digest, before = %before.digest, "policy applied");
        self.record_event(
            PodEventReason::PolicyApplied,
            format!("Policy {digest} replaces policy {}.", before.digest),
        );
        self.record_valid_files("applied", warnings);
    }

    /// Announces that the files changed, and their meaning did not.
    pub fn unchanged(&self, warnings: Option<&str>) {
        let digest = self.digest();
        info!(policy = %digest, "the policy files changed, and the policy did not");
        self.record_valid_files("unchanged", warnings);
    }

    /// Announces that the files are no valid policy now.
    pub fn refused(&self, problems: &Problems) {
        self.reject(
            problems,
            &problems.headline,
            "the previous policy stays in force",
        );
    }

    /// The files were no valid policy when this process began. `acting` says which policy decides instead.
    pub(crate) fn refused_at_start(&self, problems: &Problems, acting: &str) {
        self.reject(
            problems,
            &format!("{} ({acting})", problems.headline),
            acting,
        );
    }

    fn reject(&self, problems: &Problems, headline: &str, acting: &str) {
        self.state.policy_status.set_rejected(Some(RejectedPolicy {
            since: self.state.now(),
            headline: headline.into(),
            problems: problems.text.as_str().into(),
        }));
        self.state.metrics.policy.refused.set(1);
        let digest = self.digest();
        error!(policy = %digest, "policy files rejected; {acting}\n{}", problems.text.trim_end());
        self.record_event(
            PodEventReason::PolicyRejected,
            format!(
                "The policy files are rejected; {acting} ({digest}). {}",
                problems.headline
            ),
        );
        self.count_reload("rejected");
    }

    /// Records that the files contain the policy in force: an earlier rejection is cleared.
    fn record_valid_files(&self, outcome: &str, warnings: Option<&str>) {
        if let Some(warnings) = warnings {
            warn!("the policy's files:\n{}", warnings.trim_end());
        }
        self.state.policy_status.set_rejected(None);
        self.state.metrics.policy.refused.set(0);
        self.count_reload(outcome);
    }

    fn count_reload(&self, outcome: &str) {
        self.state
            .metrics
            .policy
            .reloads
            .with_label_values(&[outcome])
            .inc();
    }

    /// The digest of the policy in force.
    fn digest(&self) -> Digest {
        self.state.cluster().ledger().policy().digest
    }

    fn record_event(&self, kind: PodEventReason, text: String) {
        if let Some(OwnPod { key, uid }) = self.own_pod.clone() {
            self.control_plane.record_event(PodEvent {
                key,
                uid,
                kind,
                text,
            });
        }
    }
}
