//! What `stowage assess` proposes for a cluster that the lab plays, and what requests say of it.

use super::{assess, figure, workload};
use serde_json::Value;
use std::process::Command;

/// The quick form: a day of fifteen pods.
#[test]
fn a_day_that_the_lab_plays_is_assessed_and_what_is_proposed_is_played_again() {
    let folder = tempfile::tempdir().unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["simulate", "assess", "--short", "-o", "json", "--write"])
        .arg(folder.path())
        .output()
        .unwrap();
    let said: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let one = &said[0];
    let number = |week: &str, of: &str| one[week][of].as_f64().unwrap();
    for week in ["asItIs", "plan"] {
        assert_eq!(number(week, "placed"), 15.0, "{one:#}");
    }
    assert_eq!(number("plan", "requests"), number("asItIs", "requests"));
    assert!(number("plan", "gpus") < number("asItIs", "gpus"), "{one:#}");
    assert!(
        number("plan", "late") < number("asItIs", "late") + 0.5,
        "{one:#}"
    );
    let has_place = number("plan", "gpus") <= one["gpusThatSuffice"].as_f64().unwrap();
    assert_eq!(one["holds"], has_place, "{one:#}");
    assert_eq!(ran.status.code(), Some(i32::from(!has_place)), "{one:#}");

    let path = |name: &str| folder.path().join(name).display().to_string();
    let (cluster, metrics) = (path("cluster.json"), path("week.json"));
    let answer = assess(&["--cluster", &cluster, "--metrics", &metrics, "-o", "json"]).json();
    assert_eq!(answer["summary"], one["summary"]);
    assert_eq!(
        figure(&answer, "GPUs today"),
        Some(number("asItIs", "gpus"))
    );
    // A day counts, and all of it is known of each engine and GPU.
    assert_eq!(workload(&answer, "training")["ownGpu"], "busy");
    assert_eq!(workload(&answer, "chat")["ownGpu"], "size");
    for one in answer["workloads"].as_array().unwrap() {
        assert_ne!(one["ownGpu"], "unknown", "{one:#}");
        assert_eq!(one["computePercent"]["coveredPercent"], 100);
    }
}
