//! The orders in which a trial places pods. Which one needs the fewest GPUs differs from case to case: packing one after the
//! other is not monotone, and more room may even need more.

use super::question::PodToPlace;
use serde::Serialize;
use std::cmp::Reverse;
use stowage_scheduling::vocabulary::demand::Sharing;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacingOrder {
    /// The most VRAM on a GPU first, then the most GPUs.
    DecreasingSize,
    /// Pods with exclusive GPUs first, then the most GPUs, then the most VRAM on a GPU.
    ExclusiveFirst,
    /// In the order of the manifests.
    Given,
}

impl PlacingOrder {
    pub const ALL: [Self; 3] = [Self::DecreasingSize, Self::ExclusiveFirst, Self::Given];

    /// Sorts indices of pods into this order.
    pub fn arrange(self, pods: &[PodToPlace], indices: &[usize]) -> Vec<usize> {
        let mut order = indices.to_vec();
        let demand = |index: &usize| &pods[*index].demand;
        let is_shared = |index: &usize| demand(index).sharing == Sharing::Shared;
        match self {
            Self::DecreasingSize => order.sort_by_key(|pod_index| {
                let pod = demand(pod_index);
                (Reverse(pod.per_gpu), Reverse(pod.gpus), *pod_index)
            }),
            Self::ExclusiveFirst => order.sort_by_key(|pod_index| {
                let pod = demand(pod_index);
                (
                    is_shared(pod_index),
                    Reverse(pod.gpus),
                    Reverse(pod.per_gpu),
                    *pod_index,
                )
            }),
            Self::Given => order.sort_unstable(),
        }
        order
    }
}
