//! What an assessment says: values that are printed for people or written for programs, each with its source and its caution.

use super::need::OwnGpu;
use super::usage::{Quantity, Samples, Usage};
use crate::capacity_plan::report::PodNotHeld;
use serde::Serialize;
use stowage_scheduling::units::Bytes;

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Assessment {
    /// The answer in a sentence.
    pub summary: String,
    pub figures: Vec<Figure>,
    pub workloads: Vec<WorkloadAnswer>,
    pub hours: Vec<HourAnswer>,
    /// What the figures leave out, for people.
    pub cautions: Vec<String>,
    pub not_held: Vec<PodNotHeld>,
}

/// One figure of the cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Figure {
    pub name: &'static str,
    /// `None` if it is not known.
    pub value: Option<f64>,
    pub unit: &'static str,
    pub source: Source,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caution: Option<String>,
}

/// Where a figure is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    Nodes,
    Pods,
    Plan,
    Bound,
    Exporter,
    Fill,
    Price,
}

impl Source {
    pub fn describe(self) -> &'static str {
        match self {
            Self::Nodes => "the dump's nodes",
            Self::Pods => "the dump's pods",
            Self::Plan => "a plan by the code that places pods, under the policy",
            Self::Bound => "arithmetic: no arrangement of these requests needs fewer",
            Self::Exporter => "the DCGM exporter: samples at which a GPU computed less than 1 %",
            Self::Fill => "jobs placed beside all pods on today's GPUs, in the worst hour",
            Self::Price => "--gpu-hour-price, 730 hours",
        }
    }
}

impl Figure {
    pub fn describe(&self) -> &'static str {
        match self.name {
            "gpusToday" => "GPUs today",
            "gpusHeldToday" => "held by pods",
            "gpusThatSuffice" => "would suffice",
            "gpusLowerBound" => "lower bound",
            "idleGpuHoursPerDay" => "idle each day",
            "jobsBesideAtEveryHour" => "jobs fit beside",
            "priceToday" => "price today",
            _ => "price of what suffices",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadAnswer {
    /// `Deployment team-a/llama`.
    pub workload: String,
    pub pods: usize,
    /// GPUs, slices or shares that its pods request.
    pub gpus: u32,
    /// In use on one GPU.
    pub vram_bytes: Option<Distribution>,
    pub compute_percent: Option<Distribution>,
    pub kv_cache_percent: Option<Distribution>,
    pub waiting: Option<Distribution>,
    /// What each of its pods could request over its GPUs; `None` if it keeps GPUs of its own.
    pub could_request_bytes: Option<Bytes>,
    pub own_gpu: Option<OwnGpu>,
    pub why: String,
    /// By what factor its steps take longer beside the neighbors of the plan.
    pub slower_beside: Option<f64>,
}

/// A quantity over the window; unknown hours are `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Distribution {
    pub p50: u64,
    /// At the quantile that was asked for, 99 % by default.
    pub quantile: u64,
    pub peak: u64,
    /// The same quantile by hour of the day.
    pub by_hour: Vec<Option<u64>>,
    pub covered_percent: u64,
}

impl Distribution {
    pub(super) fn new(
        samples: &Samples,
        quantity: Quantity,
        unit: f64,
        usage: &Usage,
        percent: f64,
    ) -> Option<Self> {
        let whole = |value: f64| (value * unit - 1e-6).ceil() as u64;
        let at = |percent, hour| samples.quantile(quantity, percent, hour).map(whole);
        let covered = usage.covered_s(samples).max(0) * 100 / usage.window_s().max(1);
        Some(Self {
            p50: at(50.0, None)?,
            quantile: at(percent, None)?,
            peak: whole(samples.peak),
            by_hour: (0..24).map(|hour| at(percent, Some(hour))).collect(),
            covered_percent: covered as u64,
        })
    }
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

/// `18 of 44 GPUs would suffice: 12 fewer than pods hold today.`
pub(super) fn summary(figures: &[Figure], is_incomplete: bool) -> String {
    let value = |name| {
        figures
            .iter()
            .find(|one| one.name == name)
            .and_then(|one| one.value)
            .unwrap_or(0.0)
    };
    let [today, held, suffice, bound] = [
        "gpusToday",
        "gpusHeldToday",
        "gpusThatSuffice",
        "gpusLowerBound",
    ]
    .map(value);
    if is_incomplete {
        return format!(
            "{suffice} of {today} GPUs hold only a part of the pods: see those without a place."
        );
    }
    if suffice >= held {
        return format!(
            "Nothing can be saved by sharing: pods hold {held} of {today} GPUs, and {suffice} are needed under this policy."
        );
    }
    format!(
        "{suffice} of {today} GPUs would suffice under this policy: {} fewer than the {held} that pods hold today. The lower bound is {bound}.",
        held - suffice
    )
}
