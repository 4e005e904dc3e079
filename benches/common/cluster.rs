//! The cluster of the benches, and the scheduler's requests about it. Sizes vary by a fixed rule, so that nodes differ in how
//! full they are and every run sends the same requests.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{self, Write};

const GIB: u64 = 1 << 30;
/// Allocatable VRAM of a GPU of 80 GiB, without the headroom, in bytes.
const ALLOCATABLE_PER_GPU: u64 = 72 * GIB;
/// VRAM that a node advertises, in bytes.
pub const NODE_VRAM: u64 = GPUS as u64 * ALLOCATABLE_PER_GPU;
pub const GPUS: usize = 8;
const NAMESPACE: &str = "llm";

pub struct BenchCluster {
    nodes: usize,
    waiting: usize,
    /// Number of namespaces with a tenant each; 0 for one namespace without a tenant.
    tenants: usize,
}

impl BenchCluster {
    pub fn new(nodes: usize, waiting: usize) -> Self {
        Self {
            nodes,
            waiting,
            tenants: 0,
        }
    }

    pub fn with_tenants(self, tenants: usize) -> Self {
        Self { tenants, ..self }
    }

    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Number of bound pods: two for each GPU.
    pub fn resident(&self) -> usize {
        self.nodes * GPUS * 2
    }

    /// What `kubectl get nodes,pods -A -o json` would print.
    pub fn dump(&self) -> String {
        let mut text = Vec::new();
        self.write_dump(&mut text)
            .expect("memory takes what is written");
        String::from_utf8(text).expect("JSON is text")
    }

    /// Writes the dump object by object: with a million pods it has gigabytes.
    pub fn write_dump(&self, out: &mut impl Write) -> io::Result<()> {
        let (node, resident) = (self.node_template(), self.resident_template());
        out.write_all(br#"{"apiVersion":"v1","kind":"List","items":["#)?;
        for place in 0..self.nodes {
            out.write_all(if place == 0 { b"" } else { b"," })?;
            self.write_node(&node, place, NODE_VRAM, out)?;
        }
        for place in 0..self.resident() {
            out.write_all(b",")?;
            self.write_resident(&resident, place, out)?;
        }
        for i in 0..self.waiting {
            write!(out, ",{}", pod(&waiting_name(i), 1 + i as u64 % 2))?;
        }
        out.write_all(b"]}")
    }

    pub fn node_template(&self) -> ObjectTemplate {
        ObjectTemplate::from_object(&node())
    }

    pub fn write_node(
        &self,
        template: &ObjectTemplate,
        place: usize,
        vram: u64,
        out: &mut impl Write,
    ) -> io::Result<()> {
        template.write(out, |field| match field {
            Field::Node => node_name(place),
            Field::Vram => vram.to_string(),
            other => unreachable!("a node has no {other:?}"),
        })
    }

    pub fn resident_template(&self) -> ObjectTemplate {
        ObjectTemplate::from_object(&resident())
    }

    pub fn write_resident(
        &self,
        template: &ObjectTemplate,
        place: usize,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let gpu = place / 2;
        template.write(out, |field| match field {
            Field::Name => resident_name(place),
            Field::Uid => uid(&resident_name(place)),
            Field::Node => node_name(gpu / GPUS),
            Field::Gpu => (gpu % GPUS).to_string(),
            Field::Vram => (resident_gib(place) * GIB).to_string(),
            Field::Namespace => self.namespace_of(place),
        })
    }

    /// A pod behind the planner's gate, with a priority, that wants more than any GPU has free: it fits where others leave.
    pub fn gated_pod(&self, place: usize) -> Value {
        let mut pod = pod(&format!("gated-{place}"), 60);
        pod["metadata"]["namespace"] = self.namespace_of(place).into();
        pod["spec"]["priority"] = 100.into();
        pod["spec"]["schedulingGates"] = json!([{"name": "stowage.dev/plan"}]);
        pod
    }

    pub fn namespace_of(&self, place: usize) -> String {
        match self.tenants {
            0 => NAMESPACE.to_owned(),
            tenants => tenant_name(place % tenants),
        }
    }

    pub fn filter_body(&self, round: usize) -> Vec<u8> {
        self.filter_body_for_nodes(round, self.nodes)
    }

    /// Filter request about so many of the nodes.
    pub fn filter_body_for_nodes(&self, round: usize, nodes: usize) -> Vec<u8> {
        let mut names = self.names(round);
        names.truncate(nodes);
        self.args(pod(&waiting_name(round), 1 + round as u64 % 2), names)
    }

    /// Filter request of a pod with these labels.
    pub fn filter_body_with_labels(
        &self,
        round: usize,
        labels: &BTreeMap<String, String>,
    ) -> Vec<u8> {
        let mut pod = pod(&waiting_name(round), 1 + round as u64 % 2);
        pod["metadata"]["labels"] = json!(labels);
        self.args(pod, self.names(round))
    }

    /// Filter request about one node.
    pub fn filter_body_for_node(&self, round: usize, node: usize) -> Vec<u8> {
        self.args(pod(&waiting_name(round), 1), vec![node_name(node)])
    }

    /// Filter request about one node, of a pod that no other request is about.
    pub fn filter_body_of_new_pod(&self, round: usize) -> Vec<u8> {
        let name = node_name(round * 17 % self.nodes);
        self.args(pod(&format!("one-{round}"), 1), vec![name])
    }

    pub fn prioritize_body(&self, round: usize, names: &[String]) -> Vec<u8> {
        self.args(
            pod(&waiting_name(round), 1 + round as u64 % 2),
            names.to_vec(),
        )
    }

    /// A pod that fits no node as it stands, though every GPU is large enough.
    pub fn refused_body(&self, round: usize) -> Vec<u8> {
        self.args(pod(&format!("large-{round}"), 60), self.names(round))
    }

    pub fn bind_body(&self, round: usize, node: &str) -> Vec<u8> {
        let name = waiting_name(round);
        json!({"PodName": name, "PodNamespace": NAMESPACE, "PodUID": uid(&name), "Node": node})
            .to_string()
            .into_bytes()
    }

    /// The scheduler begins its round over the nodes at another one each time.
    fn names(&self, round: usize) -> Vec<String> {
        (0..self.nodes)
            .map(|i| node_name((i + round * 17) % self.nodes))
            .collect()
    }

    fn args(&self, pod: Value, names: Vec<String>) -> Vec<u8> {
        json!({"Pod": pod, "Nodes": null, "NodeNames": names})
            .to_string()
            .into_bytes()
    }
}

/// The shortlist in a filter's answer; panics if it is none.
pub fn passed_names(answer: &[u8]) -> Vec<String> {
    let answer: Value = serde_json::from_slice(answer).expect("JSON");
    let names: Vec<String> =
        serde_json::from_value(answer["NodeNames"].clone()).expect("a shortlist");
    assert_eq!(names.len(), 4, "four nodes pass: {answer}");
    names
}

/// The one node with the top score.
pub fn top_name(answer: &[u8]) -> String {
    let answer: Vec<Value> = serde_json::from_slice(answer).expect("an array");
    let mut top = answer.iter().filter(|host| host["Score"] == 10);
    let name = top.next().expect("a node has the top score")["Host"]
        .as_str()
        .expect("a name")
        .to_owned();
    assert!(top.next().is_none(), "one node has the top score");
    name
}

pub fn assert_bound(answer: &[u8]) {
    assert_eq!(
        answer,
        br#"{"Error":""}"#,
        "{}",
        String::from_utf8_lossy(answer)
    );
}

pub fn assert_all_refused(answer: &[u8], nodes: usize) {
    let answer: Value = serde_json::from_slice(answer).expect("JSON");
    let refused = answer["FailedAndUnresolvableNodes"]
        .as_object()
        .map_or(0, serde_json::Map::len);
    assert_eq!(refused, nodes);
}

/// The name of a tenant, and of its namespace.
pub fn tenant_name(i: usize) -> String {
    format!("team-{i}")
}

/// Index of the node with this name.
pub fn node_index(name: &str) -> Option<usize> {
    name.strip_prefix("gpu-node-")?.parse().ok()
}

pub fn node_name(i: usize) -> String {
    format!("gpu-node-{i:05}")
}

/// The VRAM of the pod that is the `second` (0 or 1) on this GPU.
pub fn resident_on(node: usize, gpu: usize, second: usize) -> (String, u64) {
    let i = (node * GPUS + gpu) * 2 + second;
    (uid(&resident_name(i)), resident_gib(i) * GIB)
}

pub fn resident_name(i: usize) -> String {
    format!("resident-{i}")
}

/// Two pods on each GPU leave 6 to 22 GiB of its 72 free.
fn resident_gib(i: usize) -> u64 {
    let (gpu, second) = (i / 2, i % 2);
    if second == 0 {
        30
    } else {
        20 + (gpu * 7 + gpu / GPUS * 3) as u64 % 17
    }
}

/// UID made of a name, as long as a real one.
fn uid(name: &str) -> String {
    format!("uid-{name:-<32}")
}

fn waiting_name(i: usize) -> String {
    format!("waiting-{i}")
}

/// An object's JSON, in which fields are to be filled in.
pub struct ObjectTemplate {
    /// Texts, each followed by a field.
    parts: Vec<(String, Field)>,
    end: String,
}

#[derive(Debug, Clone, Copy)]
enum Field {
    Name,
    Uid,
    Node,
    Gpu,
    Vram,
    Namespace,
}

impl Field {
    const ALL: [Self; 6] = [
        Self::Name,
        Self::Uid,
        Self::Node,
        Self::Gpu,
        Self::Vram,
        Self::Namespace,
    ];

    /// Placeholder of the field in a template.
    fn blank(self) -> String {
        format!("@{self:?}@")
    }
}

impl ObjectTemplate {
    fn from_object(object: &Value) -> Self {
        let (mut rest, mut parts) = (object.to_string(), Vec::new());
        let first = |text: &str| {
            let found = Field::ALL
                .into_iter()
                .filter_map(|field| Some((text.find(&field.blank())?, field)));
            found.min_by_key(|(at, _)| *at)
        };
        while let Some((at, field)) = first(&rest) {
            let after = rest.split_off(at + field.blank().len());
            rest.truncate(at);
            parts.push((rest, field));
            rest = after;
        }
        Self { parts, end: rest }
    }

    fn write(&self, out: &mut impl Write, value: impl Fn(Field) -> String) -> io::Result<()> {
        for (text, field) in &self.parts {
            out.write_all(text.as_bytes())?;
            out.write_all(value(*field).as_bytes())?;
        }
        out.write_all(self.end.as_bytes())
    }
}

/// Node object that already advertises the VRAM of its GPUs.
fn node() -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": Field::Node.blank(), "labels": {
        "nvidia.com/gpu.count": GPUS.to_string(),
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }}, "status": {"capacity": {"stowage.dev/vram": Field::Vram.blank()}}})
}

fn resident() -> Value {
    let mut pod = pod_with_uid(
        &Field::Name.blank(),
        &Field::Uid.blank(),
        &Field::Vram.blank(),
    );
    pod["metadata"]["namespace"] = Field::Namespace.blank().into();
    pod["spec"]["nodeName"] = Field::Node.blank().into();
    pod["status"]["phase"] = "Running".into();
    pod["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    pod["metadata"]["annotations"]["stowage.dev/devices"] =
        format!("index-{}", Field::Gpu.blank()).into();
    pod["metadata"]["annotations"]["stowage.dev/vram-granted"] = Field::Vram.blank().into();
    pod
}

fn pod(name: &str, gib: u64) -> Value {
    pod_with_uid(name, &uid(name), &(gib * GIB).to_string())
}

fn pod_with_uid(name: &str, uid: &str, vram: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "namespace": NAMESPACE, "uid": uid, "resourceVersion": "80", "generation": 1,
            "creationTimestamp": "2026-11-21T00:47:27Z",
            "labels": {"app": "llm"}, "annotations": {"stowage.dev/model": "llama-8b"},
        },
        "spec": {
            "containers": [{
                "name": "server", "image": "app:1",
                "resources": {
                    "limits": {"stowage.dev/vram": vram},
                    "requests": {"cpu": "2", "stowage.dev/vram": vram, "memory": "8Gi"},
                },
                "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
                "imagePullPolicy": "IfNotPresent",
            }],
            "restartPolicy": "Always", "terminationGracePeriodSeconds": 1, "dnsPolicy": "ClusterFirst",
            "securityContext": {}, "schedulerName": "stowage",
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            ],
            // Not a class of engines, of which one starts on a GPU at a time: none that is bound here ever gets ready.
            "priorityClassName": "stowage-batch",
            "priority": 0, "enableServiceLinks": true, "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {"phase": "Pending", "qosClass": "Burstable"},
    })
}
