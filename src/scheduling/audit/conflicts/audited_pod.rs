//! A pod as a watch shows it, as far as GPUs are granted to it or reserved for it. Nothing here comes from the ledger: what the
//! ledger believes of the pod is what is checked.

use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::units::{Bytes, Moment};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::memory_fraction::MemoryFraction;
use std::sync::Arc;

/// A watch's observation of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditedPod {
    pub key: PodKey,
    pub node: NodeName,
    /// The GPUs by the record of its Binding, or by its reservation. Empty if the pod is bound and records none.
    pub gpus: Arc<[GpuUuid]>,
    pub share: GpuShare,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuShare {
    Bound(Grant),
    /// Boxed: few pods have a reservation at a time, and every bound pod would pay for it.
    Reserved(Box<ReservedShare>),
}

/// The grant of a Binding, and how far the pod has got with its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// VRAM on each of its GPUs.
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// `per_gpu` as a share of the GPU's memory when the pod was bound; zero if unknown.
    pub fraction: MemoryFraction,
    /// A container of the pod runs or has run.
    pub has_started: bool,
    /// The pod is being deleted.
    pub is_leaving: bool,
    /// The kubelet runs it from a file: an eviction would end nothing.
    pub is_static: bool,
    /// Its VRAM is lent by engines, which keep their grants.
    pub borrows: bool,
    pub bind_times: BindTimes,
}

/// When a pod was bound and when it was created, in seconds of the API server's clock. Ordered: the later binding is greater.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BindTimes {
    pub bound: i64,
    pub created: i64,
}

/// VRAM that a reservation keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservedShare {
    /// VRAM on each of its GPUs.
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// Pods that are evicted for it.
    pub victims: Arc<[PodUid]>,
    /// The moment from which on it keeps nothing.
    pub deadline: Moment,
}

impl AuditedPod {
    /// The pod as it is shown now, except that the GPUs its Binding recorded stay as they were first shown: an edit of the
    /// record moves no process to another GPU, and a user who may edit a pod must not cause evictions of other pods by it.
    pub(super) fn keeping_first_record(self, before: &Self) -> Self {
        let (GpuShare::Bound(now), GpuShare::Bound(first)) = (&self.share, &before.share) else {
            return self;
        };
        if self.node != before.node {
            return self;
        }
        let grant = Grant {
            has_started: now.has_started || first.has_started,
            is_leaving: now.is_leaving,
            ..*first
        };
        Self {
            gpus: before.gpus.clone(),
            share: GpuShare::Bound(grant),
            ..self
        }
    }

    pub(crate) fn grant(&self) -> Option<&Grant> {
        match &self.share {
            GpuShare::Bound(grant) => Some(grant),
            GpuShare::Reserved(_) => None,
        }
    }

    /// The pod's reservation, if it keeps anything at `now`.
    pub(super) fn active_reservation(&self, now: Moment) -> Option<&ReservedShare> {
        match &self.share {
            GpuShare::Reserved(kept) if kept.deadline > now => Some(kept),
            _ => None,
        }
    }
}

impl Grant {
    /// The greatest capacity that the pod's GPU can have had when the pod was bound, by the record of its Binding; `None` if that
    /// says nothing. Rounding makes it larger than it was, never smaller.
    pub(super) fn largest_gpu(&self) -> Option<Bytes> {
        self.fraction.largest_total(self.per_gpu)
    }
}
