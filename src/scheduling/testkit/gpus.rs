//! GPUs as an agent reports them.

use super::names::{gpu, gpu_at};
use crate::ids::{GpuModel, GpuUuid};
use crate::units::Bytes;
use crate::vocabulary::gpu::{Device, Health};
use std::fmt::Display;

/// A GPU that is no MIG slice and has nothing reserved.
pub fn whole_gpu(uuid: GpuUuid, index: u32, total: Bytes) -> Device {
    Device {
        uuid,
        index,
        model: GpuModel::parse("H100").unwrap(),
        parent: None,
        total,
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: None,
    }
}

/// A GPU of 80 GiB, of which the default policy's headroom leaves 72 GiB.
pub fn h100(node: impl Display, index: u32) -> Device {
    whole_gpu(gpu_at(node, index), index, Bytes::gib(80))
}

/// A GPU of 100 B, of which the default policy's headroom leaves 90 B: small figures for random tests.
pub fn unit_gpu(node: impl Display, index: u32) -> Device {
    whole_gpu(gpu_at(node, index), index, Bytes(100))
}

/// Two GPUs of that size, `GPU-a` and `GPU-b`.
pub fn gpu_pair(total: Bytes) -> Vec<Device> {
    vec![
        whole_gpu(gpu("GPU-a"), 0, total),
        whole_gpu(gpu("GPU-b"), 1, total),
    ]
}
