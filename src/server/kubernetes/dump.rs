//! A dump in place of an API server: what `kubectl get nodes,pods,poddisruptionbudgets,namespaces -A -o yaml` (or
//! `-o json`) prints.
//!
//! Binds change the copy in memory, by the API server's own rules, and nothing outside it. For experiments, tests and
//! benchmarks.

use super::index::ClusterIndex;
use crate::service::ServerState;
use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::api::storage::v1::StorageClass;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome, ControlPlane, IsDue};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, PodEvent, StatusChange,
};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey, PodUid, printable};
use stowage_scheduling::policy::NamespaceLabels;
use stowage_scheduling::units::{is_or_are, plural};
use tracing::info;

/// The path that stands for standard input on the command line.
const STANDARD_INPUT: &str = "-";
/// A dump of 20,000 pods has some ten million YAML events; the file is the operator's own.
const MAX_YAML_EVENTS: usize = 200_000_000;

#[derive(Debug, thiserror::Error)]
pub enum DumpError {
    #[error("--cluster {}: {error}; save what `kubectl get nodes,pods -A -o yaml` prints there, or pipe it in and write -", .path.display())]
    Read {
        path: PathBuf,
        error: std::io::Error,
    },
    #[error("{}: {error}; save what `kubectl get nodes,pods -A -o yaml` prints, whole", named(.path))]
    Yaml {
        path: PathBuf,
        error: Box<serde_saphyr::Error>,
    },
    #[error("{}: {error}; save what `kubectl get nodes,pods -A -o json` prints, whole", named(.path))]
    Json {
        path: PathBuf,
        error: serde_json::Error,
    },
    #[error("{}: item {item} ({kind}): {error}", named(.path))]
    Item {
        path: PathBuf,
        item: usize,
        kind: String,
        error: serde_json::Error,
    },
    #[error(
        "{}: item {item} has no `kind`; save what `kubectl get nodes,pods -A -o yaml` prints, whole",
        named(.path)
    )]
    NoKind { path: PathBuf, item: usize },
    #[error("{}: the list has no `kind`, which is its last line: the file is cut off; save what `kubectl get nodes,pods -A -o yaml` prints, whole", named(.path))]
    CutOff { path: PathBuf },
    #[error("{} has no nodes; save what `kubectl get nodes,pods -A -o yaml` prints", named(.path))]
    NoNodes { path: PathBuf },
}

fn named(path: &Path) -> Cow<'_, str> {
    if path == Path::new("-") {
        "standard input".into()
    } else {
        path.to_string_lossy()
    }
}

/// The text of a dump. Its objects are parsed one at a time: sixteen thousand parsed pods would be most of this process'
/// memory.
#[derive(Debug)]
pub struct Dump {
    path: PathBuf,
    text: String,
}

/// Objects of a dump that `plan capacity` reads.
#[derive(Debug, Default)]
pub struct DumpContents {
    pub pods: Vec<Pod>,
    pub nodes: Vec<Node>,
    pub namespaces: NamespaceLabels,
}

enum DumpObject {
    Node(Box<Node>),
    Pod(Box<Pod>),
    Budget(Box<PodDisruptionBudget>),
    Namespace(Box<Namespace>),
    Slice(Box<ResourceSlice>),
    Claim(Box<PersistentVolumeClaim>),
    Volume(Box<PersistentVolume>),
    StorageClass(Box<StorageClass>),
}

impl Dump {
    /// `-` is standard input.
    pub fn read(path: &Path) -> Result<Self, DumpError> {
        let text = match path == Path::new(STANDARD_INPUT) {
            true => io::read_to_string(io::stdin().lock()),
            false => std::fs::read_to_string(path),
        };
        match text {
            Ok(text) => Ok(Self::from_text(text, path)),
            Err(error) => Err(DumpError::Read {
                path: path.into(),
                error,
            }),
        }
    }

    /// Makes a dump of `text`; `path` appears only in errors.
    pub fn from_text(text: String, path: &Path) -> Self {
        Self {
            path: path.into(),
            text,
        }
    }

    /// The pod of that name, as the dump shows it.
    pub fn pod(&self, key: &PodKey) -> Result<Option<Pod>, DumpError> {
        let mut found = None;
        let is_it = |pod: &Pod| objects::identity(pod).is_ok_and(|(_, named)| named == *key);
        self.for_each_object(|object| match object {
            DumpObject::Pod(pod) if is_it(&pod) => found = Some(*pod),
            _ => {}
        })?;
        Ok(found)
    }

    /// What makes each pod again, such as `Deployment team-a/llama`. Pods that nothing makes again are not in it.
    pub fn workloads(&self) -> Result<BTreeMap<PodKey, String>, DumpError> {
        let mut found = BTreeMap::new();
        self.for_each_object(|object| {
            if let DumpObject::Pod(pod) = object
                && let Ok((_, key)) = objects::identity(&pod)
                && let Some((kind, name)) = objects::workload(&pod)
            {
                let named = printable(&format!("{kind} {}/{name}", key.namespace));
                found.insert(key, named);
            }
        })?;
        Ok(found)
    }

    /// Every pod that requests a GPU, every node, and the labels of namespaces.
    pub fn contents(&self) -> Result<DumpContents, DumpError> {
        let mut found = DumpContents::default();
        self.for_each_object(|object| match object {
            DumpObject::Pod(pod)
                if objects::asks_for_gpu(&pod) || objects::uses_claims_only(&pod) =>
            {
                found.pods.push(*pod);
            }
            DumpObject::Node(node) => found.nodes.push(*node),
            DumpObject::Namespace(namespace) => {
                let metadata = namespace.metadata;
                let labels = Arc::new(metadata.labels.unwrap_or_default());
                found
                    .namespaces
                    .extend(metadata.name.map(|name| (name, labels)));
            }
            _ => {}
        })?;
        Ok(found)
    }

    /// Every object as it stands in the dump, in its order and one at a time, for readers of kinds or fields that nothing else
    /// reads. What `visit` cannot parse is the dump's error.
    pub fn for_each_raw(
        &self,
        mut visit: impl FnMut(&str, DumpItem<'_>) -> Result<(), serde_json::Error>,
    ) -> Result<(), DumpError> {
        let mut item = 0;
        let mut visit = |kind: Option<&str>, source: DumpItem<'_>| {
            let kind = kind.ok_or_else(|| DumpError::NoKind {
                path: self.path.clone(),
                item,
            })?;
            visit(kind, source).map_err(|error| DumpError::Item {
                path: self.path.clone(),
                item,
                kind: kind.into(),
                error,
            })?;
            item += 1;
            Ok(())
        };
        match self.text.trim_start().starts_with('{') {
            true => self.for_each_json_item(&mut visit),
            false => self.for_each_yaml_item(&mut visit),
        }
    }

    fn for_each_object(&self, mut visit: impl FnMut(DumpObject)) -> Result<(), DumpError> {
        self.for_each_raw(|kind, source| {
            DumpObject::parse(kind, source)?.map(&mut visit);
            Ok(())
        })
    }

    /// A `List`, or several documents.
    fn for_each_json_item(&self, visit: &mut VisitItem<'_>) -> Result<(), DumpError> {
        #[derive(serde::Deserialize)]
        struct Document<'a> {
            kind: Option<Cow<'a, str>>,
            #[serde(borrow)]
            items: Option<Vec<&'a RawValue>>,
        }
        let json = |error| DumpError::Json {
            path: self.path.clone(),
            error,
        };
        for raw in serde_json::Deserializer::from_str(&self.text).into_iter::<&RawValue>() {
            let raw = raw.map_err(json)?;
            let document: Document<'_> = serde_json::from_str(raw.get()).map_err(json)?;
            for raw in document.items.unwrap_or_else(|| vec![raw]) {
                let Document { kind, .. } = serde_json::from_str(raw.get()).map_err(json)?;
                visit(kind.as_deref(), DumpItem::Text(raw.get()))?;
            }
        }
        Ok(())
    }

    /// A `List`, or several documents.
    fn for_each_yaml_item(&self, visit: &mut VisitItem<'_>) -> Result<(), DumpError> {
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! { max_events: MAX_YAML_EVENTS, max_nodes: MAX_YAML_EVENTS },
        };
        let documents: Vec<Value> = serde_saphyr::from_multiple_with_options(&self.text, options)
            .map_err(|error| DumpError::Yaml {
            path: self.path.clone(),
            error: Box::new(error),
        })?;
        let is_cut_off = |one: &Value| one.get("items").is_some() && one.get("kind").is_none();
        if documents.iter().any(is_cut_off) {
            let path = self.path.clone();
            return Err(DumpError::CutOff { path });
        }
        let items = documents.into_iter().flat_map(|mut document| {
            match document.get_mut("items").map(Value::take) {
                Some(Value::Array(items)) => items,
                _ => vec![document],
            }
        });
        for value in items {
            let kind = value.get("kind").and_then(Value::as_str);
            visit(kind, DumpItem::Value(&value))?;
        }
        Ok(())
    }
}

type VisitItem<'a> = dyn FnMut(Option<&str>, DumpItem<'_>) -> Result<(), DumpError> + 'a;

impl DumpObject {
    /// `None` for kinds that are not needed.
    fn parse(kind: &str, source: DumpItem<'_>) -> Result<Option<Self>, serde_json::Error> {
        Ok(Some(match kind {
            "Node" => Self::Node(source.parse()?),
            "Pod" => Self::Pod(source.parse()?),
            "PodDisruptionBudget" => Self::Budget(source.parse()?),
            "Namespace" => Self::Namespace(source.parse()?),
            "PersistentVolumeClaim" => Self::Claim(source.parse()?),
            "PersistentVolume" => Self::Volume(source.parse()?),
            "StorageClass" => Self::StorageClass(source.parse()?),
            "ResourceSlice" => Self::Slice(source.parse()?),
            _ => return Ok(None),
        }))
    }
}

/// One object of a dump, not parsed yet.
#[derive(Debug, Clone, Copy)]
pub enum DumpItem<'a> {
    Text(&'a str),
    Value(&'a Value),
}

impl<'a> DumpItem<'a> {
    /// Strings of the type may be borrowed (`Cow`).
    pub fn parse<T: Deserialize<'a>>(self) -> Result<T, serde_json::Error> {
        match self {
            Self::Text(text) => serde_json::from_str(text),
            Self::Value(value) => T::deserialize(value),
        }
    }
}

/// Adds nodes, and the devices that DRA drivers publish for them, to the ledger, and nothing else.
pub fn load_nodes(nodes: &[Node], slices: &[ResourceSlice], state: &ServerState) {
    let mut index = ClusterIndex::default();
    index.begin_node_list();
    index.begin_slice_list(state);
    nodes.iter().for_each(|node| index.apply_node(state, node));
    for slice in slices {
        index.apply_slice(state, slice);
    }
    index.end_node_list(state);
    index.end_slice_list(state);
}

/// In-memory control plane of a dump: which pod is on which node.
pub struct DumpControlPlane {
    pods: Mutex<BTreeMap<PodKey, FreshPod>>,
    left_out: Vec<LeftOutPod>,
}

/// A pod that asks for a GPU and cannot be understood: no decision knows of it, and what it uses is not charged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOutPod {
    /// `NAMESPACE/NAME`, as the dump has it.
    pub pod: String,
    pub why: String,
}

impl LeftOutPod {
    /// `None` for a pod that the ledger has, or that is none of Stowage's.
    fn for_pod(pod: &Pod, state: &ServerState) -> Option<Self> {
        if !objects::asks_for_gpu(pod) || objects::is_finished(pod) {
            return None;
        }
        let why = match objects::identity(pod) {
            Ok((uid, _)) if state.cluster().ledger().pod_state(&uid).is_some() => return None,
            Ok(_) => objects::demand(pod, state.cluster().ledger().policy())
                .err()?
                .to_string(),
            Err(error) => error.to_string(),
        };
        let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
        let pod = [
            namespace.as_deref().unwrap_or("?"),
            name.as_deref().unwrap_or("?"),
        ]
        .join("/");
        // No API server has accepted the name.
        Some(Self {
            pod: printable(&pod),
            why,
        })
    }
}

/// Maximum number of pods that a warning names; the others are counted.
const MAX_LISTED_PODS: usize = 10;

/// `2 pods of the dump cannot be understood and are left out`, and a line for each; `None` without any.
pub fn left_out_text(left_out: &[LeftOutPod]) -> Option<String> {
    let (pods, are) = (plural(left_out.len(), "pod"), is_or_are(left_out.len()));
    let mut text = format!("{pods} of the dump cannot be understood and {are} left out:");
    for LeftOutPod { pod, why } in left_out.iter().take(MAX_LISTED_PODS) {
        text += &format!("\n  {pod}: {why}");
    }
    if let Some(more @ 1..) = left_out.len().checked_sub(MAX_LISTED_PODS) {
        text += &format!("\n  and {more} more");
    }
    (!left_out.is_empty()).then_some(text)
}

impl DumpControlPlane {
    /// Adds a dump to the ledger and lets this replica lead.
    pub fn load(
        dump: &Dump,
        state: &ServerState,
        index: &mut ClusterIndex,
    ) -> Result<Self, DumpError> {
        let (mut pods, mut left_out) = (BTreeMap::new(), Vec::new());
        let mut labelled_nodes = Vec::new();
        index.begin_node_list();
        index.begin_pod_list(state);
        index.begin_budget_list(state);
        index.begin_namespace_list();
        index.begin_slice_list(state);
        dump.for_each_object(|object| match object {
            DumpObject::Node(node) => {
                index.apply_node(state, &node);
                let has_labels = matches!(objects::devices_from_labels(&node), Ok(Some(_)));
                labelled_nodes.extend(has_labels.then_some(node));
            }
            DumpObject::Pod(pod) => {
                index.apply_pod(state, &pod);
                pods.extend(pod_on_record(&pod));
                left_out.extend(LeftOutPod::for_pod(&pod, state));
            }
            DumpObject::Budget(budget) => index.apply_budget(state, &budget),
            DumpObject::Namespace(namespace) => index.add_listed_namespace(&namespace.metadata),
            DumpObject::Claim(claim) => index.apply_storage(state, &*claim),
            DumpObject::Volume(volume) => index.apply_storage(state, &*volume),
            DumpObject::StorageClass(class) => index.apply_storage(state, &*class),
            DumpObject::Slice(slice) => drop(index.apply_slice(state, &slice)),
        })?;
        // No agent says which UUIDs a node's GPUs have, and the records of its pods do.
        let recorded = recorded_by_node(&pods);
        for node in labelled_nodes {
            let name = node.metadata.name.as_deref().unwrap_or_default();
            if let Some(recorded) = recorded.get(name) {
                index.apply_node_with_recorded(state, &node, recorded);
            }
        }
        index.end_node_list(state);
        index.end_pod_list(state);
        // A dump without budgets means that there are none.
        index.end_budget_list(state);
        // One without namespaces means that no selector takes any.
        state.record_namespaces(index.take_listed_namespaces());
        index.end_namespace_list();
        index.end_slice_list(state);
        if index.nodes().is_empty() {
            return Err(DumpError::NoNodes {
                path: dump.path.clone(),
            });
        }
        // Only after all objects are read: a pod may precede its node in the file.
        for event in index.current_warning_events(state) {
            info!(pod = %event.key, reason = event.kind.into_str(), "{}", event.text);
        }
        state.lead_from_the_start();
        Ok(Self {
            pods: Mutex::new(pods),
            left_out,
        })
    }

    /// In the order of the dump.
    pub fn left_out(&self) -> &[LeftOutPod] {
        &self.left_out
    }

    fn bind_now(&self, order: &BindOrder) -> BindOutcome {
        let mut pods = self.pods.lock();
        match pods.get_mut(&order.key) {
            None => BindOutcome::Refused {
                message: format!("pods \"{}\" not found", order.key),
            },
            Some(pod) if pod.uid != order.uid || pod.node.is_some() => BindOutcome::Conflict,
            Some(pod) => {
                pod.node = Some(order.placement.node.clone());
                pod.devices = order.placement.recorded_gpus();
                BindOutcome::Written
            }
        }
    }

    fn require_pod(&self, key: &PodKey, uid: &PodUid) -> Result<(), ControlPlaneError> {
        match self.pods.lock().get(key) {
            Some(pod) if pod.uid == *uid => Ok(()),
            _ => Err(ControlPlaneError::Gone),
        }
    }
}

fn recorded_by_node(pods: &BTreeMap<PodKey, FreshPod>) -> BTreeMap<&str, BTreeSet<GpuUuid>> {
    let mut found = BTreeMap::<&str, BTreeSet<GpuUuid>>::new();
    for pod in pods.values() {
        if let (Some(node), Some(devices)) = (&pod.node, &pod.devices) {
            let on_node = found.entry(node.as_str()).or_default();
            on_node.extend(devices.iter().cloned());
        }
    }
    found
}

fn pod_on_record(pod: &Pod) -> Option<(PodKey, FreshPod)> {
    if !objects::asks_for_gpu(pod) || objects::is_finished(pod) {
        return None;
    }
    let (uid, key) = objects::identity(pod).ok()?;
    let node = pod
        .spec
        .as_ref()
        .and_then(|spec| NodeName::parse(spec.node_name.as_deref()?).ok());
    let (devices, borrows) = (objects::recorded_devices(pod), objects::borrows(pod));
    let (has_started, is_over) = (
        objects::has_started(pod),
        pod.metadata.deletion_timestamp.is_some(),
    );
    Some((
        key,
        FreshPod {
            uid,
            node,
            devices,
            has_started,
            is_over,
            borrows,
            refusal: None,
        },
    ))
}

impl ControlPlane for DumpControlPlane {
    fn bind<'a>(&'a self, order: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        ready(self.bind_now(order)).boxed()
    }

    fn read_pod<'a>(
        &'a self,
        key: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<FreshPod>, ControlPlaneError>> {
        ready(Ok(self.pods.lock().get(key).cloned())).boxed()
    }

    /// kube-scheduler does not watch a dump: it is enough that the pod exists.
    fn write_status<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
        _: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        ready(self.require_pod(key, uid)).boxed()
    }

    /// Refuses: no watch would show the pod leaving, and its preemptor would wait forever.
    fn evict<'a>(
        &'a self,
        _: &'a PodKey,
        _: &'a PodUid,
        _: &'a EvictionReason,
        _: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome> {
        let message = "a dump has no kubelets: no pod can be evicted".into();
        ready(EvictionOutcome::Refused { message }).boxed()
    }

    fn remove_scheduling_gate<'a>(
        &'a self,
        key: &'a PodKey,
        uid: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        ready(self.require_pod(key, uid)).boxed()
    }

    /// There is no API server for Events, so they are logged.
    fn record_event(&self, event: PodEvent) {
        info!(pod = %event.key, reason = event.kind.into_str(), "{}", event.text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::units::Bytes;

    #[test]
    fn pods_that_cannot_be_understood_are_named_with_the_reason() {
        let pod = |name: &str, uid: &str, limits: &str| {
            format!(
                r#"{{"kind": "Pod", "metadata": {{"name": "{name}", "namespace": "x"{uid}}},
                    "spec": {{"containers": [{{"name": "c", "resources": {{"limits": {limits}}}}}]}}}}"#
            )
        };
        let items = [
            r#"{"kind": "Node", "metadata": {"name": "a"}}"#.to_owned(),
            pod("good", r#", "uid": "1""#, r#"{"stowage.dev/vram": "4Gi"}"#),
            pod(
                "fraction",
                r#", "uid": "2""#,
                r#"{"stowage.dev/vram": "1.5"}"#,
            ),
            pod("none-of-ours", r#", "uid": "3""#, r#"{"cpu": "1"}"#),
            pod("bare", "", r#"{"stowage.dev/vram": "4Gi"}"#),
        ];
        let text = format!(r#"{{"items": [{}]}}"#, items.join(","));
        let state = ServerState::new(Policy::default());
        let dump = Dump::from_text(text, Path::new("dump"));
        let loaded = DumpControlPlane::load(&dump, &state, &mut ClusterIndex::default()).unwrap();
        let text = left_out_text(loaded.left_out()).unwrap();
        assert!(
            text.starts_with("2 pods of the dump cannot be understood and are left out:\n"),
            "{text}"
        );
        assert!(
            text.contains("x/fraction: ") && text.contains("x/bare: "),
            "{text}"
        );
        assert_eq!(left_out_text(&[]), None);
        let many = vec![
            LeftOutPod {
                pod: "a/b".into(),
                why: "bad".into()
            };
            12
        ];
        assert!(left_out_text(&many).unwrap().ends_with("\n  and 2 more"));
    }

    #[test]
    fn objects_of_any_kind_are_read_as_they_stand_from_lists_and_from_documents() {
        #[derive(Deserialize)]
        struct Named<'a> {
            #[serde(borrow)]
            name: Cow<'a, str>,
        }
        let read = |text: &str| {
            let mut found = Vec::new();
            let dump = Dump::from_text(text.to_owned(), Path::new("dump"));
            dump.for_each_raw(|kind, item| {
                let named: Named<'_> = item.parse()?;
                found.push(format!("{kind} {}", named.name));
                Ok(())
            })
            .map(|()| found)
            .map_err(|error| error.to_string())
        };
        let both = ["A a", "B \"b\""].map(str::to_owned);
        for text in [
            r#"{"kind": "List", "items": [{"kind": "A", "name": "a"}, {"name": "\"b\"", "kind": "B"}]}"#,
            r#"{"items": [{"kind": "A", "name": "a"}]} {"kind": "B", "name": "\"b\""}"#,
            "kind: List\nitems: [{kind: A, name: a}, {kind: B, name: '\"b\"'}]\n",
            "kind: A\nname: a\n---\nkind: BList\nitems: [{kind: B, name: '\"b\"'}]\n",
        ] {
            assert_eq!(read(text).as_deref(), Ok(&both[..]), "{text}");
        }
        let wrong = |text, said: &str| {
            let error = read(text).unwrap_err();
            assert!(error.contains(said), "{error}");
        };
        wrong(r#"{"items": [{"kind": "A", "name"#, "EOF while parsing");
        wrong(
            r#"{"items": [{"kind": "A", "name": "a"}, {"kind": "B"}]}"#,
            "dump: item 1 (B): missing field `name`",
        );
        wrong("- a\n", "item 0 has no `kind`");
        wrong("apiVersion: v1\nitems:\n- kind: A\n  name: a\n", "cut off");
    }

    #[test]
    fn a_dump_brings_budgets_and_all_pods_along_and_one_without_budgets_has_none() {
        let node = r#"{"kind": "Node", "metadata": {"name": "a"}, "status": {"allocatable": {"pods": "9"}}}"#;
        let web = r#"{"kind": "Pod", "metadata": {"name": "web", "namespace": "x", "uid": "1"},
            "spec": {"nodeName": "a", "containers": []}}"#;
        let budget =
            r#"{"kind": "PodDisruptionBudget", "metadata": {"name": "web", "namespace": "x"}}"#;
        let load = |items: &[&str]| {
            let (state, mut index) = (ServerState::new(Policy::default()), ClusterIndex::default());
            let text = format!(r#"{{"items": [{}]}}"#, items.join(","));
            DumpControlPlane::load(
                &Dump::from_text(text, Path::new("dump")),
                &state,
                &mut index,
            )
            .unwrap();
            let budgets = state.cluster().ledger().budgets().len();
            assert!(index.synced_term().is_some() && state.cluster().ledger().are_budgets_known());
            (budgets, state.cluster().kube_filters().pods().count())
        };
        assert_eq!(load(&[node, web, budget]), (1, 1));
        assert_eq!(load(&[node]), (0, 0));
    }

    /// A node with so many GPUs of 80 GiB by its labels, and pods that are bound to it: name, GiB, recorded devices.
    fn load_bound(gpus: u32, bound: &[(&str, u32, &str)]) -> Vec<(String, Bytes)> {
        let node = format!(
            r#"{{"kind": "Node", "metadata": {{"name": "a", "labels": {{"nvidia.com/gpu.count": "{gpus}",
            "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}}},
            "status": {{"capacity": {{"stowage.dev/vram": "999Gi"}}, "allocatable": {{"stowage.dev/vram": "999Gi", "pods": "9"}}}}}}"#
        );
        let pod = |(name, gib, devices): &(&str, u32, &str)| {
            let gpus = devices.split(',').count();
            format!(
                r#"{{"kind": "Pod", "metadata": {{"name": "{name}", "namespace": "x", "uid": "{name}", "annotations":
                {{"stowage.dev/devices": "{devices}", "stowage.dev/vram-granted": "{gib}Gi", "stowage.dev/gpus": "{gpus}"}}}},
                "spec": {{"nodeName": "a", "containers": [{{"name": "c", "resources": {{"limits": {{"stowage.dev/vram": "{gib}Gi"}}}}}}]}},
                "status": {{"phase": "Running"}}}}"#
            )
        };
        let items: Vec<String> = bound.iter().map(pod).chain([node]).collect();
        let text = format!(r#"{{"items": [{}]}}"#, items.join(","));
        let state = ServerState::new(Policy::default());
        let dump = Dump::from_text(text, Path::new("dump"));
        DumpControlPlane::load(&dump, &state, &mut ClusterIndex::default()).unwrap();
        let cluster = state.cluster();
        let node = cluster
            .ledger()
            .node(&NodeName::parse("a").unwrap())
            .unwrap();
        let each = node.devices.iter().zip(node.gpus.iter());
        each.map(|(device, gpu)| (device.uuid.to_string(), gpu.charged))
            .collect()
    }

    #[test]
    fn a_pod_of_a_dump_is_charged_on_the_gpus_that_its_binding_records() {
        let gib = |uuid: &str, gib| (uuid.to_owned(), Bytes::gib(gib));
        let all_known = [("p", 40, "GPU-b"), ("q", 20, "GPU-b"), ("r", 10, "GPU-a")];
        assert_eq!(
            load_bound(2, &all_known),
            [gib("GPU-a", 10), gib("GPU-b", 60)]
        );
        let over_two = [("p", 40, "GPU-b,GPU-c"), ("q", 30, "GPU-b")];
        let left = GpuUuid::from_index(2).to_string();
        assert_eq!(
            load_bound(3, &over_two),
            [gib("GPU-b", 50), gib("GPU-c", 20), gib(&left, 0)]
        );
        // Bound by index, when no agent had reported.
        let by_index = format!("{}", GpuUuid::from_index(0));
        let both = [("p", 40, by_index.as_str()), ("q", 30, "GPU-b")];
        assert_eq!(load_bound(2, &both), [gib(&by_index, 40), gib("GPU-b", 30)]);
    }

    #[test]
    fn records_of_more_gpus_than_a_node_has_match_none_of_them() {
        let found = load_bound(1, &[("p", 40, "GPU-a"), ("q", 30, "GPU-b")]);
        assert_eq!(
            found,
            [(GpuUuid::from_index(0).to_string(), Bytes::gib(70))]
        );
    }
}
