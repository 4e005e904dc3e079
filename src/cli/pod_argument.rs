//! The pod that a command is about: `NAME`, `pod/NAME` or `NAMESPACE/NAME`, with `-n` as kubectl has it.

use anyhow::{Context, Result, bail};
use clap::Args;
use stowage_scheduling::ids::PodKey;

#[derive(Debug, Args)]
pub struct PodArgument {
    /// The pod, as NAME, pod/NAME or NAMESPACE/NAME
    #[arg(value_name = "POD")]
    pod: String,

    /// The pod's namespace [default: the one in POD, otherwise default]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
}

/// The names of the kind Pod that kubectl accepts before `/`.
const KINDS: [&str; 3] = ["pod", "pods", "po"];
/// Kinds of objects that have pods, as kubectl takes them.
const OWNERS: [&str; 16] = [
    "cronjob",
    "cronjobs",
    "daemonset",
    "daemonsets",
    "deploy",
    "deployment",
    "deployments",
    "ds",
    "job",
    "jobs",
    "replicaset",
    "replicasets",
    "rs",
    "statefulset",
    "statefulsets",
    "sts",
];

impl PodArgument {
    pub fn key(&self) -> Result<PodKey> {
        pod_key(&self.pod, self.namespace.as_deref())
    }
}

/// The pod of this name, as kubectl would take it.
pub fn pod_key(pod: &str, namespace: Option<&str>) -> Result<PodKey> {
    let (before, name) = pod.rsplit_once('/').unwrap_or(("", pod));
    // Alone it may be a namespace's name: `jobs/train`.
    if namespace.is_some() && OWNERS.contains(&before) {
        bail!("{pod:?} is not a pod: name one of its pods, as kubectl get pods prints them");
    }
    let named_namespace =
        Some(before).filter(|before| !before.is_empty() && !KINDS.contains(before));
    let namespace = match (named_namespace, namespace) {
        (Some(written), Some(namespace)) if written != namespace => {
            bail!("POD is {pod:?} and --namespace is {namespace:?}: name one namespace")
        }
        (written, namespace) => written.or(namespace).unwrap_or("default"),
    };
    let form = || format!("the pod is {pod:?}; write NAME, pod/NAME or NAMESPACE/NAME");
    if namespace.contains('/') {
        bail!(form());
    }
    PodKey::parse(namespace, name).with_context(form)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pod: &str, namespace: Option<&str>) -> Result<String> {
        let argument = PodArgument {
            pod: pod.into(),
            namespace: namespace.map(str::to_owned),
        };
        argument.key().map(|key| key.to_string())
    }

    #[test]
    fn a_pod_is_named_as_kubectl_names_it_or_with_its_namespace() {
        for (pod, namespace, is) in [
            ("small", None, "default/small"),
            ("pod/small", None, "default/small"),
            ("pods/small", Some("team-b"), "team-b/small"),
            ("small", Some("team-b"), "team-b/small"),
            ("team-b/small", None, "team-b/small"),
            ("team-b/small", Some("team-b"), "team-b/small"),
        ] {
            assert_eq!(key(pod, namespace).unwrap(), is);
        }
    }

    #[test]
    fn a_workload_is_no_namespace() {
        let error = key("deployment/small", Some("team-a"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("name one of its pods"), "{error}");
    }

    #[test]
    fn two_namespaces_and_names_that_are_none_say_what_to_write() {
        let error = key("team-a/small", Some("team-b")).unwrap_err().to_string();
        assert!(
            error.contains("team-a/small") && error.contains("team-b"),
            "{error}"
        );
        for mistake in ["", "a/b/c", "/", "UPPER CASE"] {
            let error = format!("{:#}", key(mistake, None).unwrap_err());
            assert!(error.contains("NAMESPACE/NAME"), "{mistake:?}: {error}");
        }
    }
}
