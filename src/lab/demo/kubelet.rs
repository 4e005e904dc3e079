//! The kubelets of all nodes in one: they run bound pods, end deleted pods, and publish capacity.
//!
//! They start nothing and admit everything; a pod is a sequence of status writes here. A pod that names the port of its metrics
//! has the address of this machine; others have no address, so that the agent does not probe ports of unrelated programs. A pod
//! may say how long it takes to die ([`termination`](super::termination)).

use super::termination;
use super::watching::{self, WatchNotice};
use super::writes;
use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use stowage_agent::engines::address::METRICS_PORT;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

/// How fast the nodes are.
#[derive(Debug, Clone)]
pub struct KubeletConfig {
    /// From binding to Running and Ready.
    pub start_delay: Duration,
    /// How long a second of a pod's grace period takes.
    pub grace_second: Duration,
    /// The extended resource that is copied from capacity to allocatable.
    pub resource: String,
}

impl Default for KubeletConfig {
    fn default() -> Self {
        Self {
            start_delay: Duration::ZERO,
            grace_second: Duration::from_secs(1),
            resource: "stowage.dev/vram".to_owned(),
        }
    }
}

/// Running kubelets; dropping this stops them.
pub struct Kubelet {
    task: JoinHandle<()>,
}

impl Kubelet {
    /// Starts them as clients of an API server. Must be called inside a tokio runtime.
    pub fn start(client: kube::Client, config: KubeletConfig) -> Self {
        Self {
            task: tokio::spawn(run(client, config)),
        }
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

enum KubeletMessage {
    Node(WatchNotice),
    Pod(WatchNotice),
}

/// A pod's progress: each step is begun once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PodStep {
    Starting,
    Stopping,
}

async fn run(client: kube::Client, config: KubeletConfig) {
    let (sender, mut messages) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    tasks.spawn(watching::forward_watch(
        client.clone(),
        watching::core_resource("Node", "nodes"),
        sender.clone(),
        KubeletMessage::Node,
    ));
    tasks.spawn(watching::forward_watch(
        client.clone(),
        watching::core_resource("Pod", "pods"),
        sender,
        KubeletMessage::Pod,
    ));
    let mut steps = BTreeMap::new();
    while let Some(message) = messages.recv().await {
        match message {
            KubeletMessage::Node(WatchNotice::Applied(node)) => {
                if let Some(allocatable) = missing_allocatable(&node, &config.resource) {
                    tasks.spawn(publish_allocatable(client.clone(), node, allocatable));
                }
            }
            KubeletMessage::Pod(WatchNotice::Applied(pod)) => {
                if let Some(step) = next_step(&pod, &mut steps) {
                    tasks.spawn(advance(client.clone(), config.clone(), pod, step));
                }
            }
            KubeletMessage::Pod(WatchNotice::Deleted(pod)) => {
                steps.remove(uid(&pod));
            }
            KubeletMessage::Node(_) | KubeletMessage::Pod(_) => {}
        }
        while tasks.try_join_next().is_some() {}
    }
}

/// The part of a node's capacity that its allocatable lacks.
fn missing_allocatable(node: &Value, resource: &str) -> Option<Value> {
    let status = &node["status"];
    let capacity = status["capacity"].get(resource)?;
    (status["allocatable"].get(resource) != Some(capacity)).then(|| json!({resource: capacity}))
}

async fn publish_allocatable(client: kube::Client, node: Arc<Value>, allocatable: Value) {
    let name = node["metadata"]["name"].as_str().unwrap_or_default();
    // The next change of the node tries again.
    let _ = writes::patch_status(
        &client,
        &writes::node_path(name),
        json!({"allocatable": allocatable}),
    )
    .await;
}

fn next_step(pod: &Value, steps: &mut BTreeMap<String, PodStep>) -> Option<PodStep> {
    pod["spec"]["nodeName"]
        .as_str()
        .filter(|node| !node.is_empty())?;
    let step = if !pod["metadata"]["deletionTimestamp"].is_null() {
        PodStep::Stopping
    } else if pod["status"]["phase"] == "Pending" {
        PodStep::Starting
    } else {
        return None;
    };
    let is_new = steps.get(uid(pod)).is_none_or(|begun| *begun < step);
    is_new.then(|| {
        steps.insert(uid(pod).to_owned(), step);
        step
    })
}

async fn advance(client: kube::Client, config: KubeletConfig, pod: Arc<Value>, step: PodStep) {
    let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
    let path = writes::pod_path(text("namespace"), text("name"));
    // A pod that is gone or changed meanwhile needs nothing more from its kubelet.
    let _ = match step {
        PodStep::Starting => start_pod(&client, &path, &pod, config.start_delay).await,
        PodStep::Stopping => {
            tokio::time::sleep(
                termination::termination_time(&pod).unwrap_or_else(|| grace(&pod, &config)),
            )
            .await;
            let options = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": text("uid")}});
            writes::delete(&client, &path, options).await
        }
    };
}

fn grace(pod: &Value, config: &KubeletConfig) -> Duration {
    let seconds = pod["metadata"]["deletionGracePeriodSeconds"]
        .as_u64()
        .unwrap_or_default();
    config
        .grace_second
        .saturating_mul(u32::try_from(seconds).unwrap_or(u32::MAX))
}

/// A pod has its address before its containers are up.
async fn start_pod(
    client: &kube::Client,
    path: &str,
    pod: &Value,
    delay: Duration,
) -> Result<(), writes::WriteError> {
    if pod["metadata"]["annotations"].get(METRICS_PORT).is_some() {
        writes::patch_status(client, path, json!({"podIP": Ipv4Addr::LOCALHOST})).await?;
    }
    tokio::time::sleep(delay).await;
    writes::patch_status(client, path, running_status()).await
}

fn running_status() -> Value {
    let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let condition = |kind: &str| json!({"type": kind, "status": "True", "lastTransitionTime": now});
    let conditions: Vec<Value> = ["Initialized", "ContainersReady", "Ready"]
        .map(condition)
        .into();
    json!({"phase": "Running", "startTime": now, "conditions": conditions})
}

fn uid(pod: &Value) -> &str {
    pod["metadata"]["uid"].as_str().unwrap_or_default()
}
