//! The Grafana dashboard: its identity, its rows, and that every metric it shows exists.

use super::rules::{assert_known, text};
use serde_json::Value;
use std::collections::BTreeSet;

fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&text("manifests/grafana/stowage.json")).unwrap();
    assert_eq!(dashboard["uid"], "stowage-overview", "links by it go on working");
    let variable = &dashboard["templating"]["list"][0];
    assert_eq!((&variable["name"], &variable["type"]), (&"datasource".into(), &"datasource".into()));
    dashboard["panels"].as_array().unwrap().clone()
}

fn is_row(panel: &&Value) -> bool {
    panel["type"] == "row"
}

#[test]
fn the_dashboard_has_a_row_for_each_subject() {
    let panels = panels();
    let rows: Vec<&str> = panels.iter().filter(is_row).map(|row| row["title"].as_str().unwrap()).collect();
    let subjects =
        ["Fleet", "Nodes and GPUs", "Models", "Tenants and classes", "Decisions", "Health of Stowage"];
    assert_eq!(rows, subjects);
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
}

#[test]
fn every_panel_reads_the_chosen_data_source_and_metrics_that_exist() {
    let panels = panels();
    let mut expressions = Vec::new();
    for panel in panels.iter().filter(|panel| !is_row(panel)) {
        let targets = panel["targets"].as_array().unwrap();
        assert!(!targets.is_empty(), "{}", panel["title"]);
        for target in targets {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
            expressions.push(target["expr"].as_str().unwrap().to_owned());
        }
    }
    assert!(expressions.len() > 30, "{}", expressions.len());
    assert_known(&expressions);
}
