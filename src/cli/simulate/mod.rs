//! `stowage simulate …`: workloads in simulated time, scheduled by the production code. One file for each subcommand; this file
//! has their list, and what they share: seeds, and parallel runs.

mod assess;
mod campaign;
mod faults;
mod packing;
mod scenario;

use anyhow::Result;
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::thread;

#[derive(Debug, Args)]
pub struct SimulateArgs {
    #[command(subcommand)]
    command: SimulateCommand,
}

#[derive(Debug, Subcommand)]
enum SimulateCommand {
    /// GPU allocation, by placement policy: Stowage beside best fit, FGD and other published policies
    Packing(packing::PackingArgs),
    /// Idle serving GPUs harvested: jobs between the replicas of a day, with several autoscalers and victim orders
    NightPool(scenario::ScenarioArgs),
    /// Mixed models on one pool: GPUs that a catalog of models needs, beside one model per GPU and placement without KV caches
    MixedModels(scenario::ScenarioArgs),
    /// Cold start is time: seconds until engines answer, beside kube-scheduler's placement
    ColdStart(scenario::ScenarioArgs),
    /// Warm context on opportunistic GPUs: workers that keep it, beside a pod for each batch
    WarmContext(scenario::ScenarioArgs),
    /// Two GPUs, three models: fraud detection alone, credit scoring and a chatbot beside each other
    FraudCreditChatbot(scenario::ScenarioArgs),
    /// Teams that share one pool, with guarantees and borrowing, beside a partition for each
    Teams(scenario::ScenarioArgs),
    /// A week of a cluster, assessed as `stowage assess` does, and the same week under what that proposes
    Assess(assess::SimulateAssessArgs),
    /// Fault injection: the whole service in simulated time, with seeded faults of replicas, agents, the API server and clocks
    Faults(faults::SimulateFaultsArgs),
    /// Every scenario, one after the other
    All(scenario::AllArgs),
}

impl SimulateArgs {
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            SimulateCommand::Packing(args) => args.run(),
            SimulateCommand::NightPool(args) => args.run("night-pool"),
            SimulateCommand::MixedModels(args) => args.run("mixed-models"),
            SimulateCommand::ColdStart(args) => args.run("cold-start"),
            SimulateCommand::WarmContext(args) => args.run("warm-context"),
            SimulateCommand::FraudCreditChatbot(args) => args.run("fraud-credit-chatbot"),
            SimulateCommand::Teams(args) => args.run("teams"),
            SimulateCommand::Assess(args) => args.run(),
            SimulateCommand::Faults(args) => args.run(),
            SimulateCommand::All(args) => args.run(),
        }
    }
}

/// `42`, or `42..51`, both ends included.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seeds(Vec<u64>);

/// More seeds would not change the result.
const MOST_SEEDS: u64 = 1000;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum SeedsError {
    #[error("write a whole number, or two with .. between them, such as 42..51")]
    Malformed,
    #[error("{first} is larger than {last}; write {last}..{first}")]
    Backwards { first: u64, last: u64 },
    #[error("these are more than {MOST_SEEDS}; write fewer")]
    TooMany,
}

impl FromStr for Seeds {
    type Err = SeedsError;

    fn from_str(text: &str) -> Result<Self, SeedsError> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| {
            text.trim()
                .parse::<u64>()
                .map_err(|_| SeedsError::Malformed)
        };
        let (first, last) = (number(first)?, number(last)?);
        match last.checked_sub(first) {
            None => Err(SeedsError::Backwards { first, last }),
            Some(more) if more >= MOST_SEEDS => Err(SeedsError::TooMany),
            Some(_) => Ok(Self((first..=last).collect())),
        }
    }
}

/// Each task's result, in the order of the tasks; as many run at once as the machine has processors.
fn run_parallel<T: Sync, R: Send>(tasks: &[T], run: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let workers = thread::available_parallelism()
        .map_or(1, NonZeroUsize::get)
        .min(tasks.len());
    let tasks = Mutex::new(tasks.iter().enumerate());
    // Not in the loop's head, where the lock would be held as long as the task runs. A worker that panicked leaves the queue
    // as it should be.
    let next = || tasks.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let work = || {
            let mut results_of_worker = Vec::new();
            while let Some((index, task)) = next() {
                results_of_worker.push((index, run(task)));
            }
            results_of_worker
        };
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let results = workers.into_iter().map(|worker| worker.join());
        results
            .flat_map(|mine| mine.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// A progress bar, which shows on a terminal only.
fn progress_bar(runs: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos} of {len} runs, {eta} left");
    ProgressBar::new(runs).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    #[test]
    fn seeds_are_one_or_a_range_with_both_its_ends() {
        let seeds = |text: &str| text.parse::<Seeds>().map(|seeds| seeds.0);
        assert_eq!(seeds("42"), Ok(vec![42]));
        assert_eq!(seeds("42..44"), Ok(vec![42, 43, 44]));
        assert_eq!(
            seeds("44..42"),
            Err(SeedsError::Backwards {
                first: 44,
                last: 42
            })
        );
        assert_eq!(seeds("0..1000"), Err(SeedsError::TooMany));
        assert_eq!(seeds("0..18446744073709551615"), Err(SeedsError::TooMany));
        for text in ["", "..", "-1", "a..b", "1..2..3"] {
            assert_eq!(seeds(text), Err(SeedsError::Malformed), "{text}");
        }
    }

    #[test]
    fn tasks_run_in_parallel_and_their_results_keep_the_order() {
        let workers = thread::available_parallelism()
            .map_or(1, NonZeroUsize::get)
            .min(2);
        let at_work = AtomicUsize::new(0);
        let met = run_parallel(&[1, 2], |task| {
            at_work.fetch_add(1, Ordering::SeqCst);
            let deadline = Instant::now() + Duration::from_secs(60);
            while at_work.load(Ordering::SeqCst) < workers && Instant::now() < deadline {
                thread::yield_now();
            }
            (*task, at_work.load(Ordering::SeqCst) >= workers)
        });
        assert_eq!(met, [(1, true), (2, true)]);
    }

    #[test]
    fn results_stand_in_the_order_of_their_tasks() {
        let tasks: Vec<u32> = (0..100).collect();
        assert_eq!(
            run_parallel(&tasks, |task| task * 2),
            (0..200).step_by(2).collect::<Vec<u32>>()
        );
        assert!(run_parallel(&[], |task: &u32| *task).is_empty());
    }
}
