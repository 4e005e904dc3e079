//! Recent demand: what the last pods requested, how many pods ended meanwhile, and how many never got a place.
//!
//! Only past arrivals are stored, never future ones: a history that knew a workload's future would look better than it can be. It
//! is bounded, and cheap to add to, because the ledger adds to it under its lock. Conclusions from it are drawn elsewhere.

use crate::ids::GpuModel;
use crate::policy::scoring::DEFAULT_DEMAND_WINDOW;
use crate::units::Bytes;
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::device_plugin::GpuRequest;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Pods that must have arrived before anything is concluded about later ones.
pub const MIN_ARRIVALS: usize = 10;
/// Learning is repeated after this many more arrivals: a twentieth of what is remembered.
pub const LEARN_INTERVAL: u64 = 100;

/// The shape of one pod's request, as far as its placement is concerned.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DemandShape {
    /// VRAM on each of its GPUs.
    pub per_gpu: Bytes,
    pub gpus: u32,
    pub sharing: Sharing,
    pub host_resources: HostResources,
    /// GPU models that it may run on; empty means any.
    pub models: Arc<[GpuModel]>,
}

impl DemandShape {
    /// The shape of a demand; `None` for a pod whose GPUs a device plugin assigns: Stowage cannot share them.
    pub fn from_demand(demand: &Demand) -> Option<Self> {
        let Demand {
            per_gpu,
            gpus,
            sharing,
            host_resources,
            models,
            ..
        } = demand;
        (demand.ask == GpuRequest::Vram).then(|| Self {
            per_gpu: *per_gpu,
            gpus: *gpus,
            sharing: *sharing,
            host_resources: *host_resources,
            models: models.clone(),
        })
    }

    fn vram(&self) -> Bytes {
        self.per_gpu.times(self.gpus.into())
    }
}

/// The latest demand shapes, up to the window.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(from = "StoredHistory", into = "StoredHistory")]
pub struct DemandHistory {
    window: usize,
    latest: VecDeque<RememberedArrival>,
    counts: BTreeMap<Arc<DemandShape>, u32>,
    departures: u64,
    requested: Bytes,
    turned_away: Bytes,
    /// The VRAM of pods that were refused and still wait.
    waiting: Bytes,
    arrivals: u64,
}

/// What happened between this arrival and the next.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RememberedArrival {
    demand_shape: Arc<DemandShape>,
    /// The number of pods that ended.
    departures: u32,
    /// The VRAM of pods that were refused and gave up.
    turned_away: Bytes,
}

/// The stored form of a history: its sums and counts follow from the arrivals.
#[derive(Serialize, Deserialize)]
struct StoredHistory {
    window: usize,
    latest: VecDeque<RememberedArrival>,
    waiting: Bytes,
    arrivals: u64,
}

impl From<DemandHistory> for StoredHistory {
    fn from(history: DemandHistory) -> Self {
        let DemandHistory {
            window,
            latest,
            waiting,
            arrivals,
            ..
        } = history;
        Self {
            window,
            latest,
            waiting,
            arrivals,
        }
    }
}

impl From<StoredHistory> for DemandHistory {
    fn from(stored: StoredHistory) -> Self {
        let mut history = Self {
            window: stored.window.max(1),
            ..Self::with_window(1)
        };
        for arrival in stored.latest {
            history.record_arrival(DemandShape::clone(&arrival.demand_shape));
            if let Some(latest) = history.latest.back_mut() {
                (latest.departures, latest.turned_away) = (arrival.departures, arrival.turned_away);
            }
            history.departures += u64::from(arrival.departures);
            history.turned_away += arrival.turned_away;
        }
        Self {
            waiting: stored.waiting,
            arrivals: stored.arrivals,
            ..history
        }
    }
}

impl Default for DemandHistory {
    fn default() -> Self {
        Self::with_window(DEFAULT_DEMAND_WINDOW)
    }
}

impl DemandHistory {
    /// A history of at most `window` demand shapes, and at least one.
    pub fn with_window(window: u16) -> Self {
        Self {
            window: usize::from(window).max(1),
            latest: VecDeque::new(),
            counts: BTreeMap::new(),
            departures: 0,
            requested: Bytes::ZERO,
            turned_away: Bytes::ZERO,
            waiting: Bytes::ZERO,
            arrivals: 0,
        }
    }

    /// Changes the number of demand shapes that are remembered.
    pub(crate) fn set_window(&mut self, window: u16) {
        self.window = usize::from(window).max(1);
        while self.latest.len() > self.window {
            self.forget_oldest();
        }
    }

    /// Records a pod that is observed for the first time.
    pub fn record_arrival(&mut self, demand_shape: DemandShape) {
        if self.latest.len() == self.window {
            self.forget_oldest();
        }
        let demand_shape = match self.counts.get_key_value(&demand_shape) {
            Some((shared, _)) => shared.clone(),
            None => Arc::new(demand_shape),
        };
        *self.counts.entry(demand_shape.clone()).or_default() += 1;
        self.requested += demand_shape.vram();
        self.latest.push_back(RememberedArrival {
            demand_shape,
            departures: 0,
            turned_away: Bytes::ZERO,
        });
        self.arrivals = self.arrivals.saturating_add(1);
    }

    /// Records the end of a pod that had a place.
    pub(crate) fn record_departure(&mut self) {
        if let Some(latest) = self.latest.back_mut() {
            latest.departures += 1;
            self.departures += 1;
        }
    }

    /// Records that a pod with this request was refused and is gone.
    pub(crate) fn record_unmet_demand(&mut self, vram: Bytes) {
        if let Some(latest) = self.latest.back_mut() {
            latest.turned_away += vram;
            self.turned_away += vram;
        }
    }

    /// Sets the total VRAM that refused pods still wait for.
    pub(crate) fn with_waiting(self, vram: Bytes) -> Self {
        Self {
            waiting: vram,
            ..self
        }
    }

    /// The number of all arrivals, including forgotten ones.
    pub fn arrivals(&self) -> u64 {
        self.arrivals
    }

    /// Whether to learn again, if that was last done after `learned_at` arrivals: twice as many at first, because a place that
    /// was chosen for no reason stays spoilt. After more arrivals than there are it was learned of another history, which counts
    /// until there is enough of this one.
    pub fn is_due(&self, learned_at: u64) -> bool {
        match self.arrivals.checked_sub(learned_at) {
            Some(since) => since >= learned_at.clamp(MIN_ARRIVALS as u64, LEARN_INTERVAL),
            None => self.arrivals >= MIN_ARRIVALS as u64,
        }
    }

    /// The number of demand shapes that it remembers.
    pub fn len(&self) -> usize {
        self.latest.len()
    }

    pub fn is_empty(&self) -> bool {
        self.latest.is_empty()
    }

    /// Each demand shape, and its count; in order.
    pub fn demand_shapes(&self) -> impl Iterator<Item = (&DemandShape, u32)> + Clone {
        self.counts
            .iter()
            .map(|(demand_shape, count)| (&**demand_shape, *count))
    }

    /// The number of pods that ended, per arrival.
    pub(crate) fn departures_per_arrival(&self) -> f64 {
        self.departures as f64 / self.latest.len().max(1) as f64
    }

    /// The demand that found no place, divided by all demand; more than 1 where many pods wait that arrived long ago.
    pub fn unmet_ratio(&self) -> f64 {
        (self.turned_away + self.waiting).0 as f64 / self.requested.0.max(1) as f64
    }

    fn forget_oldest(&mut self) {
        let Some(RememberedArrival {
            demand_shape,
            departures,
            turned_away,
        }) = self.latest.pop_front()
        else {
            return;
        };
        self.departures -= u64::from(departures);
        self.turned_away = self.turned_away.minus(turned_away);
        self.requested = self.requested.minus(demand_shape.vram());
        if let Some(count) = self.counts.get_mut(&demand_shape) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&demand_shape);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demand_shape(gib: u64) -> DemandShape {
        DemandShape {
            per_gpu: Bytes::gib(gib),
            gpus: 1,
            sharing: Sharing::Shared,
            host_resources: HostResources::default(),
            models: [].into(),
        }
    }

    fn seen(demand_history: &DemandHistory) -> Vec<(u64, u32)> {
        demand_history
            .demand_shapes()
            .map(|(demand_shape, count)| (demand_shape.per_gpu.0 >> 30, count))
            .collect()
    }

    #[test]
    fn the_oldest_arrivals_are_forgotten_with_their_departures() {
        let mut demand_history = DemandHistory::with_window(3);
        demand_history.record_arrival(demand_shape(10));
        demand_history.record_departure();
        demand_history.record_departure();
        for gib in [20, 10, 20] {
            demand_history.record_arrival(demand_shape(gib));
        }
        assert_eq!(seen(&demand_history), [(10, 1), (20, 2)]);
        assert_eq!(
            (
                demand_history.len(),
                demand_history.arrivals(),
                demand_history.departures_per_arrival()
            ),
            (3, 4, 0.0)
        );
    }

    #[test]
    fn learning_intervals_grow_up_to_a_hundred_arrivals() {
        let mut demand_history = DemandHistory::default();
        let (mut learned_at, mut due) = (0, Vec::new());
        for _ in 0..400 {
            demand_history.record_arrival(demand_shape(1));
            if demand_history.is_due(learned_at) {
                learned_at = demand_history.arrivals();
                due.push(learned_at);
            }
        }
        assert_eq!(due, [10, 20, 40, 80, 160, 260, 360]);
    }

    #[test]
    fn after_a_longer_history_is_discarded_learning_is_due_once_there_is_enough() {
        let mut demand_history = DemandHistory::default();
        (0..9).for_each(|_| demand_history.record_arrival(demand_shape(1)));
        assert!(!demand_history.is_due(50_000));
        demand_history.record_arrival(demand_shape(1));
        assert!(demand_history.is_due(50_000));
    }

    #[test]
    fn a_smaller_window_takes_effect_at_once() {
        let mut demand_history = DemandHistory::default();
        (1..=5).for_each(|gib| demand_history.record_arrival(demand_shape(gib)));
        demand_history.set_window(2);
        assert_eq!(seen(&demand_history), [(4, 1), (5, 1)]);
    }

    #[test]
    fn unmet_demand_is_forgotten_with_the_arrivals_of_its_time() {
        let mut demand_history = DemandHistory::with_window(2);
        demand_history.record_arrival(DemandShape {
            gpus: 3,
            ..demand_shape(10)
        });
        demand_history.record_unmet_demand(Bytes::gib(30));
        demand_history.record_arrival(demand_shape(10));
        assert_eq!(demand_history.unmet_ratio(), 0.75);
        demand_history.record_arrival(demand_shape(10));
        assert_eq!(demand_history.unmet_ratio(), 0.0);
        assert_eq!(
            demand_history.with_waiting(Bytes::gib(5)).unmet_ratio(),
            0.25
        );
    }

    #[test]
    fn departures_before_the_first_arrival_are_not_counted() {
        let mut demand_history = DemandHistory::default();
        demand_history.record_departure();
        demand_history.record_arrival(demand_shape(1));
        demand_history.record_departure();
        assert_eq!(demand_history.departures_per_arrival(), 1.0);
    }
}
