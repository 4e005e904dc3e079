//! What a plan says: values that are printed for people or written for programs.

use super::bound::LowerBound;
use super::geometry::Geometry;
use super::order::PlacingOrder;
use serde::Serialize;
use stowage_scheduling::ids::{NodeName, PodKey};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::node::NodeKind;

/// How many GPUs the pods need, and who shares them.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityPlan {
    /// Number of pods in the question.
    pub pods: usize,
    /// Number of pods that fit.
    pub held: usize,
    /// The fewest GPUs that were found to hold them: full nodes, and one of each kind with the rest.
    pub gpus: u32,
    pub nodes: u32,
    /// Lower bound for the pods that fit.
    pub lower_bound: LowerBound,
    /// The number of GPUs equals the lower bound.
    pub is_optimal: bool,
    /// A kind of node that needs fewer GPUs by itself than all kinds do in the order given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fewer_alone: Option<FewerAlone>,
    /// The order in which the pods were placed; none if no pod asks for VRAM.
    pub order: Option<PlacingOrder>,
    pub node_kinds: Vec<NodeKindPlan>,
    pub layout: Vec<NodePlan>,
    /// Idle share with one GPU more; none if the plan has no GPU.
    pub one_more: Option<OneMore>,
    pub not_held: Vec<PodNotHeld>,
}

/// A kind of node that holds all pods which ask for VRAM by itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FewerAlone {
    pub name: String,
    /// GPUs of this kind that hold them.
    pub gpus: u32,
}

/// How many nodes of one kind are needed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeKindPlan {
    pub name: String,
    pub gpu: String,
    pub allocator: NodeKind,
    pub nodes: u32,
    pub gpus: u32,
    pub gpus_per_node: u32,
    /// What pods may be allocated on one GPU, or on its largest slice; zero if it is not known.
    pub allocatable_bytes: Bytes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<Geometry>,
}

/// One node, and what is on its GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePlan {
    pub node: NodeName,
    pub kind: String,
    pub allocator: NodeKind,
    pub gpus: Vec<GpuPlan>,
    /// Pods whose GPUs are the kubelet's to pick, on a node whose plugin is only known by its counts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodKey>,
}

/// One GPU or slice, and who shares it.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPlan {
    /// Index of the GPU on its node, or of the GPU that a slice is cut from.
    pub gpu: u32,
    /// The profile of a slice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<String>,
    /// Zero where a device plugin hands it out: VRAM is not counted there.
    pub allocatable_bytes: Bytes,
    pub allocated_bytes: Bytes,
    /// Allocated share of the allocatable VRAM in per cent, rounded down.
    pub allocated_percent: u8,
    pub sharing: GpuSharing,
    pub pods: Vec<PodOnGpu>,
}

/// Whether other pods may join those on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuSharing {
    Empty,
    Shared,
    /// Its pod asked for it exclusively.
    Exclusive,
    /// Its pods' class shares a GPU with no class.
    ClassAlone,
    /// The device plugin gives it to one pod.
    DevicePlugin,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodOnGpu {
    pub pod: PodKey,
    pub class: String,
    /// VRAM that it requests on this GPU, in bytes; zero for a device plugin.
    pub vram_bytes: Bytes,
    /// Share of the GPU's allocatable VRAM in per cent, rounded down.
    pub percent: u8,
}

/// Idle share of the GPUs as planned, and with one GPU more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OneMore {
    /// Number of GPUs with the additional one.
    pub gpus: u32,
    /// The average over GPUs of what of each is not allocated, in whole per cent; as it is planned.
    pub idle_percent_now: u8,
    /// Average idle share with one GPU more, in whole per cent, however the pods are spread.
    pub idle_percent_then: u8,
}

/// A pod that no node of the plan holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodNotHeld {
    pub pod: PodKey,
    /// Manifest that it comes from: a file and an object.
    pub source: String,
    pub requests: String,
    pub reasons: Vec<NotHeldReason>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NotHeldReason {
    /// The kind of node; none if it is the pod itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    pub code: String,
    pub text: String,
    /// What to change so that the pod fits.
    pub remedy: String,
}
