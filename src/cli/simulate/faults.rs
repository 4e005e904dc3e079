//! `stowage simulate faults`: histories by seed until one fails, the seeds end, the time does, or someone interrupts. The
//! simulation is in `lab::faults`.

use super::campaign::{
    Reproduction, SeedOrigin, SeedRange, exit_code, interrupt_flag, minutes, time_limit,
};
use super::progress_bar;
use crate::cli::output::{Columns, OutputArgs};
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;
use stowage_lab::faults::campaign::{CampaignResult, CampaignRules, play_all};
use stowage_lab::faults::fault::FaultKind;
use stowage_lab::faults::planted::PlantedBug;
use stowage_lab::faults::shrink::shrink;
use stowage_lab::faults::tally::FaultTally;
use stowage_lab::faults::{DEFAULT_STEPS, History, check_folder, play};

/// How long a failing history is made smaller, unless `--shrink` says otherwise.
const SHRINK_SECONDS: u64 = 60;

#[derive(Debug, Args)]
#[command(after_help = fault_list())]
pub struct SimulateFaultsArgs {
    /// One seed, or an inclusive range
    #[arg(long, value_name = "A..B", default_value = "0..99")]
    seeds: SeedRange,

    #[command(flatten)]
    origin: SeedOrigin,

    /// Stop after so many minutes, even if seeds are left
    #[arg(long, value_name = "M", value_parser = minutes)]
    minutes: Option<u64>,

    /// Kinds of faults that do not happen, with commas between them
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    without: Vec<FaultKind>,

    /// Steps of each history before all becomes quiet; about 0.4 s of simulated time each
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    steps: u64,

    /// Print what happened in the history, with its times; for one seed
    #[arg(long, conflicts_with_all = ["output", "json"])]
    history: bool,

    /// For how many seconds a failing history is made smaller; 0 leaves it as it is
    #[arg(long, value_name = "S", default_value_t = SHRINK_SECONDS)]
    shrink: u64,

    /// A bug that is there on purpose, to see that the oracle finds it
    #[arg(long, value_name = "BUG", hide = true)]
    planted: Option<PlantedBug>,

    #[command(flatten)]
    output: OutputArgs,
}

fn fault_list() -> String {
    let line = |kind: &FaultKind| format!("  {:<18} {}\n", kind.name(), kind.what());
    format!(
        "Kinds of faults:\n{}",
        FaultKind::ALL.iter().map(line).collect::<String>()
    )
}

/// What `-o json` prints.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FaultsOutput {
    histories: u64,
    steps: u64,
    simulated_seconds: f64,
    seconds: f64,
    decisions: u64,
    answers: BTreeMap<&'static str, u64>,
    hand_overs: u64,
    bound: u64,
    reservations: u64,
    evictions: u64,
    faults: BTreeMap<&'static str, u64>,
    interrupted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<FailedHistory>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FailedHistory {
    seed: u64,
    broken: Vec<String>,
    #[serde(flatten)]
    again: Reproduction,
}

impl FailedHistory {
    /// Makes a failing history smaller.
    fn shrunk_from(history: &History, broken: Vec<String>, within: Duration) -> Self {
        let smallest = if within.is_zero() {
            history.clone()
        } else {
            shrink(history, within)
        };
        let again = Reproduction::new(&history.arguments(), &smallest.arguments());
        Self {
            seed: history.seed,
            broken,
            again,
        }
    }
}

impl SimulateFaultsArgs {
    pub fn run(self) -> Result<ExitCode> {
        self.origin.check()?;
        check_folder().with_context(|| {
            let folder = std::env::temp_dir();
            format!(
                "histories keep policy files in {}; name another folder with TMPDIR",
                folder.display()
            )
        })?;
        if self.history {
            return self.print_history(self.seeds.only()?);
        }
        let histories = self.seeds.all().map(|seed| self.history_of(seed));
        let bar = progress_bar(self.seeds.count());
        let interrupted = interrupt_flag();
        let rules = CampaignRules {
            limit: time_limit(self.minutes),
            is_interrupted: Some(&interrupted),
        };
        let CampaignResult {
            tally,
            failure: failed,
            elapsed: took,
        } = play_all(histories, &rules, |played| bar.set_position(played));
        bar.finish_and_clear();
        let is_interrupted = interrupted.load(Ordering::Relaxed);
        let within = Duration::from_secs(self.shrink);
        let failed = failed
            .map(|(history, run)| FailedHistory::shrunk_from(&history, run.violations, within));
        let has_failed = failed.is_some();
        let output = faults_output(&tally, took, is_interrupted, failed);
        self.output.print(&output, |output, columns| {
            let failed = output.failed.as_ref();
            text(&tally, took, is_interrupted, failed, columns)
        })?;
        Ok(exit_code(has_failed))
    }

    fn history_of(&self, seed: u64) -> History {
        let without: BTreeSet<FaultKind> = self.without.iter().copied().collect();
        History {
            steps: self.steps,
            without,
            planted: self.planted,
            ..History::from_seed(seed)
        }
    }

    fn print_history(&self, seed: u64) -> Result<ExitCode> {
        let run = play(&self.history_of(seed));
        let mut out = std::io::stdout().lock();
        run.lines
            .iter()
            .try_for_each(|line| writeln!(out, "{line}"))?;
        writeln!(out, "\n{}", run.tally)?;
        run.violations
            .iter()
            .try_for_each(|broken| writeln!(out, "broken: {broken}"))?;
        Ok(exit_code(!run.violations.is_empty()))
    }
}

fn faults_output(
    tally: &FaultTally,
    took: Duration,
    interrupted: bool,
    failed: Option<FailedHistory>,
) -> FaultsOutput {
    FaultsOutput {
        histories: tally.histories,
        steps: tally.steps,
        simulated_seconds: tally.simulated.as_secs_f64(),
        seconds: took.as_secs_f64(),
        decisions: tally.decisions(),
        answers: tally.answers.clone(),
        hand_overs: tally.leadership_changes,
        bound: tally.bound,
        reservations: tally.reservations,
        evictions: tally.evicted,
        faults: tally
            .faults
            .iter()
            .map(|(kind, count)| (kind.name(), *count))
            .collect(),
        interrupted,
        failed,
    }
}

fn text(
    tally: &FaultTally,
    took: Duration,
    is_interrupted: bool,
    failed: Option<&FailedHistory>,
    columns: Columns,
) -> String {
    let seconds = took.as_secs_f64().max(0.001);
    let (histories, decisions) = (
        tally.histories as f64 / seconds * 60.0,
        tally.decisions() as f64 / seconds,
    );
    // Not the commands below, which are copied.
    let mut text = columns.wrap(&format!(
        "{tally}\nin {seconds:.1} s: {histories:.0} histories a minute, {decisions:.0} decisions a second\n"
    ));
    if is_interrupted {
        text += "interrupted\n";
    }
    match failed {
        None => text += "every history kept every promise\n",
        Some(FailedHistory {
            seed,
            broken,
            again,
        }) => {
            text += &format!(
                "seed {seed} broke a promise: {}\n{}",
                broken.join("; "),
                again.text()
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_kind_of_fault_lists_the_known_ones() {
        let unknown = "kil".parse::<FaultKind>().unwrap_err().to_string();
        assert!(
            unknown.contains("\"kil\"") && unknown.contains("kill, restart"),
            "{unknown}"
        );
    }

    #[test]
    fn a_failed_history_shows_the_command_that_replays_it() {
        let history = History {
            steps: 40,
            ..History::from_seed(7)
        };
        let failed = FailedHistory::shrunk_from(
            &history,
            vec!["n0/1 is promised twice".into()],
            Duration::ZERO,
        );
        let text = text(
            &FaultTally::default(),
            Duration::from_secs(1),
            false,
            Some(&failed),
            Columns(None),
        );
        assert!(
            text.contains("again: stowage simulate faults --seeds 7 --steps 40 --found-by '"),
            "{text}"
        );
        assert!(!text.contains("smaller:"), "{text}");
    }
}
