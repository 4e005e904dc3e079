//! `stowage simulate SCENARIO` and `stowage simulate all`: stories played in simulated time, with what each is compared with, as a
//! table, an object or a picture. The scenarios are in `lab::simulate::fleet::scenarios`.

use super::{Seeds, progress_bar, run_parallel};
use crate::cli::output::{Columns, OutputArgs};
use anyhow::{Context, Result, bail};
use clap::Args;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use stowage_lab::picture::{Panel, PanelLine, PictureFile};
use stowage_lab::simulate::fleet::scenarios::{
    Figure, SCENARIOS, Scenario, ScenarioInput, ScenarioReport, Spread, TargetResult,
    TraceFileText, VariantLine, VariantRun,
};

#[derive(Debug, Args)]
pub struct ScenarioArgs {
    /// The directory of traces to play instead of the built-in workload, where the scenario has some
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,

    #[command(flatten)]
    runs: RunArgs,

    /// Draw one picture of the first seed
    #[arg(long, value_name = "FILE.svg|png")]
    plot: Option<PictureFile>,
}

#[derive(Debug, Args)]
pub struct AllArgs {
    #[command(flatten)]
    runs: RunArgs,
}

#[derive(Debug, Args)]
struct RunArgs {
    /// One seed, or an inclusive range
    #[arg(long, value_name = "A..B", default_value = "42..51")]
    seeds: Seeds,

    /// A part of each workload that takes seconds
    #[arg(long)]
    short: bool,

    /// End with exit code 1 if a target is missed
    #[arg(long)]
    check: bool,

    #[command(flatten)]
    output: OutputArgs,
}

impl ScenarioArgs {
    pub fn run(self, name: &str) -> Result<ExitCode> {
        let scenario = scenario(name)?;
        let input = ScenarioInput {
            traces: traces(scenario, self.trace.as_deref())?,
            is_short: self.runs.short,
        };
        if let Some(check) = scenario.check {
            check(&input)?;
        }
        let seeds = &self.runs.seeds.0;
        let runs = play(scenario, &input, seeds);
        let report = ScenarioReport::from_runs(scenario, seeds, &runs);
        if let (Some(file), Some(first)) = (&self.plot, runs.first()) {
            file.write(
                &format!("{} (seed {})", scenario.claim, seeds[0]),
                &panels(scenario, first),
            )?;
        }
        self.runs.print(&[report])
    }
}

impl AllArgs {
    pub fn run(self) -> Result<ExitCode> {
        let input = ScenarioInput {
            is_short: self.runs.short,
            ..ScenarioInput::default()
        };
        let seeds = &self.runs.seeds.0;
        let report = |scenario: &&'static Scenario| {
            ScenarioReport::from_runs(scenario, seeds, &play(scenario, &input, seeds))
        };
        self.runs
            .print(&SCENARIOS.iter().map(report).collect::<Vec<_>>())
    }
}

impl RunArgs {
    fn print(&self, reports: &[ScenarioReport]) -> Result<ExitCode> {
        let text = |report: &ScenarioReport, columns| report_text(report, self.short, columns);
        match reports {
            [one] => self.output.print(one, text)?,
            all => self.output.print(&all, |all, columns| {
                let texts: Vec<String> = all.iter().map(|one| text(one, columns)).collect();
                texts.join("\n")
            })?,
        }
        let is_met = reports.iter().all(ScenarioReport::is_met);
        Ok(if self.check && !is_met {
            ExitCode::from(1)
        } else {
            ExitCode::SUCCESS
        })
    }
}

fn scenario(name: &str) -> Result<&'static Scenario> {
    let found = SCENARIOS.iter().find(|scenario| scenario.name == name);
    found
        .copied()
        .with_context(|| format!("there is no scenario {name}"))
}

/// Plays a scenario with every seed and variant, in parallel; results are by seed, then by variant.
fn play(scenario: &'static Scenario, input: &ScenarioInput, seeds: &[u64]) -> Vec<Vec<VariantRun>> {
    let variants = scenario.variants.len();
    let tasks: Vec<(u64, usize)> = seeds
        .iter()
        .flat_map(|seed| (0..variants).map(|variant| (*seed, variant)))
        .collect();
    let progress = progress_bar(tasks.len() as u64);
    let played = run_parallel(&tasks, |(seed, variant)| {
        let played = (scenario.play)(input, *variant, *seed);
        progress.inc(1);
        played
    });
    progress.finish_and_clear();
    let mut played = played.into_iter();
    seeds
        .iter()
        .map(|_| played.by_ref().take(variants).collect())
        .collect()
}

fn traces(
    scenario: &Scenario,
    directory: Option<&Path>,
) -> Result<std::collections::BTreeMap<&'static str, TraceFileText>> {
    let Some(directory) = directory else {
        return Ok(Default::default());
    };
    if scenario.traces.is_empty() {
        bail!(
            "{} plays a workload of its own; leave --trace out",
            scenario.name
        );
    }
    let read = |name: &&'static str| Ok((*name, read_trace(directory, name)?));
    scenario.traces.iter().map(read).collect()
}

/// A file of the directory that `--trace` names.
pub fn read_trace(directory: &Path, name: &str) -> Result<TraceFileText> {
    let path = directory.join(name);
    let file = path.display().to_string();
    let remedy = || format!("{file} cannot be read; --trace is the directory of {name}");
    let text = std::fs::read_to_string(&path).with_context(remedy)?;
    Ok(TraceFileText { file, text })
}

fn report_text(report: &ScenarioReport, is_short: bool, columns: Columns) -> String {
    let scenario = scenario(report.scenario).expect("a report is of a scenario");
    let seeds = match report.seeds.as_slice() {
        [one] => format!("seed {one}"),
        [first, .., last] => format!("seeds {first} to {last}, mean ± standard deviation"),
        [] => "no seed".into(),
    };
    let length = if is_short {
        "; a short part, on which no target is meant to be met"
    } else {
        ""
    };
    let mut text = format!(
        "{}: {}\n{seeds}{length}\n\n{}\n",
        report.scenario,
        report.claim,
        table(scenario, report, columns)
    );
    for Figure { name, help, .. } in scenario.figures {
        let _ = writeln!(text, "{name}: {help}");
    }
    text.push('\n');
    report
        .targets
        .iter()
        .for_each(|target| text.push_str(&target_line(target)));
    report.notes.iter().for_each(|note| {
        let _ = writeln!(text, "{note}");
    });
    for broken in &report.broken {
        let _ = writeln!(text, "broken promise: {broken}");
    }
    columns.wrap(&text)
}

fn target_line(target: &TargetResult) -> String {
    let (bound, figure) = match (target.at_least, target.at_most) {
        (Some(least), _) => ("≥", least),
        (None, most) => ("≤", most.unwrap_or_default()),
    };
    let limit = target.limit.map_or_else(String::new, |limit| {
        format!("; no scheduler comes beyond {limit:.2}")
    });
    format!(
        "{:>12}  {}: {:.2} (target {bound} {figure}{limit})\n",
        target.verdict.label(),
        target.target,
        target.value
    )
}

fn table(scenario: &Scenario, report: &ScenarioReport, columns: Columns) -> String {
    let titles = scenario.figures.iter().map(|figure| figure.name);
    let header: Vec<&str> = std::iter::once("scheduler").chain(titles).collect();
    let rows = report
        .variants
        .iter()
        .map(|VariantLine { variant, figures }| {
            let cell = |figure: &Figure| mean_text(figures[figure.name], figure.decimals);
            let cells = scenario.figures.iter().map(cell);
            std::iter::once(variant.to_string()).chain(cells).collect()
        });
    let right: Vec<usize> = (1..header.len()).collect();
    columns.table(&header, rows, &right)
}

fn mean_text(Spread { mean, deviation }: Spread, decimals: usize) -> String {
    match deviation == 0.0 {
        true => format!("{mean:.decimals$}"),
        false => format!("{mean:.decimals$} ± {deviation:.decimals$}"),
    }
}

/// Colors that people with color vision deficiency can distinguish (Okabe and Ito, 2008): Stowage first.
const COLORS: [&str; 6] = [
    "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#b8860b",
];

/// One panel for each kind of curve, with a line for each variant.
fn panels(scenario: &Scenario, played: &[VariantRun]) -> Vec<Panel> {
    let kinds = played.first().map_or(0, |first| first.curves.len());
    let panel = |kind: usize| {
        let first = &played[0].curves[kind];
        let line = |variant: usize| PanelLine {
            name: scenario.variants[variant].into(),
            color: COLORS[variant % COLORS.len()],
            is_highlighted: variant == 0,
            points: played[variant].curves[kind].points.clone(),
        };
        // Stowage is drawn last, so it lies on top.
        let lines: Vec<PanelLine> = (0..played.len()).rev().map(line).collect();
        let points = || lines.iter().flat_map(|line| &line.points);
        let right = points().map(|(x, _)| *x).fold(0.0, f64::max);
        let top = points().map(|(_, y)| *y).fold(0.0, f64::max);
        let step = nice_step(right);
        let x = (0.0, (right / step).ceil().max(1.0) * step, step);
        Panel {
            title: first.name.into(),
            x_label: first.x_label.into(),
            x,
            y_step: nice_step(top),
            lines,
        }
    };
    (0..kinds).map(panel).collect()
}

/// A step of 1, 2 or 5 times a power of ten, for an axis up to `top` in six to fourteen steps.
fn nice_step(top: f64) -> f64 {
    if top <= 0.0 {
        return 1.0;
    }
    let rough = top / 12.0;
    let power = 10f64.powf(rough.log10().floor());
    let times = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|times| times * power >= rough);
    (times.unwrap_or(10.0) * power).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> (ScenarioReport, Vec<Vec<VariantRun>>) {
        let scenario = SCENARIOS[0];
        let played = |value: f64| VariantRun {
            figures: vec![value; scenario.figures.len()],
            notes: vec!["a limit".into()],
            ..VariantRun::default()
        };
        let runs: Vec<Vec<VariantRun>> = (0..2)
            .map(|seed| {
                scenario
                    .variants
                    .iter()
                    .map(|_| played(10.0 + f64::from(seed)))
                    .collect()
            })
            .collect();
        (ScenarioReport::from_runs(scenario, &[1, 2], &runs), runs)
    }

    #[test]
    fn the_text_has_the_table_the_targets_and_what_the_figures_mean() {
        let (report, _) = report();
        let text = report_text(&report, false, Columns(None));
        assert!(
            text.starts_with(&format!("{}: {}", SCENARIOS[0].name, SCENARIOS[0].claim)),
            "{text}"
        );
        assert!(
            text.contains("seeds 1 to 2") && text.contains("10.5 ± 0.7"),
            "{text}"
        );
        assert!(
            text.contains("missed  ") && text.contains("target ≥") && text.contains("a limit"),
            "{text}"
        );
    }

    #[test]
    fn steps_are_such_as_people_count_in() {
        assert_eq!(
            [100.0, 37.0, 5.0, 0.0, 1440.0].map(nice_step),
            [10.0, 5.0, 1.0, 1.0, 200.0]
        );
    }

    #[test]
    fn a_scenario_without_traces_refuses_a_directory_of_them() {
        let scenario = SCENARIOS
            .iter()
            .find(|scenario| scenario.traces.is_empty())
            .unwrap();
        let error = traces(scenario, Some(Path::new(".")))
            .unwrap_err()
            .to_string();
        assert!(error.contains("leave --trace out"), "{error}");
    }
}
