//! Small clusters for tests: nodes of 80 GiB GPUs whose agents report, pending and bound pods, and a clock that the test moves.

use crate::explaining::{Explanation, ShownNodes, explain};
use crate::ids::{GpuModel, GpuUuid, ModelId, NodeName, PodKey, PodUid};
use crate::ledger::{ObservedPhase, ObservedWaiting, OccupantPhase, PodObservation};
use crate::policy::Policy;
use crate::units::{Bytes, Millis, Moment, Percent};
use crate::verbs::Cluster;
use crate::vocabulary::demand::{ContainerRequest, Demand, PluginAmount, PodRequest};
use crate::vocabulary::device_plugin::PluginResource;
use crate::vocabulary::disruption_info::{DisruptionInfo, ObservedDisruptionInfo};
use crate::vocabulary::gpu::{Device, Health};
use crate::vocabulary::latency::EngineLatency;
use crate::vocabulary::model_tier::{ModelTier, NodeModel};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::{
    EngineLoad, GpuActivity, GpuReading, NodeIsolation, NodeReading, SleepState, VramLimit,
};
use crate::vocabulary::node_signs::NodeSigns;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Late enough that pods can have run for days before it.
const START: Moment = Moment(365 * 24 * 3600 * 1000);

pub struct ExplainedCluster {
    pub cluster: Cluster,
}

/// A pod in shorthand; its UID is its name.
#[derive(Debug, Clone, Default)]
pub struct TestPod {
    pub namespace: &'static str,
    pub name: String,
    pub vram: String,
    pub gpus: Option<u32>,
    pub exclusive: bool,
    pub priority: i32,
    pub priority_class: Option<&'static str>,
    pub never_preempts: bool,
    pub model: Option<&'static str>,
    pub labels: BTreeMap<String, String>,
    /// Amount of `nvidia.com/gpu`, in place of VRAM.
    pub devices: Option<&'static str>,
    pub cpu: Option<&'static str>,
}

pub fn pod(name: &str, vram: &str) -> TestPod {
    TestPod {
        namespace: "team",
        name: name.into(),
        vram: vram.into(),
        ..TestPod::default()
    }
}

impl TestPod {
    pub fn uid(&self) -> PodUid {
        PodUid::parse(&self.name).unwrap()
    }

    fn key(&self) -> PodKey {
        PodKey::parse(self.namespace, &self.name).unwrap()
    }

    pub fn demand(&self, policy: &Policy) -> Demand {
        let gpus = self.gpus.map(|gpus| gpus.to_string());
        let containers = [ContainerRequest {
            vram: self.devices.is_none().then_some(&self.vram),
            plugin: self
                .devices
                .map_or(PluginAmount::None, |amount| PluginAmount::One {
                    resource: "nvidia.com/gpu",
                    amount,
                }),
            cpu: self.cpu,
            ..ContainerRequest::plain("engine")
        }];
        let request = PodRequest {
            labels: &self.labels,
            priority_class: self.priority_class,
            priority: self.priority,
            may_preempt: !self.never_preempts,
            gpus: gpus.as_deref(),
            exclusive: self.exclusive.then_some("true"),
            model: self.model,
            resources: &BTreeSet::from(["stowage.dev/vram"]),
            ..PodRequest::plain(self.namespace, &containers)
        };
        Demand::from_pod(&request, policy).unwrap()
    }
}

pub fn name(node: &str) -> NodeName {
    NodeName::parse(node).unwrap()
}

fn uuid(node: &str, gpu: usize) -> GpuUuid {
    GpuUuid::parse(&format!("GPU-{node}-{gpu}")).unwrap()
}

impl ExplainedCluster {
    pub fn new(policy: Policy) -> Self {
        let mut ledger = Cluster::new(Arc::new(policy));
        ledger.ledger_mut().set_now(START);
        Self { cluster: ledger }
    }

    /// A node whose agent has just reported that many GPUs.
    pub fn with_node(mut self, node: &str, gpus: usize) -> Self {
        self.cluster
            .ledger_mut()
            .set_node(&name(node), NodeKind::Stowage, None);
        self.devices(node, &vec![Health::Healthy; gpus]);
        self.report(node, &[], &[]);
        self
    }

    pub fn with_label(mut self, node: &str, key: &str, value: &str) -> Self {
        self.cluster
            .ledger_mut()
            .set_labels(&name(node), BTreeMap::from([(key.into(), value.into())]));
        self
    }

    /// A node on which a device plugin offers so many `nvidia.com/gpu`.
    pub fn with_plugin_node(mut self, node: &str, devices: u32) -> Self {
        self.cluster
            .ledger_mut()
            .set_node(&name(node), NodeKind::DevicePlugin, Some(Vec::new()));
        let offered = [(PluginResource::parse("nvidia.com/gpu").unwrap(), devices)].into();
        self.cluster
            .ledger_mut()
            .set_plugin_devices(&name(node), offered);
        self
    }

    /// A node without reports.
    pub fn with_unreported_node(mut self, node: &str) -> Self {
        self.cluster
            .ledger_mut()
            .set_node(&name(node), NodeKind::Stowage, None);
        self
    }

    pub fn devices(&mut self, node: &str, health: &[Health]) {
        let device = |(index, health): (usize, &Health)| Device {
            uuid: uuid(node, index),
            index: index as u32,
            model: GpuModel::parse("NVIDIA-H100-80GB-HBM3").unwrap(),
            parent: None,
            total: Bytes::gib(80),
            reserved: Bytes::ZERO,
            health: *health,
            exclusive_process: false,
            island: None,
        };
        let devices = health.iter().enumerate().map(device).collect();
        self.cluster
            .ledger_mut()
            .report_devices(&name(node), devices)
            .unwrap();
    }

    /// The node's agent reports: pods use their allocation, and the engines on some GPUs have this KV cache and this queue.
    pub fn report(&mut self, node: &str, busy: &[(usize, u8, u32)], models: &[(&str, ModelTier)]) {
        let occupants = self.cluster.ledger().occupants_of(&name(node));
        let count = self
            .cluster
            .ledger()
            .node(&name(node))
            .unwrap()
            .devices
            .len();
        let gpu = |gpu_index: usize| {
            let here = occupants.iter().filter(|gpu_occupant| {
                gpu_occupant.gpus.contains(gpu_index)
                    && matches!(
                        gpu_occupant.phase,
                        OccupantPhase::Bound | OccupantPhase::Assumed
                    )
            });
            let mut attributed: Vec<(PodUid, Bytes)> = here
                .map(|gpu_occupant| (gpu_occupant.uid.clone(), gpu_occupant.per_gpu))
                .collect();
            attributed.sort_unstable();
            let engine_load = busy.iter().find(|(busy, ..)| *busy == gpu_index);
            GpuReading {
                uuid: uuid(node, gpu_index),
                used: Some(attributed.iter().map(|(_, bytes)| *bytes).sum()),
                attributed,
                engine_load: engine_load.map_or(EngineLoad::NONE, |(_, kv, queue)| {
                    EngineLoad::new(Percent::new(*kv), Some(*queue))
                }),
            }
        };
        let holding = |(model, tier): &(&str, ModelTier)| NodeModel {
            model: ModelId::parse(model).unwrap(),
            tier: *tier,
            bytes: Bytes::ZERO,
        };
        let reading = NodeReading {
            sampled: self.cluster.ledger().now(),
            gpus: (0..count).map(gpu).collect(),
            holdings: models.iter().map(holding).collect(),
            ..NodeReading::default()
        };
        // A load that lasts: one reading far from the average does not count.
        (0..3).for_each(|_| {
            drop(
                self.cluster
                    .ledger_mut()
                    .take_reading(&name(node), reading.clone().into()),
            )
        });
    }

    /// The node's agent reports the same once more, and limits of a pod's containers on the first GPUs of its node.
    pub fn report_limits(&mut self, node: &str, pod: &TestPod, limits: &[Option<Bytes>]) {
        let mut reading = self.cluster.ledger().reading(&name(node)).unwrap().clone();
        reading.isolation = Some(NodeIsolation {
            cgroup_version: 2,
            dmem: true,
        });
        let limit = |(gpu, limit): (usize, &Option<Bytes>)| VramLimit {
            pod: pod.uid(),
            gpu: uuid(node, gpu),
            limit: *limit,
            guaranteed: *limit,
        };
        reading.limits = limits.iter().enumerate().map(limit).collect();
        self.cluster
            .ledger_mut()
            .take_reading(&name(node), reading.into());
    }

    /// The node's agent reports the same once more, and what the engine of a pod there takes for a token.
    pub fn report_latency(&mut self, node: &str, pod: &TestPod, millis: u64, busy: u8) {
        let mut reading = self.cluster.ledger().reading(&name(node)).unwrap().clone();
        reading.latencies = vec![EngineLatency {
            pod: pod.uid(),
            time_per_token: Some(Millis(millis).into()),
            time_to_first_token: None,
            busy: Percent::new(busy),
        }];
        self.cluster
            .ledger_mut()
            .take_reading(&name(node), reading.into());
    }

    /// The node's agent reports the same once more, and how busy its first GPU is.
    pub fn report_activity(&mut self, node: &str, activity: GpuActivity) {
        let mut reading = self.cluster.ledger().reading(&name(node)).unwrap().clone();
        reading.activities = [(reading.gpus[0].uuid.clone(), activity)].into();
        self.cluster
            .ledger_mut()
            .take_reading(&name(node), reading.into());
    }

    /// Whether the node says that its driver keeps limits.
    pub fn set_keeps_vram_limits(&mut self, node: &str, keeps_vram_limits: bool) {
        let signs = NodeSigns {
            keeps_vram_limits,
            ..NodeSigns::default()
        };
        self.cluster.ledger_mut().set_signs(&name(node), signs);
    }

    /// The node's agent lists one of its GPUs no longer, and NVML has numbered the others anew.
    pub fn remove_gpu(&mut self, node: &str, gpu: usize) {
        let devices = self
            .cluster
            .ledger()
            .node(&name(node))
            .unwrap()
            .devices
            .clone();
        let left = devices
            .iter()
            .filter(|device| device.uuid != uuid(node, gpu))
            .cloned();
        let left: Vec<Device> = (0..)
            .zip(left)
            .map(|(index, device)| Device { index, ..device })
            .collect();
        let idle = |device: &Device| GpuReading {
            uuid: device.uuid.clone(),
            used: Some(Bytes::ZERO),
            attributed: Vec::new(),
            engine_load: EngineLoad::NONE,
        };
        let gpus = left.iter().map(idle).collect();
        let reading = NodeReading {
            sampled: self.cluster.ledger().now(),
            gpus,
            ..NodeReading::default()
        };
        self.cluster
            .ledger_mut()
            .report_all_devices(&name(node), left.into())
            .unwrap();
        self.cluster
            .ledger_mut()
            .take_reading(&name(node), reading.into());
    }

    /// Advances the clock, and applies what expires.
    pub fn advance(&mut self, time: Millis) {
        let now = self.cluster.ledger().now() + time;
        self.cluster.ledger_mut().expire(now);
    }

    pub fn add_waiting(&mut self, pod: &TestPod) -> PodUid {
        self.observe(pod, ObservedPhase::Waiting(ObservedWaiting::default()))
    }

    /// A pod that has run on the node for an hour.
    pub fn with_running(mut self, pod: &TestPod, node: &str, gpus: &[usize]) -> Self {
        self.add_bound(pod, node, gpus, false);
        self
    }

    pub fn add_bound(&mut self, pod: &TestPod, node: &str, gpus: &[usize], starting: bool) {
        let devices = Some(gpus.iter().map(|gpu| uuid(node, *gpu)).collect());
        let ran = if starting {
            None
        } else {
            Some(Millis::seconds(3600))
        };
        self.observe(
            pod,
            ObservedPhase::Bound {
                node: name(node),
                devices,
                starting,
                ran,
            },
        );
    }

    /// A pod that has run for an hour and shows this of its disruption.
    pub fn add_bound_with(
        &mut self,
        pod: &TestPod,
        node: &str,
        gpus: &[usize],
        disruption_info: DisruptionInfo,
    ) {
        let devices = Some(gpus.iter().map(|gpu| uuid(node, *gpu)).collect());
        let ran = Some(Millis::seconds(3600));
        let state = ObservedPhase::Bound {
            node: name(node),
            devices,
            starting: false,
            ran,
        };
        let observed = ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        };
        self.shows(pod, state, Some(observed));
    }

    /// A second later the agent of a node with one GPU reports so many GiB in use, by pods of which some sleep.
    pub fn report_asleep(&mut self, node: &str, used: &[(&str, u64)], asleep: &[&str]) {
        let sleep: Vec<_> = asleep
            .iter()
            .map(|pod| (*pod, SleepState::Asleep))
            .collect();
        self.report_sleep(node, used, &sleep);
    }

    /// A second later, the agent of a node with one GPU reports so many GiB in use by these pods, and whether engines sleep.
    pub fn report_sleep(&mut self, node: &str, used: &[(&str, u64)], sleep: &[(&str, SleepState)]) {
        self.advance(Millis::seconds(1));
        let uid = |pod: &str| PodUid::parse(pod).unwrap();
        let mut attributed: Vec<_> = used
            .iter()
            .map(|(pod, gib)| (uid(pod), Bytes::gib(*gib)))
            .collect();
        attributed.sort_unstable();
        let gpu = GpuReading {
            uuid: uuid(node, 0),
            used: Some(attributed.iter().map(|(_, bytes)| *bytes).sum()),
            attributed,
            engine_load: EngineLoad::NONE,
        };
        let sleep = sleep
            .iter()
            .map(|(pod, state)| (uid(pod), *state))
            .collect();
        let sampled = self.cluster.ledger().now();
        let reading = NodeReading {
            sampled,
            gpus: vec![gpu],
            sleep,
            ..NodeReading::default()
        };
        self.cluster
            .ledger_mut()
            .take_reading(&name(node), reading.into());
    }

    fn observe(&mut self, pod: &TestPod, state: ObservedPhase) -> PodUid {
        self.shows(pod, state, None);
        pod.uid()
    }

    pub fn shows(
        &mut self,
        pod: &TestPod,
        state: ObservedPhase,
        observed: Option<ObservedDisruptionInfo>,
    ) {
        let demand = pod.demand(&self.cluster.ledger().policy().clone());
        self.cluster.ledger_mut().observe_pod(PodObservation {
            uid: pod.uid(),
            key: pod.key(),
            demand,
            state,
            observed,
        });
    }

    /// Adds the pod as pending, and explains it.
    pub fn explained(&mut self, pod: &TestPod, options: &ShownNodes) -> Explanation {
        let uid = self.add_waiting(pod);
        explain(&mut self.cluster.copy(), &uid, options).unwrap()
    }
}
