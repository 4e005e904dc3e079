//! Builds the small cluster of a test case: namespaces, nodes whose agents have just reported unless the case says otherwise, and
//! pods that run on them.

use super::pod_shorthand;
use crate::file::{ExistingPod, LabelValue, TestCluster, TestGpu, TestNode};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::ids::{GpuModel, GpuUuid, InvalidName, ModelId, NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Millis, Moment, plural};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::namespaces::NamespacesListed;
use stowage_scheduling::verbs::observe::{
    DevicesReported, NodeObserved, PodObserved, ReadingReported,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::vocabulary::demand::{Demand, MAX_GPUS, RequestError};
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
use stowage_scheduling::vocabulary::gpu::{Device, Health};
use stowage_scheduling::vocabulary::model_tier::NodeModel;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use stowage_scheduling::vocabulary::node_signs::NodeSigns;

/// A GPU's default size: a common one in data centers.
const DEFAULT_GPU_MEMORY: Bytes = Bytes::gib(80);
/// A model's default size: eight billion parameters in 16 bits.
const DEFAULT_MODEL_SIZE: Bytes = Bytes(16_000_000_000);
/// The test cluster's current time. Far from zero, so that pods can have run for days before it.
const NOW: Moment = Moment(365 * 24 * 3600 * 1000);
/// Unaccounted VRAM counts after three reports in a row.
const REPORT_COUNT: u64 = 3;
/// Existing pods started long ago, unless the case says otherwise.
const DEFAULT_RUNNING_TIME: Millis = Millis::seconds(3600);

/// An invalid cluster in a case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TestClusterError {
    #[error("cluster.nodes: {0}; give it another name")]
    InvalidNodeName(#[from] InvalidName),
    #[error("cluster.nodes: {node} stands there twice; give each node a name of its own")]
    DuplicateNode { node: NodeName },
    #[error("cluster.nodes: {node} has {gpus} GPUs; {MAX_GPUS} are the most")]
    TooManyGpus { node: NodeName, gpus: usize },
    #[error("cluster.pods: {pod} stands there twice; give each pod a name of its own")]
    DuplicatePod { pod: String },
    #[error("cluster.pods: {pod} is on {node}, which is not among cluster.nodes")]
    UnknownNode { pod: String, node: String },
    #[error(
        "cluster.pods: {pod} is on GPU {index} of {node}, which has {gpus}; they are counted from 0"
    )]
    UnknownGpu {
        pod: String,
        node: String,
        index: u32,
        gpus: usize,
    },
    #[error("cluster.pods: {pod} is on {} and requests {gpus}; name as many under `on`", plural(*on, "GPU"))]
    GpuCountMismatch { pod: String, on: usize, gpus: u32 },
    #[error("cluster.pods: {pod}: {error}")]
    InvalidPod { pod: String, error: RequestError },
}

pub fn uid_from_name(name: &str) -> PodUid {
    PodUid::parse(&name.replace(' ', "-"))
        .expect("names of pods and this module's own are UIDs, too")
}

pub fn verb_request(uid: PodUid, demand: Demand) -> VerbRequest {
    let key = PodKey::parse(&demand.traits.namespace, uid.as_str());
    let key = key.expect("a namespace that was checked, and a name");
    VerbRequest {
        uid,
        key,
        demand,
        waiting: ObservedWaiting::default(),
        disruption: None,
    }
}

pub fn add_pending_pod(cluster: &mut Cluster, uid: &PodUid, demand: &Demand) {
    let VerbRequest {
        uid,
        key,
        demand,
        waiting,
        ..
    } = verb_request(uid.clone(), demand.clone());
    let state = ObservedPhase::Waiting(waiting);
    cluster.apply(PodObserved(PodObservation {
        uid,
        key,
        demand,
        state,
        observed: None,
    }));
}

pub fn build(described: &TestCluster, policy: &Policy) -> Result<Cluster, TestClusterError> {
    let mut cluster = Cluster::new(Arc::new(policy.clone()));
    cluster.apply(ClockAdvanced(NOW));
    let namespaces = described.namespaces.iter().flatten();
    let labels = |labels: &BTreeMap<String, LabelValue>| {
        Arc::new(
            labels
                .iter()
                .map(|(key, value)| (key.clone(), value.0.clone()))
                .collect(),
        )
    };
    cluster.apply(NamespacesListed(
        namespaces
            .map(|(name, all)| (name.clone(), labels(all)))
            .collect(),
    ));
    let nodes: &[TestNode] = described.nodes.as_deref().unwrap_or_default();
    for node in nodes {
        add_node(&mut cluster, node)?;
    }
    let mut running_pods: Vec<RunningPod> = Vec::new();
    for pod in described.pods.iter().flatten() {
        let running_pod = add_pod(&mut cluster, pod)?;
        if running_pods
            .iter()
            .any(|other| other.uid == running_pod.uid)
        {
            return Err(TestClusterError::DuplicatePod {
                pod: pod.pod.name.0.clone(),
            });
        }
        running_pods.push(running_pod);
    }
    for report in 1..=REPORT_COUNT {
        cluster.apply(ClockAdvanced(NOW + Millis::seconds(report)));
        for node in nodes {
            report_readings(&mut cluster, node, &running_pods)?;
        }
    }
    Ok(cluster)
}

/// A bound pod of the test cluster, and the VRAM that its node's agent reports for it on each GPU.
struct RunningPod {
    uid: PodUid,
    devices: Arc<[GpuUuid]>,
    per_gpu: Bytes,
}

fn add_node(cluster: &mut Cluster, node: &TestNode) -> Result<(), TestClusterError> {
    let name = NodeName::parse(&node.name.0)?;
    if cluster.ledger().has_node(&name) {
        return Err(TestClusterError::DuplicateNode { node: name });
    }
    let devices: Vec<Device> = devices(node)?
        .into_iter()
        .map(|(device, _)| device)
        .collect();
    if devices.len() > MAX_GPUS as usize {
        return Err(TestClusterError::TooManyGpus {
            node: name,
            gpus: devices.len(),
        });
    }
    let labels = node
        .labels
        .iter()
        .flatten()
        .map(|(key, value)| (key.clone(), value.0.clone()))
        .collect();
    let kind = if node.plugin.is_some() {
        NodeKind::DevicePlugin
    } else {
        NodeKind::Stowage
    };
    let offered = node.plugin.iter().flatten();
    let offered = offered
        .filter_map(|(name, count)| Some((PluginResource::parse(name)?, *count)))
        .collect();
    cluster.apply(NodeObserved {
        labels: Arc::new(labels),
        plugin_devices: offered,
        signs: NodeSigns {
            keeps_vram_limits: node.keeps_vram_limits,
            ..NodeSigns::default()
        },
        ..NodeObserved::new(name.clone(), kind)
    });
    cluster
        .apply(DevicesReported {
            node: name.clone(),
            devices: devices.into(),
            are_all: true,
        })
        .expect("the node is there, and its GPUs are not too many");
    Ok(())
}

/// The node's GPUs by index, each with the case's figures. Consecutive slices are of one card, as many as fill it.
fn devices(node: &TestNode) -> Result<Vec<(Device, &TestGpu)>, TestClusterError> {
    let mut devices = Vec::new();
    for gpu in node.gpus.iter().flatten() {
        for copy in 0..gpu.count.unwrap_or(1) {
            let index = devices.len() as u32;
            devices.push((device(&node.name.0, gpu, index, copy)?, gpu));
        }
    }
    Ok(devices)
}

fn device(node: &str, gpu: &TestGpu, index: u32, copy: u16) -> Result<Device, TestClusterError> {
    let uuid = |what: &str, number: u32| GpuUuid::parse(&format!("{what}-{node}-{number}"));
    let product = gpu.model.as_deref().unwrap_or("GPU");
    let model = match &gpu.mig {
        Some(profile) => GpuModel::parse(&format!("{product}-MIG-{}", profile.0))?,
        None => GpuModel::parse(product)?,
    };
    let first = index - u32::from(copy);
    Ok(Device {
        uuid: uuid(if gpu.mig.is_some() { "MIG" } else { "GPU" }, index)?,
        index,
        model,
        parent: gpu.mig.is_some().then(|| uuid("GPU", first)).transpose()?,
        total: gpu.memory.map_or(DEFAULT_GPU_MEMORY, |memory| memory.0),
        reserved: Bytes::ZERO,
        health: gpu.health.unwrap_or(Health::Healthy),
        exclusive_process: false,
        island: None,
    })
}

fn add_pod(cluster: &mut Cluster, pod: &ExistingPod) -> Result<RunningPod, TestClusterError> {
    let (name, node) = (&pod.pod.name.0, &pod.node.0);
    let policy = cluster.ledger().policy().clone();
    let demand = pod_shorthand::demand_from_shorthand(&pod.pod, &policy).map_err(|error| {
        TestClusterError::InvalidPod {
            pod: name.clone(),
            error,
        }
    })?;
    let node_name = NodeName::parse(node)?;
    let no_such_node = || TestClusterError::UnknownNode {
        pod: name.clone(),
        node: node.clone(),
    };
    let devices = cluster
        .ledger()
        .node(&node_name)
        .ok_or_else(no_such_node)?
        .devices
        .clone();
    let asks_plugin = demand.is_allocated_externally();
    if !asks_plugin && pod.on.len() != demand.gpus as usize {
        return Err(TestClusterError::GpuCountMismatch {
            pod: name.clone(),
            on: pod.on.len(),
            gpus: demand.gpus,
        });
    }
    let no_such_gpu = |index: u32| TestClusterError::UnknownGpu {
        pod: name.clone(),
        node: node.clone(),
        index,
        gpus: devices.len(),
    };
    let uuid_at = |index: &u32| {
        devices
            .get(*index as usize)
            .map(|device| device.uuid.clone())
            .ok_or_else(|| no_such_gpu(*index))
    };
    let on: Arc<[GpuUuid]> = pod.on.iter().map(uuid_at).collect::<Result<_, _>>()?;
    let running_pod = RunningPod {
        uid: uid_from_name(name),
        devices: on.clone(),
        per_gpu: demand.per_gpu,
    };
    // The reports take a moment, too.
    let ran = pod
        .pod
        .running_for
        .map_or(DEFAULT_RUNNING_TIME, |ran| ran.0);
    let ran = Some(Millis(
        ran.0.saturating_sub(Millis::seconds(REPORT_COUNT).0),
    ));
    let key = PodKey::parse(&demand.traits.namespace, name)?;
    let state = ObservedPhase::Bound {
        node: node_name,
        devices: (!asks_plugin).then_some(on),
        starting: false,
        ran,
    };
    cluster.apply(PodObserved(PodObservation {
        uid: running_pod.uid.clone(),
        key,
        demand,
        state,
        observed: None,
    }));
    Ok(running_pod)
}

/// The report of the node's agent: its pods use the VRAM allocated to them, and the rest is as the case says.
fn report_readings(
    cluster: &mut Cluster,
    node: &TestNode,
    running_pods: &[RunningPod],
) -> Result<(), TestClusterError> {
    let name = NodeName::parse(&node.name.0)?;
    let sampled = cluster
        .ledger()
        .now()
        .before(node.report_age.map_or(Millis::default(), |age| age.0));
    let gpus = devices(node)?
        .iter()
        .map(|(device, gpu)| gpu_reading(device, gpu, running_pods))
        .collect();
    let mut models = BTreeMap::new();
    for (model, tier) in node.models.iter().flatten() {
        let model = ModelId::parse(model)?;
        let node_model = NodeModel {
            model: model.clone(),
            tier: *tier,
            bytes: DEFAULT_MODEL_SIZE,
        };
        models.insert(model, node_model);
    }
    let reading = NodeReading {
        sampled,
        gpus,
        holdings: models.into_values().collect(),
        ..NodeReading::default()
    };
    cluster.apply(ReadingReported {
        node: name.clone(),
        reading: reading.into(),
    });
    Ok(())
}

fn gpu_reading(device: &Device, gpu: &TestGpu, running_pods: &[RunningPod]) -> GpuReading {
    let mut attributed: Vec<(PodUid, Bytes)> = running_pods
        .iter()
        .filter(|running_pod| running_pod.devices.contains(&device.uuid))
        .map(|running_pod| (running_pod.uid.clone(), running_pod.per_gpu))
        .collect();
    attributed.sort_unstable();
    let allocated = attributed.iter().map(|(_, bytes)| *bytes).sum();
    GpuReading {
        uuid: device.uuid.clone(),
        used: Some(gpu.used.map_or(allocated, |used| used.0)),
        attributed,
        engine_load: match (gpu.kv_cache, gpu.queue) {
            (None, None) => EngineLoad::NONE,
            (kv_cache, queue) => {
                EngineLoad::new(kv_cache.map(|percent| percent.0), queue.or(Some(0)))
            }
        },
    }
}
