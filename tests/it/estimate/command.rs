//! The command: what it prints, what it refuses and with which exit code, and what it sees of running engines.

use crate::served::{ServedCluster, bound_on, gpu_uuid, pod, report};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};

pub const LLAMA_8B: &str = r#"{
  "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8
}"#;

pub struct StowageOutput {
    pub code: i32,
    pub out: String,
    pub err: String,
}

pub fn stowage(arguments: &[&str]) -> StowageOutput {
    reading(b"", arguments)
}

fn reading(input: &[u8], arguments: &[&str]) -> StowageOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let pipes = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let pipes = pipes
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("KUBECONFIG", "/nonexistent");
    let mut child = pipes.arg("estimate").args(arguments).spawn().unwrap();
    // A command that reads nothing closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input);
    let ran = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    StowageOutput {
        code: ran.status.code().unwrap(),
        out: text(ran.stdout),
        err: text(ran.stderr),
    }
}

pub fn json_of(arguments: &[&str]) -> Value {
    let said = stowage(&[arguments, &["-o", "json"]].concat());
    assert_eq!(said.code, 0, "{}", said.err);
    serde_json::from_str(&said.out).unwrap()
}

/// A folder with this as its config.json.
pub fn folder(config: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    folder
}

pub fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_table_has_each_part_with_its_formula_and_its_source_and_the_pods_lines() {
    let said = stowage(&["--model", "llama-3.1-8b"]);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    for line in [
        "weights",
        "KV cache",
        "activations",
        "engine buffers",
        "CUDA graphs",
        "CUDA context",
        "total",
    ] {
        assert!(
            said.out.lines().any(|out| out.starts_with(line)),
            "{line}: {}",
            said.out
        );
    }
    assert!(
        said.out.contains("8,030,261,248 parameters in 16-bit"),
        "{}",
        said.out
    );
    assert!(
        said.out.contains("16 × 8,192 tokens × 128.0 KiB"),
        "{}",
        said.out
    );
    assert!(said.out.contains("Kwon et al. 2023"), "{}", said.out);
    let lines = [
        "stowage.dev/kv-cache: 16Gi",
        "stowage.dev/vram: ",
        "$(GPU_MEMORY_FRACTION)",
    ];
    assert!(
        lines.iter().all(|line| said.out.contains(line)),
        "{}",
        said.out
    );
    assert!(
        !said.out.contains("stowage.dev/gpus"),
        "one GPU needs no annotation: {}",
        said.out
    );
}

#[test]
fn what_it_prints_as_a_pods_lines_is_yaml_of_a_pod() {
    let said = stowage(&["--model", "llama-3.1-70b", "--tensor-parallel", "4"]);
    let yaml = said
        .out
        .split("In a pod:\n\n")
        .nth(1)
        .unwrap()
        .split("\n\n")
        .next()
        .unwrap();
    let pod: Value = serde_saphyr::from_str(yaml).unwrap_or_else(|error| panic!("{error}: {yaml}"));
    assert_eq!(pod["metadata"]["annotations"]["stowage.dev/gpus"], "4");
    let container = &pod["spec"]["containers"][0];
    assert!(
        container["resources"]["limits"]["stowage.dev/vram"]
            .as_str()
            .unwrap()
            .ends_with("Gi")
    );
    assert_eq!(
        container["args"][0],
        "--gpu-memory-utilization=$(GPU_MEMORY_FRACTION)"
    );
}

#[test]
fn a_file_a_folder_and_standard_input_give_the_same_and_json_and_yaml_too() {
    let folder = folder(LLAMA_8B);
    let file = folder.path().join("config.json");
    let of_file = json_of(&[path(&file)]);
    let of_folder = json_of(&[path(folder.path())]);
    assert_eq!(
        (&of_file["parts"], &of_file["pod"]),
        (&of_folder["parts"], &of_folder["pod"])
    );
    let piped = reading(LLAMA_8B.as_bytes(), &["-", "-o", "yaml"]);
    let piped: Value = serde_saphyr::from_str(&piped.out).unwrap();
    assert_eq!(of_file["parts"], piped["parts"]);
    assert_eq!(of_file["parameters"], 8_030_261_248_u64);
    assert_eq!(of_file["kvCache"]["bytesPerToken"], 131_072);
    let sum: u64 = of_file["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(of_file["perGpuBytes"], sum);
}

#[test]
fn the_workload_changes_what_it_should() {
    let bytes = |arguments: &[&str], part: usize| {
        json_of(&[&["--model", "llama-3.1-8b"], arguments].concat())["parts"][part]["bytes"]
            .as_u64()
            .unwrap()
    };
    let (weights, cache, activations) = (0, 1, 2);
    assert_eq!(
        bytes(&["--context", "4096", "--sequences", "1"], cache),
        512 << 20
    );
    assert_eq!(
        bytes(&["--max-model-len", "4096", "--sequences", "1"], cache),
        512 << 20,
        "vLLM's name, too"
    );
    assert_eq!(
        bytes(&["--kv-cache-dtype", "fp8"], cache) * 2,
        bytes(&[], cache)
    );
    assert!(bytes(&["--max-num-seqs", "1024"], activations) > 4 << 30);
    assert!(bytes(&["--quantization", "int4"], weights) < 6 << 30);
    assert!(bytes(&["--tensor-parallel", "2"], weights) < 8 << 30);
    assert_eq!(bytes(&["--enforce-eager"], 4), 0);
}

#[test]
fn a_hundred_thousand_tokens_of_a_model_without_grouped_heads_take_fifty_gigabytes() {
    let answer = json_of(&[
        "--model",
        "llama-2-7b",
        "--context",
        "100000",
        "--sequences",
        "1",
    ]);
    assert_eq!(answer["kvCache"]["bytes"], 52_428_800_000_u64);
    let notes = answer["notes"].to_string();
    assert!(notes.contains("made for 4096 tokens"), "{notes}");
}

#[test]
fn mistakes_name_the_file_the_field_and_the_way_out() {
    let refused = |arguments: &[&str], texts: &[&str]| {
        let said = stowage(arguments);
        assert_eq!(said.code, 2, "{arguments:?}: {}{}", said.out, said.err);
        assert!(
            said.err.starts_with("error: ") && said.out.is_empty(),
            "{}",
            said.err
        );
        for text in texts {
            assert!(
                said.err.contains(text),
                "{arguments:?}: no {text}: {}",
                said.err
            );
        }
    };
    let empty = tempfile::tempdir().unwrap();
    refused(
        &[path(empty.path())],
        &["has no config.json", "folder of a snapshot"],
    );
    refused(
        &["/nonexistent/config.json"],
        &["/nonexistent/config.json", "--model"],
    );
    let broken = folder("{\n  \"model_type\": llama\n}");
    refused(
        &[path(broken.path())],
        &["config.json:2:17: this is not JSON"],
    );
    let lacking = folder(&LLAMA_8B.replace("num_hidden_layers", "num_hiden_layers"));
    refused(
        &[path(lacking.path())],
        &[
            "config.json:1: `num_hidden_layers` is missing",
            "`num_hiden_layers`: is that it?",
        ],
    );
    for (model_type, fields) in [
        ("mamba", "\"state_size\""),
        // Its heads are of its states.
        ("mamba2", "\"state_size\": 128, \"num_heads\""),
    ] {
        let other = LLAMA_8B.replace("\"llama\"", &format!("\"{model_type}\""));
        let other = folder(&other.replace("\"num_attention_heads\"", fields));
        refused(
            &[path(other.path())],
            &[&format!(
                "`{model_type}` cannot be estimated: it has no attention"
            )],
        );
    }
    let wrong = folder(&LLAMA_8B.replace("14336", "\"14336\""));
    refused(
        &[path(wrong.path())],
        &["config.json:2: `intermediate_size` is \"14336\"; write a whole number"],
    );
    let huge = folder(
        &LLAMA_8B
            .replace("4096", "4294967296")
            .replace("14336", "4294967296"),
    );
    refused(
        &[path(huge.path())],
        &["config.json: that is more than 1 EiB", "check --context"],
    );
    let short = folder(LLAMA_8B);
    refused(
        &[path(short.path()), "--observe", PAGE],
        &[
            "config.json: it has no max_position_embeddings",
            "--context",
        ],
    );
    let binary = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(binary.path(), [0xff_u8, 0xfe, 0x00]).unwrap();
    refused(&[path(binary.path())], &["is not text"]);
    refused(
        &["--model", "llama-3.1-8"],
        &["--model", "did you mean `llama-3.1-8b`?"],
    );
    refused(
        &["--model", "llama-3.1-8b", "--tensor-parallel", "3"],
        &[
            "--tensor-parallel: 32 attention heads",
            "over 1, 2, 4, 8, 16, 32",
        ],
    );
    refused(
        &["-", "--observe", "-"],
        &["CONFIG and --observe are both -"],
    );
    let neither = stowage(&[]);
    assert!(
        neither.code == 2 && neither.err.contains("CONFIG"),
        "{}",
        neither.err
    );
    for slip in [
        &["--model", "phi-4", "--gpu-memory", "80GB"][..],
        &["--model", "phi-4", "--gpu-memory", "A100"],
        &["--model", "phi-4", "--gpu-memory", "80"],
        &["--model", "phi-4", "--observe", "nosuch.json"],
        &["--model", "phi-4", "--gpu-memory", "H100-80BG"],
        &["--model", "phi-4", "--context", "0"],
        &["--model", "phi-4", "--tensor-parallel", "65"],
        &["--model", "phi-4", "--reserved", "60Gi"],
        &["--model", "phi-4", "config.json"],
    ] {
        assert_eq!(stowage(slip).code, 2, "{slip:?}");
    }
    assert!(
        stowage(&["--model", "phi-4", "--gpu-memory", "H100-80BG"])
            .err
            .contains("did you mean H100-80GB?")
    );
}

#[test]
fn gpus_that_are_named_decide_the_exit_code() {
    let fits = stowage(&["--model", "llama-3.1-8b", "--gpu-memory", "t4,80Gi"]);
    assert_eq!(fits.code, 0, "{}", fits.err);
    assert!(
        fits.out.contains("Not on T4-16GB.") && fits.out.contains("80Gi"),
        "{}",
        fits.out
    );
    let none = stowage(&["--model", "llama-3.1-70b", "--gpu-memory", "T4,L4"]);
    assert_eq!(none.code, 1, "{}", none.err);
    assert!(
        none.out.contains("It fits on none of T4-16GB, L4-24GB"),
        "{}",
        none.out
    );
}

#[test]
fn built_in_models_are_listed() {
    let said = stowage(&["--list"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(
        said.out.contains("deepseek-v3") && said.out.contains("Qwen/Qwen3-Next-80B-A3B-Instruct")
    );
    let listed = json_of(&["--list"]);
    assert!(listed.as_array().unwrap().len() >= 20);
    assert_eq!(listed[0]["name"], "deepseek-v3");
}

const PAGE: &str = "tests/fixtures/engines/vllm-0.33.txt";

#[test]
fn a_metrics_page_shows_how_much_of_the_cache_is_free() {
    let observed = |more: &[&str]| {
        let base = [
            "--model",
            "qwen3-32b",
            "--observe",
            PAGE,
            "--reserved",
            "140Gi",
        ];
        json_of(&[&base, more].concat())["observed"].clone()
    };
    // Two ranks of 152,064 tokens; the fuller one is at 91 %.
    let now = observed(&[]);
    assert_eq!(now["kvCacheBytes"], 2 * 152_064 * 262_144_u64);
    assert_eq!(
        (now["advice"].as_str(), now["waiting"].as_u64()),
        (Some("grow"), Some(2))
    );
    let lower = observed(&["--peak-usage", "20%"]);
    assert_eq!(lower["advice"], "shrink");
    let vram = lower["pod"]["vram"]
        .as_str()
        .unwrap()
        .trim_end_matches("Gi")
        .parse::<u64>()
        .unwrap();
    assert!(vram < 100, "{vram}");
    let said = stowage(&[
        "--model",
        "qwen3-32b",
        "--observe",
        PAGE,
        "--reserved",
        "140Gi",
        "--peak-usage",
        "20%",
    ]);
    for text in [
        "140.0 GiB reserved",
        "Reserve less",
        "Lines to change:",
        "stowage.dev/vram: ",
        "--peak-usage",
    ] {
        assert!(said.out.contains(text), "no {text}: {}", said.out);
    }
    let lines = said
        .out
        .split("Lines to change:\n\n")
        .nth(1)
        .unwrap()
        .split("\n\n")
        .next()
        .unwrap();
    let pod: Value =
        serde_saphyr::from_str(lines).unwrap_or_else(|error| panic!("{error}: {lines}"));
    assert_eq!(
        pod["spec"]["containers"][0]["resources"]["limits"]["stowage.dev/vram"],
        lower["pod"]["vram"]
    );
    let page = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE)).unwrap();
    let piped = reading(
        &page,
        &["--model", "qwen3-32b", "--observe", "-", "-o", "json"],
    );
    assert_eq!(piped.code, 0, "{}", piped.err);
}

#[test]
fn the_least_that_is_advised_is_room_for_one_sequence_of_the_engines_full_length() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.txt");
    let metrics = "vllm:kv_cache_usage_perc{engine=\"0\"} 0.01\n\
                   vllm:cache_config_info{engine=\"0\",kv_cache_size_tokens=\"327680\"} 1.0\n";
    std::fs::write(&page, metrics).unwrap();
    let advised = |more: &[&str]| {
        let base = [
            "--model",
            "llama-3.1-8b",
            "--observe",
            path(&page),
            "--reserved",
            "60Gi",
        ];
        let said = stowage(&[&base, more].concat());
        assert_eq!(said.code, 0, "{}", said.err);
        said.out
    };
    // 131,072 tokens of 128 KiB; nothing says that the engine was told less.
    let full = advised(&[]);
    for text in [
        "one sequence of 131,072 tokens",
        "stowage.dev/kv-cache: 16Gi",
        "--max-model-len=131072",
    ] {
        assert!(full.contains(text), "no {text}: {full}");
    }
    let told = advised(&["--context", "8192"]);
    for text in [
        "one sequence of 8,192 tokens",
        "stowage.dev/kv-cache: 1Gi",
        "--max-model-len=8192",
    ] {
        assert!(told.contains(text), "no {text}: {told}");
    }
}

/// Answers one request with this.
fn server(answer: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let _ = stream.read(&mut request);
        let _ = stream.write_all(answer.as_bytes());
    });
    format!("http://{address}/metrics")
}

#[test]
fn a_url_is_fetched_and_what_is_no_page_says_so() {
    let page = server(
        "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
         vllm:cache_config_info{engine=\"0\",kv_cache_size_tokens=\"327680\"} 1.0\n",
    );
    let answer = json_of(&["--model", "llama-3.1-8b", "--observe", &page]);
    assert_eq!(answer["observed"]["kvCacheBytes"], 40_u64 << 30);
    let refused = |what: &str, text: &str| {
        let said = stowage(&["--model", "llama-3.1-8b", "--observe", what]);
        assert!(
            said.code == 2 && said.err.contains(text),
            "{what}: {} {}",
            said.code,
            said.err
        );
    };
    refused(
        &server("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
        "usually at /metrics",
    );
    refused(
        &server("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"),
        "no known engine",
    );
    refused("http://127.0.0.1:1/metrics", "nothing listens there");
    refused("https://127.0.0.1:1/metrics", "port-forward");
    refused("a/b/c", "NAMESPACE/NAME");
    refused("Cargo.toml", "no known engine");
    refused(
        "tests/fixtures/engines/llama-cpp.txt",
        "how full its KV cache is",
    );
}

/// A node whose agent sees an engine in a pod: 59 GiB in its processes, and a KV cache of 40 GiB that is 40 % full.
fn measured(uid: &str) -> Value {
    // The service has had the first.
    let mut report = report("node-a", "boot", 2, 1);
    report["gpus"][0]["processes"] = json!([{ "pid": 7, "usedBytes": 59_u64 << 30, "pod": uid }]);
    report["engines"] = json!([{
        "pod": uid, "engine": "vllm", "gpus": [gpu_uuid("node-a", 0)], "state": "serving", "kvCacheUsage": 0.4,
        "kvCacheTokens": 327_680, "waiting": 0, "running": 12,
    }]);
    report
}

#[test]
fn a_pod_is_compared_with_what_its_nodes_agent_measured() {
    let bound = bound_on(pod("llama", "60Gi"), "node-a", &[0], 60 << 30);
    let uid = bound["metadata"]["uid"].as_str().unwrap().to_owned();
    let served = ServedCluster::with_gpus(&[("node-a", 1)])
        .with([bound])
        .serve();
    assert_eq!(served.report(measured(&uid)).status, 200);
    let server = format!("http://{}", served.operators);
    let asked = [
        "--model",
        "llama-3.1-8b",
        "--observe",
        "default/llama",
        "--server",
        &server,
    ];
    let observed = &json_of(&asked)["observed"];
    assert_eq!(
        (&observed["reservedBytes"], &observed["usedBytes"]),
        (&json!(60_u64 << 30), &json!(59_u64 << 30))
    );
    assert_eq!(
        (&observed["neededBytes"], &observed["advice"]),
        (&json!(35_u64 << 30), &json!("shrink"))
    );
    assert_eq!(observed["pod"]["vram"], "39Gi");
    let said = stowage(&asked);
    assert!(
        said.out.contains("60.0 GiB reserved") && said.out.contains("35.0–39.0 GiB needed"),
        "{}",
        said.out
    );
    let absent = stowage(&[
        "--model",
        "llama-3.1-8b",
        "--observe",
        "absent",
        "--server",
        &server,
    ]);
    assert!(
        absent.code == 2 && absent.err.contains("no pod default/absent has a GPU"),
        "{}",
        absent.err
    );
    let silent = stowage(&[
        "--model",
        "llama-3.1-8b",
        "--observe",
        "llama",
        "--server",
        "http://127.0.0.1:1",
    ]);
    assert!(
        silent.code == 2 && silent.err.contains("no answer from"),
        "{}",
        silent.err
    );
}

#[test]
fn an_agents_report_in_a_file_is_read_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let write = |report: &Value| std::fs::write(&file, report.to_string()).unwrap();
    let asked = ["--model", "llama-3.1-8b", "--observe", path(&file)];
    write(&measured("uid-1"));
    assert_eq!(json_of(&asked)["observed"]["usedBytes"], 59_u64 << 30);
    write(&json!({ "node-a": { "receivedMillisAgo": 12, "report": measured("uid-1") } }));
    assert_eq!(json_of(&asked)["observed"]["usedBytes"], 59_u64 << 30);
    write(&json!([measured("uid-1"), measured("uid-2")]));
    let two = stowage(&asked);
    assert!(
        two.code == 2 && two.err.contains("2 engines") && two.err.contains("--server"),
        "{}",
        two.err
    );
    write(&json!({ "kind": "List" }));
    assert!(stowage(&asked).err.contains("neither an agent's report"));
}
