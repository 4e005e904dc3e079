//! The output of `stowage simulate packing`, and its messages about traces and arguments that it cannot use.

use super::*;
use clap::Parser;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

#[derive(Debug, Parser)]
struct ParsedPackingArgs {
    #[command(flatten)]
    packing: PackingArgs,
}

fn args(words: &[&str]) -> Result<PackingArgs, String> {
    let words = ["packing"].iter().chain(words);
    ParsedPackingArgs::try_parse_from(words)
        .map(|line| line.packing)
        .map_err(|error| error.to_string())
}

fn page(args: &PackingArgs) -> Value {
    let stage = args.setup().unwrap();
    let PackingResults { lines, beginnings } = stage.run_replays().unwrap();
    let bound = args.bound_on(&stage, &beginnings).unwrap();
    serde_json::to_value(PackingOutput {
        variant: &stage.source.variant,
        results: &lines,
        bound: bound.as_ref(),
    })
    .unwrap()
}

const NODES: &str =
    "sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,T4\nn1,96000,393216,8,G2\n";
const PODS: &str =
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli\np0,4000,8192,1,460\np1,4000,8192,2,1000\n";

fn trace(pods: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("openb_node_list_gpu_node.csv"), NODES).unwrap();
    fs::write(directory.path().join("openb_pod_list_tiny.csv"), pods).unwrap();
    directory
}

fn refusal(directory: &Path, variant: &str) -> String {
    let path = directory.to_str().unwrap();
    args(&["--trace", path, "--variant", variant])
        .unwrap()
        .setup()
        .err()
        .unwrap()
        .to_string()
}

#[test]
fn the_object_names_the_variant_and_ours_is_stowage() {
    let args = args(&["--policy", "best-fit,stowage", "--seeds", "42..43"]).unwrap();
    let page = page(&args);
    assert_eq!(page["variant"], "made-up");
    let policies: Vec<&Value> = page["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|line| &line["policy"])
        .collect();
    assert_eq!(policies, ["best-fit", "stowage"]);
    for line in page["results"].as_array().unwrap() {
        assert_eq!(line["seeds"], json!([42, 43]));
        let at_130 = line["at_130"].as_f64().unwrap();
        assert!((80.0..=100.0).contains(&at_130), "{line}");
    }
    assert_eq!(page.get("bound"), None);
}

#[test]
fn the_bound_is_a_row_of_the_table_and_a_field_of_the_object() {
    let args = args(&["--policy", "best-fit,stowage", "--seeds", "42", "--bound"]).unwrap();
    let page = page(&args);
    let (bound, results) = (&page["bound"], page["results"].as_array().unwrap());
    let longest = bound["begins_as"].as_str().unwrap();
    assert!(["best-fit", "stowage"].contains(&longest), "{bound}");
    let line = results
        .iter()
        .find(|line| line["policy"] == longest)
        .unwrap();
    assert!(
        bound["at_130"].as_f64() >= line["at_130"].as_f64(),
        "{page}"
    );
    let stage = args.setup().unwrap();
    let PackingResults { lines, beginnings } = stage.run_replays().unwrap();
    let bound = args.bound_on(&stage, &beginnings).unwrap();
    let text = table::allocation_table(
        &stage.source,
        &stage.played_trace,
        &lines,
        bound.as_ref(),
        Columns(None),
    );
    let row = text
        .lines()
        .find(|line| line.contains("bound (LP)"))
        .unwrap();
    assert_eq!(row.split_whitespace().count(), 4, "{row}");
    assert!(
        text.contains(&format!(
            "places every pod {longest} had placed before it first"
        )),
        "{text}"
    );
}

#[test]
fn without_a_policy_all_are_played_and_one_that_is_named_twice_once() {
    assert_eq!(
        args(&[]).unwrap().setup().unwrap().policies,
        SimulatedPolicy::usual()
    );
    let twice = args(&["--policy", "fgd,random,fgd"])
        .unwrap()
        .setup()
        .unwrap();
    assert_eq!(
        twice.policies,
        [SimulatedPolicy::Fgd, SimulatedPolicy::Random]
    );
}

#[test]
fn the_table_stands_beside_what_was_published() {
    let directory = trace(PODS);
    let published = "trace,policy,seed,a100,a130\ntiny,BestFit,42,91.5,92.5\n";
    fs::write(
        directory.path().join("published_alloc_ratio.csv"),
        published,
    )
    .unwrap();
    let path = directory.path().to_str().unwrap();
    let args = args(&[
        "--trace",
        path,
        "--variant",
        "tiny",
        "--policy",
        "best-fit,stowage",
        "--seeds",
        "42",
    ])
    .unwrap();
    let stage = args.setup().unwrap();
    let text = table::allocation_table(
        &stage.source,
        &stage.played_trace,
        &stage.run_replays().unwrap().lines,
        None,
        Columns(None),
    );
    assert!(
        text.starts_with("openb, tiny: 2 nodes, 10 GPUs, 2 pods; seed 42"),
        "{text}"
    );
    let line = text.lines().find(|line| line.contains("best-fit")).unwrap();
    assert!(line.contains("91.50") && line.contains("92.50"), "{line}");
}

#[test]
fn eviction_for_serving_pods_needs_a_trace_with_serving_pods() {
    let directory = trace(PODS);
    let path = directory.path().to_str().unwrap();
    let words = [
        "--trace",
        path,
        "--variant",
        "tiny",
        "--preempt-best-effort",
    ];
    let error = args(&words).unwrap().setup().err().unwrap().to_string();
    assert!(
        error.contains("no pod of tiny") && error.contains("leave --preempt-best-effort out"),
        "{error}"
    );
}

#[test]
fn the_policy_that_knows_all_arrivals_is_refused_with_churn() {
    let error = args(&["--policy", "stowage-known-demand", "--churn", "0.9"])
        .unwrap()
        .setup()
        .err()
        .unwrap();
    assert!(
        error.to_string().contains("leave it or --churn out"),
        "{error}"
    );
}

#[test]
fn pods_too_large_for_the_models_they_name_are_simulated_and_reported() {
    let pods = |rows: &str| {
        format!("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np0,4000,8192,1,460,\n{rows}")
    };
    let said = |rows: &str| {
        let directory = trace(&pods(rows));
        let path = directory.path().to_str().unwrap();
        let words = [
            "--trace",
            path,
            "--variant",
            "tiny",
            "--policy",
            "fgd,stowage",
            "--seeds",
            "42",
        ];
        let stage = args(&words).unwrap().setup().unwrap();
        let lines = stage.run_replays().unwrap().lines;
        assert_eq!(lines.len(), 2);
        table::allocation_table(
            &stage.source,
            &stage.played_trace,
            &lines,
            None,
            Columns(None),
        )
        .lines()
        .nth(1)
        .unwrap()
        .to_owned()
    };
    assert_eq!(said(""), "");
    assert_eq!(
        said("p1,1,1,8,1000,T4\n"),
        "1 pod, p1, is larger than every node of the GPU models it names, and is never placed"
    );
    let two = said("p1,1,1,8,1000,T4\np2,1,1,4,1000,T4\n");
    assert!(two.starts_with("2 pods, p1 first, are larger"), "{two}");
}

#[test]
fn the_table_says_that_the_built_in_trace_is_generated() {
    let stage = args(&["--policy", "best-fit", "--seeds", "1"])
        .unwrap()
        .setup()
        .unwrap();
    let text = table::losses_table(
        &stage.source,
        &stage.played_trace,
        &stage.run_churn("0.9".parse().unwrap()).unwrap(),
        Columns(None),
    );
    assert!(text.starts_with("made up (with --trace DIR"), "{text}");
    assert!(
        text.contains("would keep 90.0 % of the GPUs busy"),
        "{text}"
    );
}

#[test]
fn invalid_arguments_are_refused_with_the_remedy() {
    let cases: [(&[&str], &str); 7] = [
        (
            &["--policy", "worst-fit"],
            "there is no policy \"worst-fit\"; write one or several of random, dot-product",
        ),
        (&["--seeds", "51..42"], "51 is larger than 42; write 42..51"),
        (&["--seeds", "one"], "write a whole number"),
        (&["--variant", "default"], "--trace <DIR>"),
        (&["--churn", "95"], "from 0.01 to 10, such as 0.95"),
        (
            &["--churn", "0.9", "--preempt-best-effort"],
            "cannot be used with",
        ),
        (&["--bound", "--preempt-best-effort"], "cannot be used with"),
    ];
    for (words, said) in cases {
        let error = args(words).unwrap_err();
        assert!(error.contains(said), "{words:?}: {error}");
    }
}

#[test]
fn an_unknown_variant_is_answered_with_those_that_are_there() {
    let directory = trace(PODS);
    let error = refusal(directory.path(), "default");
    assert!(
        error.contains("no variant \"default\"") && error.ends_with("it has tiny"),
        "{error}"
    );
    let error = refusal(&directory.path().join("elsewhere"), "tiny");
    assert!(
        error.contains("--trace is the directory of openb's files"),
        "{error}"
    );
}

#[test]
fn the_error_for_an_invalid_trace_has_file_line_and_remedy() {
    let cases = [
        (
            PODS.replace("num_gpu,", "gpus,"),
            "line 1: there is no column \"num_gpu\"",
        ),
        (
            PODS.replace("460", "-460"),
            "line 2: gpu_milli is -460, less than nothing; write 0 or more",
        ),
        (
            PODS.replace("2,1000", "16,1000"),
            "line 3: pod p1 wants 16 GPUs",
        ),
        (
            String::new(),
            "is empty; it should begin with a line of column names",
        ),
    ];
    for (pods, said) in cases {
        let directory = trace(&pods);
        let error = refusal(directory.path(), "tiny");
        assert!(
            error.contains("openb_pod_list_tiny.csv") && error.contains(said),
            "{error}"
        );
    }
}
