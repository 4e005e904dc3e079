//! How many pods a workload makes, and from which template. Kinds that are not listed here count if they are shaped like a
//! Deployment: `spec.replicas` and `spec.template`.

use super::{MAX_PODS, ManifestError};
use serde_json::{Value, json};

/// Pods of one template, by their names.
pub(crate) struct PodTemplate {
    /// A Pod without a name.
    pub pod: Value,
    pub names: Vec<String>,
}

/// The pods that an object makes.
pub enum WorkloadPods {
    Pods(Vec<PodTemplate>),
    Nothing,
    /// Not counted, with the reason for people: it runs no pods now, or how many is unknown.
    LeftOut(&'static str),
}

/// The pods that an object of this kind makes.
pub(crate) fn templates(
    kind: &str,
    object: &Value,
    source: &str,
) -> Result<WorkloadPods, ManifestError> {
    let spec = object.get("spec").unwrap_or(&Value::Null);
    let name = ["/metadata/name", "/metadata/generateName"]
        .iter()
        .find_map(|at| object.pointer(at)?.as_str());
    let name = name.unwrap_or("unnamed");
    let count = |from: &Value, field: &'static str| count(from, field, source);
    if let ("Job" | "JobSet" | "CronJob", Some(why)) = (kind, reason_without_pods(object, spec)) {
        return Ok(if asks_for_gpu(object) {
            WorkloadPods::LeftOut(why)
        } else {
            WorkloadPods::Nothing
        });
    }
    Ok(match kind {
        "Pod" => WorkloadPods::Pods(vec![PodTemplate {
            pod: object.clone(),
            names: vec![name.into()],
        }]),
        "Job" => WorkloadPods::Pods(vec![job_template(spec, name, source)?]),
        "CronJob" => {
            let job = spec.pointer("/jobTemplate/spec").unwrap_or(&Value::Null);
            WorkloadPods::Pods(vec![job_template(job, name, source)?])
        }
        "JobSet" => WorkloadPods::Pods(job_set_templates(spec, name, source)?),
        "LeaderWorkerSet" => WorkloadPods::Pods(leader_worker_set_templates(spec, name, source)?),
        "DaemonSet" if asks_for_gpu(object) => WorkloadPods::LeftOut(
            "a DaemonSet has a pod on each node, and is left out; count its GPUs out of the nodes",
        ),
        "DaemonSet" => WorkloadPods::Nothing,
        _ if spec.pointer("/template/spec/containers").is_some() => {
            let replicas = count(spec, "replicas")?.unwrap_or(1);
            WorkloadPods::Pods(vec![PodTemplate {
                pod: pod_from_template(&spec["template"]),
                names: numbered(name, replicas),
            }])
        }
        _ if asks_for_gpu(object) => WorkloadPods::LeftOut(
            "how many pods its controller makes is not known here, and it is left out; plan from a dump of a cluster where it runs \
             (--cluster), or write its pods as a Deployment",
        ),
        _ => WorkloadPods::Nothing,
    })
}

/// Why a Job runs no pod.
fn reason_without_pods(object: &Value, spec: &Value) -> Option<&'static str> {
    let conditions = object
        .pointer("/status/conditions")
        .and_then(Value::as_array);
    let is_end = |condition: &Value| {
        let text_of = |field: &str| condition.get(field).and_then(Value::as_str);
        matches!(text_of("type"), Some("Complete" | "Completed" | "Failed"))
            && text_of("status") == Some("True")
    };
    if conditions.into_iter().flatten().any(is_end) {
        Some("it has ended, and is left out")
    } else if spec.get("suspend").and_then(Value::as_bool) == Some(true) {
        Some("it is suspended, and is left out; take spec.suspend out to plan it")
    } else {
        None
    }
}

/// Template of a Job, with as many pods as run at once.
fn job_template(spec: &Value, name: &str, source: &str) -> Result<PodTemplate, ManifestError> {
    let parallelism = count(spec, "parallelism", source)?.unwrap_or(1);
    let completions = count(spec, "completions", source)?.unwrap_or(parallelism);
    let pod = pod_from_template(spec.get("template").unwrap_or(&Value::Null));
    Ok(PodTemplate {
        pod,
        names: numbered(name, parallelism.min(completions)),
    })
}

fn job_set_templates(
    spec: &Value,
    name: &str,
    source: &str,
) -> Result<Vec<PodTemplate>, ManifestError> {
    let jobs = spec
        .get("replicatedJobs")
        .and_then(Value::as_array)
        .map_or(&[][..], Vec::as_slice);
    let templates_of_job = |job: &Value| {
        let replicas = count(job, "replicas", source)?.unwrap_or(1);
        let job_name = job.get("name").and_then(Value::as_str).unwrap_or("job");
        let template = job_template(
            job.pointer("/template/spec").unwrap_or(&Value::Null),
            job_name,
            source,
        )?;
        checked_count(
            "replicas",
            (replicas as u64).saturating_mul(template.names.len() as u64),
            source,
        )?;
        let names = (0..replicas).flat_map(|replica| {
            template
                .names
                .iter()
                .map(move |pod| format!("{name}-{replica}-{pod}"))
        });
        Ok(PodTemplate {
            names: names.collect(),
            pod: template.pod,
        })
    };
    jobs.iter().map(templates_of_job).collect()
}

/// A leader and its workers in each group; without a template of its own the leader is like a worker.
fn leader_worker_set_templates(
    spec: &Value,
    name: &str,
    source: &str,
) -> Result<Vec<PodTemplate>, ManifestError> {
    let group = spec.get("leaderWorkerTemplate").unwrap_or(&Value::Null);
    let (replicas, size) = (
        count(spec, "replicas", source)?.unwrap_or(1),
        count(group, "size", source)?.unwrap_or(1),
    );
    checked_count(
        "size",
        (replicas as u64).saturating_mul(size as u64),
        source,
    )?;
    let worker = group.get("workerTemplate").unwrap_or(&Value::Null);
    let leader = group.get("leaderTemplate").unwrap_or(worker);
    let leaders = (0..replicas)
        .filter(|_| size > 0)
        .map(|group| format!("{name}-{group}"));
    let workers = (0..replicas)
        .flat_map(|group| (1..size).map(move |index| format!("{name}-{group}-{index}")));
    Ok(vec![
        PodTemplate {
            pod: pod_from_template(leader),
            names: leaders.collect(),
        },
        PodTemplate {
            pod: pod_from_template(worker),
            names: workers.collect(),
        },
    ])
}

fn pod_from_template(template: &Value) -> Value {
    let part = |name: &str| template.get(name).cloned().unwrap_or_else(|| json!({}));
    json!({ "metadata": part("metadata"), "spec": part("spec") })
}

fn numbered(name: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|number| format!("{name}-{number}"))
        .collect()
}

/// A number of pods in a field, at most `MAX_PODS`; `None` if the field is absent.
fn count(from: &Value, field: &'static str, source: &str) -> Result<Option<usize>, ManifestError> {
    let Some(value) = from.get(field).filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    let bad = || ManifestError::Count {
        source_name: source.into(),
        field,
        value: value.to_string(),
    };
    let count = value.as_u64().ok_or_else(bad)?;
    checked_count(field, count, source).map(Some)
}

fn checked_count(field: &'static str, count: u64, source: &str) -> Result<usize, ManifestError> {
    let bad = || ManifestError::Count {
        source_name: source.into(),
        field,
        value: count.to_string(),
    };
    usize::try_from(count)
        .ok()
        .filter(|count| *count <= MAX_PODS)
        .ok_or_else(bad)
}

/// Whether anything in it names a GPU's resource: one that is known by its name, or any of NVIDIA's where resources are listed.
/// Elsewhere such names are those of labels.
fn asks_for_gpu(value: &Value) -> bool {
    let is_gpu = |key: &str| {
        key == "stowage.dev/vram" || key == "nvidia.com/gpu" || key.starts_with("nvidia.com/mig-")
    };
    let lists_gpu = |field: &str, value: &Value| {
        matches!(field, "limits" | "requests" | "resources")
            && value
                .as_object()
                .is_some_and(|amounts| amounts.keys().any(|key| key.starts_with("nvidia.com/")))
    };
    match value {
        Value::Object(fields) => fields
            .iter()
            .any(|(key, value)| is_gpu(key) || lists_gpu(key, value) || asks_for_gpu(value)),
        Value::Array(items) => items.iter().any(asks_for_gpu),
        _ => false,
    }
}
