//! Upper bounds of GPU allocation for any placement policy, by a linear program ([`program`]) on how many pods of each kind had
//! arrived ([`demand_at_load`]). How near a policy comes is not known here.
//!
//! When more has been requested than there is, some pods are rejected, and a policy that knew the future would choose which:
//! about such a policy little more can be said than that GPUs are finite. Real policies place every pod that fits. So there are
//! two bounds: for [any policy](AllocationBound::of_anybody_at_130), and for policies that [place at least the
//! pods](AllocationBound::at_130) that the best simulated policy had placed before it first rejected a pod that accepts the
//! same GPU models.

pub mod demand_at_load;
pub mod program;

use super::arrivals::Arrivals;
use super::cluster::SimulatedCluster;
use super::placer::{PlacedPod, Placer, PodArrival};
use super::policy::SimulatedPolicy;
use super::trace::{PodKind, WorkloadTrace};
use crate::simulate::openb::WHOLE_GPU;
use demand_at_load::DemandAtLoad;
use program::{Unsolved, max_allocation};
use serde::Serialize;

/// Percent of all GPUs; absent for a load at which no pod arrived.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AllocationBound {
    /// The policy that rejected no pod for longest.
    pub begins_as: SimulatedPolicy,
    /// Requests of the pods that it had placed by then, whichever pods were rejected later: the mean over seeds.
    pub placed: f64,
    /// For policies that place those pods too.
    pub at_100: Option<f64>,
    pub at_130: Option<f64>,
    /// For any policy, including one that rejects pods that fit.
    pub of_anybody_at_100: Option<f64>,
    pub of_anybody_at_130: Option<f64>,
}

/// A policy's run with each seed until it first rejected a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyUntilRefusal {
    pub policy: SimulatedPolicy,
    pub until: Vec<ArrivalsUntilRefusal>,
}

/// By kind: how many pods had arrived when the first was rejected that accepts the same GPU models. Of the kind's own pods, all
/// that arrived before were placed, and stayed.
pub type ArrivalsUntilRefusal = Vec<usize>;

impl AllocationBound {
    /// From the means over these seeds of what was allocated; `None` without runs.
    pub fn from_runs(
        setting: &WorkloadTrace,
        arrivals: &[Arrivals],
        policy_runs: &[PolicyUntilRefusal],
    ) -> Result<Option<Self>, Unsolved> {
        let placed = |beginning: &PolicyUntilRefusal| {
            mean_placed_percent(setting, arrivals, &beginning.until)
        };
        // Of equals the one that was requested first.
        let best_policy = policy_runs
            .iter()
            .rev()
            .max_by(|a, b| placed(a).total_cmp(&placed(b)));
        let Some(longest) = best_policy.filter(|_| !arrivals.is_empty()) else {
            return Ok(None);
        };
        let none_required = vec![vec![0; setting.kinds.len()]; arrivals.len()];
        let at = |until: &[ArrivalsUntilRefusal], load| bound_at(setting, arrivals, until, load);
        Ok(Some(Self {
            begins_as: longest.policy,
            placed: placed(longest),
            at_100: at(&longest.until, 100)?,
            at_130: at(&longest.until, 130)?,
            of_anybody_at_100: at(&none_required, 100)?,
            of_anybody_at_130: at(&none_required, 130)?,
        }))
    }
}

fn bound_at(
    setting: &WorkloadTrace,
    arrivals: &[Arrivals],
    until: &[ArrivalsUntilRefusal],
    load: u64,
) -> Result<Option<f64>, Unsolved> {
    let Some(demand) = DemandAtLoad::mean_at(setting, arrivals, until, load) else {
        return Ok(None);
    };
    Ok(Some(percent_of_capacity(
        setting,
        max_allocation(setting, &demand)? * f64::from(WHOLE_GPU),
    )))
}

fn mean_placed_percent(
    setting: &WorkloadTrace,
    arrivals: &[Arrivals],
    until: &[ArrivalsUntilRefusal],
) -> f64 {
    let of = |(arrivals, until): (&Arrivals, &ArrivalsUntilRefusal)| -> u64 {
        let placed = arrivals
            .iter(setting)
            .filter(|arrival| arrival.number < until[arrival.kind]);
        placed
            .map(|arrival| setting.kinds[arrival.kind].milli_gpus())
            .sum()
    };
    let requested: u64 = arrivals.iter().zip(until).map(of).sum();
    percent_of_capacity(setting, requested as f64 / arrivals.len().max(1) as f64)
}

fn percent_of_capacity(setting: &WorkloadTrace, milli: f64) -> f64 {
    100.0 * milli / setting.capacity().max(1) as f64
}

/// Observes a policy until the first pod of each kind is rejected. An eviction is the end for all kinds. Pods that do not fit
/// on any empty node are rejected by every policy, and are ignored.
pub struct RefusalRecorder<'p> {
    setting: &'p WorkloadTrace,
    placer: Box<dyn Placer + 'p>,
    arrivals: usize,
    until: Vec<Option<usize>>,
}

impl<'p> RefusalRecorder<'p> {
    pub fn new(setting: &'p WorkloadTrace, placer: Box<dyn Placer + 'p>) -> Self {
        let until = |kind| {
            if setting.fits_empty_cluster(kind) {
                None
            } else {
                Some(0)
            }
        };
        Self {
            setting,
            placer,
            arrivals: 0,
            until: setting.kinds.iter().map(until).collect(),
        }
    }

    pub fn until(self) -> ArrivalsUntilRefusal {
        self.until
            .into_iter()
            .map(|until| until.unwrap_or(self.arrivals))
            .collect()
    }

    /// From here on this run says nothing about such kinds.
    fn mark_refused(&mut self, is_like: impl Fn(&PodKind) -> bool) {
        for (until, kind) in self.until.iter_mut().zip(&self.setting.kinds) {
            if is_like(kind) {
                until.get_or_insert(self.arrivals);
            }
        }
    }
}

impl Placer for RefusalRecorder<'_> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<PlacedPod> {
        let placed = self.placer.place(cluster, arrival);
        let kind = &self.setting.kinds[arrival.kind];
        match &placed {
            Some(placed) if placed.victims.is_empty() => {}
            Some(_) => self.mark_refused(|_| true),
            None if !self.setting.fits_empty_cluster(kind) => {}
            None => self.mark_refused(|other| other.models == kind.models),
        }
        self.arrivals += 1;
        placed
    }

    fn end(&mut self, number: usize) {
        self.placer.end(number);
    }
}

#[cfg(test)]
mod tests;
