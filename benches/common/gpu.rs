//! A GPU of the benches' clusters.

use stowage_scheduling::ids::{GpuModel, GpuUuid};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::gpu::{Device, Health};

/// The one with that index of its node.
pub fn h100(uuid: GpuUuid, index: usize, island: Option<u8>) -> Device {
    Device {
        uuid,
        index: index as u32,
        model: GpuModel::parse("NVIDIA-H100-80GB-HBM3").expect("a model"),
        parent: None,
        total: Bytes::gib(80),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island,
    }
}
