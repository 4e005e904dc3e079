//! What the pods on a GPU cost each other.

use super::GPU_VRAM;
use crate::simulate::fleet::engines::Engine;
use crate::simulate::fleet::machines::PhysicalGpu;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::contention::{ComputeSharing, Contention, EngineWork, contention};
use stowage_scheduling::ids::PodUid;

/// What a GPU does.
#[derive(Debug, Default)]
pub(crate) struct GpuUse {
    /// Requests inside its engines.
    pub running: f64,
    work: Vec<(PodUid, EngineWork)>,
}

impl GpuUse {
    /// Of the SMs, a pod has as much as of the VRAM. Pods that start or wait for work do nothing.
    pub fn new(
        gpu: &PhysicalGpu,
        engines: &BTreeMap<&PodUid, &Engine>,
        jobs: &BTreeSet<&PodUid>,
    ) -> Self {
        let mut used = Self::default();
        for (uid, granted) in &gpu.pods {
            let sms = (granted.0 as f64 / GPU_VRAM.0 as f64).min(1.0);
            if let Some(engine) = engines.get(uid) {
                used.running += engine.running();
                used.work.push((uid.clone(), engine.work(sms)));
            } else if jobs.contains(uid) {
                used.work.push((uid.clone(), EngineWork::job(sms)));
            }
        }
        used
    }
}

/// What each pod's neighbors cost it; of an engine on several GPUs, on the one where its step takes longest.
pub(crate) fn contention_by_pod(
    gpus: &[GpuUse],
    sharing: ComputeSharing,
) -> BTreeMap<PodUid, Contention> {
    let mut slowest: BTreeMap<PodUid, (f64, Contention)> = BTreeMap::new();
    for gpu in gpus {
        let work: Vec<EngineWork> = gpu.work.iter().map(|(_, work)| *work).collect();
        let under = contention(&work, sharing);
        for ((uid, work), under) in gpu.work.iter().zip(under) {
            let here = (work.step_s(&under), under);
            slowest
                .entry(uid.clone())
                .and_modify(|there| {
                    if here.0 > there.0 {
                        *there = here;
                    }
                })
                .or_insert(here);
        }
    }
    slowest
        .into_iter()
        .map(|(uid, (_, under))| (uid, under))
        .collect()
}
