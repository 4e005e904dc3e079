//! What is counted over a run of the pool.

use super::Timer;
use super::catalog::{ServedModel, allocatable_vram};
use super::neighbors::GpuUse;
use crate::simulate::fleet::engines::engine::busy_share;
use crate::simulate::fleet::stage::Stage;
use stowage_scheduling::units::{Bytes, Millis};

/// Time between two points of the picture.
const CURVE_INTERVAL: Millis = Millis::seconds(60);
/// No class may join an engine that is fuller: the policy's limit.
const FULL_KV_SHARE: f64 = 0.9;

#[derive(Debug, Default)]
pub struct PoolStatistics {
    /// Models with a place when traffic began.
    pub placed_models: usize,
    pub placements: f64,
    onto_full: f64,
    /// Over time, on GPUs with a pod: GPUs, how busy they are, and the free VRAM that no model fits.
    in_use: f64,
    busy: f64,
    stranded: Bytes,
    /// The least grant of the catalog on one GPU.
    pub least_grant: Bytes,
    pub curve: Vec<(f64, f64)>,
}

impl PoolStatistics {
    pub fn for_models(models: &[ServedModel]) -> Self {
        let least_grant = models
            .iter()
            .map(|model| model.grant)
            .min()
            .unwrap_or_default();
        Self {
            least_grant,
            ..Self::default()
        }
    }

    pub fn record(&mut self, at: Millis, stage: &Stage<'_, Timer>, used: &[GpuUse]) {
        let mut in_use = 0.0;
        let gpus = stage.machines.iter().flat_map(|machine| &machine.gpus);
        for (gpu, used) in gpus.zip(used).filter(|(gpu, _)| !gpu.pods.is_empty()) {
            let free = allocatable_vram().minus(gpu.granted_bytes());
            in_use += 1.0;
            self.busy += busy_share(used.running);
            self.stranded += if free < self.least_grant {
                free
            } else {
                Bytes::ZERO
            };
        }
        self.in_use += in_use;
        if at.0.is_multiple_of(CURVE_INTERVAL.0) {
            self.curve.push((at.0 as f64 / 3.6e6, in_use));
        }
    }

    pub fn record_placement(&mut self, fullest: f64) {
        self.placements += 1.0;
        self.onto_full += if fullest > FULL_KV_SHARE { 1.0 } else { 0.0 };
    }

    /// Placements onto a GPU with a full engine, in hundredths.
    pub(crate) fn onto_full(&self) -> f64 {
        100.0 * self.onto_full / self.placements.max(1.0)
    }

    /// Time for which a GPU with a pod has a request, in percent.
    pub fn busy(&self) -> f64 {
        100.0 * self.busy / self.in_use.max(1.0)
    }

    /// Free VRAM that no model fits, in percent of the allocatable VRAM of GPUs with a pod.
    pub fn stranded(&self) -> f64 {
        100.0 * self.stranded.0 as f64 / (allocatable_vram().0 as f64 * self.in_use.max(1.0))
    }
}
