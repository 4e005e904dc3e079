//! The Grafana dashboard: its identity, its rows, and that every metric it shows exists.

use super::rules::{assert_known, text};
use serde_json::Value;
use std::collections::BTreeSet;

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&text("manifests/grafana/stowage.json")).unwrap();
    assert_eq!(
        dashboard["uid"], "stowage-overview",
        "links by it go on working"
    );
    let variable = &dashboard["templating"]["list"][0];
    assert_eq!(
        (&variable["name"], &variable["type"]),
        (&"datasource".into(), &"datasource".into())
    );
    dashboard["panels"].as_array().unwrap().clone()
}

fn is_row(panel: &&Value) -> bool {
    panel["type"] == "row"
}

#[test]
fn the_dashboard_has_a_row_for_each_subject() {
    let panels = panels();
    let rows: Vec<&str> = panels
        .iter()
        .filter(is_row)
        .map(|row| row["title"].as_str().unwrap())
        .collect();
    let subjects = [
        "Fleet",
        "Nodes and GPUs",
        "Models",
        "Tenants and classes",
        "Decisions",
        "Health of Stowage",
    ];
    assert_eq!(rows, subjects);
    let ids: BTreeSet<u64> = panels
        .iter()
        .map(|panel| panel["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
}

/// One expression of a panel.
pub struct PanelTarget {
    pub panel: String,
    pub expression: String,
    /// Empty where the panel names no series.
    pub legend: String,
}

pub fn targets() -> Vec<PanelTarget> {
    let mut found = Vec::new();
    for panel in panels().iter().filter(|panel| !is_row(panel)) {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{}", panel["title"]);
        for target in targets {
            assert_eq!(
                target["datasource"]["uid"], "${datasource}",
                "{}",
                panel["title"]
            );
            found.push(PanelTarget {
                panel: panel["title"].as_str().unwrap().to_owned(),
                expression: target["expr"].as_str().unwrap().to_owned(),
                legend: target["legendFormat"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned(),
            });
        }
    }
    found
}

#[test]
fn every_panel_reads_the_chosen_data_source_and_metrics_that_exist() {
    let expressions: Vec<String> = targets()
        .into_iter()
        .map(|target| target.expression)
        .collect();
    assert!(expressions.len() > 30, "{}", expressions.len());
    assert_known(&expressions);
}
