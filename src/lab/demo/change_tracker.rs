//! Records what has changed since the last call, from the API server's objects alone: a second accounting, to compare with the
//! ledger's.

use super::api_server::ApiServer;
use super::machine::DemoMachine;
use super::reported::ReportedEngines;
use serde_json::Value;
use std::collections::BTreeMap;
use stowage_kubernetes_objects::{VRAM, binding_annotations};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::testkit;
use stowage_scheduling::testkit::oracle::{Granted, Oracle};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::Sharing;

/// The share of a GPU that the default policy allocates to pods, in percent.
const ALLOCATABLE_PERCENT: u64 = 90;

/// One pod as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodView {
    pub name: String,
    pub uid: PodUid,
    pub node: Option<String>,
    /// The GPUs its Binding recorded.
    pub devices: Vec<String>,
    pub granted_bytes: u64,
    pub is_exclusive: bool,
    pub is_opportunistic: bool,
    /// Its VRAM is lent by engines.
    pub is_borrower: bool,
    pub is_terminating: bool,
    /// Why it was rejected, if it was.
    pub refusal: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PodChange {
    Bound(PodView),
    Refused(PodView),
    Terminating(PodView),
    Deleted(PodView),
}

/// One GPU and its pods.
#[derive(Debug, Clone)]
pub(crate) struct GpuView {
    pub node: &'static str,
    pub uuid: String,
    pub index: u32,
    pub model: &'static str,
    pub allocatable: u64,
    /// Name and bytes, in order of arrival.
    pub pods: Vec<(PodView, u64)>,
    /// The agents' reports of its engines, for display; the chronicle does not use them.
    pub engines: Option<ReportedEngines>,
}

/// Remembers what it has printed.
#[derive(Debug, Default)]
pub(crate) struct ChangeTracker {
    last_observed: BTreeMap<String, PodView>,
    bind_order: Vec<String>,
}

impl ChangeTracker {
    pub fn changes(&mut self, api: &ApiServer) -> Vec<PodChange> {
        let now: BTreeMap<String, PodView> = pods(api)
            .into_iter()
            .map(|pod| (pod.name.clone(), pod))
            .collect();
        let mut news = Vec::new();
        for (name, pod) in &now {
            let before = self.last_observed.get(name);
            if pod.node.is_some() && before.is_none_or(|before| before.node.is_none()) {
                self.bind_order.push(name.clone());
                news.push(PodChange::Bound(pod.clone()));
            } else if pod.is_terminating && before.is_some_and(|before| !before.is_terminating) {
                news.push(PodChange::Terminating(pod.clone()));
            } else if pod.refusal.is_some()
                && before.is_none_or(|before| before.refusal.is_none())
                && pod.node.is_none()
            {
                news.push(PodChange::Refused(pod.clone()));
            }
        }
        news.extend(
            self.last_observed
                .values()
                .filter(|pod| !now.contains_key(&pod.name))
                .cloned()
                .map(PodChange::Deleted),
        );
        self.last_observed = now;
        news
    }

    /// Every GPU with its pods, in the order in which they came.
    pub fn gpus(&self, machines: &[DemoMachine]) -> Vec<GpuView> {
        let all = machines
            .iter()
            .flat_map(|machine| (0..machine.gpu_count).map(move |index| (machine, index)));
        all.map(|(machine, index)| {
            let uuid = machine.uuid(index);
            let bound = self
                .bind_order
                .iter()
                .filter_map(|name| self.last_observed.get(name));
            let here = bound.filter(|pod| pod.devices.contains(&uuid));
            let pods = here
                .map(|pod| (pod.clone(), pod.granted_bytes / pod.devices.len() as u64))
                .collect();
            let allocatable = (machine.gib_per_gpu << 30) * ALLOCATABLE_PERCENT / 100;
            GpuView {
                node: machine.node,
                uuid,
                index,
                model: machine.model,
                allocatable,
                pods,
                engines: None,
            }
        })
        .collect()
    }

    pub fn pods(&self) -> impl Iterator<Item = &PodView> {
        self.last_observed.values()
    }

    pub fn is_bound(&self, pod: &str) -> bool {
        self.last_observed
            .get(pod)
            .is_some_and(|pod| pod.node.is_some())
    }

    /// Bound, or with the reason why not.
    pub fn is_bound_or_refused(&self, pod: &str) -> bool {
        self.last_observed
            .get(pod)
            .is_some_and(|pod| pod.node.is_some() || pod.refusal.is_some())
    }

    pub fn pending_pods(&self) -> Vec<String> {
        self.pods()
            .filter(|pod| pod.node.is_none())
            .map(|pod| pod.name.clone())
            .collect()
    }

    /// The first pod that was bound to a GPU and may not be evicted.
    pub(crate) fn first_serving_pod_on(&self, gpu: &str) -> Option<&PodView> {
        let bound = self
            .bind_order
            .iter()
            .filter_map(|name| self.last_observed.get(name));
        bound
            .into_iter()
            .find(|pod| !pod.is_opportunistic && pod.devices.iter().any(|uuid| uuid == gpu))
    }
}

/// Broken invariants that the API server's objects prove: what the oracle says, and a bound pod without its GPUs.
pub(crate) fn invariant_violations(gpus: &[GpuView], pods: &[&PodView]) -> Vec<String> {
    let mut oracle = Oracle::default();
    for on_node in gpus.chunk_by(|one, next| one.node == next.node) {
        let here = on_node.iter();
        let here = here.map(|gpu| (testkit::gpu(&gpu.uuid), Bytes(gpu.allocatable)));
        oracle.set_node(&testkit::node(on_node[0].node), here);
    }
    let mut violations = Vec::new();
    for pod in pods {
        let Some(node) = &pod.node else { continue };
        if pod.devices.is_empty() {
            violations.push(format!("{} is bound and has no GPU", pod.name));
            continue;
        }
        let gpus: Vec<_> = pod.devices.iter().map(|uuid| testkit::gpu(uuid)).collect();
        let granted = Granted {
            gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
            per_gpu: Bytes(pod.granted_bytes / gpus.len() as u64),
            sharing: if pod.is_exclusive {
                Sharing::Exclusive
            } else {
                Sharing::Shared
            },
            borrows: pod.is_borrower,
        };
        oracle.bind(
            &testkit::uid(&pod.name),
            &testkit::node(node),
            &gpus,
            granted,
        );
    }
    violations.extend(oracle.broken_invariants().iter().map(ToString::to_string));
    violations
}

fn pods(api: &ApiServer) -> Vec<PodView> {
    api.list("pods").iter().map(|pod| pod_view(pod)).collect()
}

fn pod_view(pod: &Value) -> PodView {
    let annotation = |key: &str| pod["metadata"]["annotations"][key].as_str();
    let devices = annotation(binding_annotations::DEVICES).unwrap_or_default();
    let conditions = pod["status"]["conditions"].as_array();
    let unscheduled = conditions.into_iter().flatten().find(|condition| {
        condition["type"] == "PodScheduled"
            && condition["status"] == "False"
            && condition["reason"] == "Unschedulable"
    });
    let spec = &pod["spec"];
    debug_assert!(spec["containers"][0]["resources"]["limits"][VRAM].is_string());
    PodView {
        name: pod["metadata"]["name"].as_str().unwrap_or_default().into(),
        uid: PodUid::parse(pod["metadata"]["uid"].as_str().unwrap_or_default())
            .expect("the server gave it one"),
        node: spec["nodeName"].as_str().map(str::to_owned),
        devices: devices
            .split(',')
            .filter(|uuid| !uuid.is_empty())
            .map(str::to_owned)
            .collect(),
        granted_bytes: annotation(binding_annotations::GRANTED)
            .and_then(|bytes| bytes.parse().ok())
            .unwrap_or(0),
        is_exclusive: annotation("stowage.dev/exclusive") == Some("true"),
        is_opportunistic: spec["priority"].as_i64().unwrap_or(0) < 0,
        is_borrower: annotation(binding_annotations::BORROWED_FROM).is_some(),
        is_terminating: pod["metadata"]["deletionTimestamp"].is_string(),
        refusal: unscheduled
            .and_then(|condition| condition["message"].as_str())
            .map(str::to_owned),
    }
}
