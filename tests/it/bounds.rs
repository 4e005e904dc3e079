//! What a tenant may write is larger than what Stowage may hold: both processes, with the memory that the manifests give them.
//!
//! In a memory cgroup of that size where one can be made, and otherwise by the most that the process ever had.

use crate::agent::world::{AgentNode, RunningAgent, bound_to, gpu};
use crate::client::{Client, TEST_TIMEOUT};
use crate::process::{RunningServe, eventually_within};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A cgroup with this much memory, which goes with it.
struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    fn of(name: &str, bytes: u64) -> Option<Self> {
        let of = |root: &str, limit: &str| {
            let folder = Path::new(root).join(format!("stowage-{name}-{}", std::process::id()));
            fs::create_dir(&folder).ok()?;
            let made = Self(folder);
            let is_one = made.0.join("cgroup.procs").exists();
            (is_one && fs::write(made.0.join(limit), bytes.to_string()).is_ok()).then_some(made)
        };
        of("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            .or_else(|| of("/sys/fs/cgroup", "memory.max"))
    }
}

/// The same command, inside the cgroup if there is one.
fn in_cgroup(cgroup: Option<&MemoryCgroup>, command: Command) -> Command {
    let Some(cgroup) = cgroup else { return command };
    let mut inside = Command::new("sh");
    let joined = format!(
        "echo $$ > '{}' && exec \"$0\" \"$@\"",
        cgroup.0.join("cgroup.procs").display()
    );
    inside
        .args(["-c", &joined])
        .arg(command.get_program())
        .args(command.get_args());
    command.get_envs().for_each(|(name, value)| match value {
        Some(value) => drop(inside.env(name, value)),
        None => drop(inside.env_remove(name)),
    });
    inside
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// The least that this manifest gives a container, in bytes.
fn shipped(manifest: &str) -> u64 {
    let text = fs::read_to_string(format!(
        "{}/manifests/base/{manifest}",
        env!("CARGO_MANIFEST_DIR")
    ))
    .unwrap();
    let limits = text.lines().filter_map(|line| {
        line.trim()
            .strip_prefix("limits: { memory: ")?
            .strip_suffix(" }")
    });
    let bytes = |limit: &str| {
        stowage_scheduling::units::Bytes::parse_quantity(limit)
            .unwrap()
            .0
    };
    limits.map(bytes).min().unwrap()
}

/// Fails if the process had more than the manifests give it, and says how that was found out.
fn assert_within_limit(what: &str, peak_kib: u64, limit: u64, cgroup: Option<&MemoryCgroup>) {
    let how = if cgroup.is_some() {
        "in a memory cgroup of"
    } else {
        "without a memory cgroup; the limit is"
    };
    println!(
        "{what}: {} MiB at most, {how} {} MiB",
        peak_kib >> 10,
        limit >> 20
    );
    // A cgroup kills, and does not count the pages of the program.
    assert!(
        cgroup.is_some() || peak_kib << 10 <= limit,
        "{what}: {peak_kib} KiB"
    );
}

fn env(entries: usize) -> Value {
    (0..entries)
        .map(|n| json!({ "name": format!("E{n}") }))
        .collect()
}

/// A pod that asks for nothing, and says much.
fn pod_with_large_env(name: &str, entries: usize) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "tenant" },
        "spec": { "containers": [{ "name": "c", "image": "i", "env": env(entries) }] },
    })
}

#[test]
#[cfg_attr(
    not(feature = "jemalloc"),
    ignore = "measures memory: needs the image's allocator, `--features jemalloc`"
)]
fn a_replica_stays_within_its_memory_limit_whatever_pods_contain() {
    let world = AgentNode::with_gpus([]);
    for n in 0..16 {
        world
            .api
            .create("pods", pod_with_large_env(&format!("wordy-{n}"), 200_000))
            .unwrap();
    }
    for n in 0..60 {
        let values: Vec<String> = (0..20_000).map(|value| format!("v{value}")).collect();
        let rule = json!({ "key": "app", "operator": "In", "values": values });
        let budget = json!({
            "metadata": { "name": format!("large-{n}"), "namespace": "tenant" },
            "spec": { "minAvailable": 1, "selector": { "matchExpressions": [rule] } },
        });
        world.api.create("poddisruptionbudgets", budget).unwrap();
    }
    // Pages of pods that are just within their bound, by what they take and by their text.
    for n in 0..250 {
        let containers: Vec<Value> = (0..40)
            .map(|c| json!({ "name": format!("c{c}"), "image": "i" }))
            .collect();
        let volumes: Vec<Value> = (0..35)
            .map(|v| json!({ "name": format!("v{v}"), "emptyDir": {} }))
            .collect();
        let spec = json!({ "containers": containers, "volumes": volumes });
        let pod = json!({ "metadata": { "name": format!("full-{n}"), "namespace": "tenant" }, "spec": spec });
        world.api.create("pods", pod).unwrap();
        let labels: BTreeMap<String, String> = (0..2_000)
            .map(|l| (format!("tenant.example/label-{l}"), "x".repeat(50)))
            .collect();
        let mut pod = pod_with_large_env(&format!("labels-{n}"), 0);
        pod["metadata"]["labels"] = json!(labels);
        world.api.create("pods", pod).unwrap();
    }
    // Beyond what is kept of any pod: it is there, and named.
    let ports: Vec<Value> = (0..20_000)
        .map(|port| json!({ "containerPort": port }))
        .collect();
    let mut large = pod_with_large_env("large", 0);
    large["spec"]["containers"][0]["ports"] = json!(ports);
    world.api.create("pods", large).unwrap();
    let limit = shipped("stowage.yaml");
    let cgroup = MemoryCgroup::of("serve", limit);
    let command = RunningServe::serve_command(&world.kubeconfig(), &["--admin", "127.0.0.1:0"]);
    let mut command = in_cgroup(cgroup.as_ref(), command);
    let running = RunningServe::run(&mut command);
    let log = running.read_lines_until("the watches have synced");
    let is_named = |line: &String| {
        line.contains("tenant/large\"") && line.contains("larger than Stowage reads")
    };
    assert!(log.iter().any(is_named), "{log:#?}");
    let metrics = Client::connect(running.operators).get_page("/metrics");
    for (resource, is_beyond) in [
        ("pods", true),
        ("poddisruptionbudgets", true),
        ("nodes", false),
    ] {
        let none = format!("stowage_bounds_reached_total{{resource=\"{resource}\"}} 0\n");
        assert_eq!(metrics.text().contains(&none), !is_beyond, "{resource}");
    }
    let pod = json!({ "metadata": { "name": "p", "namespace": "chat", "uid": "p" }, "spec": { "containers": [
        { "name": "engine", "resources": { "limits": { "stowage.dev/vram": "1Gi" } } },
    ] } });
    let asked = json!({ "Pod": pod, "NodeNames": ["node-a"] }).to_string();
    let answer = Client::connect(running.scheduler).post("/scheduler/filter", &asked);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_within_limit("serve", running.memory("VmHWM"), limit, cgroup.as_ref());
}

#[test]
#[cfg_attr(
    not(feature = "jemalloc"),
    ignore = "measures memory: needs the image's allocator, `--features jemalloc`"
)]
fn an_agent_stays_within_its_memory_limit_whatever_is_on_its_node() {
    let world = AgentNode::with_gpus([gpu("a")]);
    let cache = world.folder().join("hub");
    let snapshot = |model: &str| {
        let folder = cache.join(format!("models--tenant--{model}/snapshots/c0ffee"));
        fs::create_dir_all(&folder).unwrap();
        folder
    };
    for n in 0..3 {
        // As many tensors as fit in it, each in a file of its own name.
        let mut index = String::from("{\"weight_map\":{");
        let mut tensor = 0;
        while index.len() < (31 << 20) {
            index += &format!("\"{tensor}\":\"{}.safetensors\",", tensor % 9_990);
            tensor += 1;
        }
        index += "\"last\":\"0.safetensors\"}}";
        fs::write(
            snapshot(&format!("index-{n}")).join("model.safetensors.index.json"),
            index,
        )
        .unwrap();
    }
    for n in 0..24 {
        let folder = snapshot(&format!("links-{n}"));
        for link in 0..9_990 {
            symlink(
                "/etc/hostname",
                folder.join(format!(
                    "a-link-with-a-name-as-long-as-any-{link}.safetensors"
                )),
            )
            .unwrap();
        }
    }
    for (name, entries) in (0..15).map(|n| (format!("wordy-{n}"), 100_000)) {
        let env = env(entries);
        world.pod(&name, |pod| pod["spec"]["containers"][0]["env"] = env);
    }
    world.pod("llama", |pod| bound_to(pod, "GPU-a", 20 << 30));
    let extender = world.extender();
    let limit = shipped("agent.yaml");
    let cgroup = MemoryCgroup::of("agent", limit);
    let address = format!("http://{}", extender.agents);
    let command = world.agent(&[
        "--interval",
        "100ms",
        "--extender",
        &address,
        "--hf-cache",
        cache.to_str().unwrap(),
    ]);
    let mut command = in_cgroup(cgroup.as_ref(), command);
    let agent = RunningAgent::start(&mut command);
    eventually_within(
        20 * TEST_TIMEOUT,
        "it reports the models that it could look at",
        || {
            let report = crate::agent::world::reported(&extender);
            report["models"]
                .as_array()
                .is_some_and(|models| !models.is_empty())
        },
    );
    assert_within_limit("agent", agent.memory("VmHWM"), limit, cgroup.as_ref());
}
