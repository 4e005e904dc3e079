//! The part of `stowage serve`'s command line about the policy: its files, and the pod on which Events about it are recorded.

use anyhow::{Context, Result};
use clap::Args;
use std::path::PathBuf;
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_server::policy_watch::OwnPod;
use stowage_server::serve::PolicyOptions;

#[derive(Debug, Args)]
pub struct ServePolicyArgs {
    /// The policy: a YAML file, or a directory of them such as a mounted ConfigMap. A change takes effect within two
    /// seconds. Stowage rejects an invalid policy and keeps the last valid one [default: the built-in policy]
    #[arg(long, value_name = "PATH")]
    policy: Option<PathBuf>,

    /// A directory that persists when the process restarts, such as an emptyDir. Stowage stores the current policy there, and
    /// uses it if the next start finds an invalid policy at --policy. Without this flag, that start uses the built-in policy
    #[arg(long, value_name = "DIR", requires = "policy")]
    policy_cache: Option<PathBuf>,

    /// The pod that this process runs in, on which Events about the policy are recorded: its name, namespace and UID, from the
    /// downward API. Without them they are only logged
    #[arg(long, value_name = "NAME", env = "POD_NAME", hide_env_values = true)]
    pod_name: Option<String>,

    #[arg(
        long,
        value_name = "NAMESPACE",
        env = "POD_NAMESPACE",
        hide_env_values = true
    )]
    pod_namespace: Option<String>,

    #[arg(long, value_name = "UID", env = "POD_UID", hide_env_values = true)]
    pod_uid: Option<String>,
}

impl ServePolicyArgs {
    pub fn validate(self) -> Result<PolicyOptions> {
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        let parts = (
            given(self.pod_name),
            given(self.pod_namespace),
            given(self.pod_uid),
        );
        let own_pod = match parts {
            (Some(name), Some(namespace), Some(uid)) => Some(OwnPod {
                key: PodKey::parse(&namespace, &name).context("--pod-name and --pod-namespace")?,
                uid: PodUid::parse(&uid).context("--pod-uid")?,
            }),
            _ => None,
        };
        Ok(PolicyOptions {
            path: self.policy,
            cache: self.policy_cache,
            own_pod,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(uid: Option<&str>) -> ServePolicyArgs {
        ServePolicyArgs {
            policy: None,
            policy_cache: None,
            pod_name: Some("stowage-0".into()),
            pod_namespace: Some("kube-system".into()),
            pod_uid: uid.map(str::to_owned),
        }
    }

    #[test]
    fn the_own_pod_is_known_by_all_three_or_not_at_all() {
        let own_pod = args(Some("uid-1")).validate().unwrap().own_pod.unwrap();
        assert_eq!(own_pod.key.to_string(), "kube-system/stowage-0");
        assert_eq!(args(None).validate().unwrap().own_pod, None);
        assert_eq!(
            args(Some("")).validate().unwrap().own_pod,
            None,
            "an empty variable is none"
        );
    }
}
