//! Manifests as files have them: which pods their workloads make, and which nodes they show. A `List`, several YAML documents,
//! or JSON as kubectl prints it; a file, a directory of them, or standard input.
//!
//! [`workload`] knows how many pods each kind of workload makes. Nothing is sent to a cluster, and nothing is decided here.

mod workload;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stowage_scheduling::units::plural;
use workload::{PodTemplate, WorkloadPods};

/// The path that stands for standard input on the command line.
const STANDARD_INPUT: &str = "-";
/// Limit on YAML events, as high as for a dump: the file is the operator's own.
const MAX_YAML_EVENTS: usize = 200_000_000;
/// More GPU pods than the largest clusters run: a number of replicas beyond it is a slip. The time of a plan grows with its
/// square.
pub const MAX_PODS: usize = 20_000;
/// File extensions of manifests in a directory.
const FILE_EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];

/// Why manifests cannot be read. Each text names the file and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("{}: {error}; name a file or a directory of manifests, or pipe them in and write -", .path.display())]
    Read { path: PathBuf, error: io::Error },
    #[error("{}: no file in it ends in .yaml, .yml or .json; name the directory of the manifests", .path.display())]
    NoFiles { path: PathBuf },
    #[error("{file}: {error}")]
    Yaml {
        file: String,
        error: Box<serde_saphyr::Error>,
    },
    #[error("{file}: {error}")]
    Json {
        file: String,
        error: serde_json::Error,
    },
    #[error(
        "{file}: object {item} has no `kind`; each must be a Kubernetes object, such as a Deployment"
    )]
    NoKind { file: String, item: usize },
    #[error("{source_name}: {error}")]
    Object {
        source_name: String,
        error: serde_path_to_error::Error<serde_json::Error>,
    },
    #[error("{source_name}: {field} is {value}; write a whole number of at most {MAX_PODS}")]
    Count {
        source_name: String,
        field: &'static str,
        value: String,
    },
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
    /// Where its document begins; `None` in a list, whose items are not told apart by lines.
    line: Option<usize>,
    kind: String,
    value: Value,
}

/// Kind, namespace and name.
type Identity = (String, String, String);

/// How the pods of an object are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CountedBy {
    Itself,
    Owner,
    /// How many pods it makes is unknown, but the pods that it made are among the objects.
    MadePods,
}

/// A document of a file.
struct Document {
    line: Option<usize>,
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
    /// `FILE:LINE: KIND NAMESPACE/NAME`, without the line in a list.
    pub source: Arc<str>,
    /// Pods of the same number are equal in all but name.
    pub workload: usize,
    pub pod: Pod,
}

impl Manifests {
    /// A file, the files of a directory in order of name, or `-` for standard input.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let read_error = |path: &Path| {
            let path = path.to_owned();
            move |error| ManifestError::Read { path, error }
        };
        if path == Path::new(STANDARD_INPUT) {
            let text = io::read_to_string(io::stdin().lock()).map_err(read_error(path))?;
            return Self::parse(&text, "standard input");
        }
        if !path.is_dir() {
            let text = std::fs::read_to_string(path).map_err(read_error(path))?;
            return Self::parse(&text, &path.display().to_string());
        }
        let mut all = Self::default();
        let files = files_in(path).map_err(read_error(path))?;
        if files.is_empty() {
            return Err(ManifestError::NoFiles { path: path.into() });
        }
        for file in files {
            let text = std::fs::read_to_string(&file).map_err(read_error(&file))?;
            all.0
                .extend(Self::parse(&text, &file.display().to_string())?.0);
        }
        Ok(all)
    }

    /// `file` is only named in errors and sources.
    pub fn parse(text: &str, file: &str) -> Result<Self, ManifestError> {
        let name: Arc<str> = file.into();
        // A brace begins JSON, or a mapping of YAML in one line.
        let documents = match text.trim_start().starts_with('{') {
            true => json(text, file).or_else(|not_json| yaml(text, file).map_err(|_| not_json)),
            false => yaml(text, file),
        }?;
        let mut objects = Vec::new();
        let documents = documents.into_iter().flat_map(|Document { line, value }| {
            let is_list = value.get("items").is_some_and(Value::is_array);
            items(value)
                .into_iter()
                .map(move |item| (line.filter(|_| !is_list), item))
        });
        for (item, (line, value)) in documents.enumerate() {
            let kind = value.get("kind").and_then(Value::as_str).map(str::to_owned);
            let kind = kind.ok_or_else(|| ManifestError::NoKind {
                file: file.into(),
                item,
            })?;
            objects.push(ManifestObject {
                file: name.clone(),
                line,
                kind,
                value,
            });
        }
        Ok(Self(objects))
    }

    pub fn merge(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }

    /// The pods that the objects make, as a cluster would have them: with the priorities of their PriorityClasses, as far as
    /// those are among the objects. What a workload among them made is counted with that workload.
    pub fn pods(&self) -> Result<ManifestPods, ManifestError> {
        let priorities = self.priorities();
        let made = |object: &ManifestObject| {
            workload::templates(&object.kind, &object.value, &object.source())
        };
        let made: Vec<WorkloadPods> = self.0.iter().map(made).collect::<Result<_, _>>()?;
        let counted = self.counted_by(&made);
        let mut found = ManifestPods::default();
        let mut unknown_classes = BTreeSet::new();
        for ((object, made), counted) in self.0.iter().zip(made).zip(counted) {
            match made {
                WorkloadPods::Pods(templates) if counted == CountedBy::Itself => {
                    found.add(object, templates, &priorities, &mut unknown_classes)?;
                }
                WorkloadPods::LeftOut(why) if counted == CountedBy::Itself => {
                    found.warnings.push(format!("{}: {why}", object.source()));
                }
                WorkloadPods::Pods(_) | WorkloadPods::LeftOut(_) | WorkloadPods::Nothing => {}
            }
        }
        let unknown = unknown_classes.into_iter().map(|name| {
            format!("PriorityClass {name} is not among the manifests: its pods count with priority 0; add it, or set spec.priority")
        });
        found.warnings.extend(unknown);
        Ok(found)
    }

    /// The nodes among the objects, each with its file and name.
    pub fn nodes(&self) -> Result<Vec<(String, Node)>, ManifestError> {
        let nodes = self.0.iter().filter(|object| object.kind == "Node");
        nodes
            .map(|object| {
                Ok((
                    object.source(),
                    parsed(object.value.clone(), &object.source())?,
                ))
            })
            .collect()
    }

    fn priorities(&self) -> BTreeMap<&str, i64> {
        let classes = self
            .0
            .iter()
            .filter(|object| object.kind == "PriorityClass");
        let named = classes.filter_map(|class| {
            Some((
                class.value.pointer("/metadata/name")?.as_str()?,
                class.value.get("value")?.as_i64()?,
            ))
        });
        // Kubernetes' own two.
        let built_in = [
            ("system-cluster-critical", 2_000_000_000),
            ("system-node-critical", 2_000_001_000),
        ];
        built_in.into_iter().chain(named).collect()
    }

    /// How each object is counted. Owners are followed as far as they are present: the workers of a group belong to its leader's Pod,
    /// that to a StatefulSet, and that to the LeaderWorkerSet.
    fn counted_by(&self, made: &[WorkloadPods]) -> Vec<CountedBy> {
        let named = |(index, object): (usize, &ManifestObject)| (object.identity(), index);
        let indices: BTreeMap<Identity, usize> = self.0.iter().enumerate().map(named).collect();
        let makes_pods = |index: usize| {
            self.0[index].kind != "Pod" && matches!(made[index], WorkloadPods::Pods(_))
        };
        let mut counted = vec![CountedBy::Itself; self.0.len()];
        for start in 0..self.0.len() {
            let mut ancestors: Vec<usize> = Vec::new();
            let mut index = start;
            while let Some(owner) = self.0[index]
                .owners()
                .iter()
                .find_map(|owner| indices.get(owner))
            {
                // Owners in a circle are nobody's.
                if ancestors.contains(owner) || *owner == start {
                    break;
                }
                ancestors.push(*owner);
                index = *owner;
            }
            if ancestors.iter().any(|owner| makes_pods(*owner)) {
                counted[start] = CountedBy::Owner;
            } else if matches!(made[start], WorkloadPods::Pods(_)) {
                let unknown = ancestors
                    .into_iter()
                    .filter(|owner| matches!(made[*owner], WorkloadPods::LeftOut(_)));
                unknown.for_each(|owner| counted[owner] = CountedBy::MadePods);
            }
        }
        counted
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
            pod.metadata
                .namespace
                .get_or_insert_with(|| object.namespace());
            if let Some(spec) = pod.spec.as_mut().filter(|spec| spec.priority.is_none())
                && let Some(name) = spec.priority_class_name.clone()
            {
                spec.priority = priorities
                    .get(&*name)
                    .and_then(|value| i32::try_from(*value).ok());
                if spec.priority.is_none() {
                    unknown.insert(name);
                }
            }
            if self.pods.len() + template.names.len() > MAX_PODS {
                return Err(ManifestError::TooManyPods {
                    source_name: source.to_string(),
                });
            }
            for name in template.names {
                let mut pod = pod.clone();
                pod.metadata.name = Some(name);
                self.pods.push(ManifestPod {
                    source: source.clone(),
                    workload,
                    pod,
                });
            }
        }
        Ok(())
    }
}

impl ManifestObject {
    fn source(&self) -> String {
        let line = self
            .line
            .map_or_else(String::new, |line| format!(":{line}"));
        format!(
            "{}{line}: {} {}/{}",
            self.file,
            self.kind,
            self.namespace(),
            self.name()
        )
    }

    fn identity(&self) -> Identity {
        (self.kind.clone(), self.namespace(), self.name())
    }

    fn text(&self, pointer: &str) -> Option<&str> {
        self.value.pointer(pointer)?.as_str()
    }

    fn name(&self) -> String {
        let name = self
            .text("/metadata/name")
            .or_else(|| self.text("/metadata/generateName"));
        name.unwrap_or("unnamed").to_owned()
    }

    fn namespace(&self) -> String {
        self.text("/metadata/namespace")
            .unwrap_or("default")
            .to_owned()
    }

    /// What made it; the nearest first. The ReplicaSet between a pod and its Deployment is named after both, `NAME-HASH`, and
    /// often not there.
    fn owners(&self) -> Vec<Identity> {
        self.named_owners().unwrap_or_default()
    }

    fn named_owners(&self) -> Option<Vec<Identity>> {
        let owners = self
            .value
            .pointer("/metadata/ownerReferences")?
            .as_array()?;
        let owner = owners
            .iter()
            .find(|owner| owner.get("controller").and_then(Value::as_bool) == Some(true))?;
        let (kind, name) = (owner.get("kind")?.as_str()?, owner.get("name")?.as_str()?);
        let deployment = self
            .text("/metadata/labels/pod-template-hash")
            .filter(|_| kind == "ReplicaSet");
        let deployment = deployment.and_then(|hash| name.strip_suffix(hash)?.strip_suffix('-'));
        let owner = (kind.into(), self.namespace(), name.into());
        let deployment =
            deployment.map(|name| ("Deployment".into(), self.namespace(), name.into()));
        Some([Some(owner), deployment].into_iter().flatten().collect())
    }
}

fn files_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths = entries.collect::<io::Result<Vec<PathBuf>>>()?;
    let ends = |path: &PathBuf| {
        path.extension()
            .is_some_and(|ending| FILE_EXTENSIONS.iter().any(|extension| ending == *extension))
    };
    paths.retain(|path| ends(path) && path.is_file());
    paths.sort();
    Ok(paths)
}

fn json(text: &str, file: &str) -> Result<Vec<Document>, ManifestError> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let (mut documents, mut line, mut counted) = (Vec::new(), 1, 0);
    loop {
        let remaining = &text[values.byte_offset()..];
        let start = text.len() - remaining.trim_start().len();
        line += text[counted..start].matches('\n').count();
        counted = start;
        match values.next() {
            None => return Ok(documents),
            Some(Ok(value)) => documents.push(Document {
                line: Some(line),
                value,
            }),
            Some(Err(error)) => {
                return Err(ManifestError::Json {
                    file: file.into(),
                    error,
                });
            }
        }
    }
}

fn yaml(text: &str, file: &str) -> Result<Vec<Document>, ManifestError> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_events: MAX_YAML_EVENTS, max_nodes: MAX_YAML_EVENTS },
    };
    let values: Vec<Value> =
        serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
            ManifestError::Yaml {
                file: file.into(),
                error: Box::new(error),
            }
        })?;
    let values: Vec<Value> = values
        .into_iter()
        .filter(|value| !value.is_null())
        .collect();
    let lines = document_lines(text);
    // A document such as `null` is nothing to the parser: no line is better than a wrong one.
    let is_sure = lines.len() == values.len();
    let line = |index: usize| lines.get(index).copied().filter(|_| is_sure);
    Ok(values
        .into_iter()
        .enumerate()
        .map(|(index, value)| Document {
            line: line(index),
            value,
        })
        .collect())
}

/// The lines on which documents of YAML begin that have more than comments.
fn document_lines(text: &str) -> Vec<usize> {
    let (mut lines, mut is_open) = (Vec::new(), false);
    for (index, line) in text.lines().enumerate() {
        let marker = line
            .strip_prefix("---")
            .or_else(|| line.strip_prefix("..."));
        let after = marker.filter(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace));
        is_open &= after.is_none();
        let content = after.unwrap_or(line).trim();
        if !is_open && !content.is_empty() && !content.starts_with(['#', '%']) {
            is_open = true;
            lines.push(index + 1);
        }
    }
    lines
}

/// The objects of a list and of lists in it, or the object itself; none of an empty document. An API server leaves the kind out of
/// the items of a `PodList`.
fn items(mut document: Value) -> Vec<Value> {
    let kind = document
        .get("kind")
        .and_then(Value::as_str)
        .unwrap_or("List");
    let item_kind = kind.strip_suffix("List").map(str::to_owned);
    match document.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => {
            let with_kind = |mut item: Value| {
                if let (Some(kind), Some(fields)) = (item_kind.as_deref(), item.as_object_mut())
                    && !kind.is_empty()
                {
                    fields.entry("kind").or_insert_with(|| kind.into());
                }
                item
            };
            items
                .into_iter()
                .map(with_kind)
                .flat_map(self::items)
                .collect()
        }
        _ if document.is_null() => Vec::new(),
        _ => vec![document],
    }
}

/// Deserializes an object; an error names the field.
fn parsed<T: DeserializeOwned>(value: Value, source: &str) -> Result<T, ManifestError> {
    let error = |error| ManifestError::Object {
        source_name: source.into(),
        error,
    };
    serde_path_to_error::deserialize(value).map_err(error)
}

#[cfg(test)]
mod tests;
