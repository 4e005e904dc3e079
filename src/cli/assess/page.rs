//! An assessment as one page of HTML that needs nothing else: for a manager, each figure with its source and its caution.

use super::text::{could_request, value, why};
use stowage_sizing::assess::report::{Assessment, Distribution, WorkloadAnswer};

const STYLE: &str = "\
:root{color-scheme:light dark}body{font:15px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(13rem,1fr));gap:.8rem}\
.figures div,td,th{border:1px solid #8886;padding:.5rem}.figures div{border-radius:.5rem}b{display:block;font-size:1.7rem}\
small{display:block;opacity:.75}table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;font-size:.85rem}\
svg{width:100%;height:auto}rect{fill:#2a7ab8}text{fill:currentColor;font-size:9px}.scroll{overflow-x:auto}";

pub fn page(answer: &Assessment) -> String {
    let figures = answer.figures.iter().map(|one| {
        let (label, value) = (escape(one.name), value(one.value));
        let (source, caution) = (escape(one.source), escape(&one.caution));
        format!("<div>{label}<b>{value}</b><small>From {source}.</small><small>Caution: {caution}.</small></div>")
    });
    let idle = answer.hours.iter().map(|one| one.idle_gpu_hours);
    let jobs = answer.hours.iter().map(|one| one.jobs.map(f64::from));
    let rows = answer.workloads.iter().map(row);
    let unplaced = answer.not_held.iter();
    let unplaced = unplaced.map(|pod| format!("<li>{} has no place.</li>", pod.pod));
    let cautions = answer
        .cautions
        .iter()
        .map(|one| format!("<li>{}</li>", escape(one)));
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>GPUs by use</title><style>{STYLE}</style><h1>{}</h1><div class=\"figures\">{}</div>\
         {}{}<h2>Workloads</h2><p>Median / quantile / peak, and the quantile by hour of day.</p><div class=\"scroll\"><table>\
         <tr><th>Workload<th>GPUs<th>VRAM, GiB<th>Compute, %<th>KV cache, %<th>Queue<th>Could request<th>Why</tr>{}</table></div>\
         <h2>Cautions</h2><ul>{}</ul></html>\n",
        escape(&answer.summary),
        figures.collect::<String>(),
        chart("Idle GPUs", &idle.collect::<Vec<_>>()),
        chart("Jobs that fit beside", &jobs.collect::<Vec<_>>()),
        rows.collect::<String>(),
        unplaced.chain(cautions).collect::<String>(),
    )
}

fn row(one: &WorkloadAnswer) -> String {
    let gib = (1u64 << 30) as f64;
    let cells = [
        cell(one.vram_bytes.as_ref(), gib),
        cell(one.compute_percent.as_ref(), 1.0),
        cell(one.kv_cache_percent.as_ref(), 1.0),
        cell(one.waiting.as_ref(), 1.0),
    ];
    format!(
        "<tr><td>{}<td>{}{}<td>{}<td>{}</tr>",
        escape(&one.workload),
        one.gpus,
        cells.concat(),
        could_request(one),
        escape(&why(one))
    )
}

fn cell(of: Option<&Distribution>, unit: f64) -> String {
    let Some(of) = of else {
        return "<td>unknown".into();
    };
    let three = [of.p50, of.quantile, of.peak]
        .map(|value| ((value as f64 / unit * 10.0).round() / 10.0).to_string());
    let hours = of.by_hour.iter().map(|hour| hour.map(|value| value as f64));
    let covered = of.covered_percent;
    format!(
        "<td>{}<small>{covered} % of the window</small>{}",
        three.join(" / "),
        bars(&hours.collect::<Vec<_>>(), false)
    )
}

/// Nothing, if no hour is known: the figure above says so.
fn chart(what: &str, values: &[Option<f64>]) -> String {
    match values.iter().all(Option::is_none) {
        true => String::new(),
        false => format!("<h2>{what} by hour of day (UTC)</h2>{}", bars(values, true)),
    }
}

/// A bar for each hour; an unknown one has none.
fn bars(values: &[Option<f64>], has_text: bool) -> String {
    let most = values
        .iter()
        .flatten()
        .fold(0.0, |most: f64, value| most.max(*value))
        .max(1e-9);
    let bar = |(hour, value): (usize, &Option<f64>)| {
        let (x, known) = (hour * 24, value.unwrap_or(0.0));
        let height = known / most * 60.0;
        let title = value.map_or("?".to_owned(), |value| value.to_string());
        let text = match has_text {
            true => format!(
                "<text x=\"{x}\" y=\"82\">{hour:02}</text><text x=\"{x}\" y=\"{:.1}\">{title}</text>",
                68.0 - height
            ),
            false => String::new(),
        };
        format!(
            "<rect x=\"{x}\" y=\"{:.1}\" width=\"20\" height=\"{height:.1}\"><title>{hour:02}: {title}</title></rect>{text}",
            70.0 - height
        )
    };
    let bars = values.iter().enumerate().map(bar);
    format!(
        "<svg viewBox=\"0 0 576 84\" role=\"img\" aria-label=\"by hour of day\">{}</svg>",
        bars.collect::<String>()
    )
}

fn escape(text: &str) -> String {
    let one = |letter| match letter {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        other => String::from(other),
    };
    text.chars().map(one).collect()
}
