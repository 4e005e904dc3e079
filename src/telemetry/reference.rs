//! `docs/reference/metrics.md`: every family of both pages, generated from their declarations.

use super::Metrics;
use super::agent::AgentMetrics;
use super::family::{Families, Family, Label, LabelValues};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The whole page, as Markdown.
pub fn markdown() -> String {
    let mut text = String::from(HEAD);
    section(&mut text, SERVE, Metrics::new().families());
    section(&mut text, AGENT, AgentMetrics::new().families());
    text
}

const HEAD: &str = "<!-- Generated from src/telemetry: STOWAGE_BLESS=1 cargo test --test it metrics -->

# Metrics

Stowage has two pages for Prometheus: `/metrics` of `stowage serve`, on the operators' address of each replica, and `/metrics` of
`stowage agent`, on each node. [Run day](../use/run-day.md#metrics) says what to look at, [install
day](../use/install-day.md#monitoring) how to scrape.

- A name says its unit. A family whose labels have known values is there from the start, at zero; one about nodes, GPUs, classes,
  tenants or models has a series for each that there is now. An unknown value has no series, because zero is a value.
- Each replica has all families. Take those about the cluster from the leader (`stowage_leader == 1`), or their maximum. Sum counters
  of decisions and writes: they rise where these are made.
";

const SERVE: &str = "
## stowage serve

`--gpu-metrics=false` leaves out the families `stowage_gpu_…` with the label `gpu`: six series for each GPU.
";

const AGENT: &str = "
## stowage agent

With `--metrics-listen`. The names in brackets are fields of NVIDIA's DCGM exporter with the same figure.
";

fn section(text: &mut String, head: &str, families: &Families) {
    text.push_str(head);
    let mut all: Vec<&Family> = families.all().iter().map(|family| &**family).collect();
    all.sort_by(|one, other| one.name.cmp(&other.name));
    let shared = shared(&all);
    text.push_str("\nLabels of several families:");
    for (name, values) in &shared {
        write!(text, "\n- `{name}`: {values}").expect("a String takes any text");
    }
    text.push_str("\n\n| family | type | labels | |\n|---|---|---|---|\n");
    for family in all {
        let Family {
            name,
            kind,
            help,
            labels,
        } = family;
        let labels = labels.iter().map(|label| {
            let values = label_values(label);
            match shared.get(label.name) {
                Some(shared_values) if *shared_values == values => format!("`{}`", label.name),
                _ => format!("`{}`: {values}", label.name),
            }
        });
        let labels = labels.collect::<Vec<_>>().join("; ");
        let help = escape_cell(help);
        writeln!(
            text,
            "| `{name}` | {} | {labels} | {help} |",
            kind.into_str()
        )
        .expect("a String takes any text");
    }
}

/// By the name of a label, its values in most of the families that have them in common.
fn shared(all: &[&Family]) -> BTreeMap<&'static str, String> {
    let mut counts: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for label in all.iter().flat_map(|family| &family.labels) {
        *counts.entry((label.name, label_values(label))).or_default() += 1;
    }
    let mut common: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 1).collect();
    common.sort_by_key(|(_, count)| *count);
    common
        .into_iter()
        .map(|((name, values), _)| (name, values))
        .collect()
}

fn label_values(Label { values, .. }: &Label) -> String {
    match values {
        LabelValues::Known(values) => {
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            values.join(", ")
        }
        LabelValues::Open(bound) => escape_cell(bound),
    }
}

fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|")
}
