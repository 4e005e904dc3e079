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

/// A GPU's default size: a common one in data centers.
const USUAL_MEMORY: Bytes = Bytes::gib(80);
/// A model's default size: eight billion parameters in 16 bits.
const USUAL_WEIGHTS: Bytes = Bytes(16_000_000_000);
/// The test cluster's current time. Far from zero, so that pods can have run for days before it.
const NOW: Moment = Moment(365 * 24 * 3600 * 1000);
/// Unaccounted VRAM counts after three reports in a row.
const REPORTS: u64 = 3;
/// Existing pods started long ago, unless the case says otherwise.
const USUAL_RUN: Millis = Millis::seconds(3600);

/// An invalid cluster in a case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadCluster {
    #[error("cluster.nodes: {0}; give it another name")]
    Name(#[from] InvalidName),
    #[error("cluster.nodes: {node} stands there twice; give each node a name of its own")]
    TwoNodes { node: NodeName },
    #[error("cluster.nodes: {node} has {gpus} GPUs; {MAX_GPUS} are the most")]
    TooManyGpus { node: NodeName, gpus: usize },
    #[error("cluster.pods: {pod} stands there twice; give each pod a name of its own")]
    TwoPods { pod: String },
    #[error("cluster.pods: {pod} is on {node}, which is not among cluster.nodes")]
    NoSuchNode { pod: String, node: String },
    #[error(
        "cluster.pods: {pod} is on GPU {index} of {node}, which has {gpus}; they are counted from 0"
    )]
    NoSuchGpu {
        pod: String,
        node: String,
        index: u32,
        gpus: usize,
    },
    #[error("cluster.pods: {pod} is on {} and requests {gpus}; name as many under `on`", plural(*on, "GPU"))]
    OtherCount { pod: String, on: usize, gpus: u32 },
    #[error("cluster.pods: {pod}: {error}")]
    Pod { pod: String, error: RequestError },
}

pub fn uid(name: &str) -> PodUid {
    PodUid::parse(&name.replace(' ', "-"))
        .expect("names of pods and this module's own are UIDs, too")
}

pub fn request(uid: PodUid, demand: Demand) -> VerbRequest {
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

pub fn wait(cluster: &mut Cluster, uid: &PodUid, demand: &Demand) {
    let VerbRequest {
        uid,
        key,
        demand,
        waiting,
        ..
    } = request(uid.clone(), demand.clone());
    let state = ObservedPhase::Waiting(waiting);
    cluster.apply(PodObserved(PodObservation {
        uid,
        key,
        demand,
        state,
        observed: None,
    }));
}

pub fn build(cluster: &TestCluster, policy: &Policy) -> Result<Cluster, BadCluster> {
    let mut ledger = Cluster::new(Arc::new(policy.clone()));
    ledger.apply(ClockAdvanced(NOW));
    let namespaces = cluster.namespaces.iter().flatten();
    let labels = |labels: &BTreeMap<String, LabelValue>| {
        Arc::new(
            labels
                .iter()
                .map(|(key, value)| (key.clone(), value.0.clone()))
                .collect(),
        )
    };
    ledger.apply(NamespacesListed(
        namespaces
            .map(|(name, all)| (name.clone(), labels(all)))
            .collect(),
    ));
    let nodes: &[TestNode] = cluster.nodes.as_deref().unwrap_or_default();
    for node in nodes {
        add_node(&mut ledger, node)?;
    }
    let mut tenants: Vec<CasePod> = Vec::new();
    for pod in cluster.pods.iter().flatten() {
        let tenant = add_pod(&mut ledger, pod)?;
        if tenants.iter().any(|other| other.uid == tenant.uid) {
            return Err(BadCluster::TwoPods {
                pod: pod.pod.name.0.clone(),
            });
        }
        tenants.push(tenant);
    }
    for report in 1..=REPORTS {
        ledger.apply(ClockAdvanced(NOW + Millis::seconds(report)));
        for node in nodes {
            read(&mut ledger, node, &tenants)?;
        }
    }
    Ok(ledger)
}

/// A bound pod of the test cluster, and the VRAM that its node's agent reports for it on each GPU.
struct CasePod {
    uid: PodUid,
    devices: Arc<[GpuUuid]>,
    per_gpu: Bytes,
}

fn add_node(ledger: &mut Cluster, node: &TestNode) -> Result<(), BadCluster> {
    let name = NodeName::parse(&node.name.0)?;
    if ledger.ledger().has_node(&name) {
        return Err(BadCluster::TwoNodes { node: name });
    }
    let devices: Vec<Device> = devices(node)?
        .into_iter()
        .map(|(device, _)| device)
        .collect();
    if devices.len() > MAX_GPUS as usize {
        return Err(BadCluster::TooManyGpus {
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
    ledger.apply(NodeObserved {
        labels: Arc::new(labels),
        plugin_devices: offered,
        ..NodeObserved::new(name.clone(), kind)
    });
    ledger
        .apply(DevicesReported {
            node: name.clone(),
            devices: devices.into(),
            are_all: true,
        })
        .expect("the node is there, and its GPUs are not too many");
    Ok(())
}

/// The node's GPUs by index, each with the case's figures. Consecutive slices are of one card, as many as fill it.
fn devices(node: &TestNode) -> Result<Vec<(Device, &TestGpu)>, BadCluster> {
    let mut devices = Vec::new();
    for gpu in node.gpus.iter().flatten() {
        for copy in 0..gpu.count.unwrap_or(1) {
            let index = devices.len() as u32;
            devices.push((device(&node.name.0, gpu, index, copy)?, gpu));
        }
    }
    Ok(devices)
}

fn device(node: &str, gpu: &TestGpu, index: u32, copy: u16) -> Result<Device, BadCluster> {
    let uuid = |what: &str, place: u32| GpuUuid::parse(&format!("{what}-{node}-{place}"));
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
        total: gpu.memory.map_or(USUAL_MEMORY, |memory| memory.0),
        reserved: Bytes::ZERO,
        health: gpu.health.unwrap_or(Health::Healthy),
        exclusive_process: false,
        island: None,
    })
}

fn add_pod(ledger: &mut Cluster, pod: &ExistingPod) -> Result<CasePod, BadCluster> {
    let (name, node) = (&pod.pod.name.0, &pod.node.0);
    let policy = ledger.ledger().policy().clone();
    let demand = pod_shorthand::demand(&pod.pod, &policy).map_err(|error| BadCluster::Pod {
        pod: name.clone(),
        error,
    })?;
    let node_name = NodeName::parse(node)?;
    let no_such_node = || BadCluster::NoSuchNode {
        pod: name.clone(),
        node: node.clone(),
    };
    let devices = ledger
        .ledger()
        .node(&node_name)
        .ok_or_else(no_such_node)?
        .devices
        .clone();
    let asks_plugin = demand.asks_plugin();
    if !asks_plugin && pod.on.len() != demand.gpus as usize {
        return Err(BadCluster::OtherCount {
            pod: name.clone(),
            on: pod.on.len(),
            gpus: demand.gpus,
        });
    }
    let no_such_gpu = |index: u32| BadCluster::NoSuchGpu {
        pod: name.clone(),
        node: node.clone(),
        index,
        gpus: devices.len(),
    };
    let on = |index: &u32| {
        devices
            .get(*index as usize)
            .map(|device| device.uuid.clone())
            .ok_or_else(|| no_such_gpu(*index))
    };
    let on: Arc<[GpuUuid]> = pod.on.iter().map(on).collect::<Result<_, _>>()?;
    let tenant = CasePod {
        uid: uid(name),
        devices: on.clone(),
        per_gpu: demand.per_gpu,
    };
    // The reports take a moment, too.
    let ran = pod.pod.running_for.map_or(USUAL_RUN, |ran| ran.0);
    let ran = Some(Millis(ran.0.saturating_sub(Millis::seconds(REPORTS).0)));
    let key = PodKey::parse(&demand.traits.namespace, name)?;
    let state = ObservedPhase::Bound {
        node: node_name,
        devices: (!asks_plugin).then_some(on),
        starting: false,
        ran,
    };
    ledger.apply(PodObserved(PodObservation {
        uid: tenant.uid.clone(),
        key,
        demand,
        state,
        observed: None,
    }));
    Ok(tenant)
}

/// The report of the node's agent: its pods use the VRAM allocated to them, and the rest is as the case says.
fn read(ledger: &mut Cluster, node: &TestNode, tenants: &[CasePod]) -> Result<(), BadCluster> {
    let name = NodeName::parse(&node.name.0)?;
    let sampled = ledger
        .ledger()
        .now()
        .before(node.report_age.map_or(Millis::default(), |age| age.0));
    let gpus = devices(node)?
        .iter()
        .map(|(device, gpu)| reading(device, gpu, tenants))
        .collect();
    let mut holdings = BTreeMap::new();
    for (model, tier) in node.models.iter().flatten() {
        let model = ModelId::parse(model)?;
        let holding = NodeModel {
            model: model.clone(),
            tier: *tier,
            bytes: USUAL_WEIGHTS,
        };
        holdings.insert(model, holding);
    }
    let reading = NodeReading {
        sampled,
        gpus,
        holdings: holdings.into_values().collect(),
        engines: Vec::new(),
        in_flight: Vec::new(),
        sleep: Vec::new(),
        over_grant: Vec::new(),
        unread: Vec::new(),
    };
    ledger.apply(ReadingReported {
        node: name.clone(),
        reading: reading.into(),
    });
    Ok(())
}

fn reading(device: &Device, gpu: &TestGpu, tenants: &[CasePod]) -> GpuReading {
    let mut attributed: Vec<(PodUid, Bytes)> = tenants
        .iter()
        .filter(|tenant| tenant.devices.contains(&device.uuid))
        .map(|tenant| (tenant.uid.clone(), tenant.per_gpu))
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
                EngineLoad::of(kv_cache.map(|percent| percent.0), queue.or(Some(0)))
            }
        },
    }
}
