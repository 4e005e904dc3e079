//! Start times, predicted and observed: engines start on three nodes whose speeds are not those of the policy, and the service
//! learns from nothing but when they were ready.
//!
//! The service, its ledger and the cluster index are those that `serve` runs, on a clock that is advanced from start to start:
//! hours of starts take less than a second, and every run of a seed is the same. The kubelets here pull, load and start as
//! [`ActualSlowdown`] says, with noise on each start. The service is shown what an API server would show: nodes with their images,
//! and pods that are bound, running and ready.

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::Node;
use serde::Serialize;
use serde_json::{Value, json};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodUid};
use stowage_scheduling::ledger::PodStart;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked};
use stowage_scheduling::verbs::binding::{BindingAnswer, BindingAnswered, BindingStage};
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::model_tier::{ModelTier, NodeModel};
use stowage_scheduling::vocabulary::node_reading::NodeReading;
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::service::{ServerState, TimeSource};

/// How many times as long a node takes as the policy says.
#[derive(Debug, Clone, Copy)]
struct ActualSlowdown {
    pull: f64,
    network: f64,
    disk: f64,
    init: f64,
}

struct SlowNode {
    node: &'static str,
    gpu: &'static str,
    hidden: ActualSlowdown,
}

/// Two of the nodes have the same GPUs: what one teaches misleads about the other until that one has taught more.
const MACHINES: [SlowNode; 3] = [
    SlowNode {
        node: "node-a",
        gpu: "NVIDIA-H100-80GB-HBM3",
        hidden: ActualSlowdown {
            pull: 3.0,
            network: 3.0,
            disk: 3.0,
            init: 3.0,
        },
    },
    SlowNode {
        node: "node-b",
        gpu: "NVIDIA-H100-80GB-HBM3",
        hidden: ActualSlowdown {
            pull: 1.0 / 3.0,
            network: 1.0 / 3.0,
            disk: 1.0 / 3.0,
            init: 1.0 / 3.0,
        },
    },
    SlowNode {
        node: "node-c",
        gpu: "NVIDIA-L40S",
        hidden: ActualSlowdown {
            pull: 3.0,
            network: 3.0,
            disk: 1.0 / 3.0,
            init: 1.0,
        },
    },
];

/// Up to this share, each start takes more or less than its node's speeds say.
const NOISE: f64 = 0.3;
/// Weights in GB; each model is on the disk of every node under one name, and must be fetched under another.
const MODELS: [u64; 4] = [8, 15, 27, 65];
const IMAGE_BYTES: Bytes = Bytes(9_000_000_000);
/// Starts after which another version of the engine's image is rolled out.
const STARTS_PER_IMAGE_VERSION: usize = 7;
/// Starts of each node and way after which predictions are measured, and those that are measured.
const WARM_UP_STARTS: usize = 10;
const MEASURED_STARTS: usize = 60;
/// The error that half of the measured starts may have, in per cent: most of it is the noise, which no prediction can know.
const MAX_P50_ERROR_PERCENT: f64 = 20.0;

/// How the model comes to the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WeightsSource {
    Network,
    Disk,
}

/// Errors relative to what was observed, in per cent, over the measured starts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct StartErrorPercentiles {
    pub p50: f64,
    pub p90: f64,
}

/// The starts of one node and way.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StartTimesRow {
    pub node: &'static str,
    pub way: WeightsSource,
    /// By the policy's speeds.
    pub before: StartErrorPercentiles,
    /// As they were predicted at bind.
    pub after: StartErrorPercentiles,
}

/// Predicted and observed starts of all nodes and ways.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StartTimesTable {
    pub seed: u64,
    pub starts: usize,
    pub rows: Vec<StartTimesRow>,
}

thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The simulation's clock; it advances with each start.
const CLOCK: TimeSource = TimeSource {
    monotonic: || NOW.get(),
    wall: || {
        jiff::Timestamp::UNIX_EPOCH
            .saturating_add(NOW.get())
            .expect("a duration since 1970 adds")
    },
};

fn advance_clock(time: Millis) {
    NOW.set(NOW.get() + Duration::from_millis(time.0));
}

impl StartTimesTable {
    /// Plays all starts of a seed.
    pub fn play(seed: u64) -> Result<Self> {
        NOW.set(Duration::ZERO);
        let mut starts = StartSimulation::new(seed)?;
        let ways = [WeightsSource::Network, WeightsSource::Disk];
        let groups = || (0..MACHINES.len()).flat_map(|machine| ways.map(|way| (machine, way)));
        let mut errors: Vec<Vec<[f64; 2]>> = groups().map(|_| Vec::new()).collect();
        // In turns, so that nodes with the same GPUs mislead each other from the beginning.
        for _ in 0..WARM_UP_STARTS + MEASURED_STARTS {
            for ((machine, way), errors) in groups().zip(&mut errors) {
                errors.push(starts.run_start(&MACHINES[machine], way)?);
            }
        }
        let rows = groups().zip(&errors).map(|((machine, way), errors)| {
            let measured = &errors[WARM_UP_STARTS..];
            let percentiles = |basis: usize| {
                StartErrorPercentiles::from_errors(measured.iter().map(|error| error[basis]))
            };
            StartTimesRow {
                node: MACHINES[machine].node,
                way,
                before: percentiles(0),
                after: percentiles(1),
            }
        });
        Ok(Self {
            seed,
            starts: errors.iter().map(Vec::len).sum(),
            rows: rows.collect(),
        })
    }

    /// As text, a line for each row.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "Predicted against observed start times: {} starts on a clock of their own (seed {}), speeds up to three times off the policy's, ±{:.0} % noise.",
                self.starts,
                self.seed,
                NOISE * 100.0
            ),
            format!(
                "Errors of those after the first {WARM_UP_STARTS} of each row, by the policy's speeds and as calibrated:"
            ),
            format!(
                "{:<10}{:<10}{:>12}{:>8}{:>18}{:>8}",
                "node", "from", "policy p50", "p90", "calibrated p50", "p90"
            ),
        ];
        lines.extend(self.rows.iter().map(|row| {
            let way = match row.way {
                WeightsSource::Network => "network",
                WeightsSource::Disk => "disk",
            };
            let (before, after) = (row.before, row.after);
            format!(
                "{:<10}{way:<10}{:>10.0} %{:>6.0} %{:>16.0} %{:>6.0} %",
                row.node, before.p50, before.p90, after.p50, after.p90
            )
        }));
        lines
    }

    /// Rows whose predictions are worse than they may be.
    pub fn violations(&self) -> Vec<String> {
        let is_off = |row: &&StartTimesRow| row.after.p50 > MAX_P50_ERROR_PERCENT;
        let text = |row: &StartTimesRow| {
            let StartTimesRow {
                node, way, after, ..
            } = row;
            format!(
                "half of the starts on {node} ({way:?}) are predicted with an error above {:.0} %",
                after.p50
            )
        };
        self.rows.iter().filter(is_off).map(text).collect()
    }
}

impl StartErrorPercentiles {
    fn from_errors(errors: impl Iterator<Item = f64>) -> Self {
        let mut errors: Vec<f64> = errors.collect();
        errors.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| errors[((errors.len() as f64 * share).ceil() as usize).max(1) - 1];
        Self {
            p50: at(0.5),
            p90: at(0.9),
        }
    }
}

/// The cluster, and the dice of its kubelets.
struct StartSimulation {
    state: Arc<ServerState>,
    index: ClusterIndex,
    dice: Random,
    /// Starts played so far.
    starts_played: usize,
    /// The image versions that each machine has pulled.
    pulled_versions: [Vec<usize>; MACHINES.len()],
}

impl StartSimulation {
    fn new(seed: u64) -> Result<Self> {
        let state = ServerState::with_time_source(CLOCK, Policy::default());
        let mut starts = Self {
            state,
            index: ClusterIndex::default(),
            dice: Random::seeded(seed, 0),
            starts_played: 0,
            pulled_versions: Default::default(),
        };
        for machine in &MACHINES {
            starts.apply_node(machine)?;
            let node = NodeName::parse(machine.node)?;
            let devices = vec![device(machine)?];
            starts
                .state
                .cluster()
                .apply(DevicesReported {
                    node,
                    devices: devices.into(),
                    are_all: true,
                })
                .map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
        }
        starts.state.lead_from_the_start();
        Ok(starts)
    }

    /// One pod starts and ends. Answers by how much the policy's speeds and the prediction were off, in per cent.
    fn run_start(&mut self, machine: &SlowNode, way: WeightsSource) -> Result<[f64; 2]> {
        self.starts_played += 1;
        let (name, uid) = (
            format!("engine-{}", self.starts_played),
            PodUid::parse(&format!("uid-{}", self.starts_played))?,
        );
        let node = NodeName::parse(machine.node)?;
        let (model, version) = (
            MODELS[self.dice.below(MODELS.len())],
            self.starts_played / STARTS_PER_IMAGE_VERSION,
        );
        self.report_models(machine)?;
        let pod = manifest(&name, &uid, model, way, version);
        self.apply_pod(&pod)?;
        let start = self.bind(&uid, &node)?;
        let mut bound = pod;
        bound["spec"]["nodeName"] = machine.node.into();
        let devices = device(machine)?.uuid.to_string();
        bound["metadata"]["annotations"]["stowage.dev/devices"] = devices.into();
        bound["status"] = json!({ "phase": "Pending" });
        self.apply_pod(&bound)?;

        let ActualTimes { pull, engine } = self.actual_times(machine, way, model, version);
        advance_clock(pull);
        self.apply_node(machine)?;
        bound["status"] = json!({ "phase": "Running" });
        self.apply_pod(&bound)?;
        advance_clock(engine);
        bound["status"]["conditions"] = json!([{ "type": "Ready", "status": "True" }]);
        self.apply_pod(&bound)?;
        self.index.delete_pod(&self.state, &parsed(&bound)?);

        let observed = pull.0 + engine.0;
        let off = |time: Millis| time.0.abs_diff(observed) as f64 * 100.0 / observed as f64;
        Ok([
            off(start.expected.prior.total()),
            off(start.expected.time.total()),
        ])
    }

    /// What the node's kubelet and engine take. Nothing else here knows it.
    fn actual_times(
        &mut self,
        machine: &SlowNode,
        way: WeightsSource,
        model: u64,
        version: usize,
    ) -> ActualTimes {
        let index = MACHINES
            .iter()
            .position(|one| one.node == machine.node)
            .expect("it is one of them");
        let ActualSlowdown {
            pull,
            network,
            disk,
            init,
        } = machine.hidden;
        let speeds = Policy::default().loading.clone();
        let mut noise = || 1.0 + NOISE * (2.0 * self.dice.unit_interval() - 1.0);
        let millis = |time: Millis, factor: f64| Millis((time.0 as f64 * factor).round() as u64);
        let weights = Bytes(model * 1_000_000_000);
        let fetch = if way == WeightsSource::Network {
            millis(weights.transfer_time(speeds.network), network)
        } else {
            Millis(0)
        };
        let engine =
            fetch + millis(weights.transfer_time(speeds.disk), disk) + millis(speeds.init, init);
        let (of_pull, of_engine) = (noise(), noise());
        let is_pulled = self.pulled_versions[index].contains(&version);
        if !is_pulled {
            self.pulled_versions[index].push(version);
        }
        let pull = if is_pulled {
            Millis(0)
        } else {
            millis(IMAGE_BYTES.transfer_time(speeds.image_pull), pull)
        };
        ActualTimes {
            pull: millis(pull, of_pull),
            engine: millis(engine, of_engine),
        }
    }

    fn bind(&mut self, uid: &PodUid, node: &NodeName) -> Result<Arc<PodStart>> {
        let mut cluster = self.state.cluster();
        let query =
            BindAsked::for_pod(cluster.ledger(), uid, node).context("the pod is in the ledger")?;
        let BindAnswer::Write(decision) = cluster
            .apply(query)
            .map_err(|why| anyhow::anyhow!("{why:?}"))?
        else {
            bail!("{uid} is bound already");
        };
        cluster.apply(BindingAnswered {
            uid: uid.clone(),
            placement: decision.placement,
            stage: BindingStage::Request {
                is_new: decision.is_new,
            },
            answer: BindingAnswer::Written,
            max_commit_delay: Millis::seconds(16),
        });
        let start = cluster
            .ledger()
            .pod_state(uid)
            .and_then(|pod| pod.start.clone());
        start.context("a start is expected of an engine that is bound")
    }

    fn apply_pod(&mut self, pod: &Value) -> Result<()> {
        self.index.apply_pod(&self.state, &parsed(pod)?);
        Ok(())
    }

    /// The node with the images that it has by now.
    fn apply_node(&mut self, machine: &SlowNode) -> Result<()> {
        let index = MACHINES
            .iter()
            .position(|one| one.node == machine.node)
            .expect("it is one of them");
        let mut images =
            vec![json!({ "names": ["registry.k8s.io/pause:3.10"], "sizeBytes": 320_000 })];
        images.extend(
            self.pulled_versions[index]
                .iter()
                .map(|version| json!({ "names": [image(*version)], "sizeBytes": IMAGE_BYTES.0 })),
        );
        let node: Node = parsed(&json!({
            "metadata": { "name": machine.node, "uid": machine.node },
            "status": { "images": images },
        }))?;
        self.index.apply_node(&self.state, &node);
        Ok(())
    }

    /// What the node's agent finds on its disk.
    fn report_models(&self, machine: &SlowNode) -> Result<()> {
        let on_disk = |weights: &u64| {
            let (model, bytes) = (
                ModelId::parse(&model(*weights, WeightsSource::Disk))?,
                Bytes(weights * 1_000_000_000),
            );
            Ok(NodeModel {
                model,
                tier: ModelTier::Disk,
                bytes,
            })
        };
        let holdings = MODELS.iter().map(on_disk).collect::<Result<Vec<_>>>()?;
        let mut cluster = self.state.cluster();
        let reading = NodeReading {
            sampled: cluster.ledger().now(),
            holdings: holdings.into(),
            ..NodeReading::default()
        };
        cluster.apply(ReadingReported {
            node: NodeName::parse(machine.node)?,
            reading: reading.into(),
        });
        Ok(())
    }
}

/// How long a start takes, and only the kubelet knows.
struct ActualTimes {
    pull: Millis,
    engine: Millis,
}

fn device(machine: &SlowNode) -> Result<Device> {
    Ok(Device {
        uuid: GpuUuid::parse(&format!("GPU-{}", machine.node))?,
        index: 0,
        model: GpuModel::parse(machine.gpu)?,
        parent: None,
        total: Bytes::gib(80),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: None,
    })
}

fn model(weights: u64, way: WeightsSource) -> String {
    match way {
        WeightsSource::Network => format!("fetched-{weights}"),
        WeightsSource::Disk => format!("local-{weights}"),
    }
}

fn image(version: usize) -> String {
    format!("docker.io/vllm/vllm-openai:v{version}")
}

fn manifest(name: &str, uid: &PodUid, weights: u64, way: WeightsSource, version: usize) -> Value {
    let vram = weights * 1_000_000_000 + (1 << 30);
    json!({
        "metadata": {
            "name": name, "namespace": "default", "uid": uid.as_str(),
            "annotations": { "stowage.dev/model": model(weights, way), "stowage.dev/kv-cache": "1Gi" },
        },
        "spec": {
            "schedulerName": "stowage",
            "containers": [{
                "name": "engine", "image": format!("vllm/vllm-openai:v{version}"),
                "resources": { "limits": { "stowage.dev/vram": vram.to_string() } },
                "readinessProbe": { "httpGet": { "path": "/health", "port": 8000 } },
            }],
        },
    })
}

fn parsed<T: serde::de::DeserializeOwned>(object: &Value) -> Result<T> {
    Ok(serde_json::from_value(object.clone())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_ten_starts_half_of_all_start_times_are_predicted_within_a_fifth() {
        for seed in [1, 2, 3, 42] {
            let table = StartTimesTable::play(seed).unwrap();
            let text = table.lines().join("\n");
            assert_eq!(table.rows.len(), 6, "{text}");
            for row in &table.rows {
                assert!(row.after.p50 <= MAX_P50_ERROR_PERCENT, "{text}");
                assert!(row.before.p50 > row.after.p50, "{text}");
            }
            let poor = table
                .rows
                .iter()
                .filter(|row| row.before.p50 > 50.0)
                .count();
            assert!(
                poor >= 5,
                "the policy's own speeds are no good guess\n{text}"
            );
            assert_eq!(table.violations(), [""; 0]);
        }
    }

    #[test]
    fn a_seed_is_played_the_same_way_each_time() {
        let play = || serde_json::to_string(&StartTimesTable::play(7).unwrap()).unwrap();
        assert_eq!(play(), play());
    }
}
