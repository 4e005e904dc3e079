//! What happens in the demo, chapter by chapter. Data only: who arrives, who leaves, and what a newcomer should see in it.

use super::agents::Machine;
use serde_json::{Value, json};

pub const MACHINES: [Machine; 3] = [
    Machine { node: "node-a", model: "NVIDIA-H100-80GB-HBM3", gpus: 4, gib: 80 },
    Machine { node: "node-b", model: "NVIDIA-A100-SXM4-40GB", gpus: 4, gib: 40 },
    Machine { node: "node-c", model: "NVIDIA-L40S", gpus: 2, gib: 48 },
];

/// Who may be pushed out for whom: a negative priority says "evict me first".
pub const PRIORITY_CLASSES: [(&str, i64); 2] = [("stowage-opportunistic", -1000), ("stowage-serving", 1000)];

pub struct Chapter {
    pub title: &'static str,
    pub text: &'static str,
    pub arrive: Vec<Arrival>,
    pub leave: &'static [&'static str],
    pub expect: Expect,
}

/// When a chapter is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Everyone who arrived is bound.
    AllBound,
    /// Everyone who arrived is bound or was told why not.
    AllAnswered,
    /// Nobody who could be placed waits any more: at least this many of the waiting pods are bound.
    WaitingBound(usize),
}

/// A pod to be.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub name: String,
    gib: u64,
    gpus: u32,
    exclusive: bool,
    priority_class: &'static str,
}

pub fn chapters() -> Vec<Chapter> {
    vec![
        Chapter {
            title: "Mixed models arrive",
            text: "Each asks for VRAM, not for a whole GPU. Stowage puts each on the GPU it fills best.",
            arrive: [
                several("llama-8b", 2, 20),
                several("qwen-14b", 2, 34),
                several("mistral-7b", 2, 16),
                several("embedder", 3, 4),
            ]
            .concat(),
            leave: &[],
            expect: Expect::AllBound,
        },
        Chapter {
            title: "A 70B model over two GPUs, and one that wants a GPU to itself",
            text: "llama-70b takes an equal share of two GPUs of one node; nobody may join fraud-detector.",
            arrive: vec![
                Arrival { gpus: 2, ..serving("llama-70b", 140) },
                Arrival { exclusive: true, ..serving("fraud-detector", 24) },
            ],
            leave: &[],
            expect: Expect::AllBound,
        },
        Chapter {
            title: "Opportunistic jobs fill the rest",
            text: "They may be evicted at any time, and cost nobody anything meanwhile. What fits nowhere is told why.",
            arrive: [
                opportunistic("fine-tune", 3, 26),
                opportunistic("batch-eval", 16, 8),
                opportunistic("indexer", 12, 3),
            ]
            .concat(),
            leave: &[],
            expect: Expect::AllAnswered,
        },
        Chapter {
            title: "A serving pod arrives, and the cluster is full",
            text: "Pods leave one GPU, the cheapest for it, and the room they leave is held for the one who asked.",
            arrive: vec![serving("qwen-7b-urgent", 24)],
            leave: &[],
            expect: Expect::AllBound,
        },
        Chapter {
            title: "Two services scale down",
            text: "Jobs that were refused take the free VRAM without anybody asking again.",
            arrive: vec![],
            leave: &["llama-8b-1", "mistral-7b-1"],
            expect: Expect::WaitingBound(4),
        },
    ]
}

fn several(name: &str, count: usize, gib: u64) -> Vec<Arrival> {
    (1..=count).map(|i| serving(&format!("{name}-{i}"), gib)).collect()
}

fn serving(name: &str, gib: u64) -> Arrival {
    Arrival { name: name.into(), gib, gpus: 1, exclusive: false, priority_class: "stowage-serving" }
}

fn opportunistic(name: &str, count: usize, gib: u64) -> Vec<Arrival> {
    let job = |i| Arrival { priority_class: "stowage-opportunistic", ..serving(&format!("{name}-{i}"), gib) };
    (1..=count).map(job).collect()
}

impl Arrival {
    /// Its manifest, as its owner would write it.
    pub fn pod(&self) -> Value {
        let mut annotations = json!({"stowage.dev/model": self.name.trim_end_matches(|c: char| c == '-' || c.is_ascii_digit())});
        if self.gpus > 1 {
            annotations["stowage.dev/gpus"] = self.gpus.to_string().into();
        }
        if self.exclusive {
            annotations["stowage.dev/exclusive"] = "true".into();
        }
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "default", "annotations": annotations},
            "spec": {
                "schedulerName": "stowage",
                "priorityClassName": self.priority_class,
                "terminationGracePeriodSeconds": 3,
                "containers": [{
                    "name": "engine", "image": "engine:1",
                    "resources": {"limits": {"stowage.dev/vram": format!("{}Gi", self.gib)}, "requests": {"cpu": "1"}},
                }],
            },
        })
    }
}
