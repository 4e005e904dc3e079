//! An assessment as one page of HTML that needs nothing else: for a manager, each figure with its source and its caution.

use super::text::{self, value};
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
    let unplaced = unplaced.map(|pod| format!("{} has no place.", pod.pod));
    let cautions = unplaced.chain(answer.cautions.iter().cloned());
    let cautions = cautions.map(|one| format!("<li>{}</li>", escape(&one)));
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
        cautions.collect::<String>(),
    )
}

fn row(one: &WorkloadAnswer) -> String {
    let measured = [
        &one.vram_bytes,
        &one.compute_percent,
        &one.kv_cache_percent,
        &one.waiting,
    ];
    let mut cells: Vec<String> = text::row(one).iter().map(|cell| escape(cell)).collect();
    for (cell, of) in cells[2..].iter_mut().zip(measured) {
        *cell += &of.as_ref().map_or(String::new(), by_hour);
    }
    let why = escape(&text::why(one));
    format!("<tr><td>{}<td>{why}</tr>", cells.join("<td>"))
}

fn by_hour(of: &Distribution) -> String {
    let hours = of.by_hour.iter().map(|hour| hour.map(|value| value as f64));
    let bars = bars(&hours.collect::<Vec<_>>(), false);
    format!(
        "<small>{} % of the window</small>{bars}",
        of.covered_percent
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
    let known = values.iter().flatten();
    let most = known.fold(1e-9, |most: f64, value| most.max(*value));
    let bar = |(hour, value): (usize, &Option<f64>)| {
        let (x, height) = (hour * 24, value.unwrap_or(0.0) / most * 60.0);
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
    let markup = [
        ('&', "&amp;"),
        ('<', "&lt;"),
        ('>', "&gt;"),
        ('"', "&quot;"),
    ];
    let escaped = |text: String, (letter, name)| text.replace(letter, name);
    markup.into_iter().fold(text.to_owned(), escaped)
}
