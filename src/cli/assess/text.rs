//! An assessment for people: the answer, the cluster's figures, what each workload uses and could request, and the hours of the day.

use crate::cli::output::Columns;
use stowage_sizing::assess::report::{Assessment, Distribution, WorkloadAnswer};

/// Shown where a figure is not known.
const UNKNOWN: &str = "unknown";

pub fn text(answer: &Assessment, columns: Columns) -> String {
    let rows = answer.figures.iter().map(|figure| {
        vec![
            figure.name.into(),
            value(figure.value),
            figure.source.into(),
            figure.caution.clone(),
        ]
    });
    let figures = columns.table(&["FIGURE", "VALUE", "SOURCE", "CAUTION"], rows, &[1]);
    let header = [
        "WORKLOAD",
        "GPUS",
        "VRAM",
        "COMPUTE",
        "KV",
        "QUEUE",
        "COULD REQUEST",
    ];
    let workloads = columns.table(&header, answer.workloads.iter().map(row), &[1]);
    let reasons = answer.workloads.iter();
    let reasons = reasons.map(|one| format!("- {}: {}\n", one.workload, why(one)));
    let rows = answer.hours.iter().map(|one| {
        let jobs = one.jobs.map(f64::from);
        vec![
            format!("{:02}", one.hour),
            value(one.idle_gpu_hours),
            value(jobs),
        ]
    });
    let hours = columns.table(&["HOUR", "IDLE GPUS", "JOBS BESIDE"], rows, &[0, 1, 2]);
    let unplaced = answer.not_held.iter().map(|pod| {
        let why = pod.reasons.first().map_or("", |reason| &reason.text);
        format!("- {} has no place: {why}\n", pod.pod)
    });
    let cautions = answer
        .cautions
        .iter()
        .map(|caution| format!("- {caution}\n"));
    let text = format!(
        "{}\n\n{figures}\nMedian/quantile/peak of the window (by hour of day: -o json, --page):\n{workloads}\nWhy:\n{}{}\n{hours}\n{}",
        answer.summary,
        reasons.collect::<String>(),
        unplaced.collect::<String>(),
        cautions.collect::<String>(),
    );
    columns.wrap(&text)
}

pub fn why(one: &WorkloadAnswer) -> String {
    let slower = one.slower_beside.filter(|most| *most > 1.0);
    let slower = slower.map(|most| format!("; beside others its steps take {most} times as long"));
    format!("{}{}", one.why, slower.unwrap_or_default())
}

pub fn value(value: Option<f64>) -> String {
    value.map_or(UNKNOWN.to_owned(), |value| value.to_string())
}

/// Name, GPUs, what is measured, and the request.
pub fn row(one: &WorkloadAnswer) -> Vec<String> {
    let plain = |count: u64| count.to_string();
    vec![
        one.workload.clone(),
        one.gpus.to_string(),
        three(&one.vram_bytes, gib),
        three(&one.compute_percent, plain),
        three(&one.kv_cache_percent, plain),
        three(&one.waiting, plain),
        could_request(one),
    ]
}

fn three(of: &Option<Distribution>, unit: fn(u64) -> String) -> String {
    match of {
        None => UNKNOWN.to_owned(),
        Some(of) => [of.p50, of.quantile, of.peak].map(unit).join("/"),
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / (1u64 << 30) as f64)
}

fn could_request(one: &WorkloadAnswer) -> String {
    match (one.could_request_bytes, one.own_gpu) {
        (Some(each), _) => format!("{each} a GPU"),
        (None, reason) => {
            let reason = reason.map(|reason| format!("{reason:?}").to_lowercase());
            format!("its own ({})", reason.unwrap_or_default())
        }
    }
}
