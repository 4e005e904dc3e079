//! How fast GPUs are: data sheets, and how much of them engines reach.

use crate::units::Bytes;

/// The share of its data sheet's memory bandwidth that a GPU reaches while it decodes. This and the two below are fitted to all
/// figures of `src/lab/simulate/fleet/engines/published.md` at once.
pub const BANDWIDTH_REACHED: f64 = 0.85;
/// The share of its data sheet's dense FLOP/s that it reaches while it prefills.
pub const FLOPS_REACHED: f64 = 0.58;
/// What every step takes besides the GPU's work: scheduling, launches, sampling.
pub const STEP_OVERHEAD_S: f64 = 1.5e-3;

/// A GPU's data sheet, for weights of two bytes, dense and without sparsity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSpeed {
    /// As NVML names the product, with `-` for spaces and without the vendor.
    pub product: &'static str,
    pub memory: Bytes,
    /// Bytes a second.
    pub bandwidth: f64,
    /// Floating-point operations a second in the weights' type.
    pub flops: f64,
}

/// Sources: NVIDIA's data sheets of each product; where one prints FLOP/s with sparsity, half of that.
impl GpuSpeed {
    pub const H100: Self = sheet("H100-80GB-HBM3", 80, 3.35e12, 989e12);
    pub const H200: Self = sheet("H200", 141, 4.8e12, 989e12);
    pub const A100: Self = sheet("A100-SXM4-80GB", 80, 2.039e12, 312e12);
    pub const A100_PCIE: Self = sheet("A100-80GB-PCIe", 80, 1.935e12, 312e12);
    pub const A100_40GB: Self = sheet("A100-SXM4-40GB", 40, 1.555e12, 312e12);

    /// All that are known here.
    pub const ALL: [Self; 9] = [
        Self::H100,
        Self::H200,
        Self::A100,
        Self::A100_PCIE,
        Self::A100_40GB,
        sheet("A30", 24, 933e9, 165e12),
        sheet("A10", 24, 600e9, 125e12),
        sheet("L40S", 48, 864e9, 362.05e12),
        sheet("L4", 24, 300e9, 121e12),
    ];

    /// The speed of a product as NVML names it, with or without the vendor; `None` for one that is not known, and for a MIG slice.
    pub fn of(product: &str) -> Option<Self> {
        let name = product.strip_prefix("NVIDIA-").unwrap_or(product);
        Self::ALL.into_iter().find(|speed| speed.product == name)
    }

    /// Seconds in which a step reads so many bytes.
    pub fn memory_s(&self, bytes: f64) -> f64 {
        bytes / (self.bandwidth * BANDWIDTH_REACHED)
    }

    /// Seconds of so many operations: two for each parameter and token.
    pub fn compute_s(&self, operations: f64) -> f64 {
        operations / (self.flops * FLOPS_REACHED)
    }
}

const fn sheet(product: &'static str, gib: u64, bandwidth: f64, flops: f64) -> GpuSpeed {
    GpuSpeed {
        product,
        memory: Bytes::gib(gib),
        bandwidth,
        flops,
    }
}
