//! `stowage plan capacity`: the answer for people and for programs, what a mistake says, and the exit codes.

use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

struct StowageOutput {
    code: i32,
    out: String,
    err: String,
}

/// `stowage plan capacity` with these arguments, in the repository's root.
fn capacity(arguments: &[&str]) -> StowageOutput {
    capacity_from_stdin(arguments, "")
}

/// The same with something on standard input.
fn capacity_from_stdin(arguments: &[&str], input: &str) -> StowageOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    command
        .args(["plan", "capacity"])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let pipes = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = pipes.spawn().unwrap();
    // A command that reads none of it may have ended.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let ran = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    StowageOutput {
        code: ran.status.code().unwrap(),
        out: text(ran.stdout),
        err: text(ran.stderr),
    }
}

const MODELS: &str = "manifests/examples/three-models.yaml";
const PRIORITIES: &str = "manifests/base/priority-classes.yaml";
const A100: &str = "gpus=2,gpu=A100-80GB";

fn file(folder: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A Pod whose one container has these limits.
fn pod(name: &str, limits: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "team-a", "uid": name},
        "spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]},
    })
}

fn list(items: Vec<Value>) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string()
}

#[test]
fn two_gpus_hold_fraud_detection_credit_scoring_and_the_chatbot() {
    let said = capacity(&["--pods", MODELS, "--pods", PRIORITIES, "--nodes", A100]);
    assert_eq!((said.code, &*said.err), (0, ""), "{}", said.out);
    let summary = "2 GPUs hold all 3 pods: 1 node a100-80gb (2 GPUs each).\nThat is optimal: no arrangement needs fewer";
    assert!(said.out.starts_with(summary), "{}", said.out);
    let line = |name: &str| said.out.lines().find(|line| line.contains(name)).unwrap();
    assert!(
        line("fraud-detection-0").ends_with("exclusively")
            && line("fraud-detection-0").contains("100 %")
    );
    let shared = line("credit-scoring-0");
    assert!(
        shared.contains("97 %") && shared.contains("70.0 GiB of 72.0 GiB"),
        "{shared}"
    );
    assert!(
        shared.contains("default/chatbot-0 (opportunistic) 30.0 GiB"),
        "{shared}"
    );
    assert!(
        said.out
            .contains("A third GPU is not needed: with it, 34 % of the GPUs would stand idle"),
        "{}",
        said.out
    );
}

#[test]
fn the_answer_as_data_has_the_same_numbers() {
    let said = capacity(&[
        "--pods", MODELS, "--pods", PRIORITIES, "--nodes", A100, "-o", "json",
    ]);
    let answer: Value = serde_json::from_str(&said.out).unwrap();
    let of = |field: &str| answer[field].clone();
    assert_eq!(
        (of("gpus"), of("nodes"), of("pods"), of("held")),
        (json!(2), json!(1), json!(3), json!(3))
    );
    assert_eq!(
        (of("isOptimal"), of("notHeld"), of("leftOut")),
        (json!(true), json!([]), json!([]))
    );
    assert_eq!(answer["lowerBound"]["gpus"], json!(2));
    assert_eq!(
        answer["oneMore"],
        json!({"gpus": 3, "idlePercentNow": 1, "idlePercentThen": 34})
    );
    let gpus = answer["layout"][0]["gpus"].as_array().unwrap();
    let shared = gpus.iter().find(|gpu| gpu["sharing"] == "shared").unwrap();
    assert_eq!(
        (&shared["allocatedBytes"], &shared["allocatableBytes"]),
        (&json!(70u64 << 30), &json!(72u64 << 30))
    );
    assert_eq!(shared["pods"].as_array().unwrap().len(), 2);
    let yaml = capacity(&[
        "--pods", MODELS, "--pods", PRIORITIES, "--nodes", A100, "-o", "yaml",
    ])
    .out;
    assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), answer);
}

#[test]
fn the_policy_says_who_shares_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let labelled = |name: &str, priority: i32, vram: &str| {
        let mut pod = pod(name, json!({"stowage.dev/vram": vram}));
        pod["metadata"]["labels"] = json!({"app": name});
        pod["spec"]["priority"] = json!(priority);
        pod
    };
    let pods = [
        labelled("fraud", 1000, "20Gi"),
        labelled("credit", 100, "30Gi"),
        labelled("chatbot", 10, "20Gi"),
    ];
    let pods = file(&folder, "pods.json", &list(pods.into()));
    let asked = [
        "--pods",
        path(&pods),
        "--nodes",
        "gpus=2,gpu=A100-80GB,label=gpu-pool=bank",
    ];
    assert!(capacity(&asked).out.starts_with("1 GPU holds all 3 pods"));
    let by_policy =
        capacity(&[&asked[..], &["--policy", "policies/fraud-credit-chatbot"]].concat());
    assert!(
        by_policy.out.starts_with("2 GPUs hold all 3 pods"),
        "{}",
        by_policy.out
    );
    assert!(
        by_policy.out.contains("alone: its class shares with none"),
        "{}",
        by_policy.out
    );
}

#[test]
fn a_geometry_that_a_gpu_cannot_be_cut_into_is_refused_with_its_placements() {
    let asked = |mig: &str| {
        capacity(&[
            "--pods",
            MODELS,
            "--nodes",
            "gpus=2,gpu=A100-80GB",
            "--mig",
            mig,
        ])
    };
    let four = asked("2g.20gb,2g.20gb,2g.20gb,2g.20gb");
    assert_eq!(four.code, 2);
    let why = "A100-80GB cannot be cut into 2g.20gb × 4: 2g.20gb takes 2 of 8 memory slices and has placements at 0, 2, 4, so at most 3 fit";
    assert!(
        four.err.starts_with("error: ") && four.err.contains(why),
        "{}",
        four.err
    );
    assert_eq!(
        four.err.matches("--mig").count(),
        1,
        "the reason is given once: {}",
        four.err
    );
    assert!(
        asked("3g.40gb,3g.40gb,3g.40gb")
            .err
            .contains("so at most 2 fit")
    );
    assert!(asked("3g.40g").err.contains("did you mean 3g.40gb?"));
    for possible in [
        "3g.40gb,3g.40gb",
        "4g.40gb,3g.40gb",
        "1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb",
    ] {
        assert!(
            asked(possible).code < 2,
            "{possible}: {}",
            asked(possible).err
        );
    }
}

#[test]
fn pods_of_a_device_plugin_ask_for_a_geometry() {
    let pods = (0..4)
        .map(|n| pod(&format!("p{n}"), json!({"nvidia.com/mig-3g.40gb": "1"})))
        .collect();
    let said = capacity_from_stdin(
        &["--pods", "-", "--nodes", "gpus=8,gpu=A100-80GB"],
        &list(pods),
    );
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(
        said.out.starts_with(
            "2 GPUs hold all 4 pods: 1 node a100-80gb (2 of its 8 GPUs, by the device plugin)"
        ),
        "{}",
        said.out
    );
    assert!(
        said.out.contains("0 3g.40gb") && said.out.contains("1 3g.40gb"),
        "{}",
        said.out
    );
}

#[test]
fn a_pod_that_no_gpu_holds_is_named_with_its_file_and_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let pods = list(vec![
        pod("huge", json!({"stowage.dev/vram": "100Gi"})),
        pod("small", json!({"stowage.dev/vram": "10Gi"})),
        pod("odd", json!({"stowage.dev/vram": "1.5"})),
    ]);
    let pods = file(&folder, "pods.json", &pods);
    let said = capacity(&["--pods", path(&pods), "--nodes", A100]);
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(
        said.out.starts_with("1 GPU holds 1 of 3 pods"),
        "{}",
        said.out
    );
    for part in [
        "team-a/huge  100.0 GiB on 1 GPU",
        "pods.json: Pod team-a/huge",
        "stowage.dev/gpus: \"2\"",
        "it is not a whole number",
    ] {
        assert!(said.out.contains(part), "{part}: {}", said.out);
    }
    let json: Value =
        serde_json::from_str(&capacity(&["--pods", path(&pods), "--nodes", A100, "--json"]).out)
            .unwrap();
    let codes: Vec<&Value> = json["notHeld"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| &pod["reasons"][0]["code"])
        .collect();
    assert_eq!(codes, [&json!("too-large"), &json!("bad-quantity")]);
}

#[test]
fn a_pod_that_the_api_server_would_refuse_is_not_planned() {
    let vram = |amount: &str| json!({"stowage.dev/vram": amount});
    let with = |name: &str, requests: Value, limits: Value| {
        let mut pod = pod(name, limits);
        pod["spec"]["containers"][0]["resources"]["requests"] = requests;
        pod
    };
    let mut over_two = pod("over-two", vram("300Mi"));
    over_two["metadata"]["annotations"] = json!({"stowage.dev/gpus": "2"});
    let refused = [
        (pod("bytes", vram("40000")), "256.0 MiB"),
        (pod("little", vram("255Mi")), "256.0 MiB"),
        (over_two, "512.0 MiB"),
        (with("differ", vram("20Gi"), vram("60Gi")), "differ"),
        (with("no-limit", vram("20Gi"), json!({})), "limits"),
        (
            with(
                "devices",
                json!({"nvidia.com/gpu": "1"}),
                json!({"nvidia.com/gpu": "2"}),
            ),
            "nvidia.com/gpu",
        ),
    ];
    for (pod, part) in refused {
        let said = capacity_from_stdin(&["--pods", "-", "--nodes", A100], &list(vec![pod]));
        assert!(
            said.code == 1 && said.out.contains(part),
            "{part}: {}{}",
            said.out,
            said.err
        );
    }
    let taken = [
        pod("least", vram("256Mi")),
        with("same", vram("1024Mi"), vram("1Gi")),
        with(
            "host",
            json!({"cpu": "1"}),
            json!({"cpu": "2", "stowage.dev/vram": "1Gi"}),
        ),
    ];
    let said = capacity_from_stdin(&["--pods", "-", "--nodes", A100], &list(taken.to_vec()));
    assert!(
        said.code == 0 && said.out.starts_with("1 GPU holds"),
        "{}{}",
        said.out,
        said.err
    );
}

#[test]
fn an_unplaced_pod_is_listed_with_its_line_and_units() {
    let mut first = pod("first", json!({"stowage.dev/vram": "10Gi", "cpu": "64"}));
    first["spec"]["containers"][0]["resources"]["requests"] = json!({"cpu": "64"});
    let said = capacity_from_stdin(
        &["--pods", "-", "--nodes", "gpus=2,gpu=A100-80GB,cpu=32"],
        &format!("\n\n{first}\n"),
    );
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(
        said.out.contains("standard input:3: Pod team-a/first"),
        "{}",
        said.out
    );
    assert!(
        said.out
            .contains("the pod asks for 64 CPU, and the node has 32 in all"),
        "{}",
        said.out
    );
}

#[test]
fn a_pod_with_an_invalid_name_is_not_placed() {
    let odd = pod("Bad Name!", json!({"stowage.dev/vram": "1Gi"}));
    let said = capacity_from_stdin(
        &["--pods", "-", "--nodes", A100],
        &list(vec![odd, pod("ok", json!({"stowage.dev/vram": "1Gi"}))]),
    );
    assert_eq!(said.code, 1, "{}", said.err);
    assert!(
        said.out.starts_with("1 GPU holds 1 of 2 pods"),
        "{}",
        said.out
    );
    assert!(said.out.contains("Pod team-a/Bad Name!"), "{}", said.out);
}

#[test]
fn nodes_that_differ_by_little_memory_are_one_kind_and_pods_bound_to_one_of_them_may_go_to_any() {
    let node = |number: u64| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": format!("n{number}"), "labels": {
                "kubernetes.io/hostname": format!("n{number}"), "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81920",
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
            }},
            "status": {"allocatable": {"cpu": "96", "memory": format!("{}Ki", 1_056_000_000 + 4 * number), "pods": "110"}},
        })
    };
    let mut pinned = pod("pinned", json!({"stowage.dev/vram": "30Gi"}));
    pinned["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "n3"});
    let mut items: Vec<Value> = (0..40).map(node).collect();
    items.push(pinned);
    let folder = tempfile::tempdir().unwrap();
    let cluster = file(&folder, "cluster.json", &list(items));
    let said = capacity(&["--cluster", path(&cluster)]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(
        said.out
            .starts_with("1 GPU holds the pod: 1 node a100-80gb"),
        "{}",
        said.out
    );
    assert!(
        said.err
            .contains("1 pod: a selector of one node by its name; the plan does not take that"),
        "{}",
        said.err
    );
}

#[test]
fn a_kind_of_node_that_needs_fewer_gpus_alone_is_named() {
    let pods = (0..6)
        .map(|n| pod(&format!("p{n}"), json!({"stowage.dev/vram": "30Gi"})))
        .collect();
    let said = capacity_from_stdin(
        &[
            "--pods",
            "-",
            "--nodes",
            "gpus=8,gpu=L40S",
            "--nodes",
            "gpus=8,gpu=A100-80GB",
        ],
        &list(pods),
    );
    assert!(
        said.out.starts_with("6 GPUs hold all 6 pods"),
        "{}",
        said.out
    );
    assert!(
        said.out
            .contains("found to hold them with the kinds of nodes in the order given."),
        "{}",
        said.out
    );
    assert!(
        said.out
            .contains("3 GPUs of a100-80gb alone hold all of them."),
        "{}",
        said.out
    );
}

#[test]
fn a_misspelled_argument_gets_a_suggestion() {
    let error = |arguments: &[&str]| {
        let said = capacity(arguments);
        assert!(
            said.code == 2 && said.out.is_empty() && said.err.starts_with("error: "),
            "{arguments:?}: {}",
            said.err
        );
        said.err
    };
    assert!(
        error(&["--pods", MODELS, "--nodes", "gpuz=8,gpu=A100-80GB"])
            .contains("did you mean gpus?")
    );
    assert!(
        error(&["--pods", MODELS, "--nodes", "gpus=8,gpu=A100"]).contains("A100-40GB, A100-80GB")
    );
    assert!(error(&["--pods", MODELS, "--nodes", "gpus=8"]).contains("add gpu=A100-80GB"));
    assert!(error(&["--pods", MODELS, "--nodes", "nodes.yaml"]).contains("nodes.yaml: "));
    assert!(error(&["--pods", "nope.yaml", "--nodes", A100]).contains("nope.yaml: "));
    assert!(
        error(&["--pods", MODELS, "--nodes", A100, "--gpu-type", "L4"]).contains("'--gpu-types'")
    );
    assert!(error(&["--pods", MODELS]).contains("--nodes"));
    assert!(
        error(&["--pods", "-", "--cluster", "-", "--nodes", A100]).contains("--pods are both -")
    );
    assert!(error(&["--pods", MODELS, "--nodes", A100, "--policy", "nope"]).contains("nope"));
    assert!(
        error(&["--pods", MODELS, "--nodes", A100, "--gpu-types", "L4"])
            .contains("leave gpu= and vram= out")
    );
    let cut = [
        "--pods",
        MODELS,
        "--nodes",
        "gpus=8,gpu=B200",
        "--mig",
        "1g.23gb,1g.23gb",
    ];
    assert!(
        error(&cut).contains("how much memory a slice 1g.23gb of B200-180GB has is not known here")
    );
}

#[test]
fn without_a_pod_that_requests_a_gpu_there_is_nothing_to_plan() {
    let empty = capacity_from_stdin(&["--pods", "-", "--nodes", A100], "");
    assert_eq!(empty.code, 2);
    assert!(
        empty.err.contains("there is no pod that requests a GPU")
            && empty.err.contains("stowage.dev/vram"),
        "{}",
        empty.err
    );
    let none = capacity_from_stdin(
        &["--pods", "-", "--nodes", A100],
        &list(vec![pod("web", json!({"cpu": "1"}))]),
    );
    assert!(
        none.code == 2 && none.err.contains("1 pod left out: no GPU is requested"),
        "{}",
        none.err
    );
}

/// What `kubectl get nodes,pods -A -o json` prints of two nodes of one kind, with a pod that runs, one that waits and one that
/// ended.
fn dump() -> String {
    let node = |name: &str| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {
                "kubernetes.io/hostname": name, "nvidia.com/gpu.count": "2", "nvidia.com/gpu.memory": "81920",
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
            }},
            "status": {"allocatable": {"cpu": "32", "memory": "256Gi", "pods": "110"}},
        })
    };
    let mut running = pod("running", json!({"stowage.dev/vram": "40Gi"}));
    running["spec"]["nodeName"] = json!("a");
    let mut ended = pod("ended", json!({"stowage.dev/vram": "40Gi"}));
    ended["status"] = json!({"phase": "Succeeded"});
    let cpu = json!({"metadata": {"name": "cpu-only"}, "kind": "Node"});
    list(vec![
        node("a"),
        node("b"),
        cpu,
        running,
        pod("waiting", json!({"stowage.dev/vram": "30Gi"})),
        ended,
    ])
}

#[test]
fn pods_of_a_dump_are_planned_on_its_own_kinds_of_nodes_or_on_others() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = file(&folder, "cluster.json", &dump());
    let own = capacity(&["--cluster", path(&cluster)]);
    assert_eq!(own.code, 0, "{}", own.err);
    assert!(
        own.out
            .starts_with("1 GPU holds all 2 pods: 1 node a100-80gb (1 of its 2 GPUs)"),
        "{}",
        own.out
    );
    assert!(own.err.contains("1 pod left out"), "{}", own.err);
    let other = capacity(&[
        "--cluster",
        path(&cluster),
        "--nodes",
        "gpus=1,gpu=L40S-48GB",
    ]);
    assert!(
        other
            .out
            .starts_with("2 GPUs hold all 2 pods: 2 nodes l40s-48gb (1 GPU each)"),
        "{}",
        other.out
    );
    let with_more = capacity(&[
        "--cluster",
        path(&cluster),
        "--pods",
        MODELS,
        "--pods",
        PRIORITIES,
        "--nodes",
        A100,
    ]);
    assert!(with_more.out.contains("all 5 pods"), "{}", with_more.out);
    let nodes_of_the_dump = capacity(&[
        "--pods",
        MODELS,
        "--pods",
        PRIORITIES,
        "--nodes",
        path(&cluster),
    ]);
    assert!(
        nodes_of_the_dump
            .out
            .starts_with("2 GPUs hold all 3 pods: 1 node a100-80gb"),
        "{}",
        nodes_of_the_dump.out
    );
}

#[test]
fn gpu_types_are_compared_and_the_smallest_that_holds_all_is_named() {
    let asked = [
        "--pods",
        MODELS,
        "--pods",
        PRIORITIES,
        "--nodes",
        "gpus=4",
        "--gpu-types",
        "L4-24GB,L40S-48GB,H200,A100-80GB",
    ];
    let said = capacity(&asked);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(
        said.out
            .contains("The smallest type that holds every pod is L40S-48GB."),
        "{}",
        said.out
    );
    let line = |name: &str| {
        said.out
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap()
    };
    assert!(
        line("L4-24GB").contains("0 of 3") && line("L4-24GB").contains("has no place"),
        "{}",
        said.out
    );
    assert!(line("L40S-48GB").ends_with("all"), "{}", said.out);
    let json: Value =
        serde_json::from_str(&capacity(&[&asked[..], &["-o", "json"]].concat()).out).unwrap();
    let gpus: Vec<&Value> = json["types"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["plan"]["gpus"])
        .collect();
    assert_eq!(gpus, [&json!(0), &json!(3), &json!(2), &json!(2)]);
    let cut = [
        "--pods",
        MODELS,
        "--nodes",
        "gpus=4",
        "--gpu-types",
        "L4,A100-80GB",
        "--mig",
        "7g.80gb",
    ];
    let said = capacity(&cut);
    let line = |name: &str| {
        said.out
            .lines()
            .find(|line| line.starts_with(name))
            .unwrap()
    };
    assert!(
        line("L4-24GB").contains("cannot be cut into MIG slices"),
        "{}{}",
        said.out,
        said.err
    );
    assert!(line("A100-80GB").ends_with("all"), "{}", said.out);
    let by_none = capacity(&[
        "--pods",
        MODELS,
        "--nodes",
        "gpus=4",
        "--gpu-types",
        "L4,L40S",
        "--mig",
        "3g.40gb",
    ]);
    assert!(
        by_none.code == 2 && by_none.err.contains("L4-24GB cannot be cut"),
        "{}",
        by_none.err
    );
    let none = capacity(&["--pods", MODELS, "--nodes", "gpus=4", "--gpu-types", "L4"]);
    assert!(
        none.code == 1 && none.out.contains("No type holds every pod"),
        "{}",
        none.out
    );
}

#[test]
fn the_example_leader_worker_set_needs_two_whole_nodes() {
    let lws = "manifests/examples/leaderworkerset.yaml";
    let said = capacity(&[
        "--pods",
        lws,
        "--pods",
        PRIORITIES,
        "--nodes",
        "gpus=8,gpu=H100-80GB",
    ]);
    assert!(
        said.out
            .starts_with("16 GPUs hold all 2 pods: 2 nodes h100-80gb (8 GPUs each)"),
        "{}{}",
        said.out,
        said.err
    );
}
