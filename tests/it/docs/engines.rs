//! The lists of engines that people and the API server read are those of the declarations. `STOWAGE_BLESS=1` writes them again.

use super::root;
use stowage_scheduling::engines::MeasuredLatency::{self, *};
use stowage_scheduling::engines::MetricQuantity::{self, *};
use stowage_scheduling::engines::{
    DECLARATIONS, Engine, EngineDeclaration, GATEWAYS, MetricReading,
};

/// What the table says of an engine, in the order of its columns.
type Figure = (
    &'static str,
    &'static [MetricQuantity],
    &'static [MeasuredLatency],
);

const FIGURES: [Figure; 9] = [
    (
        "KV cache in use",
        &[KvUsage, KvUsageOldName, BatchTokens],
        &[],
    ),
    ("queue", &[Waiting], &[]),
    ("interruptions", &[Preemptions], &[]),
    ("running requests", &[Running], &[]),
    ("tokens", &[GeneratedTokens], &[]),
    ("KV cache size", &[KvTokens, KvBlocks], &[]),
    ("sleep", &[Awake], &[]),
    ("time per token", &[], &[PerToken, PerTokenOldName]),
    ("time to first token", &[], &[ToFirstToken]),
];

const HEADER: &str = "| engine | label | page by default | versions seen | read | not read |\n|---|---|---|---|---|---|\n";

fn declared() -> impl Iterator<Item = &'static EngineDeclaration> {
    DECLARATIONS
        .iter()
        .filter(|one| one.engine != Engine::Other)
}

fn is_read(
    one: &EngineDeclaration,
    quantities: &[MetricQuantity],
    latencies: &[MeasuredLatency],
) -> bool {
    let has = |quantity: &MetricQuantity| quantities.contains(quantity);
    let readings = one
        .dialects
        .iter()
        .flat_map(|dialect| dialect.metrics)
        .map(|(_, reading)| reading);
    let by_metric = readings.into_iter().any(|reading| match reading {
        MetricReading::Histogram(latency) => latencies.contains(latency),
        MetricReading::Value(quantity) => has(quantity),
        MetricReading::ByLabel(_, all) | MetricReading::Labels(all) => {
            all.iter().any(|(_, quantity)| has(quantity))
        }
    });
    by_metric || one.has_props_endpoint && quantities.contains(&KvTokens)
}

fn table() -> String {
    let row = |one: &EngineDeclaration| {
        let ports: Vec<_> = one.ports.iter().map(|port| format!(":{port}")).collect();
        let prefixes: Vec<_> = one.dialects.iter().map(|dialect| dialect.prefix).collect();
        let name = match prefixes[..] {
            [""] => "no prefix".into(),
            _ => prefixes
                .iter()
                .map(|prefix| format!("`{prefix}`"))
                .collect::<Vec<_>>()
                .join(", "),
        };
        let (read, not_read): (Vec<_>, Vec<_>) = FIGURES
            .iter()
            .partition(|(_, all, latencies)| is_read(one, all, latencies));
        let list = |figures: Vec<&Figure>| match figures[..] {
            [] => "–".to_owned(),
            _ => figures
                .iter()
                .map(|(name, ..)| *name)
                .collect::<Vec<_>>()
                .join(", "),
        };
        format!(
            "| {name} | `{}` | `{}{}` | {} | {} | {} |\n",
            one.name,
            ports.join(" "),
            one.path,
            one.versions,
            list(read),
            list(not_read),
        )
    };
    HEADER.to_owned() + &declared().map(row).collect::<String>()
}

/// The chain of conditions by which the policy that completes pods names the engine of an image.
fn expression() -> String {
    let conditions = declared()
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .flat_map(|one| {
            one.images.iter().map(|part| {
                format!(
                    "        variables.image.contains(\"{part}\") ? \"{}\" :\n",
                    one.name
                )
            })
        });
    conditions.collect()
}

/// `text` from `start` to `end`, which stays.
fn replaced(file: &str, start: &str, end: &str, generated: &str) {
    let path = root().join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    let from = text
        .find(start)
        .unwrap_or_else(|| panic!("{file} has no {start:?}"));
    let to = from + text[from..].find(end).unwrap();
    let written = format!("{}{generated}{}", &text[..from], &text[to..]);
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(&path, &written).unwrap();
    }
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text == written, "STOWAGE_BLESS=1 writes {file} again");
}

#[test]
fn the_table_of_engines_is_that_of_the_declarations() {
    replaced(
        "docs/reference/engines.md",
        "| engine | label |",
        "\n\n",
        table().trim_end(),
    );
    let page = std::fs::read_to_string(root().join("docs/reference/engines.md")).unwrap();
    for gateway in &GATEWAYS {
        assert!(
            page.split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
                .contains(gateway.name),
            "{}",
            gateway.name
        );
    }
}

#[test]
fn the_policy_that_completes_pods_names_every_engine() {
    let file = "manifests/components/pod-defaults/pod-defaults.yaml";
    replaced(
        file,
        "        variables.image.contains(",
        "        \"\"\n",
        &expression(),
    );
}

#[test]
fn every_declared_engine_has_a_recorded_page() {
    let folder = std::fs::read_dir(root().join("tests/fixtures/engines")).unwrap();
    let pages: Vec<Vec<u8>> = folder
        .map(|file| std::fs::read(file.unwrap().path()).unwrap())
        .collect();
    for one in declared() {
        let is_of = |page: &Vec<u8>| {
            stowage_report::engine_metrics::parse_page(page, Some(one.engine))
                .is_ok_and(|figures| figures.engine == one.engine)
        };
        assert!(pages.iter().any(is_of), "{}", one.name);
    }
}
