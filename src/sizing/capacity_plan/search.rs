//! The search for the fewest GPUs that hold all pods which ask for VRAM: doubling and bisection over trials, in several orders.
//!
//! What a trial says is not monotone in the number of GPUs, so the number found is the smallest of those that were tried; the
//! lower bound beside it says how far it may be off.

use super::device_plugin::PluginPlan;
use super::order::PlacingOrder;
use super::trial::{CandidateNodes, Obstacles, Trial, TrialSetting};

/// Pods without a place, and why.
pub(crate) type NotHeld = Vec<(usize, Obstacles)>;

/// Number of GPUs of each kind of node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fleet(Vec<u32>);

/// Search over fleets for pods that request VRAM.
pub struct Search<'q> {
    setting: &'q TrialSetting<'q>,
    plugin: &'q PluginPlan,
    /// Maximum number of GPUs, by kind of node.
    max_gpus: Vec<u32>,
    orders: Vec<(PlacingOrder, Vec<usize>)>,
}

/// The fewest GPUs that were found to hold the pods, and in which order.
#[derive(Debug, Clone)]
pub struct SearchResult {
    pub fleet: Fleet,
    pub order: PlacingOrder,
    /// Pods that do not fit even on all nodes that there may be.
    pub not_held: NotHeld,
}

/// When a trial ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TrialEnd {
    /// With the first pod that has no place.
    FirstMisfit,
    LastPod,
}

impl Fleet {
    pub fn gpus(&self, template: usize) -> u32 {
        self.0[template]
    }
}

/// Pods of one workload, which are equal in all but name.
fn are_same_workload(setting: &TrialSetting<'_>, one: usize, other: usize) -> bool {
    one == other || setting.pod(one).workload == setting.pod(other).workload
}

impl<'q> Search<'q> {
    /// Search for these pods, by index in the question. `max_gpus` is the maximum number of GPUs, by kind of node.
    pub fn new(
        setting: &'q TrialSetting<'q>,
        plugin: &'q PluginPlan,
        pods: &[usize],
        max_gpus: Vec<u32>,
    ) -> Self {
        let mut orders: Vec<(PlacingOrder, Vec<usize>)> = Vec::new();
        for order in PlacingOrder::ALL {
            let indices = order.arrange(&setting.question.pods, pods);
            // Replicas of one workload are in the same order whatever it is called: one trial stands for all three.
            let is_same = |existing: &[usize]| {
                existing
                    .iter()
                    .zip(&indices)
                    .all(|(one, other)| are_same_workload(setting, *one, *other))
            };
            if !orders.iter().any(|(_, pod_indices)| is_same(pod_indices)) {
                orders.push((order, indices));
            }
        }
        Self {
            setting,
            plugin,
            max_gpus,
            orders,
        }
    }

    /// The fewest GPUs that hold all pods, or the most pods that all nodes hold. With one kind of node the search starts at
    /// `least` GPUs.
    pub fn run(&mut self, least: u32) -> SearchResult {
        if let Some((fleet, order)) = self.fewest_fleet(least) {
            return SearchResult {
                fleet,
                order,
                not_held: Vec::new(),
            };
        }
        let (order, not_held) = self.best_order();
        let is_held = |index: &usize| not_held.iter().all(|(other, _)| other != index);
        self.orders
            .iter_mut()
            .for_each(|(_, pod_indices)| pod_indices.retain(is_held));
        match self.fewest_fleet(0) {
            Some((fleet, order)) => SearchResult {
                fleet,
                order,
                not_held,
            },
            // Fewer pods are held in no order: as it is with all nodes.
            None => SearchResult {
                fleet: Fleet(self.max_gpus.clone()),
                order,
                not_held,
            },
        }
    }

    /// Fewest GPUs of one kind of node that hold all pods by themselves, if they are less than `below`.
    pub fn fewest_alone(&self, kind: usize, least: u32, below: u32) -> Option<u32> {
        let most = self.max_gpus[kind].min(below.checked_sub(1)?);
        let mut fleet = Fleet(vec![0; self.max_gpus.len()]);
        fleet.0[kind] = most;
        // Usually they are too few, and one trial shows it.
        self.first_order_that_holds(&fleet)?;
        let mut only = fleet.clone();
        match self.fewest_of_kind(&mut only, kind, least.min(most)) {
            Some(_) => Some(only.gpus(kind).min(most)),
            None => Some(most),
        }
    }

    /// Runs one trial in one order. Returns the pods that do not fit, with their obstacles; empty if all fit.
    pub fn trial(&self, fleet: &Fleet, order: PlacingOrder) -> (Trial<'q>, NotHeld) {
        self.run_trial(fleet, order, TrialEnd::LastPod)
    }

    fn fewest_fleet(&self, least: u32) -> Option<(Fleet, PlacingOrder)> {
        let used: Vec<usize> = (0..self.max_gpus.len())
            .filter(|kind| self.max_gpus[*kind] > 0)
            .collect();
        let mut fleet = Fleet(self.max_gpus.clone());
        let mut order = None;
        if let [only] = used[..] {
            return self
                .fewest_of_kind(&mut fleet, only, least.min(self.max_gpus[only]))
                .map(|order| (fleet, order));
        }
        if used.is_empty() || self.first_order_that_holds(&fleet).is_none() {
            return self
                .first_order_that_holds(&fleet)
                .map(|order| (fleet, order));
        }
        // Nodes of a later kind are added only for what the earlier ones cannot hold.
        for kind in used.into_iter().rev() {
            order = self.fewest_of_kind(&mut fleet, kind, 0).or(order);
        }
        order.map(|order| (fleet, order))
    }

    /// Sets the fleet to the fewest GPUs of the kind, at least `least`, with which it holds all pods; `None` if no number does.
    fn fewest_of_kind(&self, fleet: &mut Fleet, kind: usize, least: u32) -> Option<PlacingOrder> {
        let mut holds = |gpus: u32| {
            fleet.0[kind] = gpus;
            self.first_order_that_holds(fleet)
        };
        let (mut too_few, mut gpus, mut step) = (None, least, 1);
        let mut order = loop {
            if let Some(order) = holds(gpus) {
                break order;
            }
            too_few = Some(gpus);
            if gpus >= self.max_gpus[kind] {
                return None;
            }
            gpus = gpus.saturating_add(step).min(self.max_gpus[kind]);
            step *= 2;
        };
        while let Some(few) = too_few.filter(|few| gpus - few > 1) {
            let middle = few + (gpus - few) / 2;
            match holds(middle) {
                Some(found) => (gpus, order) = (middle, found),
                None => too_few = Some(middle),
            }
        }
        fleet.0[kind] = gpus;
        Some(order)
    }

    /// First order in which the fleet holds all pods.
    fn first_order_that_holds(&self, fleet: &Fleet) -> Option<PlacingOrder> {
        let mut orders = self.orders.iter().map(|(order, _)| *order);
        orders.find(|order| {
            self.run_trial(fleet, *order, TrialEnd::FirstMisfit)
                .1
                .is_empty()
        })
    }

    /// The order in which all nodes hold the most pods, and those that they do not.
    fn best_order(&self) -> (PlacingOrder, NotHeld) {
        let all = Fleet(self.max_gpus.clone());
        let each = self
            .orders
            .iter()
            .map(|(order, _)| (*order, self.run_trial(&all, *order, TrialEnd::LastPod).1));
        each.min_by_key(|(_, not_held)| not_held.len())
            .expect("there are orders")
    }

    fn run_trial(
        &self,
        fleet: &Fleet,
        order: PlacingOrder,
        until: TrialEnd,
    ) -> (Trial<'q>, NotHeld) {
        let mut trial = Trial::new(self.setting);
        // The plugin's pods are on nodes of their own, and count towards their tenants' quotas.
        self.plugin.place_all(&mut trial, self.setting);
        for kind in 0..self.max_gpus.len() {
            trial.add_nodes(kind, fleet.gpus(kind));
        }
        let mut not_held = Vec::new();
        let indices = self
            .orders
            .iter()
            .find(|(tried_order, _)| *tried_order == order)
            .map_or(&[][..], |(_, pod_indices)| pod_indices);
        for index in indices {
            if let Err(obstacles) = trial.place(*index, CandidateNodes::Any) {
                not_held.push((*index, obstacles));
                if until == TrialEnd::FirstMisfit {
                    break;
                }
            }
        }
        (trial, not_held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capacity_plan::testkit::{nodes, policy, question, shared_pod};

    #[test]
    fn orders_that_differ_in_nothing_are_tried_once() {
        let orders = |gib: [u64; 3]| {
            let pods = gib.map(|gib| shared_pod("p", gib));
            let asked = question(policy(&[]), pods, [nodes(8, 80)]);
            let setting = TrialSetting::new(&asked);
            Search::new(&setting, &PluginPlan::default(), &[0, 1, 2], vec![3])
                .orders
                .len()
        };
        assert_eq!((orders([30, 30, 30]), orders([10, 20, 30])), (1, 2));
    }
}
