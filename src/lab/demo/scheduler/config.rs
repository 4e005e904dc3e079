//! The stand-in scheduler's configuration: one profile and one extender of a KubeSchedulerConfiguration, with v1.36's defaults.

use std::time::Duration;

#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    pub scheduler_name: String,
    pub extender: ExtenderConfig,
    /// `None`: the default formula, (50 − n/125) %, at least 5 % and at least 100 nodes.
    pub percentage_of_nodes_to_score: Option<usize>,
    /// Back-off after the first failure; it doubles with each.
    pub initial_back_off: Duration,
    pub max_back_off: Duration,
    /// How long an unschedulable pod sleeps when nothing wakes it.
    pub flush_unschedulable_after: Duration,
    pub concurrent_binds: usize,
    /// Own plugins' scores are 0 to this, drawn at random.
    pub own_score_jitter: usize,
    pub seed: u64,
}

#[derive(Debug, Clone)]
pub struct ExtenderConfig {
    /// `http://host:port/scheduler`.
    pub url_prefix: String,
    pub timeout: Duration,
    pub weight: i64,
    pub node_cache_capable: bool,
    pub ignorable: bool,
    pub managed_resource: String,
    pub ignored_by_scheduler: bool,
}

impl SchedulerConfig {
    /// As the shipped manifests have it: all nodes asked about, the extender not ignorable, names only.
    pub fn as_shipped(url_prefix: &str) -> Self {
        Self {
            scheduler_name: "stowage".to_owned(),
            extender: ExtenderConfig {
                url_prefix: url_prefix.trim_end_matches('/').to_owned(),
                timeout: Duration::from_secs(15),
                weight: 15,
                node_cache_capable: true,
                ignorable: false,
                managed_resource: "stowage.dev/vram".to_owned(),
                ignored_by_scheduler: false,
            },
            percentage_of_nodes_to_score: Some(100),
            initial_back_off: Duration::from_secs(1),
            max_back_off: Duration::from_secs(10),
            flush_unschedulable_after: Duration::from_secs(300),
            concurrent_binds: 29,
            own_score_jitter: 0,
            seed: 1,
        }
    }

    /// The back-off after the `failures`th failure in a row.
    pub fn back_off(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        self.initial_back_off
            .saturating_mul(1 << doublings)
            .min(self.max_back_off)
    }

    /// How many feasible nodes are enough among `nodes`.
    pub(crate) fn nodes_to_find(&self, nodes: usize) -> usize {
        /// Up to this many, all nodes are checked: sampling would save nothing.
        const MIN_NODES: usize = 100;
        const MIN_PERCENT: usize = 5;
        let percent = self
            .percentage_of_nodes_to_score
            .unwrap_or_else(|| 50_usize.saturating_sub(nodes / 125).max(MIN_PERCENT));
        if nodes < MIN_NODES || percent >= 100 {
            nodes
        } else {
            (nodes * percent / 100).max(MIN_NODES)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_cluster_is_sampled_unless_configured_otherwise() {
        let mut config = SchedulerConfig::as_shipped("http://e/scheduler/");
        assert_eq!(config.nodes_to_find(5000), 5000);
        config.percentage_of_nodes_to_score = None;
        assert_eq!(config.nodes_to_find(99), 99);
        assert_eq!(config.nodes_to_find(150), 100);
        assert_eq!(config.nodes_to_find(1000), 420);
        assert_eq!(config.nodes_to_find(5000), 500);
    }

    #[test]
    fn back_off_doubles_up_to_its_limit() {
        let config = SchedulerConfig::as_shipped("");
        let seconds: Vec<u64> = (1..=6)
            .map(|failures| config.back_off(failures).as_secs())
            .collect();
        assert_eq!(seconds, [1, 2, 4, 8, 10, 10]);
    }
}
