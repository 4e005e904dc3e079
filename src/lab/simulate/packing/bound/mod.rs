//! Upper bounds of GPU allocation for any placement policy, by a linear program ([`program`]) on how many pods of each kind had
//! arrived ([`demand_at_load`]). How near a policy comes is not known here.
//!
//! When more has been requested than there is, some pods are rejected, and a policy that knew the future would choose which:
//! about such a policy little more can be said than that GPUs are finite. Real policies place every pod that fits. So there are
//! two bounds: for [any policy](AllocationBound::of_anybody_at_130), and for policies that [place at least the
//! pods](AllocationBound::at_130) that the best simulated policy had placed before it first rejected a pod that accepts the
//! same GPU models.

pub mod asked;
pub mod program;

use super::arrivals::Arrivals;
use super::cluster::SimulatedCluster;
use super::placer::{Placed, Placer, PodArrival};
use super::policy::PlayedPolicy;
use super::trace::{PlayedTrace, PodKind};
use crate::simulate::openb::WHOLE_GPU;
use asked::DemandAtLoad;
use program::{Unsolved, most};
use serde::Serialize;

/// Percent of all GPUs; absent for a load at which no pod arrived.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AllocationBound {
    /// The policy that rejected no pod for longest.
    pub begins_as: PlayedPolicy,
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
pub struct UntilFirstRefusal {
    pub policy: PlayedPolicy,
    pub until: Vec<Until>,
}

/// By kind: how many pods had arrived when the first was rejected that accepts the same GPU models. Of the kind's own pods, all
/// that arrived before were placed, and stayed.
pub type Until = Vec<usize>;

impl AllocationBound {
    /// From the means over these seeds of what was allocated; `None` without runs.
    pub fn of(
        setting: &PlayedTrace,
        arrivals: &[Arrivals],
        beginnings: &[UntilFirstRefusal],
    ) -> Result<Option<Self>, Unsolved> {
        let placed = |beginning: &UntilFirstRefusal| placed(setting, arrivals, &beginning.until);
        // Of equals the one that was requested first.
        let longest = beginnings
            .iter()
            .rev()
            .max_by(|a, b| placed(a).total_cmp(&placed(b)));
        let Some(longest) = longest.filter(|_| !arrivals.is_empty()) else {
            return Ok(None);
        };
        let nobody = vec![vec![0; setting.kinds.len()]; arrivals.len()];
        let at = |until: &[Until], load| at(setting, arrivals, until, load);
        Ok(Some(Self {
            begins_as: longest.policy,
            placed: placed(longest),
            at_100: at(&longest.until, 100)?,
            at_130: at(&longest.until, 130)?,
            of_anybody_at_100: at(&nobody, 100)?,
            of_anybody_at_130: at(&nobody, 130)?,
        }))
    }
}

fn at(
    setting: &PlayedTrace,
    arrivals: &[Arrivals],
    until: &[Until],
    load: u64,
) -> Result<Option<f64>, Unsolved> {
    let Some(asked) = DemandAtLoad::at(setting, arrivals, until, load) else {
        return Ok(None);
    };
    Ok(Some(hundredths(
        setting,
        most(setting, &asked)? * f64::from(WHOLE_GPU),
    )))
}

fn placed(setting: &PlayedTrace, arrivals: &[Arrivals], until: &[Until]) -> f64 {
    let of = |(arrivals, until): (&Arrivals, &Until)| -> u64 {
        let placed = arrivals
            .iter(setting)
            .filter(|arrival| arrival.number < until[arrival.kind]);
        placed
            .map(|arrival| setting.kinds[arrival.kind].milli_gpus())
            .sum()
    };
    let asked: u64 = arrivals.iter().zip(until).map(of).sum();
    hundredths(setting, asked as f64 / arrivals.len().max(1) as f64)
}

fn hundredths(setting: &PlayedTrace, milli: f64) -> f64 {
    100.0 * milli / setting.capacity().max(1) as f64
}

/// Observes a policy until the first pod of each kind is rejected. An eviction is the end for all kinds. Pods that do not fit
/// on any empty node are rejected by every policy, and are ignored.
pub struct ObservedPlacer<'p> {
    setting: &'p PlayedTrace,
    placer: Box<dyn Placer + 'p>,
    came: usize,
    until: Vec<Option<usize>>,
}

impl<'p> ObservedPlacer<'p> {
    pub fn new(setting: &'p PlayedTrace, placer: Box<dyn Placer + 'p>) -> Self {
        let until = |kind| {
            if setting.could_fit(kind) {
                None
            } else {
                Some(0)
            }
        };
        Self {
            setting,
            placer,
            came: 0,
            until: setting.kinds.iter().map(until).collect(),
        }
    }

    pub fn until(self) -> Until {
        self.until
            .into_iter()
            .map(|until| until.unwrap_or(self.came))
            .collect()
    }

    /// From here on this run says nothing about such kinds.
    fn stop(&mut self, is_like: impl Fn(&PodKind) -> bool) {
        for (until, kind) in self.until.iter_mut().zip(&self.setting.kinds) {
            if is_like(kind) {
                until.get_or_insert(self.came);
            }
        }
    }
}

impl Placer for ObservedPlacer<'_> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<Placed> {
        let placed = self.placer.place(cluster, arrival);
        let kind = &self.setting.kinds[arrival.kind];
        match &placed {
            Some(placed) if placed.evicted.is_empty() => {}
            Some(_) => self.stop(|_| true),
            None if !self.setting.could_fit(kind) => {}
            None => self.stop(|other| other.models == kind.models),
        }
        self.came += 1;
        placed
    }

    fn end(&mut self, number: usize) {
        self.placer.end(number);
    }
}

#[cfg(test)]
mod tests;
