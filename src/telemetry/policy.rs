//! Metrics of the policy: which one is current, the outcomes of changes to its files, and whether they are rejected now.

use crate::scheduling::policy::{Mode, Policy};
use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

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
    pub(super) fn new(registry: &Registry) -> Self {
        let keep = |collector: Box<dyn Collector>| {
            registry.register(collector).expect("each metric is registered once");
        };
        let reloads = Opts::new("stowage_policy_reloads_total", "Reloads of the policy files, by outcome.");
        let reloads = IntCounterVec::new(reloads, &["outcome"]).expect("the name and labels are valid");
        let refused = IntGauge::new(
            "stowage_policy_reload_failed",
            "1 while the policy files are rejected and the previous policy stays in force.",
        )
        .expect("the name is valid");
        let window_changes = IntCounter::new(
            "stowage_policy_window_changes_total",
            "Times at which windows of the policy opened or closed.",
        )
        .expect("the name is valid");
        let open_windows =
            IntGauge::new("stowage_policy_open_windows", "Windows of the policy that are open.")
                .expect("the name is valid");
        let info = Opts::new("stowage_policy_info", "1 for the policy in force, by its digest and mode.");
        let info = IntGaugeVec::new(info, &["digest", "mode"]).expect("the name and labels are valid");
        keep(Box::new(reloads.clone()));
        keep(Box::new(refused.clone()));
        keep(Box::new(window_changes.clone()));
        keep(Box::new(open_windows.clone()));
        keep(Box::new(info.clone()));
        // An alert on a rate needs to see the count before its first rise.
        for outcome in ["applied", "unchanged", "rejected"] {
            reloads.with_label_values(&[outcome]);
        }
        Self { reloads, refused, window_changes, open_windows, info, shown: Mutex::default() }
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
        if let Some(before) = shown.replace(labels.clone()).filter(|before| *before != labels) {
            // It is there: it was shown.
            let _ = self.info.remove_label_values(&before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Metrics;
    use super::*;
    use crate::scheduling::policy::Digest;

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
        for (digest, mode, name) in
            [(1, Mode::Enforce, "enforce"), (2, Mode::Enforce, "enforce"), (2, Mode::Shadow, "shadow")]
        {
            (policy.digest, policy.mode) = (Digest(digest), mode);
            for _ in 0..2 {
                metrics.policy.set_in_force(&policy);
                assert_eq!(
                    shown(),
                    [format!("stowage_policy_info{{digest=\"{digest:016x}\",mode=\"{name}\"}} 1")]
                );
            }
        }
    }
}
