//! The policy of a loop: the recorded one as it changes, or another one whose windows open and close by the recorded time.

use jiff::Timestamp;
use stowage_policy_file::windows::TimeZones;
use stowage_policy_file::with_digest;
use stowage_scheduling::policy::{Mode, PackingPolicy, Policy};

/// Policy by which a loop decides: the recorded one, with what replaces it.
#[derive(Debug, Clone, Default)]
pub struct LoopPolicy {
    /// Policy that replaces the recorded one.
    pub replacement: Option<Policy>,
    /// Packing policy that replaces the policy's own.
    pub packing_override: Option<PackingPolicy>,
}

impl LoopPolicy {
    /// Policy in force in the loop at a wall time when `recorded` is the recorded one.
    pub fn policy_at(&self, recorded: &Policy, zones: &mut TimeZones, at: Timestamp) -> Policy {
        let mut policy = match &self.replacement {
            Some(given) => {
                let open = zones.open_at(given, at);
                given.clone().with_open_windows(open)
            }
            None => recorded.clone(),
        };
        if let Some(packing) = self
            .packing_override
            .filter(|packing| *packing != policy.packing.policy)
        {
            policy.settings.packing.policy = packing;
            policy = with_digest(policy);
        }
        // It is compared by what it says, whether or not it was enforced.
        policy.settings.mode = Mode::Enforce;
        policy
    }

    /// Whether the time alone may change it.
    pub(crate) fn has_windows(&self) -> bool {
        self.replacement
            .as_ref()
            .is_some_and(|given| given.windows().next().is_some())
    }
}
