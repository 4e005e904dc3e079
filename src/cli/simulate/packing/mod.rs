//! `stowage simulate packing`: GPU allocation under several policies, as a table, a JSON object or a picture. The simulation is
//! in `lab::simulate::packing`; this file has the arguments, and the parallel runs.
//!
//! [`source`] reads the trace and the published results next to it, [`through_extender`] calls the verbs over HTTP, [`table`]
//! and [`picture`] format the results.

mod picture;
mod source;
mod table;
mod through_extender;

use super::{Seeds, progress_bar, run_parallel};
use crate::cli::output::{Columns, OutputArgs};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use source::PackingTrace;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_lab::picture::PictureFile;
use stowage_lab::simulate::packing::bound::{AllocationBound, PolicyUntilRefusal, RefusalRecorder};
use stowage_lab::simulate::packing::churn::churn;
use stowage_lab::simulate::packing::placer::Placer;
use stowage_lab::simulate::packing::replay::has_high_priority;
use stowage_lab::simulate::packing::report::RejectionLine;
use stowage_lab::simulate::packing::{
    Arrivals, CpuRule, OfferedLoad, PackingLine, SimulatedEviction, SimulatedPolicy, TypicalPods,
    WorkloadTrace, replay,
};
use through_extender::ThroughExtender;

#[derive(Debug, Args)]
pub struct PackingArgs {
    /// The directory of the openb trace [default: a small generated trace]
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,

    /// Which of the trace's lists of pods: NAME of openb_pod_list_NAME.csv
    #[arg(
        long,
        value_name = "NAME",
        default_value = "default",
        requires = "trace"
    )]
    variant: String,

    /// Policies to run, separated by commas: random, dot-product, clustering, packing, best-fit, fgd, stowage [default: these],
    /// and stowage-known-demand, which knows beforehand how often each pod will come
    #[arg(long, value_name = "P", value_delimiter = ',')]
    policy: Vec<SimulatedPolicy>,

    /// One seed, or an inclusive range
    #[arg(long, value_name = "A..B", default_value = "42..51")]
    seeds: Seeds,

    /// Let pods end, at this load of all GPUs, and count rejected pods: 0.95 for 95 %
    #[arg(long, value_name = "LOAD", conflicts_with = "preempt_best_effort")]
    churn: Option<OfferedLoad>,

    /// Let Stowage evict best-effort pods for serving pods
    #[arg(long)]
    preempt_best_effort: bool,

    /// Call Stowage through its HTTP verbs, as kube-scheduler would: scores 0 to 10, ties at random
    #[arg(long, conflicts_with = "preempt_best_effort")]
    through_extender: bool,

    /// How pods without GPUs are placed beside Stowage: by the learned packing, or best fit
    #[arg(long, value_enum, value_name = "RULE", default_value_t = CpuPodPolicy::Learned)]
    cpu_pods: CpuPodPolicy,

    /// Print upper bounds of the allocation: for policies that begin like the last one to reject a pod, and for any policy
    /// (some seconds)
    #[arg(long, conflicts_with_all = ["churn", "preempt_best_effort"])]
    bound: bool,

    /// Draw the allocated and the fragmented share over the requested share
    #[arg(long, value_name = "FILE.svg|png", conflicts_with = "churn")]
    plot: Option<PictureFile>,

    #[command(flatten)]
    output: OutputArgs,
}

/// What is printed for programs; `L` is a policy's result.
#[derive(Debug, Serialize)]
struct PackingOutput<'a, L> {
    variant: &'a str,
    results: &'a [L],
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<&'a AllocationBound>,
}

/// Results of policies, and when each first rejected a pod.
struct PackingResults {
    lines: Vec<PackingLine>,
    beginnings: Vec<PolicyUntilRefusal>,
}

/// The setup that all runs share.
struct PackingSetup {
    source: PackingTrace,
    played_trace: WorkloadTrace,
    typical: TypicalPods,
    arrivals: Vec<Arrivals>,
    policies: Vec<SimulatedPolicy>,
    eviction: SimulatedEviction,
    driver: StowageDriver,
    cpu_rule: CpuRule,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CpuPodPolicy {
    Learned,
    BestFit,
}

impl From<CpuPodPolicy> for CpuRule {
    fn from(pods: CpuPodPolicy) -> Self {
        match pods {
            CpuPodPolicy::Learned => Self::Learned,
            CpuPodPolicy::BestFit => Self::BestFit,
        }
    }
}

/// How Stowage is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StowageDriver {
    InProcess,
    ThroughExtender,
}

impl PackingArgs {
    pub fn run(self) -> Result<ExitCode> {
        let setup = self.setup()?;
        match self.churn {
            None => {
                let PackingResults { lines, beginnings } = setup.run_replays()?;
                if let Some(file) = &self.plot {
                    file.write(
                        &table::title(&setup.source, &setup.played_trace, &self.seeds.0),
                        &picture::panels(&lines),
                    )?;
                }
                let bound = self.bound_on(&setup, &beginnings)?;
                let text = |columns| {
                    table::allocation_table(
                        &setup.source,
                        &setup.played_trace,
                        &lines,
                        bound.as_ref(),
                        columns,
                    )
                };
                self.print(&setup, &lines, bound.as_ref(), text)?;
            }
            Some(load) => {
                let losses = setup.run_churn(load)?;
                let text = |columns| {
                    table::losses_table(&setup.source, &setup.played_trace, &losses, columns)
                };
                self.print(&setup, &losses, None, text)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    fn setup(&self) -> Result<PackingSetup> {
        let source = match &self.trace {
            Some(directory) => PackingTrace::read(directory, &self.variant)?,
            None => PackingTrace::built_in(),
        };
        let played_trace = WorkloadTrace::from_trace(&source.trace);
        if self.churn.is_some() && self.policy.contains(&SimulatedPolicy::StowageKnownDemand) {
            bail!(
                "stowage-known-demand knows which pods come and not which end; leave it or --churn out"
            );
        }
        if self.preempt_best_effort
            && !played_trace
                .pods
                .iter()
                .any(|pod| has_high_priority(pod.qos))
        {
            bail!(
                "no pod of {} has a qos that says it serves (LS, Guaranteed), so no pod would be evicted; leave --preempt-best-effort out",
                source.variant
            );
        }
        let mut policies = if self.policy.is_empty() {
            SimulatedPolicy::usual()
        } else {
            self.policy.clone()
        };
        // Each once, in the order in which they were requested.
        let requested = policies.clone();
        let mut position = 0;
        policies.retain(|policy| {
            position += 1;
            !requested[..position - 1].contains(policy)
        });
        Ok(PackingSetup {
            arrivals: self
                .seeds
                .0
                .iter()
                .map(|seed| Arrivals::draw(&played_trace, *seed))
                .collect(),
            typical: TypicalPods::from_trace(&played_trace),
            eviction: if self.preempt_best_effort {
                SimulatedEviction::BestEffortPods
            } else {
                SimulatedEviction::Never
            },
            driver: if self.through_extender {
                StowageDriver::ThroughExtender
            } else {
                StowageDriver::InProcess
            },
            cpu_rule: self.cpu_pods.into(),
            source,
            played_trace,
            policies,
        })
    }

    /// `None` unless it was requested.
    fn bound_on(
        &self,
        setup: &PackingSetup,
        beginnings: &[PolicyUntilRefusal],
    ) -> Result<Option<AllocationBound>> {
        match self.bound {
            true => Ok(AllocationBound::from_runs(
                &setup.played_trace,
                &setup.arrivals,
                beginnings,
            )?),
            false => Ok(None),
        }
    }

    fn print<L: Serialize>(
        &self,
        setup: &PackingSetup,
        results: &[L],
        bound: Option<&AllocationBound>,
        text: impl FnOnce(Columns) -> String,
    ) -> Result<()> {
        let output = PackingOutput {
            variant: &setup.source.variant,
            results,
            bound,
        };
        self.output
            .print(&output, |_, columns| columns.wrap(&text(columns)))
    }
}

impl PackingSetup {
    fn run_replays(&self) -> Result<PackingResults> {
        let run = |policy: SimulatedPolicy, arrivals: &Arrivals| {
            let mut placer =
                RefusalRecorder::new(&self.played_trace, self.placer(policy, arrivals)?);
            Ok((
                replay(&self.played_trace, arrivals, &self.typical, &mut placer),
                placer.until(),
            ))
        };
        let shows_admission = self.eviction != SimulatedEviction::Never;
        let mut played = PackingResults {
            lines: Vec::new(),
            beginnings: Vec::new(),
        };
        for (policy, runs) in self.run_each(run)? {
            let (replays, until): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
            played
                .lines
                .push(PackingLine::from_replays(policy, &replays, shows_admission));
            played.beginnings.push(PolicyUntilRefusal { policy, until });
        }
        Ok(played)
    }

    fn run_churn(&self, load: OfferedLoad) -> Result<Vec<RejectionLine>> {
        let run = |policy: SimulatedPolicy, arrivals: &Arrivals| {
            let mut placer = self.placer(policy, arrivals)?;
            Ok((
                arrivals.seed,
                churn(&self.played_trace, arrivals, load, &mut *placer),
            ))
        };
        Ok(self
            .run_each(run)?
            .into_iter()
            .map(|(policy, runs)| RejectionLine::from_runs(policy, load, &runs))
            .collect())
    }

    fn placer<'s>(
        &'s self,
        policy: SimulatedPolicy,
        arrivals: &Arrivals,
    ) -> Result<Box<dyn Placer + 's>> {
        let Self {
            played_trace: setting,
            typical,
            cpu_rule,
            ..
        } = self;
        Ok(match (policy, self.driver) {
            (
                SimulatedPolicy::Stowage | SimulatedPolicy::StowageKnownDemand,
                StowageDriver::ThroughExtender,
            ) => Box::new(ThroughExtender::new(
                setting,
                arrivals,
                *cpu_rule,
                policy.demand_knowledge(setting),
            )?),
            _ => policy.placer(setting, typical, arrivals, self.eviction, *cpu_rule),
        })
    }

    /// Every policy with every seed, in parallel; by policy, in the order of the seeds.
    fn run_each<R: Send>(
        &self,
        run: impl Fn(SimulatedPolicy, &Arrivals) -> Result<R> + Sync,
    ) -> Result<Vec<(SimulatedPolicy, Vec<R>)>> {
        let tasks: Vec<(SimulatedPolicy, &Arrivals)> = self
            .policies
            .iter()
            .flat_map(|policy| self.arrivals.iter().map(|arrivals| (*policy, arrivals)))
            .collect();
        let progress = progress_bar(tasks.len() as u64);
        let results = run_parallel(&tasks, |(policy, arrivals)| {
            let result = run(*policy, arrivals);
            progress.inc(1);
            result
        });
        progress.finish_and_clear();
        let mut results = results.into_iter();
        let mut results_of = |policy: &SimulatedPolicy| {
            let runs: Result<Vec<R>> = results.by_ref().take(self.arrivals.len()).collect();
            Ok((*policy, runs?))
        };
        self.policies.iter().map(&mut results_of).collect()
    }
}

#[cfg(test)]
mod tests;
