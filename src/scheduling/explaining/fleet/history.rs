//! Sums of the cluster over time: what the page plots of the last hour.

use super::{Fleet, FleetGpu, fleet_gpus};
use crate::ledger::{Ledger, PodPhase};
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::gpu::Health;
use serde::{Deserialize, Serialize};
use std::borrow::Borrow;
use std::collections::{BTreeMap, VecDeque};

/// Sums over the whole cluster at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetSums {
    pub at: Moment,
    pub gpus: u64,
    pub healthy_gpus: u64,
    pub allocatable_bytes: Bytes,
    pub allocated_bytes: Bytes,
    pub unaccounted_bytes: Bytes,
    /// The mean of the GPUs with engines that report it; `None` without any.
    pub kv_cache_mean_percent: Option<u8>,
    pub kv_cache_max_percent: Option<u8>,
    /// Requests that wait, where engines report them.
    pub queue: u64,
    pub pending: u64,
    /// What the pods of each class have.
    pub classes: BTreeMap<String, Bytes>,
}

/// The KV caches of engines while they are added up.
#[derive(Default)]
struct KvCaches {
    percent: u64,
    count: u64,
}

impl FleetSums {
    pub fn from_fleet(fleet: &Fleet) -> Self {
        let classes = fleet
            .classes
            .iter()
            .map(|class| (class.name.clone(), class.allocated_bytes));
        let sums = Self {
            at: fleet.now,
            pending: fleet.pending_count,
            classes: classes.collect(),
            ..Self::default()
        };
        sums.with_gpus(fleet.nodes.iter().flat_map(|node| &node.gpus))
    }

    /// The sums of a ledger, without a [`Fleet`], which takes ten times as long.
    pub fn from_ledger(ledger: &Ledger) -> Self {
        let policy = ledger.policy();
        let mut by_class = vec![Bytes::ZERO; policy.classes().len()];
        for node_state in ledger.all_node_states() {
            let gpus = &node_state.view().gpus;
            for pod in node_state
                .residents()
                .iter()
                .filter(|pod| pod.is_placed || pod.bound_since.is_none())
            {
                let charges = pod.gpus.iter().filter_map(|gpu_index| gpus.get(gpu_index));
                let charged = charges
                    .map(|gpu| gpu.charge_for(pod.per_gpu, pod.sharing))
                    .sum();
                by_class
                    .get_mut(pod.class.index())
                    .into_iter()
                    .for_each(|sum| *sum += charged);
            }
        }
        let names = policy.classes().iter().map(|class| class.name.clone());
        let waiting = ledger
            .pods_in_no_order()
            .filter(|(_, pod)| matches!(pod.phase, PodPhase::Waiting(_)));
        let sums = Self {
            at: ledger.now(),
            pending: waiting.count() as u64,
            classes: names.zip(by_class).collect(),
            ..Self::default()
        };
        sums.with_gpus(
            ledger
                .node_views()
                .flat_map(|(_, node)| fleet_gpus(ledger, node)),
        )
    }

    /// Adds the sums over these GPUs.
    fn with_gpus(mut self, gpus: impl Iterator<Item = impl Borrow<FleetGpu>>) -> Self {
        let mut kv_caches = KvCaches::default();
        for gpu in gpus {
            let gpu = gpu.borrow();
            self.gpus += 1;
            self.healthy_gpus += u64::from(gpu.health == Health::Healthy);
            self.allocatable_bytes += gpu.allocatable_bytes;
            self.allocated_bytes += gpu.allocated_bytes;
            self.unaccounted_bytes += gpu.unaccounted_bytes;
            self.queue += u64::from(gpu.queue.unwrap_or(0));
            // A GPU without engines has an empty KV cache, which says nothing of the engines.
            if let Some(percent) = gpu
                .kv_cache_percent
                .filter(|_| gpu.allocated_bytes > Bytes::ZERO)
            {
                self.kv_cache_max_percent = self.kv_cache_max_percent.max(Some(percent.get()));
                kv_caches.percent += u64::from(percent.get());
                kv_caches.count += 1;
            }
        }
        let mean = kv_caches.percent.checked_div(kv_caches.count);
        self.kv_cache_mean_percent = mean.and_then(|mean| u8::try_from(mean).ok());
        self
    }
}

/// The sums of the last while, oldest first, at even distances.
#[derive(Debug, Clone)]
pub struct FleetHistory {
    interval: Millis,
    max_len: usize,
    sums: VecDeque<FleetSums>,
}

impl FleetHistory {
    /// A history of at most `max_len` sums, one in each `interval`.
    pub fn new(max_len: usize, interval: Millis) -> Self {
        Self {
            interval,
            max_len,
            sums: VecDeque::new(),
        }
    }

    /// How long until the next sums are due.
    pub fn due_in(&self, now: Moment) -> Millis {
        self.sums
            .back()
            .map_or(Millis(0), |latest| (latest.at + self.interval).since(now))
    }

    /// Records the sums if they are due, and drops the oldest beyond the limit. Returns whether it recorded them.
    pub fn record(&mut self, sums: FleetSums) -> bool {
        if self.due_in(sums.at) > Millis(0) {
            return false;
        }
        self.sums.push_back(sums);
        if self.sums.len() > self.max_len {
            self.sums.pop_front();
        }
        true
    }

    pub fn sums(&self) -> &VecDeque<FleetSums> {
        &self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explaining::testkit::{ExplainedCluster, pod};
    use crate::policy::Policy;

    #[test]
    fn sums_are_over_all_gpus_and_kv_caches_over_those_with_pods() {
        let cluster = ExplainedCluster::new(Policy::default()).with_node("a", 3);
        let mut cluster = cluster
            .with_running(&pod("x", "40Gi"), "a", &[0])
            .with_running(&pod("y", "10Gi"), "a", &[1]);
        cluster.report("a", &[(0, 80, 3), (1, 40, 4)], &[]);
        cluster.add_waiting(&pod("waits", "100Gi"));
        let sums = FleetSums::from_fleet(&Fleet::from_ledger(cluster.cluster.ledger(), 0));
        assert_eq!(
            (sums.gpus, sums.healthy_gpus, sums.pending, sums.queue),
            (3, 3, 1, 7)
        );
        assert_eq!(
            (sums.allocatable_bytes, sums.allocated_bytes),
            (Bytes::gib(3 * 72), Bytes::gib(50))
        );
        assert_eq!(
            (sums.kv_cache_mean_percent, sums.kv_cache_max_percent),
            (Some(60), Some(80))
        );
        assert_eq!(
            sums.classes.values().copied().sum::<Bytes>(),
            Bytes::gib(50)
        );
        assert_eq!(FleetSums::from_ledger(cluster.cluster.ledger()), sums);
        let empty = ExplainedCluster::new(Policy::default()).with_node("a", 1);
        let empty = FleetSums::from_fleet(&Fleet::from_ledger(empty.cluster.ledger(), 0));
        assert_eq!(
            (empty.kv_cache_mean_percent, empty.kv_cache_max_percent),
            (None, None)
        );
    }

    #[test]
    fn one_in_ten_seconds_is_kept_and_the_oldest_beyond_the_limit_is_forgotten() {
        let mut history = FleetHistory::new(3, Millis::seconds(10));
        let at = |seconds: u64| Moment(seconds * 1000);
        let kept: Vec<u64> = (0..60)
            .filter(|second| {
                history.record(FleetSums {
                    at: at(*second),
                    ..FleetSums::default()
                })
            })
            .collect();
        assert_eq!(kept, [0, 10, 20, 30, 40, 50]);
        let left: Vec<Moment> = history.sums().iter().map(|sums| sums.at).collect();
        assert_eq!(left, [at(30), at(40), at(50)]);
        assert_eq!(history.due_in(at(53)), Millis::seconds(7));
    }
}
