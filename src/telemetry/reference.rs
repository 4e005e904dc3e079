//! `docs/reference/metrics.md`: every family of both pages, generated from their declarations.

use super::Metrics;
use super::agent::AgentMetrics;
use super::family::{Families, Family, Label, LabelValues};
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
`stowage agent`, on each node. [Run day](../use/run-day.md#metrics) says how to scrape them and what to alert on.

- The format is Prometheus' text, version 0.0.4, by the `prometheus` crate. OpenMetrics would add exemplars, which nothing here
  has: a decision is found by its pod, with `stowage explain`, its Events and the log.
- A family whose labels have known values is on the page from the start, at zero. One about nodes, GPUs, classes, tenants or
  models has a series for each that there is now; what is gone leaves none behind.
- An unknown value has no series, because zero is a value.
- Each label says what bounds its values. Names that users choose are escaped.
- Each replica of `stowage serve` has all families. Those about the cluster agree, as far as the replicas have seen the same; take
  those of the leader (`stowage_leader == 1`), or their maximum. Counters of decisions and writes rise where they are made: sum
  them.
";

const SERVE: &str = "
## stowage serve

`--gpu-metrics=false` leaves out the families whose names begin with `stowage_gpu_` and have the label `gpu`: six series for each
GPU, a quarter of a million on 5,000 nodes with 8 GPUs each.
";

const AGENT: &str = "
## stowage agent

With `--metrics-listen`. Temperature, power, utilization, KV cache and queue of each GPU are here and not on `stowage serve`'s page:
Prometheus scrapes them where they are measured. The names in brackets are fields of NVIDIA's DCGM exporter with the same figure.
";

fn section(text: &mut String, head: &str, families: &Families) {
    text.push_str(head);
    text.push_str("\n| family | type | unit | labels | |\n|---|---|---|---|---|\n");
    let mut all: Vec<&Family> = families.all().iter().map(|family| &**family).collect();
    all.sort_by(|one, other| one.name.cmp(&other.name));
    for family in all {
        let Family {
            name,
            kind,
            help,
            labels,
        } = family;
        let labels = labels.iter().map(described).collect::<Vec<_>>().join("; ");
        let help = cell(help);
        writeln!(
            text,
            "| `{name}` | {} | {} | {labels} | {help} |",
            kind.name(),
            family.unit()
        )
        .expect("a String takes any text");
    }
}

fn described(Label { name, values }: &Label) -> String {
    match values {
        LabelValues::Known(values) => {
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            format!("`{name}`: {}", values.join(", "))
        }
        LabelValues::Open(bound) => format!("`{name}`: {}", cell(bound)),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
