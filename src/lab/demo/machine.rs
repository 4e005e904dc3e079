//! The hardware of the demo's nodes: their GPUs, and the models on their disks. Data only.

use serde_json::{Value, json};

/// One node's hardware.
#[derive(Debug, Clone, Copy)]
pub struct DemoMachine {
    pub node: &'static str,
    pub model: &'static str,
    pub gpu_count: u32,
    pub gib_per_gpu: u64,
    pub models: &'static [ModelOnDisk],
}

/// A model of which all files are on a node's disk.
#[derive(Debug, Clone, Copy)]
pub struct ModelOnDisk {
    pub model: &'static str,
    pub gib: u64,
}

impl DemoMachine {
    pub fn uuid(&self, gpu: u32) -> String {
        format!("GPU-{}-{gpu}", self.node)
    }

    /// Its Node object, as its kubelet would register it.
    pub fn node_object(&self) -> Value {
        let resources = json!({"cpu": "96", "memory": "1Ti", "pods": "110"});
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": self.node},
            "status": {"capacity": resources, "allocatable": resources},
        })
    }
}
