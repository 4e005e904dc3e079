//! The workload: a trace's nodes and pods as numbers, so that millions of reads are cheap. Pods with the same request are of
//! one kind; scores are cached by kind. Whether a pod fits is not known here.

use crate::simulate::openb::{Qos, Trace, TraceNode, TracePod, WHOLE_GPU};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, NodeName};

/// What a kubelet takes by default (`maxPods`); no trace's node comes near it.
pub(crate) const POD_SLOTS: u32 = 110;

/// A trace, parsed once and simulated many times.
#[derive(Debug, Clone)]
pub struct PlayedTrace {
    pub sites: Vec<PlayedNode>,
    pub models: Vec<GpuModel>,
    pub kinds: Vec<PodKind>,
    /// In the trace's order.
    pub pods: Vec<PlayedPod>,
}

/// A node's capacity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlayedNode {
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
    pub milli: u32,
    /// Whether it may run on a node of each model, by the model's index.
    pub models: Box<[bool]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlayedPod {
    /// Its index in [`WorkloadTrace::kinds`].
    pub kind: usize,
    pub qos: Option<Qos>,
}

impl PlayedTrace {
    pub fn of(trace: &Trace) -> Self {
        let mut models: Vec<GpuModel> = trace.nodes.iter().map(|node| node.model.clone()).collect();
        models.sort_unstable();
        models.dedup();
        let sites = trace.nodes.iter().map(|node| site(node, &models)).collect();
        let mut kinds = Vec::new();
        let mut places = BTreeMap::new();
        let mut pod = |pod: &TracePod| {
            let asked = (pod.cpu, pod.memory, pod.gpus, pod.milli, pod.models.clone());
            let kind = *places.entry(asked).or_insert_with(|| {
                kinds.push(PodKind::of(pod, &models));
                kinds.len() - 1
            });
            PlayedPod { kind, qos: pod.qos }
        };
        let pods = trace.pods.iter().map(&mut pod).collect();
        Self {
            sites,
            models,
            kinds,
            pods,
        }
    }

    pub fn kind_of(&self, pod: usize) -> &PodKind {
        &self.kinds[self.pods[pod].kind]
    }

    /// Whether a pod of the kind fits on any empty node.
    pub fn could_fit(&self, kind: &PodKind) -> bool {
        self.sites.iter().any(|site| site.could_fit(kind))
    }

    /// Capacity of all GPUs, in thousandths of one.
    pub fn capacity(&self) -> u64 {
        self.sites
            .iter()
            .map(|site| u64::from(site.gpus))
            .sum::<u64>()
            * u64::from(WHOLE_GPU)
    }
}

impl PlayedNode {
    /// Whether a pod of the kind fits on this node if it is empty.
    pub fn could_fit(&self, kind: &PodKind) -> bool {
        kind.models[self.model]
            && kind.gpus <= self.gpus
            && kind.cpu <= self.cpu
            && kind.memory <= self.memory
    }
}

impl PodKind {
    fn of(pod: &TracePod, models: &[GpuModel]) -> Self {
        let is_accepted =
            |model| pod.gpus == 0 || pod.models.is_empty() || pod.models.contains(model);
        Self {
            cpu: pod.cpu.0,
            memory: pod.memory.0,
            gpus: pod.gpus,
            milli: pod.milli,
            models: models.iter().map(is_accepted).collect(),
        }
    }

    /// The request over all its GPUs, in thousandths of one.
    pub fn milli_gpus(&self) -> u64 {
        u64::from(self.gpus) * u64::from(self.milli)
    }

    /// Whether it requests a part of one GPU.
    pub fn is_shared(&self) -> bool {
        self.gpus == 1 && self.milli < WHOLE_GPU
    }
}

fn site(node: &TraceNode, models: &[GpuModel]) -> PlayedNode {
    PlayedNode {
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
    fn pods_that_ask_for_the_same_are_of_one_kind_whatever_became_of_them() {
        let trace = built_in::trace();
        let setting = PlayedTrace::of(&trace);
        assert_eq!(setting.capacity(), 24 * 8 * 1000);
        assert_eq!(setting.pods.len(), trace.pods.len());
        // Of the nine generated shapes, three request one whole GPU, and two a half.
        assert_eq!(setting.kinds.len(), 6);
        for (pod, written) in setting.pods.iter().zip(&trace.pods) {
            let kind = &setting.kinds[pod.kind];
            assert_eq!(
                (kind.gpus, kind.milli, kind.cpu),
                (written.gpus, written.milli, written.cpu.0)
            );
        }
    }
}
