//! What an assessment says: values that are printed for people or written for programs, each with its source and its caution.

use super::need::{Measured, OwnGpu};
use super::usage::Quantity;
use crate::capacity_plan::report::PodNotHeld;
use serde::Serialize;
use stowage_scheduling::units::Bytes;

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Assessment {
    /// The answer in a sentence.
    pub summary: String,
    pub figures: Vec<Figure>,
    pub hours: Vec<HourAnswer>,
    pub workloads: Vec<WorkloadAnswer>,
    pub not_held: Vec<PodNotHeld>,
    /// What the figures leave out, for people.
    pub cautions: Vec<String>,
}

/// One figure of the cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Figure {
    pub name: &'static str,
    /// `None` if it is not known.
    pub value: Option<f64>,
    pub source: &'static str,
    pub caution: String,
}

/// One hour of the day, on average over the window.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HourAnswer {
    pub hour: usize,
    pub idle_gpu_hours: Option<f64>,
    /// How many jobs fit beside all pods at this hour.
    pub jobs: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadAnswer {
    /// `Deployment team-a/llama`.
    pub workload: String,
    pub pods: usize,
    /// GPUs, slices or shares that its pods request together.
    pub gpus: u32,
    /// In use on one GPU.
    pub vram_bytes: Option<Distribution>,
    pub compute_percent: Option<Distribution>,
    pub kv_cache_percent: Option<Distribution>,
    pub waiting: Option<Distribution>,
    /// What each of its pods could request on each of its GPUs; `None` if it keeps GPUs of its own.
    pub could_request_bytes: Option<Bytes>,
    pub own_gpu: Option<OwnGpu>,
    pub why: String,
    /// By what factor its steps take longer beside the neighbors of the plan.
    pub slower_beside: Option<f64>,
}

/// A quantity over the window.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Distribution {
    pub p50: u64,
    /// At the quantile that was asked for.
    pub quantile: u64,
    pub peak: u64,
    /// The same quantile by hour of the day; unknown hours are `None`.
    pub by_hour: Vec<Option<u64>>,
    pub covered_percent: i64,
}

impl Distribution {
    pub(super) fn new(measured: Measured<'_>, of: Quantity, percent: f64) -> Option<Self> {
        let (samples, usage) = (measured.samples(of)?, measured.usage);
        let unit = match of {
            Quantity::Vram => f64::from(1 << 20),
            Quantity::Active | Quantity::KvUsage => 100.0,
            _ => 1.0,
        };
        let whole = |value: f64| (value * unit - 1e-6).ceil() as u64;
        let at = |percent, hour| measured.quantile(of, percent, hour).map(whole);
        Some(Self {
            p50: at(50.0, None)?,
            quantile: at(percent, None)?,
            peak: whole(samples.peak),
            by_hour: (0..24).map(|hour| at(percent, Some(hour))).collect(),
            covered_percent: usage.covered_s(samples) * 100 / usage.window_s().max(1),
        })
    }
}
