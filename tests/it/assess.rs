//! `stowage assess`: what it says of a cluster whose truth is known, and of clusters in which GPUs are handed out in other ways.

mod fixture;
mod prometheus;
mod replay;

use fixture::{HOURS, START, answer, dump, folder, idle_gpus, week, workloads};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Said {
    fn json(&self) -> Value {
        assert!(self.code < 2, "{}", self.err);
        serde_json::from_str(&self.out).unwrap()
    }
}

fn assess(arguments: &[&str]) -> Said {
    let ran = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .arg("assess")
        .args(arguments)
        .env_remove("COLUMNS")
        .output()
        .unwrap();
    Said {
        code: ran.status.code().unwrap(),
        out: String::from_utf8(ran.stdout).unwrap(),
        err: String::from_utf8(ran.stderr).unwrap(),
    }
}

fn file(folder: &TempDir, name: &str, value: &Value) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, value.to_string()).unwrap();
    path.display().to_string()
}

fn committed(name: &str) -> String {
    folder().join(name).display().to_string()
}

fn on_fixture(more: &[&str]) -> Said {
    with_metrics(&committed("week.json"), more)
}

/// The committed cluster, with other figures.
fn with_metrics(metrics: &str, more: &[&str]) -> Said {
    let cluster = committed("device-plugin.json");
    assess(&[&["--cluster", &cluster, "--metrics", metrics], more].concat())
}

fn figure(answer: &Value, name: &str) -> Option<f64> {
    let all = answer["figures"].as_array().unwrap();
    let found = all.iter().find(|one| one["name"] == name).unwrap();
    found["value"].as_f64()
}

fn workload<'a>(answer: &'a Value, name: &str) -> &'a Value {
    let all = answer["workloads"].as_array().unwrap();
    let is_it = |one: &&Value| one["workload"].as_str().unwrap().ends_with(name);
    all.iter()
        .find(is_it)
        .unwrap_or_else(|| panic!("{name}: {answer:#}"))
}

/// A file that a test makes: as it is committed, or written again.
fn expect_file(path: &Path, made: &str) {
    if std::env::var_os("STOWAGE_BLESS").is_some() {
        std::fs::write(path, made).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        committed == made,
        "{}: STOWAGE_BLESS=1 writes it again",
        path.display()
    );
}

#[test]
fn the_fixture_is_what_the_generator_makes() {
    let week = week();
    let metrics = json!([answer(&week)]).to_string();
    assert!(metrics.len() < 300_000, "{}", metrics.len());
    expect_file(&folder().join("week.json"), &metrics);
    expect_file(
        &folder().join("device-plugin.json"),
        &format!("{:#}\n", dump()),
    );
}

#[test]
fn the_text_of_the_fixture_is_the_committed_one() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/assess.txt");
    let said = on_fixture(&["--job", "20Gi", "--gpu-hour-price", "2.5"]);
    expect_file(&golden, &said.out);
    assert_eq!((said.code, &*said.err), (0, ""));
}

#[test]
fn figures_of_the_fixture_are_its_truth() {
    let said = on_fixture(&["-o", "json", "--gpu-hour-price", "2.5", "--job", "20Gi"]).json();
    // 24 whole ones, 2 behind four slices, 2 behind eight shares.
    assert_eq!(figure(&said, "GPUs today"), Some(28.0));
    // 20 whole ones, and a half of the four that are shared or cut is a whole one.
    assert_eq!(figure(&said, "GPUs requested"), Some(24.0));
    let suffice = figure(&said, "GPUs that suffice").unwrap();
    let bound = figure(&said, "lower bound").unwrap();
    assert!(bound <= suffice && suffice < 24.0, "{bound} {suffice}");
    assert_eq!(figure(&said, "price today"), Some(28.0 * 2.5 * 730.0));
    let hours = said["hours"].as_array().unwrap();
    for (hour, one) in (0..).zip(hours) {
        assert_eq!(one["idleGpuHours"], f64::from(idle_gpus(hour)), "{hour}");
    }
    for made in workloads().iter().filter(|made| made.kv.is_some()) {
        let one = workload(&said, made.name);
        assert_eq!(
            one["kvCachePercent"]["peak"],
            made.kv.unwrap().1,
            "{}",
            made.name
        );
        assert_eq!(
            one["vramBytes"]["p50"],
            made.vram_mib << 20,
            "{}",
            made.name
        );
        assert_eq!(
            one["computePercent"]["peak"], made.compute.1,
            "{}",
            made.name
        );
        assert_eq!(
            one["computePercent"]["byHour"][3],
            made.compute_at(3),
            "{}",
            made.name
        );
        assert_eq!(one["kvCachePercent"]["coveredPercent"], 100);
    }
}

#[test]
fn each_workload_of_the_fixture_gets_its_request_or_the_reason_why_not() {
    let said = on_fixture(&["-o", "json"]).json();
    let own = |name: &str| workload(&said, name)["ownGpu"].clone();
    for (name, reason) in [
        ("mixtral", "size"),
        ("house-model", "unknown"),
        ("train", "busy"),
        ("classifier", "kept"),
        ("embed", "kept"),
    ] {
        assert_eq!(own(name), reason, "{name}");
        assert!(workload(&said, name)["couldRequestBytes"].is_null());
    }
    assert!(
        workload(&said, "house-model")["why"]
            .as_str()
            .unwrap()
            .contains("acme/house-13b")
    );
    let requests = |name: &str| workload(&said, name)["couldRequestBytes"].as_u64().unwrap() >> 30;
    // The peak of 6 GiB, and a quarter more.
    assert_eq!((requests("notebook"), requests("render")), (8, 15));
    // 15 GiB of weights, 45 % of 51 GiB of KV cache and a quarter more, and what the engine takes beside.
    assert!(
        (44..=52).contains(&requests("llama-8b")),
        "{}",
        requests("llama-8b")
    );
    assert!(requests("phi-4") < 45 && requests("qwen-7b") < 35);
    assert!(
        workload(&said, "llama-8b")["why"]
            .as_str()
            .unwrap()
            .contains("KV cache")
    );
    assert!(workload(&said, "notebook")["workload"] == "Pod team-c/notebook");
}

#[test]
fn without_figures_nothing_is_known_and_nothing_is_saved() {
    let said = assess(&["--cluster", &committed("device-plugin.json"), "-o", "json"]).json();
    assert!(
        said["summary"]
            .as_str()
            .unwrap()
            .starts_with("Unknown: of no workload"),
        "{}",
        said["summary"]
    );
    assert_eq!(figure(&said, "idle GPU hours a day"), None);
    assert_eq!(workload(&said, "llama-8b")["ownGpu"], "unknown");
    assert!(workload(&said, "notebook")["vramBytes"].is_null());
}

#[test]
fn three_exporters_of_each_gpu_change_no_figure() {
    let folder = tempfile::tempdir().unwrap();
    let mut week = week();
    for exporter in ["one", "two"] {
        let more = week
            .clone()
            .into_iter()
            .filter(|(labels, _)| !labels.iter().any(|(key, _)| key == "scraped_by"));
        let more = more.map(|(mut labels, values)| {
            labels.push(("scraped_by".into(), exporter.into()));
            (labels, values)
        });
        week.extend(more.collect::<Vec<_>>());
    }
    let metrics = file(&folder, "week.json", &json!([answer(&week)]));
    let said = with_metrics(&metrics, &["-o", "json"]).json();
    let once = on_fixture(&["-o", "json"]).json();
    for part in ["summary", "figures", "hours", "workloads"] {
        assert_eq!(said[part], once[part], "{part}");
    }
    assert!(
        said["cautions"]
            .to_string()
            .contains("of several series of one GPU")
    );
}

#[test]
fn gaps_blank_values_and_pods_that_were_replaced_are_read_as_what_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let mut week = week();
    for (labels, values) in &mut week {
        // An earlier pod of the Deployment had the figures of one that is there.
        for (_, value) in labels.iter_mut() {
            *value = value.replace("llama-8b-7c9d4b5f6-x0", "llama-8b-5f6c9d4b7-zz9");
        }
        let is = |name: &str| labels.iter().any(|(_, value)| value == name);
        if is("notebook") && is("DCGM_FI_DEV_FB_USED") {
            values.truncate(20);
        }
        if is("render-p0") && is("DCGM_FI_DEV_FB_USED") {
            values[7] = "9223372036854775794".into();
            values[8] = "NaN".into();
        }
    }
    let metrics = file(&folder, "week.json", &json!([answer(&week)]));
    let said = with_metrics(&metrics, &["-o", "json"]).json();
    let once = on_fixture(&["-o", "json"]).json();
    for part in ["kvCachePercent", "vramBytes", "couldRequestBytes", "why"] {
        let of = |all| workload(all, "llama-8b")[part].clone();
        assert_eq!(of(&said), of(&once), "{part}");
    }
    let notebook = workload(&said, "notebook");
    assert_eq!(notebook["ownGpu"], "unknown");
    assert_eq!(notebook["why"], "its VRAM is known for 20 hours only");
    assert_eq!(
        workload(&said, "render")["vramBytes"]["peak"],
        12_288u64 << 20
    );
    assert!(said["cautions"].to_string().contains("2 samples cannot be"));
}

fn pod(name: &str, metadata: Value, limits: Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "namespace": "n", "uid": name },
        "spec": { "nodeName": "n1", "containers": [{ "name": "main", "resources": { "limits": limits } }] },
    });
    pod["metadata"]
        .as_object_mut()
        .unwrap()
        .extend(metadata.as_object().unwrap().clone());
    pod
}

fn node(labels: Value, offered: Value) -> Value {
    let mut labels = labels;
    labels["nvidia.com/gpu.product"] = json!("NVIDIA-A100-SXM4-80GB");
    let mut amounts = json!({ "cpu": "128", "memory": "1Ti", "pods": "110" });
    amounts
        .as_object_mut()
        .unwrap()
        .extend(offered.as_object().unwrap().clone());
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1", "labels": labels }, "status": { "allocatable": amounts, "capacity": amounts } })
}

fn of_items(items: &[Value], more: &[&str]) -> Said {
    let folder = tempfile::tempdir().unwrap();
    let dump = file(
        &folder,
        "dump.json",
        &json!({ "kind": "List", "items": items }),
    );
    assess(&[&["--cluster", &dump, "-o", "json"], more].concat())
}

const FOUR: &str = "4";

fn gfd(count: &str) -> Value {
    json!({ "nvidia.com/gpu.count": count, "nvidia.com/gpu.memory": "81920" })
}

#[test]
fn pods_of_hami_and_kai_request_parts_and_stay_where_they_are() {
    let mut hami_node = node(json!({}), json!({ "nvidia.com/gpu": "40" }));
    let labels = hami_node["metadata"]["labels"].as_object_mut().unwrap();
    labels.remove("nvidia.com/gpu.product");
    let device = json!({ "id": "GPU-1", "count": 10, "devmem": 81920, "type": "NVIDIA-NVIDIA A100-SXM4-80GB" });
    let register = json!([device, device, device, device]).to_string();
    hami_node["metadata"]["annotations"] = json!({ "hami.io/node-nvidia-register": register });
    let hami = [
        hami_node,
        pod(
            "a",
            json!({}),
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "20000" }),
        ),
        pod(
            "b",
            json!({}),
            json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "20000" }),
        ),
    ];
    let said = of_items(&hami, &[]).json();
    assert_eq!(
        (
            figure(&said, "GPUs requested"),
            figure(&said, "GPUs that suffice")
        ),
        (Some(1.0), Some(2.0))
    );
    assert_eq!(workload(&said, "n/a")["ownGpu"], "kept");
    let mut one_gpu = hami[0].clone();
    let register = json!([device]).to_string();
    one_gpu["metadata"]["annotations"] = json!({ "hami.io/node-nvidia-register": register });
    one_gpu["status"]["allocatable"]["nvidia.com/gpu"] = json!("10");
    let limits = json!({ "nvidia.com/gpu": "1", "nvidia.com/gpumem": "7000" });
    let ten = (0..10).map(|at| pod(&format!("p{at}"), json!({}), limits.clone()));
    let said = of_items(&[one_gpu].into_iter().chain(ten).collect::<Vec<_>>(), &[]).json();
    let names = ["GPUs today", "GPUs requested", "GPUs that suffice"];
    assert_eq!(names.map(|name| figure(&said, name)), [Some(1.0); 3]);
    let group =
        json!({ "labels": { "runai-gpu-group": "g" }, "annotations": { "gpu-fraction": "0.5" } });
    let kai = [
        node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" })),
        pod("half", group, json!({})),
        pod(
            "mib",
            json!({ "annotations": { "gpu-memory": "8000" } }),
            json!({}),
        ),
        pod(
            "gpu-reservation-1",
            json!({ "labels": { "runai-gpu-group": "g" } }),
            json!({ "nvidia.com/gpu": "1" }),
        ),
    ];
    let said = of_items(&kai, &[]).json();
    assert_eq!(said["workloads"].as_array().unwrap().len(), 2);
    assert_eq!(workload(&said, "half")["ownGpu"], "kept");
    assert_eq!(figure(&said, "GPUs that suffice"), Some(2.0));
}

#[test]
fn gpus_of_a_model_that_nobody_knows_are_counted_and_stay() {
    let mut unknown = node(json!({}), json!({ "nvidia.com/gpu": "20" }));
    let labels = unknown["metadata"]["labels"].as_object_mut().unwrap();
    labels.remove("nvidia.com/gpu.product");
    let device = json!({ "id": "G", "count": 10, "type": "NVIDIA-Unheard X1" });
    let register = json!([device, device]).to_string();
    unknown["metadata"]["annotations"] = json!({ "hami.io/node-nvidia-register": register });
    let plain = pod("a", json!({}), json!({ "nvidia.com/gpu": "1" }));
    let said = of_items(&[unknown, plain], &[]);
    assert!(!said.out.contains("0 B"), "{}", said.out);
    let said = said.json();
    let counts = ["GPUs today", "GPUs that suffice"].map(|name| figure(&said, name));
    assert_eq!(counts, [Some(2.0), Some(1.0)]);
    let mut engine = pod("a", json!({}), json!({ "nvidia.com/gpu": "1" }));
    engine["spec"]["containers"][0]["args"] = json!(["--max-model-len=8", "--model=\u{1b}[2Jevil"]);
    let whole = node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" }));
    let said = of_items(&[whole, engine], &[]).json();
    let why = workload(&said, "n/a")["why"].as_str().unwrap();
    assert!(why.contains("evil") && !why.contains('\u{1b}'), "{why}");
}

#[test]
fn devices_of_claims_count_whether_labels_show_them_or_not() {
    let device = |name: &str| json!({ "name": name, "attributes": { "type": { "string": "gpu" }, "productName": { "string": "NVIDIA A100-SXM4-80GB" } } });
    let mut claiming = pod("a", json!({}), json!({}));
    claiming["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": "two" }]);
    let results = ["gpu-0", "gpu-1"].map(|device| json!({ "driver": "gpu.nvidia.com", "device": device, "pool": "n1", "request": "gpu" }));
    let items = [
        node(json!({}), json!({})),
        json!({ "kind": "ResourceSlice", "metadata": { "name": "s" }, "spec": { "driver": "gpu.nvidia.com", "nodeName": "n1", "pool": { "name": "n1", "generation": 1, "resourceSliceCount": 1 }, "devices": [device("gpu-0"), device("gpu-1"), device("gpu-2")] } }),
        json!({ "kind": "ResourceClaim", "metadata": { "name": "two", "namespace": "n" }, "status": { "allocation": { "devices": { "results": results } }, "reservedFor": [{ "name": "a" }] } }),
        claiming,
    ];
    let said = of_items(&items, &[]).json();
    assert_eq!(
        (figure(&said, "GPUs today"), figure(&said, "GPUs requested")),
        (Some(3.0), Some(2.0))
    );
    assert_eq!(
        (
            figure(&said, "GPUs that suffice"),
            &workload(&said, "n/a")["ownGpu"]
        ),
        (Some(2.0), &json!("unknown"))
    );
}

#[test]
fn a_pod_beside_which_its_class_would_be_too_late_keeps_its_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.yaml");
    let class = |limit: &str| {
        format!(
            "apiVersion: stowage.dev/v1alpha1\nkind: SchedulingPolicy\nclasses:\n  - name: serving\n    maxTimePerToken: {limit}\n"
        )
    };
    let own = |limit: &str| {
        std::fs::write(&policy, class(limit)).unwrap();
        let said = on_fixture(&["-o", "json", "--policy", policy.to_str().unwrap()]).json();
        (
            workload(&said, "llama-8b")["ownGpu"].clone(),
            figure(&said, "GPUs that suffice").unwrap(),
        )
    };
    let (strict, loose) = (own("11ms"), own("10s"));
    assert_eq!((strict.0, loose.0), (json!("latency"), Value::Null));
    assert!(strict.1 > loose.1);
}

#[test]
fn the_page_has_every_figure_with_source_and_caution_and_no_markup_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let mut with_markup = dump();
    let items = with_markup["items"].as_array_mut().unwrap();
    let house = items.iter_mut().filter(|item| {
        item["metadata"]["name"]
            .as_str()
            .unwrap()
            .starts_with("house")
    });
    house.for_each(|pod| {
        pod["spec"]["containers"][0]["args"] = json!(["--model=<script>alert(1)</script>"])
    });
    let cluster = file(&folder, "dump.json", &with_markup);
    let said = assess(&[
        "--cluster",
        &cluster,
        "--metrics",
        &committed("week.json"),
        "--page",
        page.to_str().unwrap(),
        "--gpu-hour-price",
        "2",
        "-o",
        "json",
    ])
    .json();
    let page = std::fs::read_to_string(&page).unwrap();
    for one in said["figures"].as_array().unwrap() {
        for part in ["source", "caution"] {
            let text = one[part].as_str().unwrap().replace('<', "&lt;");
            assert!(page.contains(&text), "{text}");
        }
    }
    assert!(page.contains("&lt;script&gt;alert(1)") && !page.contains("<script"));
    assert!(
        page.contains("<svg")
            && page.contains("prefers-color-scheme") | page.contains("color-scheme:light dark")
    );
    assert!(!page.contains("http"), "it needs nothing else");
}

#[test]
fn mistakes_are_named_with_a_way_out() {
    let cluster = committed("device-plugin.json");
    let folder = tempfile::tempdir().unwrap();
    let (none, page) = (
        file(&folder, "none.json", &json!({ "data": 1 })),
        "/nonexistent/page.html",
    );
    for (arguments, expected) in [
        (&["--cluster", "/nonexistent"][..], "--cluster /nonexistent"),
        (
            &["--cluster", &cluster, "--metrics", "/nonexistent"],
            "--metrics /nonexistent",
        ),
        (
            &["--cluster", &cluster, "--metrics", &none],
            "it should have what /api/v1/query_range answers",
        ),
        (
            &["--cluster", &cluster, "--page", page],
            "--page /nonexistent/page.html",
        ),
        (&["--cluster", &cluster, "--job", "20"], "--job"),
        (
            &["--cluster", &cluster, "--gpu-hour-price", "cheap"],
            "such as 2.50",
        ),
        (&["--cluster", &cluster, "--window", "7"], "--window"),
        (
            &[
                "--cluster",
                &cluster,
                "--step",
                "9d",
                "--prometheus",
                "http://x",
            ],
            "no longer than --window",
        ),
        (
            &[
                "--cluster",
                &cluster,
                "--step",
                "0s",
                "--prometheus",
                "http://x",
            ],
            "more than zero",
        ),
        (
            &["--cluster", &cluster, "--promtheus", "x"],
            "'--prometheus'",
        ),
        (
            &["--cluster", &cluster, "--prometheus", "not a url"],
            "--prometheus not a url",
        ),
        (&["--cluster", &none], "none.json"),
    ] {
        let said = assess(arguments);
        assert!(
            said.code == 2 && said.err.contains(expected),
            "{arguments:?}: {}",
            said.err
        );
    }
}

#[test]
fn gke_shows_its_gpus_by_labels_of_its_own_and_unknown_gpus_stay_as_they_are() {
    let labelled = |labels: Value, offered: &str| {
        let mut node = node(labels, json!({ "nvidia.com/gpu": offered }));
        let labels = node["metadata"]["labels"].as_object_mut().unwrap();
        labels.remove("nvidia.com/gpu.product");
        node
    };
    let one = || pod("a", json!({}), json!({ "nvidia.com/gpu": "1" }));
    let gke = json!({ "cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-max-shared-clients-per-gpu": "3" });
    let said = of_items(&[labelled(gke, "6"), one()], &[]).json();
    assert_eq!(figure(&said, "GPUs today"), Some(2.0));
    assert!(
        workload(&said, "n/a")["why"]
            .as_str()
            .unwrap()
            .contains("time-slicing")
    );
    let said = of_items(&[labelled(json!({}), "4"), one()], &[]).json();
    let counts = ["GPUs today", "GPUs that suffice"].map(|name| figure(&said, name));
    assert_eq!(counts, [Some(4.0), Some(1.0)]);
    assert_eq!(said["notHeld"], json!([]));
}

#[test]
fn figures_of_a_slice_and_of_other_clusters_are_no_figures() {
    let folder = tempfile::tempdir().unwrap();
    let series = |more: (&str, &str)| {
        let labels = [("__name__", "DCGM_FI_DEV_GPU_UTIL"), ("UUID", more.1), more];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        (labels.to_vec(), vec!["0".to_owned(); 48])
    };
    let figures = [("GPU_I_ID", "7"), ("Hostname", "elsewhere")].map(series);
    let metrics = file(&folder, "slice.json", &answer(&figures));
    let cluster = committed("device-plugin.json");
    let said = assess(&["--cluster", &cluster, "--metrics", &metrics, "-o", "json"]).json();
    assert_eq!(figure(&said, "idle GPU hours a day"), None);
    let cautions = said["cautions"].to_string();
    assert!(
        cautions.contains("no nodes of the dump: 1 of"),
        "{cautions}"
    );
}

/// Two days of a GPU's figures, by the hour.
fn gpu_figures(pod: &str, compute: impl Fn(usize) -> u32) -> [fixture::Figures; 2] {
    let of = |name: &str, values: Vec<String>| {
        let labels = [
            ("__name__", name),
            ("UUID", pod),
            ("exported_namespace", "n"),
            ("exported_pod", pod),
        ];
        let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
        (labels.to_vec(), values)
    };
    let compute = (0..48).map(|hour| compute(hour).to_string()).collect();
    let vram = vec!["6000".to_owned(); 48];
    [
        of("DCGM_FI_DEV_GPU_UTIL", compute),
        of("DCGM_FI_DEV_FB_USED", vram),
    ]
}

/// Pods `a` and `b` with a GPU each, in a cluster of these nodes.
fn two_pods(nodes: &[Value], metadata: &Value, compute: impl Fn(usize) -> u32 + Copy) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let pods = ["a", "b"].map(|name| pod(name, metadata.clone(), json!({ "nvidia.com/gpu": "1" })));
    let figures = ["a", "b"].map(|name| gpu_figures(name, compute)).concat();
    let metrics = file(&folder, "metrics.json", &answer(&figures));
    let more = ["--metrics", &metrics, "--job", "20Gi"];
    of_items(&[nodes, &pods].concat(), &more).json()
}

#[test]
fn pods_that_are_busy_in_the_same_hour_share_no_gpu() {
    let nodes = [node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" }))];
    let suffice = |compute: u32| {
        let said = two_pods(
            &nodes,
            &json!({}),
            |hour| {
                if hour % 24 < 11 { compute } else { 0 }
            },
        );
        let own = workload(&said, "n/b")["ownGpu"].clone();
        (figure(&said, "GPUs that suffice"), own)
    };
    assert_eq!(suffice(40), (Some(1.0), Value::Null));
    assert_eq!(suffice(60), (Some(2.0), json!("busy")));
}

#[test]
fn figures_of_a_pod_whose_name_only_begins_alike_are_not_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let metrics = file(
        &folder,
        "metrics.json",
        &answer(&gpu_figures("a-70b-0", |_| 2)),
    );
    let items = [
        node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" })),
        pod("a", json!({}), json!({ "nvidia.com/gpu": "1" })),
    ];
    let said = of_items(&items, &["--metrics", &metrics]).json();
    assert_eq!(workload(&said, "n/a")["ownGpu"], "unknown");
}

#[test]
fn pods_of_daemon_sets_stay_and_nodes_that_are_not_ready_get_nothing() {
    let ready = node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" }));
    let owner = json!({ "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true });
    let owned = json!({ "ownerReferences": [owner] });
    let said = two_pods(std::slice::from_ref(&ready), &owned, |_| 3);
    assert_eq!(workload(&said, "n/d")["ownGpu"], "kept");
    assert_eq!(figure(&said, "GPUs that suffice"), Some(2.0));
    let jobs = |nodes: &[Value]| {
        let said = two_pods(nodes, &json!({}), |_| 3);
        let cautions = said["cautions"].to_string();
        (
            figure(&said, "jobs that fit beside"),
            cautions.contains("as not ready: 1 node"),
        )
    };
    let mut gone = ready.clone();
    gone["metadata"]["name"] = json!("n2");
    let with_ready = jobs(&[ready.clone(), gone.clone()]);
    gone["status"]["conditions"] = json!([{ "type": "Ready", "status": "Unknown" }]);
    let alone = jobs(std::slice::from_ref(&ready));
    assert_eq!(jobs(&[ready, gone]), (alone.0, true));
    assert!(with_ready.0 > alone.0 && !with_ready.1);
}

#[test]
fn pods_of_which_nobody_can_read_what_they_have_make_the_answer_unknown() {
    let kai = |fraction: &str| {
        let annotations = json!({ "annotations": { "gpu-fraction": fraction } });
        pod("a", annotations, json!({}))
    };
    let plain = |gpus: &str| pod("a", json!({}), json!({ "nvidia.com/gpu": gpus }));
    let mut claiming = plain("1");
    claiming["spec"]["containers"][0]["resources"] = json!({});
    claiming["spec"]["resourceClaims"] = json!([{ "name": "gpu", "resourceClaimName": "two" }]);
    let mut unbound = plain("1");
    unbound["spec"].as_object_mut().unwrap().remove("nodeName");
    let whole = || node(gfd(FOUR), json!({ "nvidia.com/gpu": "4" }));
    for one in ["NaN", "0", "-1", "1e308", "text"]
        .map(kai)
        .into_iter()
        .chain([plain("4000000000"), claiming])
    {
        let said = of_items(&[whole(), one.clone()], &["--gpu-hour-price", "2"]).json();
        let names = ["GPUs that suffice", "lower bound", "jobs that fit beside"];
        for name in names.into_iter().chain(["price of what suffices"]) {
            assert_eq!(figure(&said, name), None, "{name} {one}");
        }
        let summary = said["summary"].as_str().unwrap();
        assert!(
            summary.starts_with("Unknown: there are GPUs of 1 pod"),
            "{summary}"
        );
    }
    let said = of_items(&[whole(), unbound], &[]).json();
    assert!(
        said["cautions"]
            .to_string()
            .contains("they have no node: 1 pod")
    );
    for count in ["0", "4294967295", "9000000000"] {
        let offered =
            json!({ "nvidia.com/gpu": "9000000000", "nvidia.com/mig-1g.5gb": "9000000000" });
        let said = of_items(&[node(gfd(count), offered), plain("1")], &[]).json();
        assert_eq!(figure(&said, "GPUs today"), Some(0.0));
    }
}
