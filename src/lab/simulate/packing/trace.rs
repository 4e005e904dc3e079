//! The workload: a trace's nodes and pods as numbers, so that millions of reads are cheap. Pods with the same request are of
//! one kind; scores are cached by kind. Whether a pod fits is not known here.

use crate::simulate::openb::{Qos, Trace, TraceNode, TracePod, WHOLE_GPU};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, NodeName};

/// What a kubelet takes by default (`maxPods`); no trace's node comes near it.
pub(crate) const PODS_PER_NODE: u32 = 110;

/// A trace, parsed once and simulated many times.
#[derive(Debug, Clone)]
pub struct WorkloadTrace {
    pub nodes: Vec<WorkloadNode>,
    pub models: Vec<GpuModel>,
    pub kinds: Vec<PodKind>,
    /// In the trace's order.
    pub pods: Vec<WorkloadPod>,
}

/// A node's capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadNode {
    pub name: NodeName,
    /// Its index in [`WorkloadTrace::models`].
    pub model: usize,
    /// In thousandths of a core.
    pub cpu: u64,
    /// In bytes.
    pub memory: u64,
    pub gpus: u32,
}

/// A pod's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodKind {
    pub cpu: u64,
    pub memory: u64,
    /// None for a pod without GPUs.
    pub gpus: u32,
    /// Requested share of each of its GPUs, in thousandths.
    pub milli_per_gpu: u32,
    /// Whether it may run on a node of each model, by the model's index.
    pub models: Box<[bool]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkloadPod {
    /// Its index in [`WorkloadTrace::kinds`].
    pub kind: usize,
    pub qos: Option<Qos>,
}

impl WorkloadTrace {
    pub fn from_trace(trace: &Trace) -> Self {
        let mut models: Vec<GpuModel> = trace.nodes.iter().map(|node| node.model.clone()).collect();
        models.sort_unstable();
        models.dedup();
        let sites = trace
            .nodes
            .iter()
            .map(|node| packing_node(node, &models))
            .collect();
        let mut kinds = Vec::new();
        let mut kind_indices = BTreeMap::new();
        let mut pod = |pod: &TracePod| {
            let request = (
                pod.cpu,
                pod.memory,
                pod.gpus,
                pod.milli_per_gpu,
                pod.models.clone(),
            );
            let kind = *kind_indices.entry(request).or_insert_with(|| {
                kinds.push(PodKind::from_pod(pod, &models));
                kinds.len() - 1
            });
            WorkloadPod { kind, qos: pod.qos }
        };
        let pods = trace.pods.iter().map(&mut pod).collect();
        Self {
            nodes: sites,
            models,
            kinds,
            pods,
        }
    }

    pub fn kind_of(&self, pod: usize) -> &PodKind {
        &self.kinds[self.pods[pod].kind]
    }

    /// Whether a pod of the kind fits on any empty node.
    pub fn fits_empty_cluster(&self, kind: &PodKind) -> bool {
        self.nodes.iter().any(|site| site.fits_when_empty(kind))
    }

    /// Capacity of all GPUs, in thousandths of one.
    pub fn capacity(&self) -> u64 {
        self.nodes
            .iter()
            .map(|site| u64::from(site.gpus))
            .sum::<u64>()
            * u64::from(WHOLE_GPU)
    }
}

impl WorkloadNode {
    /// Whether a pod of the kind fits on this node if it is empty.
    pub fn fits_when_empty(&self, kind: &PodKind) -> bool {
        kind.models[self.model]
            && kind.gpus <= self.gpus
            && kind.cpu <= self.cpu
            && kind.memory <= self.memory
    }
}

impl PodKind {
    fn from_pod(pod: &TracePod, models: &[GpuModel]) -> Self {
        let is_accepted =
            |model| pod.gpus == 0 || pod.models.is_empty() || pod.models.contains(model);
        Self {
            cpu: pod.cpu.0,
            memory: pod.memory.0,
            gpus: pod.gpus,
            milli_per_gpu: pod.milli_per_gpu,
            models: models.iter().map(is_accepted).collect(),
        }
    }

    /// The request over all its GPUs, in thousandths of one.
    pub fn milli_gpus(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.milli_per_gpu)
    }

    /// Whether it requests a part of one GPU.
    pub fn is_shared(&self) -> bool {
        self.gpus == 1 && self.milli_per_gpu < WHOLE_GPU
    }
}

fn packing_node(node: &TraceNode, models: &[GpuModel]) -> WorkloadNode {
    WorkloadNode {
        name: node.name.clone(),
        model: models
            .binary_search(&node.model)
            .expect("every node's model was listed"),
        cpu: node.cpu.0,
        memory: node.memory.0,
        gpus: node.gpus,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::openb::built_in;

    #[test]
    fn pods_with_equal_requests_share_a_kind() {
        let trace = built_in::trace();
        let setting = WorkloadTrace::from_trace(&trace);
        assert_eq!(setting.capacity(), 24 * 8 * 1000);
        assert_eq!(setting.pods.len(), trace.pods.len());
        // Of the nine generated shapes, three request one whole GPU, and two a half.
        assert_eq!(setting.kinds.len(), 6);
        for (pod, written) in setting.pods.iter().zip(&trace.pods) {
            let kind = &setting.kinds[pod.kind];
            assert_eq!(
                (kind.gpus, kind.milli_per_gpu, kind.cpu),
                (written.gpus, written.milli_per_gpu, written.cpu.0)
            );
        }
    }
}
