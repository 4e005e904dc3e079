//! The page of `stowage agent`: the node's GPUs as the driver shows them, the engines on them, and how its reports fare.
//!
//! Everything about GPUs and engines is sampled from the latest round. What cannot be read has no series: zero would be a reading.
//! NVIDIA's DCGM exporter has some of these figures too; the help names its fields.

use super::family::{Families, Label, Sampled, known, open};
use super::scrape::Scrape;
use prometheus::{Gauge, Histogram, IntCounterVec};
use std::collections::BTreeMap;
use std::io;
use stowage_report::{EngineReport, EngineState, GpuReport, NodeReport, ReportPart};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::vocabulary::gpu::Health;
use stowage_scheduling::vocabulary::latency::Latency;
use strum::VariantArray;

/// What the sensors of one GPU say, as far as its driver knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SensorReading {
    pub temperature_celsius: Option<u32>,
    pub power_milliwatts: Option<u32>,
}

/// A GPU with its sensors and the load of its engines.
#[derive(Clone, Copy)]
struct SampledGpu<'r> {
    gpu: &'r GpuReport,
    sensors: SensorReading,
    load: GpuLoad,
}

/// The serving engines on a GPU: the fullest KV cache counts, queues add up. An engine over several GPUs counts on each.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct GpuLoad {
    kv_cache_usage: Option<f64>,
    waiting: Option<u64>,
    running: Option<u64>,
    time_per_token: Option<f64>,
    time_to_first_token: Option<f64>,
}

/// Shared by the rounds, the publisher and the page.
pub struct AgentMetrics {
    families: Families,
    /// Reports by what a replica made of them.
    pub reports: IntCounterVec,
    /// When a replica last accepted one, in Unix time.
    pub last_accepted: Gauge,
    pub round_seconds: Histogram,
    gpu_info: Sampled,
    figures: Vec<(Sampled, Figure)>,
    engines: Sampled,
    missing: Sampled,
}

type Figure = fn(&SampledGpu<'_>) -> Option<f64>;

/// What a replica makes of a report, as labels.
pub(crate) const SENT_OUTCOMES: [&str; 5] =
    ["accepted", "dropped", "rejected", "unreachable", "unsent"];

/// A round is to be over well within the second between two of them.
const ROUND_BUCKETS: [f64; 9] = [5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5];

impl AgentMetrics {
    pub fn new() -> Self {
        let mut declared = Families::new();
        let families = &mut declared;
        super::declare_build_and_process(families);
        Self {
            reports: families.counters(
                "stowage_agent_sent_reports_total",
                "Reports, once for each replica of the extender, by what it made of them.",
                [known("outcome", SENT_OUTCOMES)],
            ),
            last_accepted: families.float_gauge(
                "stowage_agent_last_accepted_report_timestamp_seconds",
                "When a replica last accepted a report, in Unix time; 0 before the first.",
            ),
            round_seconds: families.histogram(
                "stowage_agent_round_duration_seconds",
                "Time to sample the node once, before the report is sent.",
                &ROUND_BUCKETS,
            ),
            gpu_info: families.sampled(
                "stowage_agent_gpu_info",
                "1; NVML's index of the GPU or MIG slice, and its product name.",
                [
                    gpu(),
                    open("index", "one for each GPU"),
                    open("model_name", "one for each GPU"),
                ],
            ),
            figures: FIGURES
                .map(|(name, help, figure)| (families.sampled(name, help, [gpu()]), figure))
                .into_iter()
                .collect(),
            engines: families.sampled(
                "stowage_agent_engines",
                "Inference engines on the node, by state.",
                [known(
                    "state",
                    EngineState::VARIANTS.iter().map(EngineState::into_str),
                )],
            ),
            missing: families.sampled(
                "stowage_agent_missing_part",
                "1 for a part that the latest report lacks, because it could not be sampled.",
                [known(
                    "part",
                    ReportPart::VARIANTS.iter().map(ReportPart::into_str),
                )],
            ),
            families: declared,
        }
    }

    /// Every family of the agent's page.
    pub fn families(&self) -> &Families {
        &self.families
    }

    /// The whole page; before the first round, without what a round finds.
    pub fn render(
        &self,
        latest: Option<(&NodeReport, &BTreeMap<GpuUuid, SensorReading>)>,
    ) -> String {
        let mut text = Vec::new();
        self.write(&mut Scrape::new(&mut text), latest)
            .expect("writing to memory does not fail");
        String::from_utf8(text).expect("the text format is UTF-8")
    }

    fn write(
        &self,
        scrape: &mut Scrape<'_>,
        latest: Option<(&NodeReport, &BTreeMap<GpuUuid, SensorReading>)>,
    ) -> io::Result<()> {
        scrape.write_registered(&self.families)?;
        let Some((report, sensors)) = latest else {
            return Ok(());
        };
        let gpus = report.gpus.as_deref().unwrap_or_default();
        let info = gpus.iter().map(|gpu| {
            (
                [
                    gpu.uuid.as_str().to_owned(),
                    gpu.index.to_string(),
                    gpu.model.as_str().to_owned(),
                ],
                1.0,
            )
        });
        scrape.write_samples(&self.gpu_info, info)?;
        let sampled_gpus: Vec<SampledGpu<'_>> = gpus
            .iter()
            .map(|gpu| SampledGpu {
                gpu,
                sensors: sensors.get(&gpu.uuid).copied().unwrap_or_default(),
                load: GpuLoad::for_gpu(&gpu.uuid, &report.engines),
            })
            .collect();
        for (family, figure) in &self.figures {
            let samples = sampled_gpus
                .iter()
                .filter_map(|one| Some(([one.gpu.uuid.as_str()], figure(one)?)));
            scrape.write_samples(family, samples)?;
        }
        let in_state = |state| {
            report
                .engines
                .iter()
                .filter(|engine| engine.state == state)
                .count()
        };
        scrape.write_samples(
            &self.engines,
            EngineState::VARIANTS
                .iter()
                .map(|state| ([state.into_str()], in_state(*state) as f64)),
        )?;
        let lacks = |part| report.missing.iter().any(|missing| missing.part == part);
        scrape.write_samples(
            &self.missing,
            ReportPart::VARIANTS
                .iter()
                .map(|part| ([part.into_str()], f64::from(u8::from(lacks(*part))))),
        )
    }
}

impl Default for AgentMetrics {
    fn default() -> Self {
        Self::new()
    }
}

/// The figures of each GPU.
const FIGURES: [(&str, &str, Figure); 16] = [
    (
        "stowage_agent_gpu_vram_total_bytes",
        "VRAM of a GPU (DCGM_FI_DEV_FB_TOTAL).",
        |one| Some(one.gpu.total_bytes.0 as f64),
    ),
    (
        "stowage_agent_gpu_vram_reserved_bytes",
        "VRAM that the driver keeps for itself (DCGM_FI_DEV_FB_RESERVED).",
        |one| Some(one.gpu.reserved_bytes.0 as f64),
    ),
    (
        "stowage_agent_gpu_vram_used_bytes",
        "VRAM in use, without the driver's reserve (DCGM_FI_DEV_FB_USED).",
        |one| Some(one.gpu.used_bytes?.0 as f64),
    ),
    (
        "stowage_agent_gpu_vram_free_bytes",
        "VRAM that is neither in use nor reserved (DCGM_FI_DEV_FB_FREE).",
        |one| {
            Some(
                one.gpu
                    .total_bytes
                    .minus(one.gpu.reserved_bytes)
                    .minus(one.gpu.used_bytes?)
                    .0 as f64,
            )
        },
    ),
    (
        "stowage_agent_gpu_vram_limited_bytes",
        "Sum of the VRAM limits in force of the pods on a GPU, by their cgroups; a pod without a limit counts with the whole GPU. Absent \
         if no limit is known.",
        |one| {
            let known = one
                .gpu
                .cgroups
                .iter()
                .filter_map(|cgroup| cgroup.limit_bytes);
            let sum = known.reduce(|sum, limit| sum + limit)?;
            Some(sum.0 as f64)
        },
    ),
    (
        "stowage_agent_gpu_utilization_ratio",
        "Share of the last sample in which a kernel ran (DCGM_FI_DEV_GPU_UTIL). An engine is as busy with one request as with a \
         hundred: scale by KV cache and queue.",
        |one| Some(f64::from(one.gpu.utilization_percent?) / 100.0),
    ),
    (
        "stowage_agent_gpu_sm_activity_ratio",
        "Share of the time since the round before in which an SM of a GPU had work, on average over its SMs (DCGM_FI_PROF_SM_ACTIVE). \
         Absent before Hopper and on MIG slices.",
        |one| Some(f64::from(one.gpu.activity?.sm_percent?.get()) / 100.0),
    ),
    (
        "stowage_agent_gpu_memory_bandwidth_ratio",
        "Share of a GPU's memory bandwidth in use since the round before (DCGM_FI_PROF_DRAM_ACTIVE). Absent before Hopper and on MIG \
         slices.",
        |one| Some(f64::from(one.gpu.activity?.memory_bandwidth_percent?.get()) / 100.0),
    ),
    (
        "stowage_agent_gpu_temperature_celsius",
        "Temperature of a GPU (DCGM_FI_DEV_GPU_TEMP).",
        |one| Some(one.sensors.temperature_celsius?.into()),
    ),
    (
        "stowage_agent_gpu_power_watts",
        "Power that a GPU draws (DCGM_FI_DEV_POWER_USAGE).",
        |one| Some(f64::from(one.sensors.power_milliwatts?) / 1e3),
    ),
    (
        "stowage_agent_gpu_healthy",
        "1 if a GPU takes pods, 0 if it is draining or lost (DCGM_FI_DEV_XID_ERRORS and others say why).",
        |one| Some(f64::from(u8::from(one.gpu.health == Health::Healthy))),
    ),
    (
        "stowage_agent_gpu_kv_cache_usage_ratio",
        "Share of the KV cache in use, of the fullest serving engine on a GPU.",
        |one| one.load.kv_cache_usage,
    ),
    (
        "stowage_agent_gpu_waiting_requests",
        "Requests in the queues of the serving engines on a GPU.",
        |one| Some(one.load.waiting? as f64),
    ),
    (
        "stowage_agent_gpu_running_requests",
        "Requests that the serving engines on a GPU process.",
        |one| Some(one.load.running? as f64),
    ),
    (
        "stowage_agent_gpu_time_per_token_seconds",
        "From one output token of a request to the next, over half a minute, of the slowest serving engine on a GPU.",
        |one| one.load.time_per_token,
    ),
    (
        "stowage_agent_gpu_time_to_first_token_seconds",
        "From a request's arrival to its first token, over half a minute, of the slowest serving engine on a GPU.",
        |one| one.load.time_to_first_token,
    ),
];

fn gpu() -> Label {
    open(
        "gpu",
        "the node's GPUs and MIG slices, at most 64 beside the cards that are cut",
    )
}

impl GpuLoad {
    fn for_gpu(gpu: &GpuUuid, engines: &[EngineReport]) -> Self {
        let here = engines
            .iter()
            .filter(|engine| engine.state == EngineState::Serving);
        here.filter(|engine| engine.gpus.contains(gpu))
            .fold(Self::default(), |load, engine| Self {
                kv_cache_usage: larger(load.kv_cache_usage, engine.kv_cache_usage),
                waiting: sum(load.waiting, engine.waiting),
                running: sum(load.running, engine.running),
                time_per_token: larger(load.time_per_token, mean(engine.time_per_token)),
                time_to_first_token: larger(
                    load.time_to_first_token,
                    mean(engine.time_to_first_token),
                ),
            })
    }
}

fn mean(latency: Option<Latency>) -> Option<f64> {
    Some(latency?.mean.as_seconds())
}

fn larger(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}

fn sum(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> NodeReport {
        serde_json::from_value(serde_json::json!({
            "node": "n", "bootId": "b", "sequence": 1,
            "gpus": [
                { "uuid": "GPU-a", "index": 0, "model": "H100", "totalBytes": 100, "reservedBytes": 10, "usedBytes": 30,
                  "utilizationPercent": 25, "activity": { "smPercent": 40 }, "cgroups": [{ "pod": "p", "limitBytes": 20 }, { "pod": "q" }, { "pod": "r", "limitBytes": 25 }] },
                { "uuid": "GPU-b", "index": 1, "model": "H100", "totalBytes": 100, "health": "lost" },
            ],
            "engines": [
                { "pod": "p", "engine": "vllm", "gpus": ["GPU-a"], "state": "serving", "kvCacheUsage": 0.5, "waiting": 3,
                  "timePerToken": { "meanMicros": 14_000 } },
                { "pod": "q", "engine": "vllm", "gpus": ["GPU-a", "GPU-b"], "state": "serving", "kvCacheUsage": 0.25,
                  "waiting": 4, "timePerToken": { "meanMicros": 9_000, "p99Micros": 30_000 } },
                { "pod": "r", "engine": "vllm", "gpus": ["GPU-a"], "state": "sleeping", "kvCacheUsage": 1.0, "waiting": 9 },
            ],
            "missing": [{ "part": "models", "reason": "no disk" }],
        }))
        .unwrap()
    }

    #[test]
    fn a_figure_that_the_driver_does_not_know_has_no_series() {
        let metrics = AgentMetrics::new();
        let sensors = SensorReading {
            temperature_celsius: Some(41),
            power_milliwatts: None,
        };
        let sensors = BTreeMap::from([(GpuUuid::parse("GPU-a").unwrap(), sensors)]);
        let text = metrics.render(Some((&report(), &sensors)));
        for line in [
            "stowage_agent_gpu_info{gpu=\"GPU-a\",index=\"0\",model_name=\"H100\"} 1\n",
            "stowage_agent_gpu_vram_free_bytes{gpu=\"GPU-a\"} 60\n",
            "stowage_agent_gpu_vram_limited_bytes{gpu=\"GPU-a\"} 45\n",
            "stowage_agent_gpu_utilization_ratio{gpu=\"GPU-a\"} 0.25\n",
            "stowage_agent_gpu_sm_activity_ratio{gpu=\"GPU-a\"} 0.4\n",
            "stowage_agent_gpu_temperature_celsius{gpu=\"GPU-a\"} 41\n",
            "stowage_agent_gpu_healthy{gpu=\"GPU-b\"} 0\n",
            "stowage_agent_gpu_kv_cache_usage_ratio{gpu=\"GPU-a\"} 0.5\n",
            "stowage_agent_gpu_kv_cache_usage_ratio{gpu=\"GPU-b\"} 0.25\n",
            "stowage_agent_gpu_waiting_requests{gpu=\"GPU-a\"} 7\n",
            "stowage_agent_gpu_time_per_token_seconds{gpu=\"GPU-a\"} 0.014\n",
            "stowage_agent_gpu_time_per_token_seconds{gpu=\"GPU-b\"} 0.009\n",
            "stowage_agent_engines{state=\"serving\"} 2\n",
            "stowage_agent_engines{state=\"loading\"} 0\n",
            "stowage_agent_missing_part{part=\"models\"} 1\n",
            "stowage_agent_missing_part{part=\"gpus\"} 0\n",
            "stowage_agent_sent_reports_total{outcome=\"accepted\"} 0\n",
        ] {
            assert!(text.contains(line), "{line}{text}");
        }
        for absent in [
            "stowage_agent_gpu_power_watts{",
            "stowage_agent_gpu_sm_activity_ratio{gpu=\"GPU-b\"}",
            "stowage_agent_gpu_memory_bandwidth_ratio{",
            "stowage_agent_gpu_temperature_celsius{gpu=\"GPU-b\"}",
            "stowage_agent_gpu_vram_used_bytes{gpu=\"GPU-b\"}",
            "stowage_agent_gpu_vram_limited_bytes{gpu=\"GPU-b\"}",
            "stowage_agent_gpu_running_requests{",
        ] {
            assert!(!text.contains(absent), "{absent}\n{text}");
        }
    }

    #[test]
    fn before_the_first_round_the_page_has_the_agents_own_figures() {
        let text = AgentMetrics::new().render(None);
        assert!(
            text.contains("stowage_build_info{") && text.contains("process_start_time_seconds ")
        );
        assert!(!text.contains("stowage_agent_gpu_"), "{text}");
    }
}
