//! The file of rules as tests read it.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

pub const FILE: &str = "manifests/prometheus/stowage-rules.yaml";

pub struct Alert {
    pub name: String,
    /// Of its expression: what is compared.
    pub left: String,
    /// With what.
    pub right: String,
    pub rule: Value,
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn text(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn rules() -> Vec<Value> {
    let file: Value = serde_saphyr::from_str(&text(FILE)).unwrap();
    let groups = file["groups"].as_array().unwrap().iter();
    groups
        .flat_map(|group| group["rules"].as_array().unwrap())
        .cloned()
        .collect()
}

pub fn alerts() -> Vec<Alert> {
    let alert = |rule: Value| {
        let name = rule["alert"].as_str()?.to_owned();
        let expression = rule["expr"].as_str().unwrap().trim();
        let splits = [" == ", " > ", " < "]
            .iter()
            .filter_map(|operator| expression.rsplit_once(operator));
        // The last comparison: the one with the shortest right side.
        let (left, right) = splits
            .min_by_key(|(_, right)| right.len())
            .expect("a comparison");
        Some(Alert {
            name,
            left: left.to_owned(),
            right: right.to_owned(),
            rule,
        })
    };
    rules().into_iter().filter_map(alert).collect()
}

/// Names of the recorded series.
pub fn recorded() -> BTreeSet<String> {
    rules()
        .iter()
        .filter_map(|rule| Some(rule["record"].as_str()?.to_owned()))
        .collect()
}

/// The names of series in an expression: words outside of quotes that have a family's prefix, or a colon.
pub fn metric_names(expression: &str) -> BTreeSet<String> {
    let outside: String = expression
        .split('"')
        .step_by(2)
        .collect::<Vec<_>>()
        .join(" ");
    let words = outside.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    let is_name = |word: &&str| {
        ["stowage_", "process_"].iter().any(|p| word.starts_with(p)) || word.contains(':')
    };
    words.filter(is_name).map(str::to_owned).collect()
}

/// Each name is a family of the reference, or recorded by a rule.
///
/// # Panics
///
/// If one is neither.
pub fn assert_known(expressions: &[String]) {
    let (reference, recorded) = (text("docs/reference/metrics.md"), recorded());
    let mut found = 0;
    for name in expressions
        .iter()
        .flat_map(|expression| metric_names(expression))
    {
        // A histogram's series.
        let family = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix));
        let is_family = |name: &str| reference.contains(&format!("\n| `{name}` |"));
        let is_known =
            is_family(&name) || family.is_some_and(is_family) || recorded.contains(&name);
        assert!(is_known, "docs/reference/metrics.md has no {name}");
        found += 1;
    }
    assert!(found > 20, "{found}");
}
