//! Manifests as files have them: which pods their workloads make, and which nodes they show. A `List`, several YAML documents,
//! or JSON as kubectl prints it; a file, a directory of them, or standard input.
//!
//! [`workload`] knows how many pods each kind of workload makes. Nothing is sent to a cluster, and nothing is decided here.

mod workload;

use crate::units::plural;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use workload::PodTemplate;

/// The path that stands for standard input on the command line.
const STANDARD_INPUT: &str = "-";
/// As for a dump: the file is the operator's own.
const MAX_YAML_EVENTS: usize = 200_000_000;
/// More than the largest clusters run: a number of replicas beyond it is a slip.
const MAX_PODS: usize = 100_000;
/// Endings of manifests in a directory.
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

/// Why manifests cannot be read. Each text names the file and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("{}: {error}; name a file or a directory of manifests, or pipe them in and write -", .path.display())]
    Read { path: PathBuf, error: io::Error },
    #[error("{}: no file in it ends in .yaml, .yml or .json; name the directory of the manifests", .path.display())]
    NoFiles { path: PathBuf },
    #[error("{file}: {error}")]
    Yaml { file: String, error: Box<serde_saphyr::Error> },
    #[error("{file}: {error}")]
    Json { file: String, error: serde_json::Error },
    #[error("{file}: object {item} has no `kind`; each must be a Kubernetes object, such as a Deployment")]
    NoKind { file: String, item: usize },
    #[error("{source_name}: {error}")]
    Object { source_name: String, error: serde_path_to_error::Error<serde_json::Error> },
    #[error("{source_name}: {field} is {value}; write a whole number of at most {MAX_PODS}")]
    Count { source_name: String, field: &'static str, value: String },
    #[error(
        "{source_name}: these would be more than {}; is the number of replicas right?",
        plural(MAX_PODS, "pod")
    )]
    TooManyPods { source_name: String },
}

/// The objects of some manifests, in order.
#[derive(Debug, Default)]
pub struct Manifests(Vec<ManifestObject>);

#[derive(Debug)]
struct ManifestObject {
    file: Arc<str>,
    kind: String,
    value: Value,
}

/// The pods that manifests make, and what was passed over.
#[derive(Debug, Default)]
pub struct ManifestPods {
    pub pods: Vec<ManifestPod>,
    /// Each for people, with the file and the object.
    pub warnings: Vec<String>,
}

/// One pod that a manifest makes.
#[derive(Debug)]
pub struct ManifestPod {
    /// `FILE: KIND NAMESPACE/NAME`.
    pub source: Arc<str>,
    /// Pods of the same number are equal in all but name.
    pub workload: usize,
    pub pod: Pod,
}

impl Manifests {
    /// A file, the files of a directory in order of name, or `-` for standard input.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let unreadable = |path: &Path| {
            let path = path.to_owned();
            move |error| ManifestError::Read { path, error }
        };
        if path == Path::new(STANDARD_INPUT) {
            let text = io::read_to_string(io::stdin().lock()).map_err(unreadable(path))?;
            return Self::of(&text, "standard input");
        }
        if !path.is_dir() {
            let text = std::fs::read_to_string(path).map_err(unreadable(path))?;
            return Self::of(&text, &path.display().to_string());
        }
        let mut all = Self::default();
        let files = files_in(path).map_err(unreadable(path))?;
        if files.is_empty() {
            return Err(ManifestError::NoFiles { path: path.into() });
        }
        for file in files {
            let text = std::fs::read_to_string(&file).map_err(unreadable(&file))?;
            all.0.extend(Self::of(&text, &file.display().to_string())?.0);
        }
        Ok(all)
    }

    /// `file` is only named in errors and sources.
    pub fn of(text: &str, file: &str) -> Result<Self, ManifestError> {
        let name: Arc<str> = file.into();
        // A brace begins JSON, or a mapping of YAML in one line.
        let documents = match text.trim_start().starts_with('{') {
            true => json(text, file).or_else(|not_json| yaml(text, file).map_err(|_| not_json)),
            false => yaml(text, file),
        }?;
        let mut objects = Vec::new();
        for (item, value) in documents.into_iter().flat_map(items).enumerate() {
            let kind = value.get("kind").and_then(Value::as_str).map(str::to_owned);
            let kind = kind.ok_or_else(|| ManifestError::NoKind { file: file.into(), item })?;
            objects.push(ManifestObject { file: name.clone(), kind, value });
        }
        Ok(Self(objects))
    }

    pub fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// The pods that the objects make, as a cluster would have them: with the priorities of their PriorityClasses, as far as
    /// those are among the objects. A pod whose workload is there too is counted with it.
    pub fn pods(&self) -> Result<ManifestPods, ManifestError> {
        let (priorities, owners) = (self.priorities(), self.owners());
        let mut found = ManifestPods::default();
        let mut unknown = BTreeSet::new();
        for object in &self.0 {
            if object.owner().is_some_and(|owner| owners.contains(&owner)) {
                continue;
            }
            match workload::templates(&object.kind, &object.value, &object.source())? {
                workload::Made::Pods(templates) => found.add(object, templates, &priorities, &mut unknown)?,
                workload::Made::Nothing => {}
                workload::Made::Unknown(why) => found.warnings.push(format!("{}: {why}", object.source())),
            }
        }
        let unknown = unknown.into_iter().map(|name| {
            format!("PriorityClass {name} is not among the manifests: its pods count with priority 0; add it, or set spec.priority")
        });
        found.warnings.extend(unknown);
        Ok(found)
    }

    /// The nodes among the objects, each with its file and name.
    pub fn nodes(&self) -> Result<Vec<(String, Node)>, ManifestError> {
        let nodes = self.0.iter().filter(|object| object.kind == "Node");
        nodes.map(|object| Ok((object.source(), parsed(object.value.clone(), &object.source())?))).collect()
    }

    fn priorities(&self) -> BTreeMap<&str, i64> {
        let classes = self.0.iter().filter(|object| object.kind == "PriorityClass");
        let named = classes.filter_map(|class| {
            Some((class.value.pointer("/metadata/name")?.as_str()?, class.value.get("value")?.as_i64()?))
        });
        // Kubernetes' own two.
        let own = [("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)];
        own.into_iter().chain(named).collect()
    }

    /// Kind, namespace and name of all objects that make pods.
    fn owners(&self) -> BTreeSet<(String, String, String)> {
        let makes_pods = |object: &&ManifestObject| object.kind != "Pod";
        self.0
            .iter()
            .filter(makes_pods)
            .map(|object| (object.kind.clone(), object.namespace(), object.name()))
            .collect()
    }
}

impl ManifestPods {
    fn add(
        &mut self,
        object: &ManifestObject,
        templates: Vec<PodTemplate>,
        priorities: &BTreeMap<&str, i64>,
        unknown: &mut BTreeSet<String>,
    ) -> Result<(), ManifestError> {
        let source: Arc<str> = object.source().into();
        for template in templates {
            let workload = self.pods.last().map_or(0, |last| last.workload + 1);
            let mut pod: Pod = parsed(template.pod, &source)?;
            pod.metadata.namespace.get_or_insert_with(|| object.namespace());
            if let Some(spec) = pod.spec.as_mut().filter(|spec| spec.priority.is_none())
                && let Some(name) = spec.priority_class_name.clone()
            {
                spec.priority = priorities.get(&*name).and_then(|value| i32::try_from(*value).ok());
                if spec.priority.is_none() {
                    unknown.insert(name);
                }
            }
            if self.pods.len() + template.names.len() > MAX_PODS {
                return Err(ManifestError::TooManyPods { source_name: source.to_string() });
            }
            for name in template.names {
                let mut pod = pod.clone();
                pod.metadata.name = Some(name);
                self.pods.push(ManifestPod { source: source.clone(), workload, pod });
            }
        }
        Ok(())
    }
}

impl ManifestObject {
    fn source(&self) -> String {
        format!("{}: {} {}/{}", self.file, self.kind, self.namespace(), self.name())
    }

    fn text(&self, pointer: &str) -> Option<&str> {
        self.value.pointer(pointer)?.as_str()
    }

    fn name(&self) -> String {
        let name = self.text("/metadata/name").or_else(|| self.text("/metadata/generateName"));
        name.unwrap_or("unnamed").to_owned()
    }

    fn namespace(&self) -> String {
        self.text("/metadata/namespace").unwrap_or("default").to_owned()
    }

    /// What made it. The ReplicaSet between a pod and its Deployment is named after both: `NAME-HASH`.
    fn owner(&self) -> Option<(String, String, String)> {
        let owners = self.value.pointer("/metadata/ownerReferences")?.as_array()?;
        let owner =
            owners.iter().find(|owner| owner.get("controller").and_then(Value::as_bool) == Some(true))?;
        let (kind, name) = (owner.get("kind")?.as_str()?, owner.get("name")?.as_str()?);
        let deployment = self.text("/metadata/labels/pod-template-hash").filter(|_| kind == "ReplicaSet");
        let deployment = deployment.and_then(|hash| name.strip_suffix(hash)?.strip_suffix('-'));
        Some(match deployment {
            Some(deployment) => ("Deployment".into(), self.namespace(), deployment.into()),
            None => (kind.into(), self.namespace(), name.into()),
        })
    }
}

fn files_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<io::Result<Vec<PathBuf>>>()?;
    let ends =
        |path: &PathBuf| path.extension().is_some_and(|ending| ENDINGS.iter().any(|known| ending == *known));
    paths.retain(|path| ends(path) && path.is_file());
    paths.sort();
    Ok(paths)
}

fn json(text: &str, file: &str) -> Result<Vec<Value>, ManifestError> {
    let values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    values.collect::<Result<_, _>>().map_err(|error| ManifestError::Json { file: file.into(), error })
}

fn yaml(text: &str, file: &str) -> Result<Vec<Value>, ManifestError> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_events: MAX_YAML_EVENTS, max_nodes: MAX_YAML_EVENTS },
    };
    serde_saphyr::from_multiple_with_options(text, options)
        .map_err(|error| ManifestError::Yaml { file: file.into(), error: Box::new(error) })
}

/// The objects of a list, or the object itself; none of an empty document.
fn items(mut document: Value) -> Vec<Value> {
    match document.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => items,
        _ if document.is_null() => Vec::new(),
        _ => vec![document],
    }
}

/// An error names the field.
fn parsed<T: DeserializeOwned>(value: Value, source: &str) -> Result<T, ManifestError> {
    let error = |error| ManifestError::Object { source_name: source.into(), error };
    serde_path_to_error::deserialize(value).map_err(error)
}

#[cfg(test)]
mod tests;
