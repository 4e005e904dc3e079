//! Alerts and recording rules: promtool loads them and their unit tests pass, the operator's object has the same groups, every
//! alert has a runbook page, every metric that they read exists, and a real Prometheus that scrapes a cluster has data for all of
//! them.

mod dashboard;
pub mod prometheus;
mod rules;
mod scraped;

use crate::needs::skip_not_installed;
use rules::{Alert, alerts, metric_names, recorded, root, text};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

const RULES: &str = rules::FILE;
const OBJECT: &str = "manifests/components/prometheus-rules/prometheus-rules.yaml";
const RUNBOOKS: &str = "https://github.com/stowage-dev/stowage/blob/main/";

/// What promtool prints on success; `None`, with a line that says so, where there is none.
pub fn promtool(arguments: &[&str]) -> Option<String> {
    let Ok(ran) = Command::new("promtool")
        .args(arguments)
        .current_dir(root())
        .output()
    else {
        skip_not_installed("promtool", "prometheus");
        return None;
    };
    let said = String::from_utf8([ran.stdout, ran.stderr].concat()).unwrap();
    assert!(
        ran.status.success(),
        "promtool {}: {said}",
        arguments.join(" ")
    );
    Some(said)
}

/// The files of promtool's unit tests.
fn unit_tests() -> Vec<String> {
    let files = std::fs::read_dir(root().join("tests/prometheus")).unwrap();
    let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    files
        .map(|file| format!("tests/prometheus/{file}"))
        .collect()
}

#[test]
fn promtool_loads_the_rules() {
    let Some(said) = promtool(&["check", "rules", RULES]) else {
        return;
    };
    let count = alerts().len() + recorded().len();
    assert!(said.contains(&format!("{count} rules found")), "{said}");
}

#[test]
fn promtools_unit_tests_pass() {
    let files = unit_tests();
    let arguments: Vec<&str> = ["test", "rules"]
        .into_iter()
        .chain(files.iter().map(String::as_str))
        .collect();
    let Some(said) = promtool(&arguments) else {
        return;
    };
    assert_eq!(said.matches("SUCCESS").count(), files.len(), "{said}");
}

#[test]
fn every_alert_fires_in_one_unit_test_and_is_silent_in_another() {
    let (mut fires, mut silent) = (BTreeSet::new(), BTreeSet::new());
    for file in unit_tests() {
        let file: Value = serde_saphyr::from_str(&text(&file)).unwrap();
        let tests = file["tests"].as_array().unwrap().iter();
        for case in tests.flat_map(|test| test["alert_rule_test"].as_array().unwrap()) {
            let name = case["alertname"].as_str().unwrap().to_owned();
            let is_silent = case["exp_alerts"].as_array().unwrap().is_empty();
            if is_silent { &mut silent } else { &mut fires }.insert(name);
        }
    }
    let names: BTreeSet<String> = alerts().into_iter().map(|alert| alert.name).collect();
    assert!(names.len() >= 12, "{names:?}");
    assert_eq!((&fires, &silent), (&names, &names));
}

#[test]
fn the_operators_object_has_the_same_groups() {
    let head = "# The groups of manifests/prometheus/stowage-rules.yaml: STOWAGE_BLESS=1 cargo test --test it alerts\n\
        apiVersion: monitoring.coreos.com/v1\n\
        kind: PrometheusRule\n\
        metadata:\n  name: stowage\n  namespace: kube-system\n  \
        labels: { app.kubernetes.io/name: stowage, app.kubernetes.io/part-of: stowage }\n\
        spec:\n";
    let rules = text(RULES);
    let groups = &rules[rules.find("groups:\n").unwrap()..];
    let indented = groups.lines().map(|line| match line {
        "" => "\n".to_owned(),
        line => format!("  {line}\n"),
    });
    let generated: String = [head.to_owned()].into_iter().chain(indented).collect();
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(root().join(OBJECT), &generated).unwrap();
    }
    assert_eq!(
        text(OBJECT),
        generated,
        "STOWAGE_BLESS=1 writes {OBJECT} again"
    );
    let parse = |text: &str| serde_saphyr::from_str::<Value>(text).unwrap();
    assert_eq!(
        parse(&generated)["spec"],
        parse(&rules),
        "indented, it says the same"
    );
}

#[test]
fn every_alert_has_a_severity_words_and_a_runbook_of_its_own() {
    let mut pages = BTreeSet::new();
    for Alert { name, rule, .. } in alerts() {
        let severity = rule["labels"]["severity"].as_str().unwrap_or_default();
        assert!(
            ["critical", "warning", "info"].contains(&severity),
            "{name}: {severity:?}"
        );
        for annotation in ["summary", "description"] {
            let words = rule["annotations"][annotation].as_str().unwrap_or_default();
            assert!(
                words.ends_with('.') && words.len() > 20,
                "{name}: {annotation}: {words:?}"
            );
        }
        let description = rule["annotations"]["description"].as_str().unwrap();
        assert!(
            description.chars().any(|c| c.is_ascii_digit()) || description.contains("$value"),
            "{name}"
        );
        let url = rule["annotations"]["runbook_url"]
            .as_str()
            .unwrap_or_default();
        let page = url
            .strip_prefix(RUNBOOKS)
            .unwrap_or_else(|| panic!("{name}: {url:?}"));
        assert_eq!(
            text(page).lines().next(),
            Some(&*format!("# {name}")),
            "{page}"
        );
        assert!(pages.insert(page.to_owned()), "{page} is of two alerts");
        let run_day = text("docs/use/run-day.md");
        let link = format!("[{name}](../{})", page.strip_prefix("docs/").unwrap());
        assert!(run_day.contains(&link), "docs/use/run-day.md lacks {link}");
    }
    let files = std::fs::read_dir(root().join("docs/runbooks")).unwrap();
    let files = files.map(|file| {
        format!(
            "docs/runbooks/{}",
            file.unwrap().file_name().into_string().unwrap()
        )
    });
    assert_eq!(
        files.collect::<BTreeSet<_>>(),
        pages,
        "a page without an alert"
    );
}

#[test]
fn a_runbook_says_what_it_means_what_users_feel_where_to_look_and_what_to_do() {
    for file in std::fs::read_dir(root().join("docs/runbooks")).unwrap() {
        let file = file.unwrap().path();
        let page = std::fs::read_to_string(&file).unwrap();
        let places = [
            "\n**Meaning.** ",
            "\n**What users feel.** ",
            "\n**Look.**",
            "\n```sh\n",
            "\n**Do.** ",
        ]
        .map(|part| {
            page.find(part)
                .unwrap_or_else(|| panic!("{}: no {part:?}", file.display()))
        });
        assert!(places.is_sorted(), "{}: in this order", file.display());
    }
}

#[test]
fn every_metric_that_a_rule_reads_exists() {
    let file: Value = serde_saphyr::from_str(&text(RULES)).unwrap();
    let groups = file["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
    let expressions: Vec<String> = rules
        .map(|rule| rule["expr"].as_str().unwrap().to_owned())
        .collect();
    rules::assert_known(&expressions);
}

#[test]
fn an_alert_compares_one_left_side_with_one_number() {
    for alert in alerts() {
        assert!(
            alert.right.parse::<f64>().is_ok(),
            "{}: {:?}",
            alert.name,
            alert.right
        );
        let depth = alert.left.chars().try_fold(0_i32, |depth, c| match c {
            '(' => Some(depth + 1),
            ')' if depth == 0 => None,
            ')' => Some(depth - 1),
            _ => Some(depth),
        });
        assert_eq!(depth, Some(0), "{}: {}", alert.name, alert.left);
    }
}

#[test]
fn metric_names_are_found_beside_functions_labels_and_recorded_ones() {
    let expression = "max by (cluster, node) (stowage_gpus{kind=\"stowage_no\"}) / a:stowage_b:max - rate(process_cpu_seconds_total[5m])";
    let names = metric_names(expression);
    assert_eq!(
        names,
        [
            "stowage_gpus",
            "a:stowage_b:max",
            "process_cpu_seconds_total"
        ]
        .map(str::to_owned)
        .into()
    );
}
