//! The openb trace: the nodes and pods of a production cluster whose GPUs are shared (Alibaba's cluster-trace-gpu-v2023, of
//! "Beware of Fragmentation", Weng, Yang et al., USENIX ATC 2023), parsed from the texts of its files; and, without that trace,
//! a small generated one ([`built_in`]). For comparison with published runs there are their random numbers ([`go_dice`]) and
//! their results ([`published`]). The simulations are not known here.

pub mod built_in;
pub(crate) mod go_dice;
pub mod published;
mod rows;

pub use super::table::TraceText;

use super::table::TableError;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, NodeName};
use stowage_scheduling::units::{Bytes, MilliCpu};

/// The file of the cluster's nodes.
pub const NODES: &str = "openb_node_list_gpu_node.csv";
/// The file of its pods as they were submitted.
pub const PODS: &str = "openb_pod_list_default.csv";

/// The file of a variant's pods.
pub fn pods_file(variant: &str) -> String {
    format!("openb_pod_list_{variant}.csv")
}

/// The variant whose pods a file of this name holds.
pub fn variant_of(file: &str) -> Option<&str> {
    file.strip_prefix("openb_pod_list_")?
        .strip_suffix(".csv")
        .filter(|variant| !variant.is_empty())
}

/// A whole GPU, in the trace's own measure.
pub(crate) const WHOLE_GPU: u32 = 1000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    pub nodes: Vec<TraceNode>,
    pub pods: Vec<TracePod>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceNode {
    pub name: NodeName,
    pub cpu: MilliCpu,
    pub memory: Bytes,
    pub gpus: u32,
    pub model: GpuModel,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracePod {
    pub name: Arc<str>,
    pub cpu: MilliCpu,
    pub memory: Bytes,
    /// None for a pod without GPUs.
    pub gpus: u32,
    /// Requested share of each of its GPUs, in thousandths.
    pub milli_per_gpu: u32,
    /// The models it may run on; none means any.
    pub models: Arc<[GpuModel]>,
    /// Absent from the variants whose pods have no history.
    pub qos: Option<Qos>,
}

/// A pod's quality-of-service class in the trace's cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Qos {
    BestEffort,
    Burstable,
    Guaranteed,
    LatencySensitive,
}

/// What is wrong with a trace, and the fix.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TraceError {
    #[error(transparent)]
    Table(#[from] TableError),
    #[error(
        "{file}, line {line}: it names row {row}, and the pods are rows 0 to {last}; give both files of one trace"
    )]
    NoSuchRow {
        file: String,
        line: usize,
        row: u64,
        last: usize,
    },
    #[error("{file}, line {line}: {column} is {text:?}: {why}")]
    Name {
        file: String,
        line: usize,
        column: &'static str,
        text: String,
        why: stowage_scheduling::ids::InvalidName,
    },
    #[error("{file}, line {line}: qos is {text:?}; write BE, Burstable, Guaranteed or LS")]
    Qos {
        file: String,
        line: usize,
        text: String,
    },
    #[error(
        "{file}, line {line}: the pod asks for {gpus} GPUs and {milli} thousandths of each; over several GPUs write 1000, for none 0"
    )]
    PartOfSeveral {
        file: String,
        line: usize,
        gpus: u32,
        milli: u32,
    },
    #[error("{file}, line {line}: two nodes are called {name:?}; give each a name of its own")]
    SameName {
        file: String,
        line: usize,
        name: String,
    },
    #[error(
        "{file}, line {line}: pod {pod} wants {wants}, and no node of any model has that much; make it smaller, or add such a node"
    )]
    LargerThanAnyNode {
        file: String,
        line: usize,
        pod: String,
        wants: String,
    },
    #[error(
        "{file}, line {line}: pod {pod} wants a GPU of {models}, and no node has one; name another model, or add such a node"
    )]
    NoSuchModel {
        file: String,
        line: usize,
        pod: String,
        models: String,
    },
}

impl Trace {
    /// The trace in two files. Every pod is small enough for some node, and names a GPU model that some node has or none at
    /// all; no single node need satisfy both.
    pub fn read(nodes: TraceText<'_>, pods: TraceText<'_>) -> Result<Self, TraceError> {
        let nodes = rows::nodes(nodes)?;
        let pods = rows::pods(pods, &nodes)?;
        Ok(Self { nodes, pods })
    }

    /// Pods that do not fit on any node even if it is empty: all nodes of the models that they accept are too small. The
    /// published runs have such pods, and never place them.
    pub fn never_placed(&self) -> impl Iterator<Item = &TracePod> {
        self.pods
            .iter()
            .filter(|pod| !self.nodes.iter().any(|node| node.could_fit(pod)))
    }
}

impl TraceNode {
    /// Whether the pod fits on this node if it is empty.
    pub fn could_fit(&self, pod: &TracePod) -> bool {
        self.is_accepted_by(pod) && self.is_large_enough_for(pod)
    }

    fn is_accepted_by(&self, pod: &TracePod) -> bool {
        pod.gpus == 0 || pod.models.is_empty() || pod.models.contains(&self.model)
    }

    fn is_large_enough_for(&self, pod: &TracePod) -> bool {
        pod.gpus <= self.gpus && pod.cpu <= self.cpu && pod.memory <= self.memory
    }
}

#[cfg(test)]
mod tests;
