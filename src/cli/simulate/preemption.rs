//! `stowage simulate preemption`: work lost under each order of victims, as a table or one object. The simulation is in
//! `lab::simulate::preemption`.

use super::{Seeds, side_by_side, trace_in};
use anyhow::Result;
use clap::Args;
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_lab::simulate::openb::{PODS, built_in};
use stowage_lab::simulate::preemption::report::{OrderLine, RunOutcome, Spread};
use stowage_lab::simulate::preemption::{Report, VictimOrder, Workload, WorkloadExtent, play};

#[derive(Debug, Args)]
pub struct SimulatePreemptionArgs {
    /// The directory of the openb trace [default: a small generated workload]
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,

    /// One seed, or an inclusive range
    #[arg(long, value_name = "A..B", default_value = "42..51")]
    seeds: Seeds,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum WorkloadSource {
    Openb,
    MadeUp,
}

#[derive(Serialize)]
struct PreemptionOutput<'a> {
    workload: WorkloadSource,
    #[serde(flatten)]
    report: &'a Report,
}

impl SimulatePreemptionArgs {
    pub fn run(self) -> Result<ExitCode> {
        let (source, trace, extent) = match &self.trace {
            Some(directory) => (WorkloadSource::Openb, trace_in(directory, PODS)?, WorkloadExtent::OPENB),
            None => (WorkloadSource::MadeUp, built_in::trace(), WorkloadExtent::BUILT_IN),
        };
        let workloads: Vec<Workload> =
            self.seeds.0.iter().map(|seed| Workload::of(&trace, extent, *seed)).collect::<Result<_, _>>()?;
        let runs: Vec<(&Workload, VictimOrder)> =
            workloads.iter().flat_map(|workload| VictimOrder::ALL.map(|order| (workload, order))).collect();
        let outcomes = side_by_side(&runs, |(workload, order)| RunOutcome {
            order: *order,
            seed: workload.seed,
            tally: play(workload, *order),
        });
        let report = Report::of(&workloads, &outcomes);
        let mut out = std::io::stdout().lock();
        if self.json {
            let page = PreemptionOutput { workload: source, report: &report };
            writeln!(out, "{}", serde_json::to_string_pretty(&page)?)?;
        } else {
            write!(out, "{}", text(source, &report))?;
        }
        Ok(if report.broken_promises() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

const LEGEND: &str = "\
lost: the work of residents since their last checkpoints, and their time to load again, in GPU-hours
rejected: arrivals for which no pods could be evicted; used: the part of all GPU time; kept: less what was lost";

fn text(source: WorkloadSource, report: &Report) -> String {
    let Report { seeds, nodes, gpus, .. } = report;
    let on = match source {
        WorkloadSource::Openb => "of the openb trace",
        WorkloadSource::MadeUp => "that are made up (with --trace DIR the openb trace is played)",
    };
    let seeds = match seeds.as_slice() {
        [one] => format!("seed {one}"),
        [first, .., last] => format!("seeds {first} to {last}, mean ± standard deviation"),
        [] => "no seed".into(),
    };
    let broken = match report.broken_promises() {
        0 => String::new(),
        broken => {
            format!("broken promises, which no scheduler may make: {broken} (--json says of which order)\n")
        }
    };
    format!(
        "{nodes} nodes and {gpus} GPUs {on}; the second of two days; {seeds}\n\n{}\n\n{LEGEND}\n{broken}",
        table(report)
    )
}

fn table(report: &Report) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header([
        "victims by",
        "lost",
        "× ours",
        "work alone",
        "× ours",
        "victims",
        "rejected",
        "used",
        "kept",
    ]);
    for line in &report.results {
        table.add_row(row(line));
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn row(line: &OrderLine) -> [String; 9] {
    [
        line.order.said().into(),
        said(line.lost_gpu_hours, 1),
        line.lost_times_ours.map_or_else(String::new, |times| said(times, 2)),
        said(line.work_gpu_hours, 1),
        line.work_times_ours.map_or_else(String::new, |times| said(times, 2)),
        said(line.victims, 0),
        format!("{:.0}", line.arrivals.mean - line.admitted.mean),
        format!("{:.1} %", line.used_percent.mean),
        format!("{:.1} %", line.kept_percent.mean),
    ]
}

fn said(Spread { mean, deviation }: Spread, decimals: usize) -> String {
    if deviation == 0.0 {
        return format!("{mean:.decimals$}");
    }
    format!("{mean:.decimals$} ± {deviation:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_lab::simulate::preemption::PreemptionTally;
    use stowage_lab::simulate::preemption::tally::GpuTime;

    fn report() -> Report {
        let extent = WorkloadExtent { node_step: 24, ..WorkloadExtent::BUILT_IN };
        let workload = |seed| Workload::of(&built_in::trace(), extent, seed).unwrap();
        let hours = |hours: u64| GpuTime(hours * 3_600_000_000);
        let lost = |order| if order == VictimOrder::Stowage { hours(2) } else { hours(5) };
        let tally = |order| PreemptionTally {
            arrivals: 9,
            admitted: 7,
            lost_work: lost(order),
            ..PreemptionTally::default()
        };
        let outcome = |seed| move |order| RunOutcome { order, seed, tally: tally(order) };
        let outcomes: Vec<RunOutcome> =
            [42, 43].into_iter().flat_map(|seed| VictimOrder::ALL.map(outcome(seed))).collect();
        Report::of(&[workload(42), workload(43)], &outcomes)
    }

    #[test]
    fn the_table_says_what_was_played_and_what_each_order_lost() {
        let text = text(WorkloadSource::MadeUp, &report());
        assert!(text.starts_with("1 nodes and 8 GPUs that are made up"), "{text}");
        assert!(text.contains("seeds 42 to 43"), "{text}");
        let line = text.lines().find(|line| line.contains("youngest first")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            words,
            ["youngest", "first", "5.0", "2.50", "5.0", "2.50", "0", "2", "0.0", "%", "-2.6", "%"]
        );
    }

    #[test]
    fn the_object_names_the_orders_and_ours_is_stowage() {
        let report = report();
        let page =
            serde_json::to_value(PreemptionOutput { workload: WorkloadSource::Openb, report: &report })
                .unwrap();
        assert_eq!(page["workload"], "openb");
        assert_eq!(page["seeds"], serde_json::json!([42, 43]));
        assert_eq!(page["results"][0]["order"], "stowage");
        assert_eq!(page["results"][1]["lost_times_ours"]["mean"], 2.5);
    }
}
