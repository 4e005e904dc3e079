//! Agents' reports in: which GPUs a node has, as its agent sees them.
//!
//! A report is taken whole or not at all. Reports are ordered by (the agent's boot, sequence number); one that is older than
//! what is known is dropped.

use super::Extender;
use super::request::BadRequest;
use crate::ids::{GpuModel, GpuUuid, NodeName};
use crate::scheduling::device::{Device, Health};
use crate::scheduling::ledger::DevicesRefused;
use crate::scheduling::request::MAX_GPUS;
use crate::units::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What one agent says of its node. Fields this version does not know are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    pub node: NodeName,
    /// Drawn anew at each start of the agent.
    pub boot_id: String,
    /// Rises with each report of one boot.
    pub sequence: u64,
    pub gpus: Vec<GpuReport>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuReport {
    pub uuid: GpuUuid,
    pub index: u32,
    pub model: GpuModel,
    /// For a MIG slice, the UUID of the GPU it is cut from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<GpuUuid>,
    pub total_bytes: Bytes,
    /// What the driver keeps for itself.
    #[serde(default)]
    pub reserved_bytes: Bytes,
    #[serde(default = "healthy")]
    pub health: Health,
}

fn healthy() -> Health {
    Health::Healthy
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    #[error("Stowage knows no node {0:?}; is the agent's node name its Node object's name?")]
    UnknownNode(String),
    #[error("GPU {0} is listed twice")]
    GpuTwice(GpuUuid),
    #[error("GPU {uuid} reserves {reserved} of a total of {total}")]
    ReservedAboveTotal { uuid: GpuUuid, reserved: Bytes, total: Bytes },
    #[error("{0} is no GPU's UUID: Stowage uses such names itself, or lists them with commas")]
    BadUuid(GpuUuid),
    #[error("the bootId is {0} bytes long; at most {MAX_BOOT_ID} are kept")]
    BootIdTooLong(usize),
    #[error("GPU {0} has no memory")]
    NoMemory(GpuUuid),
    #[error("the report lists {0} GPUs and slices; at most {MAX_GPUS} are supported on a node")]
    TooMany(usize),
    #[error("report {sequence} is not newer than report {known} of the same boot")]
    Old { sequence: u64, known: u64 },
    #[error("the report is of an earlier boot of the agent")]
    EarlierBoot,
}

impl ReportError {
    /// A short name for metrics.
    pub fn code(&self) -> &'static str {
        match self {
            Self::UnknownNode(_) => "unknown-node",
            Self::GpuTwice(_) => "gpu-twice",
            Self::ReservedAboveTotal { .. } => "reserved-above-total",
            Self::BadUuid(_) => "bad-uuid",
            Self::BootIdTooLong(_) => "boot-id-too-long",
            Self::NoMemory(_) => "no-memory",
            Self::TooMany(_) => "too-many-gpus",
            Self::Old { .. } | Self::EarlierBoot => "old",
        }
    }
}

/// What became of each report of a body.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportsResult {
    pub accepted: usize,
    /// Older than what is known, and dropped.
    pub dropped: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<Refused>,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// Its place in the batch, from 0.
    pub report: usize,
    pub code: &'static str,
    pub error: String,
}

/// The latest report of each node, as far as telling old from new goes.
#[derive(Debug, Default)]
pub struct Board {
    latest: Mutex<BTreeMap<NodeName, Latest>>,
}

#[derive(Debug)]
struct Latest {
    boot_id: String,
    sequence: u64,
    /// Boots that have ended, so that a late report of theirs is known for what it is.
    earlier_boots: VecDeque<String>,
}

/// A UUID has 36; several are kept for each node.
const MAX_BOOT_ID: usize = 128;
/// Refused reports of one batch that are explained one by one.
const MAX_EXPLAINED: usize = 100;

/// Ended boots remembered per node. A report delayed beyond this many restarts of its agent would pass for new.
const EARLIER_BOOTS: usize = 4;

impl Board {
    /// Notes the report as the latest, unless it is not.
    fn advance(&self, report: &NodeReport) -> Result<(), ReportError> {
        let mut latest = self.latest.lock();
        let fresh = || Latest {
            boot_id: report.boot_id.clone(),
            sequence: report.sequence,
            earlier_boots: VecDeque::new(),
        };
        let Some(known) = latest.get_mut(&report.node) else {
            latest.insert(report.node.clone(), fresh());
            return Ok(());
        };
        if known.boot_id == report.boot_id {
            if report.sequence <= known.sequence {
                return Err(ReportError::Old { sequence: report.sequence, known: known.sequence });
            }
            known.sequence = report.sequence;
            return Ok(());
        }
        if known.earlier_boots.contains(&report.boot_id) {
            return Err(ReportError::EarlierBoot);
        }
        known.earlier_boots.push_front(std::mem::replace(&mut known.boot_id, report.boot_id.clone()));
        known.earlier_boots.truncate(EARLIER_BOOTS);
        known.sequence = report.sequence;
        Ok(())
    }
}

pub fn reports(extender: &Extender, body: &[u8]) -> Result<ReportsResult, BadRequest> {
    let mut result = ReportsResult::default();
    for (place, report) in split(body)?.into_iter().enumerate() {
        let outcome = match serde_json::from_slice(report) {
            Ok(report) => take(extender, &report).map_err(|error| (error.code(), error.to_string())),
            Err(error) if !error.is_data() => return Err(BadRequest::Malformed(error.to_string())),
            Err(error) => Err(("malformed", error.to_string())),
        };
        let label = match outcome {
            Ok(()) => {
                result.accepted += 1;
                "accepted"
            }
            Err(("old", _)) => {
                result.dropped += 1;
                "old"
            }
            Err((code, error)) => {
                if result.refused.len() < MAX_EXPLAINED {
                    result.refused.push(Refused { report: place, code, error });
                }
                code
            }
        };
        extender.service.metrics.reports.with_label_values(&[label]).inc();
    }
    match &result.refused[..] {
        // A single report that was refused is the request's own error; of a batch the others count.
        [refused] if result.accepted + result.dropped == 0 => {
            Err(BadRequest::Unprocessable { code: refused.code, message: refused.error.clone() })
        }
        _ => Ok(result),
    }
}

/// The reports in a body: the body itself, or each element of the array it is.
fn split(body: &[u8]) -> Result<Vec<&[u8]>, BadRequest> {
    if body.trim_ascii_start().first() != Some(&b'[') {
        return Ok(vec![body]);
    }
    let batch: Vec<&RawValue> = super::request::parse(body)?;
    Ok(batch.into_iter().map(|raw| raw.get().as_bytes()).collect())
}

fn take(extender: &Extender, report: &NodeReport) -> Result<(), ReportError> {
    let devices = devices(report)?;
    let mut ledger = extender.service.ledger();
    let refused = |error| match error {
        DevicesRefused::UnknownNode => ReportError::UnknownNode(report.node.to_string()),
        DevicesRefused::TooMany(devices) => ReportError::TooMany(devices),
    };
    if !ledger.has_node(&report.node) {
        return Err(refused(DevicesRefused::UnknownNode));
    }
    extender.board.advance(report)?;
    ledger.report_devices(&report.node, devices).map_err(refused)
}

/// What can be placed on: MIG slices instead of the GPUs they are cut from.
fn devices(report: &NodeReport) -> Result<Vec<Device>, ReportError> {
    let parents: BTreeSet<&GpuUuid> = report.gpus.iter().filter_map(|gpu| gpu.parent.as_ref()).collect();
    let mut seen = BTreeSet::new();
    if report.boot_id.len() > MAX_BOOT_ID {
        return Err(ReportError::BootIdTooLong(report.boot_id.len()));
    }
    for gpu in &report.gpus {
        if gpu.uuid.index().is_some() || gpu.uuid.as_str().contains(',') {
            return Err(ReportError::BadUuid(gpu.uuid.clone()));
        }
        let (uuid, total, reserved) = (gpu.uuid.clone(), gpu.total_bytes, gpu.reserved_bytes);
        if !seen.insert(&gpu.uuid) {
            return Err(ReportError::GpuTwice(uuid));
        }
        if reserved > total {
            return Err(ReportError::ReservedAboveTotal { uuid, reserved, total });
        }
        if total == Bytes::ZERO {
            return Err(ReportError::NoMemory(uuid));
        }
    }
    let placeable: Vec<&GpuReport> = report.gpus.iter().filter(|gpu| !parents.contains(&gpu.uuid)).collect();
    if placeable.len() > MAX_GPUS as usize {
        return Err(ReportError::TooMany(placeable.len()));
    }
    Ok(placeable.into_iter().map(device).collect())
}

fn device(gpu: &GpuReport) -> Device {
    Device {
        uuid: gpu.uuid.clone(),
        index: gpu.index,
        model: gpu.model.clone(),
        parent: gpu.parent.clone(),
        total: gpu.total_bytes,
        reserved: gpu.reserved_bytes,
        health: gpu.health,
    }
}
