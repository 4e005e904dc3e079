//! What a script says: the GPUs of a node, what runs on them, and what has gone wrong.
//!
//! Plain data with plain defaults, so that a test writes only what it is about. No behavior.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NvmlScript {
    pub driver_version: String,
    /// What `nvmlInit` answers, if not success.
    pub init_error: Option<u32>,
    /// What `nvmlDeviceGetCount` answers, if not success.
    pub count_error: Option<u32>,
    /// `nvmlDeviceGetCount` does not return until the script says otherwise.
    pub hangs: bool,
    pub gpus: Vec<ScriptedGpu>,
    /// Events in the order in which they happen. A test only ever appends; each is delivered once.
    pub xids: Vec<Xid>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScriptedGpu {
    pub uuid: String,
    pub name: String,
    /// As NVML writes it, such as `00000000:3B:00.0`.
    pub pci_bus_id: String,
    /// In bytes, as are all sizes.
    pub total: u64,
    pub reserved: u64,
    /// Without the reserve.
    pub used: u64,
    /// 0 to 100.
    pub utilization: u32,
    /// What GPM says of its SMs and of its memory bandwidth, in percent, as text: JSON has no `NaN`. `None` without GPM.
    pub gpm: Option<[String; 2]>,
    /// In degrees Celsius.
    pub temperature: u32,
    pub power_milliwatts: u32,
    pub processes: Vec<GpuProcess>,
    /// N of `/dev/nvidiaN`; its place in the script unless it is given.
    pub minor: Option<u32>,
    /// `nvmlComputeMode_t`: 0 is the default mode, 2 prohibited, 3 exclusive-process.
    pub compute_mode: u32,
    pub mig_enabled: bool,
    /// By their place; NVML answers "not found" for the places between.
    pub slices: BTreeMap<u32, Slice>,
    /// GPUs with the same number reach each other over NVLink.
    pub nvlink: Option<u32>,
    /// Uncorrectable since the driver was loaded; `None` without ECC.
    pub ecc_errors: Option<u64>,
    /// Rows wait for a reset to be remapped; `None` where the GPU does not remap rows.
    pub remap_pending: Option<bool>,
    pub remap_failed: Option<bool>,
    /// Memory pages wait for a reset to be retired; `None` where the GPU does not retire pages.
    pub retirement_pending: Option<bool>,
    /// It fell off the bus: every call but the one for its handle answers so.
    pub lost: bool,
    /// By the C function's name, the code it answers for this GPU.
    pub refuse: BTreeMap<String, u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Slice {
    pub uuid: String,
    pub name: String,
    pub total: u64,
    pub reserved: u64,
    pub used: u64,
    pub processes: Vec<GpuProcess>,
    /// Its GPU instance's id, as its processes show it; its place unless it is given.
    pub gpu_instance: Option<u32>,
    /// As [`ScriptedGpu::refuse`].
    pub refuse: BTreeMap<String, u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuProcess {
    pub pid: u32,
    /// In bytes; `None` where the driver does not report it.
    pub used: Option<u64>,
    /// A client of an MPS server: listed apart.
    pub mps: bool,
    /// It draws: listed apart, and also computes if `both`.
    pub graphics: bool,
    pub both: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Xid {
    /// The GPU's place in [`NvmlScript::gpus`].
    pub gpu: usize,
    pub xid: u64,
}

impl Default for NvmlScript {
    fn default() -> Self {
        Self {
            driver_version: "580.95.05".into(),
            init_error: None,
            count_error: None,
            hangs: false,
            gpus: Vec::new(),
            xids: Vec::new(),
        }
    }
}

impl Default for ScriptedGpu {
    fn default() -> Self {
        Self {
            uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
            name: "NVIDIA H100 80GB HBM3".into(),
            pci_bus_id: "00000000:00:00.0".into(),
            total: 80 << 30,
            reserved: 600 << 20,
            used: 0,
            utilization: 0,
            gpm: None,
            temperature: 30,
            power_milliwatts: 70_000,
            processes: Vec::new(),
            minor: None,
            compute_mode: 0,
            mig_enabled: false,
            slices: BTreeMap::new(),
            nvlink: None,
            ecc_errors: Some(0),
            remap_pending: Some(false),
            remap_failed: Some(false),
            retirement_pending: None,
            lost: false,
            refuse: BTreeMap::new(),
        }
    }
}

impl Default for Slice {
    fn default() -> Self {
        Self {
            uuid: "MIG-00000000-0000-0000-0000-000000000000".into(),
            name: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".into(),
            total: 10 << 30,
            reserved: 0,
            used: 0,
            processes: Vec::new(),
            gpu_instance: None,
            refuse: BTreeMap::new(),
        }
    }
}
