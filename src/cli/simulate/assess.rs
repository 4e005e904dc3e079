//! `stowage simulate assess`: the week of a cluster with a device plugin goes through the code of `stowage assess`, and the same week
//! is played under what that proposes. The simulation is in `lab::simulate::fleet::assessed`.

use super::scenario::read_trace;
use super::{Seeds, progress_bar, run_parallel};
use crate::cli::output::{Columns, OutputArgs};
use crate::cli::{assess, exit_without_answer};
use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use stowage_lab::simulate::fleet::assessed::{AssessedWeek, TRACE, WeekServed, holds, texts};
use stowage_lab::simulate::fleet::scenarios::TraceFileText;
use stowage_lab::simulate::fleet::traffic::TrafficText;

const HELP: &str = "Exit codes: 0 if the plan holds with every seed, 1 if it does not, 2 if something cannot be read or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct SimulateAssessArgs {
    /// The directory of azure2024_week_7min.csv, to play its week instead of the built-in one
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,

    /// One seed, or an inclusive range
    #[arg(long, value_name = "A..B", default_value = "42")]
    seeds: Seeds,

    /// A day of fifteen pods, which takes seconds
    #[arg(long)]
    short: bool,

    /// Leave there what was assessed with the first seed: cluster.json and week.json, for `stowage assess --cluster --metrics`
    #[arg(long, value_name = "DIR")]
    write: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

/// One seed's weeks.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Replay {
    seed: u64,
    /// What the assessment says.
    summary: String,
    gpus_that_suffice: Option<f64>,
    as_it_is: WeekServed,
    plan: WeekServed,
    holds: bool,
}

impl SimulateAssessArgs {
    pub fn run(self) -> Result<ExitCode> {
        self.try_run().or_else(exit_without_answer)
    }

    fn try_run(self) -> Result<ExitCode> {
        let trace = self.trace.as_ref().map(|folder| read_trace(folder, TRACE));
        let trace = trace.transpose()?;
        let trace = trace
            .as_ref()
            .map(|TraceFileText { file, text }| TrafficText { file, text });
        let seeds = &self.seeds.0;
        let progress = progress_bar(seeds.len() as u64);
        let replays = run_parallel(seeds, |seed| {
            let folder = self.write.as_deref().filter(|_| *seed == seeds[0]);
            let replay = replay(*seed, trace, self.short, folder);
            progress.inc(1);
            replay
        });
        progress.finish_and_clear();
        let replays = replays.into_iter().collect::<Result<Vec<Replay>>>()?;
        self.output.print(&replays, |all, columns| {
            let texts: Vec<String> = all.iter().map(|one| text_of(one, columns)).collect();
            texts.join("\n")
        })?;
        let holds = replays.iter().all(|one| one.holds);
        Ok(ExitCode::from(u8::from(!holds)))
    }
}

fn replay(
    seed: u64,
    trace: Option<TrafficText<'_>>,
    is_short: bool,
    folder: Option<&Path>,
) -> Result<Replay> {
    let week = AssessedWeek::new(seed, trace, is_short)?;
    let before = week.as_it_is()?;
    let own = tempfile::tempdir()?;
    let folder = folder.unwrap_or(own.path());
    let write = |name: &str, value: &Value| {
        let path = folder.join(name);
        std::fs::create_dir_all(folder)
            .and_then(|()| std::fs::write(&path, value.to_string()))
            .with_context(|| format!("--write: {}", path.display()))?;
        Ok::<PathBuf, anyhow::Error>(path)
    };
    let cluster = write("cluster.json", &texts::dump(&week, &before))?;
    let metrics = write("week.json", &texts::metrics(&week, &before))?;
    let (answer, policy) = assess::of_files(&cluster, &metrics)?;
    let plan = week.plan(&answer, &policy)?;
    let suffice = answer.figures.iter();
    let suffice = suffice.filter(|figure| figure.name == "GPUs that suffice");
    let suffice = suffice.filter_map(|figure| figure.value).next();
    Ok(Replay {
        seed,
        gpus_that_suffice: suffice,
        holds: holds(&before.served, &plan, suffice),
        summary: answer.summary,
        as_it_is: before.served,
        plan,
    })
}

fn text_of(one: &Replay, columns: Columns) -> String {
    let header = [
        "",
        "GPUS",
        "PODS",
        "REQUESTS",
        "LATE",
        "SLOW",
        "TTFT P99",
        "TOKEN P99",
    ];
    let row = |name: &str, week: &WeekServed| {
        let share = |count: f64| format!("{:.3} %", 100.0 * count / week.requests.max(1.0));
        let seconds = week.ttft_p99_s.unwrap_or(f64::NAN);
        let millis = 1e3 * week.time_per_token_p99_s.unwrap_or(f64::NAN);
        vec![
            name.to_owned(),
            week.gpus.to_string(),
            format!("{}/{}", week.placed, week.pods),
            format!("{:.0}", week.requests),
            share(week.late),
            share(week.slowed),
            format!("{seconds:.2} s"),
            format!("{millis:.0} ms"),
        ]
    };
    let rows = [row("as it is", &one.as_it_is), row("the plan", &one.plan)];
    let table = columns.table(&header, rows, &[1, 2, 3, 4, 5, 6, 7]);
    let (late, more) = (one.plan.late, one.plan.late - one.as_it_is.late);
    let suffice = one.gpus_that_suffice.unwrap_or(0.0);
    let beyond = (f64::from(one.plan.gpus) - suffice).max(0.0);
    let verdict = match one.holds {
        true => format!("The plan holds: {late:.0} requests are late, no more than before."),
        false => format!(
            "The plan does not hold: {beyond:.0} more GPUs are needed than it says, and {more:.0} more requests are late."
        ),
    };
    columns.wrap(&format!(
        "Seed {}: {}\n\n{table}\nLate: first token after 5 s, or 0.2 s for a further one. Slow: more than twice as long for a token as alone.\n{verdict}\n",
        one.seed, one.summary
    ))
}
