//! One node as its agent reports it: 8 GPUs with 16 processes, 8 engines, 6 models, all fields. Between reports the sequence
//! number, the used VRAM and the engines' load change; the numbers are the same in every run.

use crate::cluster::{GPUS, node_name, resident_on};
use serde_json::json;
use stowage_report::NodeReport;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};

const MIB: u64 = 1 << 20;
/// The VRAM that a CUDA context uses beyond its pod's allocation, and what a driver keeps.
const CUDA_CONTEXT_BYTES: u64 = 480 * MIB;
const DRIVER_RESERVED_BYTES: u64 = 611 * MIB;

pub struct ReportingNode {
    place: usize,
    report: NodeReport,
}

/// Usage of the KV caches of a node's engines.
#[derive(Clone, Copy, PartialEq)]
pub enum CacheUsage {
    /// Each engine its own, from idle to full; a node's eight differ, so that each node has a GPU that fits.
    Mixed,
    Full,
    /// Each engine its own, the same in every report; so is all else but what no decision reads.
    Steady,
    /// Each engine its own, and nothing differs from the report before but times.
    Unchanged,
    /// Around the same figures, by up to six points and one request. All else is the same in every report.
    Jittering,
}

impl ReportingNode {
    /// `boot`: number of this start of its agent.
    pub fn new(place: usize, boot: usize) -> Self {
        let models = (0..6).map(|m| {
            json!({
                "model": model(place + m), "tier": if m == 0 { "resident" } else { "disk" },
                "bytes": (15 + 9 * m as u64) << 30, "source": if m == 0 { "engine" } else { "huggingface" },
            })
        });
        let report = json!({
            "node": node_name(place), "bootId": format!("5d2f1c8e-77aa-4b0e-{boot:04x}-{place:012x}"), "sequence": 0,
            "gpus": (0..GPUS).map(|gpu| gpu_report(place, gpu)).collect::<Vec<_>>(),
            "engines": (0..GPUS).map(|gpu| engine(place, gpu)).collect::<Vec<_>>(),
            "models": models.collect::<Vec<_>>(),
        });
        Self {
            place,
            report: serde_json::from_value(report).expect("a report"),
        }
    }

    /// The next report, as the agent would write it.
    pub fn next(&mut self, caches: CacheUsage) -> Vec<u8> {
        let report = &mut self.report;
        report.sequence += 1;
        let mut random = Random::seeded(self.place as u64, report.sequence);
        report.age_millis = Millis(3 + random.below(9) as u64);
        for gpu in report.gpus.iter_mut().flatten() {
            gpu.utilization_percent = Some(random.below(101) as u8);
            let churn = if matches!(caches, CacheUsage::Mixed | CacheUsage::Full) {
                USED_BYTES_CHANGE
            } else {
                1
            };
            let processes = gpu.processes.iter_mut().flatten();
            let grown = processes.map(|process| {
                let used = process.used_bytes.map(|used| {
                    Bytes(
                        used.0 / USED_BYTES_CHANGE * USED_BYTES_CHANGE
                            + random.below(churn as usize) as u64,
                    )
                });
                process.used_bytes = used;
                used.unwrap_or_default()
            });
            gpu.used_bytes = Some(grown.sum());
        }
        for (place, engine) in report.engines.iter_mut().enumerate() {
            let (usage, waiting) = engine_load(caches, self.place * GPUS + place, &mut random);
            engine.kv_cache_usage = Some(usage);
            engine.waiting = Some(waiting);
            let running = if caches == CacheUsage::Unchanged {
                100
            } else {
                random.below(200)
            };
            engine.running = Some(running as u64);
            engine.age_millis = Millis(random.below(40) as u64);
        }
        serde_json::to_vec(report).expect("a report is plain data")
    }
}

/// The KV cache in use of one engine, and the requests that wait for it.
fn engine_load(caches: CacheUsage, engine: usize, random: &mut Random) -> (f64, u64) {
    let hundredths = match caches {
        CacheUsage::Full => 9900,
        CacheUsage::Mixed => (engine % GPUS * 1250 + random.below(1250)).max(1),
        CacheUsage::Steady | CacheUsage::Unchanged => mean_usage(engine),
        CacheUsage::Jittering => mean_usage(engine) - 600 + random.below(1201),
    };
    let waiting = match caches {
        CacheUsage::Full | CacheUsage::Mixed => random.below(9),
        CacheUsage::Steady | CacheUsage::Unchanged => 1,
        CacheUsage::Jittering => random.below(3),
    };
    (hundredths as f64 / 1e4, waiting as u64)
}

/// Mean usage of an engine's cache in hundredths of a percentage point: from 6 to 85 points.
fn mean_usage(engine: usize) -> usize {
    100 * (6 + engine * 37 % 80)
}

/// Range within which a process's memory changes from report to report, in bytes.
const USED_BYTES_CHANGE: u64 = 64 * MIB;

fn gpu_uuid(node: usize, gpu: usize) -> String {
    format!("GPU-{node:08x}-7c41-4a53-b3d2-{gpu:012x}")
}

fn model(n: usize) -> String {
    let models = [
        "Llama-3.1-8B-Instruct",
        "Qwen2.5-32B-Instruct",
        "Mistral-7B-v0.3",
        "gemma-2-27b-it",
    ];
    format!("organization-{}/{}", n % 23, models[n % models.len()])
}

fn gpu_report(node: usize, gpu: usize) -> serde_json::Value {
    let process = |second: usize| {
        let (pod, promised) = resident_on(node, gpu, second);
        json!({ "pid": 40_000 + 100 * gpu + second, "usedBytes": promised + CUDA_CONTEXT_BYTES, "pod": pod })
    };
    json!({
        "uuid": gpu_uuid(node, gpu), "index": gpu, "model": "NVIDIA-H100-80GB-HBM3",
        "totalBytes": 81_559 * MIB, "reservedBytes": DRIVER_RESERVED_BYTES, "usedBytes": 0, "utilizationPercent": 0,
        "health": "healthy", "numaNode": gpu / 4, "nvlinkIsland": 0, "processes": [process(0), process(1)],
    })
}

fn engine(node: usize, gpu: usize) -> serde_json::Value {
    let (pod, _) = resident_on(node, gpu, 0);
    json!({
        "pod": pod, "engine": "vllm", "gpus": [gpu_uuid(node, gpu)], "state": "serving", "model": model(node),
        "kvCacheUsage": 0.5, "kvCacheTokens": 438_608, "waiting": 0, "running": 0,
    })
}
