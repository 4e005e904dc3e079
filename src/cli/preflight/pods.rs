//! Which pods the shipped admission policies would refuse or complete.

use super::facts::{Facts, RUNTIME_CLASS, label_command};
use super::{Gap, Group, gap};
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::admission::{
    AdmittedPod, Creator, NamespaceFacts, PatchOp, Refusal, defaults, patch, refusals,
};
use stowage_scheduling::ids::printable;
use stowage_scheduling::policy::Mode;
use stowage_server::kubernetes::dump::{Dump, DumpError};

/// The policy that only warns in shadow mode.
const VISIBLE_DEVICES: &str = "stowage-visible-devices";

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    Refused,
    Warned,
    Unknown,
    Completed,
}

impl Verdict {
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Refused => "refused, when created again",
            Self::Warned => "created with a warning, in shadow mode",
            Self::Unknown => {
                "refused, unless the namespace is exempt, which the dump does not show"
            }
            Self::Completed => "completed",
        }
    }
}

/// Pods by what makes them again, and their number.
pub fn judge(
    dumps: &[Dump],
    facts: &Facts,
    mode: Mode,
) -> Result<(usize, Vec<Group<Verdict>>), DumpError> {
    let mut found = BTreeMap::<_, (usize, Vec<Gap>)>::new();
    let mut pods = 0;
    for dump in dumps {
        dump.for_each_raw(|kind, item| {
            if kind != "Pod" {
                return Ok(());
            }
            pods += 1;
            let (pod, object): (Pod, Value) = (item.parse()?, item.parse()?);
            // Nobody creates it again under its name.
            if objects::is_finished(&pod) {
                return Ok(());
            }
            if let Some((verdict, why)) = verdict(&pod, object, facts, mode)? {
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                let own_name = || ("Pod", pod.metadata.name.as_deref().unwrap_or_default());
                let (kind, name) = objects::workload(&pod).unwrap_or_else(own_name);
                let remedies = match verdict {
                    Verdict::Completed => Vec::new(),
                    _ => remedies(&why, namespace, kind, name),
                };
                let key = (
                    verdict,
                    printable(&format!("{kind} {namespace}/{name}")),
                    why,
                );
                found.entry(key).or_insert((0, remedies)).0 += 1;
            }
            Ok(())
        })?;
    }
    let group = |((verdict, name, why), (count, remedies))| Group {
        verdict,
        names: vec![name],
        count,
        why,
        remedies,
    };
    Ok((pods, found.into_iter().map(group).collect()))
}

/// `None` for a pod that would be created as it is.
fn verdict(
    pod: &Pod,
    mut object: Value,
    facts: &Facts,
    mode: Mode,
) -> Result<Option<(Verdict, Vec<String>)>, serde_json::Error> {
    let name = pod.metadata.namespace.as_deref().unwrap_or_default();
    let labels = facts.namespace_labels(name);
    let annotations = pod.metadata.annotations.as_ref();
    let is_mirror = annotations.is_some_and(|all| all.contains_key("kubernetes.io/config.mirror"));
    let by = match objects::workload(pod) {
        Some(("Node", _)) if is_mirror => Creator::Kubelet,
        _ => Creator::Anyone,
    };
    object["status"].take();
    // Nobody can tell who chose the node of a pod that was placed, and Stowage's Binding has written its annotations.
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|status| &status.conditions)
        .flatten();
    if conditions.any(|one| one.type_ == "PodScheduled" && one.status == "True") {
        object["spec"]["nodeName"] = "".into();
        if objects::recorded_devices(pod).is_some() {
            object["metadata"]["annotations"] = serde_json::json!({});
        }
    }
    let class = facts.has_runtime_class().then_some(RUNTIME_CLASS);
    let mut added = defaults(&AdmittedPod::deserialize(&object)?, class);
    if labels.is_some_and(|all| all["stowage.dev/pod-defaults"] == "false") {
        added.clear();
    }
    patch(&mut object, &added);
    let refusals = refusals(&object, NamespaceFacts { name, labels }, by);
    let of_one = |refusal: &Refusal| match refusal.policy {
        _ if !refusal.is_certain => Verdict::Unknown,
        VISIBLE_DEVICES if mode == Mode::Shadow => Verdict::Warned,
        _ => Verdict::Refused,
    };
    let why = refusals
        .iter()
        .map(|one| format!("{}: {}", one.policy, one.message));
    let what = |op: &PatchOp| {
        let value = op.value.as_str().or(op.value["name"].as_str())?;
        Some(format!("{}: {value}", op.path))
    };
    Ok(match refusals.iter().map(of_one).min() {
        Some(verdict) => Some((verdict, why.collect())),
        None if added.is_empty() => None,
        None => Some((Verdict::Completed, added.iter().filter_map(what).collect())),
    })
}

/// What can be done about these messages, each under its condition.
fn remedies(why: &[String], namespace: &str, kind: &str, name: &str) -> Vec<Gap> {
    let has = |parts: [&str; 2]| {
        why.iter()
            .any(|one| parts.iter().all(|part| one.contains(part)))
    };
    let wants_variable = has(["NVIDIA_VISIBLE_DEVICES", "must "]);
    let all = has([VISIBLE_DEVICES, ""])
        .then(|| gap("if its pods may see all GPUs", label_command(namespace)));
    let (when, command) = match kind {
        "DaemonSet" if wants_variable => return Vec::from_iter(all),
        "Deployment" | "StatefulSet" | "ReplicaSet" | "CronJob" if wants_variable => (
            "",
            format!("set env {kind}/{name} NVIDIA_VISIBLE_DEVICES=void"),
        ),
        _ => ("as the message says; ", format!("edit {kind} {name}")),
    };
    let none = if wants_variable {
        "void, if it needs no GPU or has it by a claim"
    } else {
        ""
    };
    let when = [when, none].concat();
    // An owner's kind and name are what a tenant wrote, and the line is pasted into a shell.
    let is_plain = |word: &str| {
        let mut letters = word.chars();
        letters.all(|one| one.is_ascii_alphanumeric() || matches!(one, '-' | '.'))
    };
    let own = [namespace, kind, name].into_iter().all(is_plain).then(|| {
        gap(
            when.trim_end_matches("; "),
            format!("kubectl -n {namespace} {command}"),
        )
    });
    own.into_iter().chain(all).collect()
}
