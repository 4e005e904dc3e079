//! Records what has changed since the last call, from the API server's objects alone: a second accounting, to compare with the
//! ledger's.

use super::api_server::ApiServer;
use super::machine::DemoMachine;
use super::reported::ReportedEngines;
use serde_json::Value;
use std::collections::BTreeMap;
use stowage_kubernetes_objects::{VRAM, written};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::testkit;
use stowage_scheduling::testkit::oracle::{Granted, Oracle};
use stowage_scheduling::units::Bytes;
use stowage_scheduling::vocabulary::demand::Sharing;

/// The share of a GPU that the default policy allocates to pods, in percent.
const PROMISABLE_PERCENT: u64 = 90;

/// One pod as the API server shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodView {
    pub name: String,
    pub uid: PodUid,
    pub node: Option<String>,
    /// The GPUs its Binding recorded.
    pub devices: Vec<String>,
    pub granted: u64,
    pub exclusive: bool,
    pub opportunistic: bool,
    /// Its VRAM is lent by sleeping engines.
    pub borrows: bool,
    pub leaving: bool,
    /// Why it was rejected, if it was.
    pub refusal: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Bound(PodView),
    Refused(PodView),
    Leaving(PodView),
    Gone(PodView),
}

/// One GPU and its pods.
#[derive(Debug, Clone)]
pub(crate) struct GpuView {
    pub node: &'static str,
    pub uuid: String,
    pub index: u32,
    pub model: &'static str,
    pub promisable: u64,
    /// Name and bytes, in order of arrival.
    pub pods: Vec<(PodView, u64)>,
    /// The agents' reports of its engines, for display; the chronicle does not use them.
    pub engines: Option<ReportedEngines>,
}

/// Remembers what it has printed.
#[derive(Debug, Default)]
pub(crate) struct Chronicle {
    known: BTreeMap<String, PodView>,
    arrived: Vec<String>,
}

impl Chronicle {
    pub fn news(&mut self, api: &ApiServer) -> Vec<News> {
        let now: BTreeMap<String, PodView> = pods(api)
            .into_iter()
            .map(|pod| (pod.name.clone(), pod))
            .collect();
        let mut news = Vec::new();
        for (name, pod) in &now {
            let before = self.known.get(name);
            if pod.node.is_some() && before.is_none_or(|before| before.node.is_none()) {
                self.arrived.push(name.clone());
                news.push(News::Bound(pod.clone()));
            } else if pod.leaving && before.is_some_and(|before| !before.leaving) {
                news.push(News::Leaving(pod.clone()));
            } else if pod.refusal.is_some()
                && before.is_none_or(|before| before.refusal.is_none())
                && pod.node.is_none()
            {
                news.push(News::Refused(pod.clone()));
            }
        }
        news.extend(
            self.known
                .values()
                .filter(|pod| !now.contains_key(&pod.name))
                .cloned()
                .map(News::Gone),
        );
        self.known = now;
        news
    }

    /// Every GPU with its pods, in the order in which they came.
    pub fn gpus(&self, machines: &[DemoMachine]) -> Vec<GpuView> {
        let all = machines
            .iter()
            .flat_map(|machine| (0..machine.gpus).map(move |index| (machine, index)));
        all.map(|(machine, index)| {
            let uuid = machine.uuid(index);
            let bound = self.arrived.iter().filter_map(|name| self.known.get(name));
            let here = bound.filter(|pod| pod.devices.contains(&uuid));
            let pods = here
                .map(|pod| (pod.clone(), pod.granted / pod.devices.len() as u64))
                .collect();
            let promisable = (machine.gib << 30) * PROMISABLE_PERCENT / 100;
            GpuView {
                node: machine.node,
                uuid,
                index,
                model: machine.model,
                promisable,
                pods,
                engines: None,
            }
        })
        .collect()
    }

    pub fn pods(&self) -> impl Iterator<Item = &PodView> {
        self.known.values()
    }

    pub fn is_bound(&self, pod: &str) -> bool {
        self.known.get(pod).is_some_and(|pod| pod.node.is_some())
    }

    /// Bound, or with the reason why not.
    pub fn is_answered(&self, pod: &str) -> bool {
        self.known
            .get(pod)
            .is_some_and(|pod| pod.node.is_some() || pod.refusal.is_some())
    }

    pub fn waiting(&self) -> Vec<String> {
        self.pods()
            .filter(|pod| pod.node.is_none())
            .map(|pod| pod.name.clone())
            .collect()
    }

    /// The first pod that was bound to a GPU and may not be evicted.
    pub(crate) fn server_on(&self, gpu: &str) -> Option<&PodView> {
        let bound = self.arrived.iter().filter_map(|name| self.known.get(name));
        bound
            .into_iter()
            .find(|pod| !pod.opportunistic && pod.devices.iter().any(|uuid| uuid == gpu))
    }
}

/// Broken invariants that the API server's objects prove: what the oracle says, and a bound pod without its GPUs.
pub(crate) fn broken_promises(gpus: &[GpuView], pods: &[&PodView]) -> Vec<String> {
    let mut oracle = Oracle::default();
    for on_node in gpus.chunk_by(|one, next| one.node == next.node) {
        let here = on_node.iter();
        let here = here.map(|gpu| (testkit::gpu(&gpu.uuid), Bytes(gpu.promisable)));
        oracle.show_node(&testkit::node(on_node[0].node), here);
    }
    let mut broken = Vec::new();
    for pod in pods {
        let Some(node) = &pod.node else { continue };
        if pod.devices.is_empty() {
            broken.push(format!("{} is bound and has no GPU", pod.name));
            continue;
        }
        let gpus: Vec<_> = pod.devices.iter().map(|uuid| testkit::gpu(uuid)).collect();
        let granted = Granted {
            gpus: u32::try_from(gpus.len()).unwrap_or(u32::MAX),
            per_gpu: Bytes(pod.granted / gpus.len() as u64),
            sharing: if pod.exclusive {
                Sharing::Exclusive
            } else {
                Sharing::Shared
            },
            borrows: pod.borrows,
        };
        oracle.bind(
            &testkit::uid(&pod.name),
            &testkit::node(node),
            &gpus,
            granted,
        );
    }
    broken.extend(oracle.broken().iter().map(ToString::to_string));
    broken
}

fn pods(api: &ApiServer) -> Vec<PodView> {
    api.list("pods").iter().map(|pod| view(pod)).collect()
}

fn view(pod: &Value) -> PodView {
    let annotation = |key: &str| pod["metadata"]["annotations"][key].as_str();
    let devices = annotation(written::DEVICES).unwrap_or_default();
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
        granted: annotation(written::GRANTED)
            .and_then(|bytes| bytes.parse().ok())
            .unwrap_or(0),
        exclusive: annotation("stowage.dev/exclusive") == Some("true"),
        opportunistic: spec["priority"].as_i64().unwrap_or(0) < 0,
        borrows: annotation(written::BORROWED_FROM).is_some(),
        leaving: pod["metadata"]["deletionTimestamp"].is_string(),
        refusal: unscheduled
            .and_then(|condition| condition["message"].as_str())
            .map(str::to_owned),
    }
}
