//! What the replicas of a workload show alike is kept once. Of a million pods it would be most of the ledger's memory.

use crate::ids::GpuModel;
use crate::sharing::Interner;
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::demand::{AskingContainer, Demand};
use crate::vocabulary::image::ImageId;

#[derive(Debug, Clone, Default)]
pub(super) struct SharedParts {
    traits: Interner<PodTraits>,
    models: Interner<[GpuModel]>,
    containers: Interner<[AskingContainer]>,
    images: Interner<[ImageId]>,
}

impl SharedParts {
    pub(super) fn share(&mut self, demand: &mut Demand) {
        self.traits.share(&mut demand.traits);
        self.models.share(&mut demand.models);
        self.containers.share(&mut demand.containers);
        self.images.share(&mut demand.images);
    }
}
