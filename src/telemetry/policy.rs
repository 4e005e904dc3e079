//! Metrics of the policy: which one is current, the outcomes of changes to its files, and whether they are rejected now.

use super::family::{Families, known, open};
use parking_lot::Mutex;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use stowage_scheduling::policy::{Mode, Policy};

pub struct PolicyMetrics {
    /// Changes of the policy's files, by outcome.
    pub reloads: IntCounterVec,
    /// 1 while the files are rejected.
    pub refused: IntGauge,
    /// Times at which windows of the policy opened or closed.
    pub window_changes: IntCounter,
    /// Windows that are open.
    open_windows: IntGauge,
    /// 1 for the digest and mode in force.
    info: IntGaugeVec,
    /// The labels that `info` shows.
    shown: Mutex<Option<[String; 2]>>,
}

impl PolicyMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        Self {
            reloads: families.counters(
                "stowage_policy_reloads_total",
                "Reloads of the policy files, by outcome.",
                [known("outcome", ["applied", "unchanged", "rejected"])],
            ),
            refused: families.gauge(
                "stowage_policy_reload_failed",
                "1 while the policy files are rejected; the last valid policy, or the built-in one, stays in force.",
            ),
            window_changes: families.counter(
                "stowage_policy_window_changes_total",
                "Times at which windows of the policy opened or closed.",
            ),
            open_windows: families
                .gauge("stowage_policy_open_windows", "Windows of the policy that are open."),
            info: families.gauges(
                "stowage_policy_info",
                "1 for the policy in force, by its digest and mode.",
                // One at a time, so none from the start.
                [open("digest", "one at a time"), open("mode", "enforce or shadow, one at a time")],
            ),
            shown: Mutex::default(),
        }
    }

    /// This policy decides from now on.
    pub fn set_in_force(&self, policy: &Policy) {
        let mode = match policy.mode {
            Mode::Enforce => "enforce",
            Mode::Shadow => "shadow",
        };
        self.open_windows.set(policy.open_windows().len() as i64);
        let labels = [policy.digest.to_string(), mode.to_owned()];
        let mut shown = self.shown.lock();
        // The new one first: a scrape in between sees two, never none.
        self.info.with_label_values(&labels).set(1);
        if let Some(before) = shown
            .replace(labels.clone())
            .filter(|before| *before != labels)
        {
            // It is there: it was shown.
            let _ = self.info.remove_label_values(&before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;
    use stowage_scheduling::policy::Digest;

    #[test]
    fn one_policy_is_shown_at_a_time() {
        let metrics = Metrics::new();
        let shown = || {
            let text = metrics.render();
            text.lines()
                .filter(|line| line.starts_with("stowage_policy_info{"))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let mut policy = Policy::default();
        for (digest, mode, name) in [
            (1, Mode::Enforce, "enforce"),
            (2, Mode::Enforce, "enforce"),
            (2, Mode::Shadow, "shadow"),
        ] {
            (policy.digest, policy.mode) = (Digest(digest), mode);
            for _ in 0..2 {
                metrics.policy.set_in_force(&policy);
                assert_eq!(
                    shown(),
                    [format!(
                        "stowage_policy_info{{digest=\"{digest:016x}\",mode=\"{name}\"}} 1"
                    )]
                );
            }
        }
    }
}
