//! Sources of an explanation: the operators' address of a running service, or a dump that is loaded here.

use crate::cli::access::Access;
use crate::cli::operators_client::{self, OperatorsClientError, escape_query_value};
use crate::cli::print_to_stderr;
use k8s_openapi::api::core::v1::Pod;
use std::path::Path;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::explaining::{Explanation, ShownNodes, explain};
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::demand::RequestError;
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane, DumpError, left_out_text};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::service::ServerState;

/// Why there is no explanation. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ExplainError {
    #[error("{0}")]
    UnknownPod(String),
    #[error(transparent)]
    Server(#[from] OperatorsClientError),
    #[error(transparent)]
    Dump(#[from] DumpError),
}

pub async fn from_server(
    access: &Access,
    pod: &PodKey,
    options: &ShownNodes,
) -> Result<Explanation, ExplainError> {
    Ok(operators_client::get(access, &explain_path(pod, options), "explanation").await?)
}

fn explain_path(pod: &PodKey, options: &ShownNodes) -> String {
    let which = match options {
        ShownNodes::Best(_) => String::new(),
        ShownNodes::All => "&all=true".into(),
        ShownNodes::Node(node) => format!("&node={}", escape_query_value(node.as_str())),
    };
    format!(
        "/v1/explain?pod={}{which}",
        escape_query_value(&pod.to_string())
    )
}

pub fn from_dump(
    path: &Path,
    policy: Policy,
    key: &PodKey,
    options: &ShownNodes,
) -> Result<Explanation, ExplainError> {
    let dump = Dump::read(path)?;
    let state = ServerState::new(policy);
    let loaded = DumpControlPlane::load(&dump, &state, &mut ClusterIndex::default())?;
    if let Some(left_out) = left_out_text(loaded.left_out()) {
        print_to_stderr(format_args!("warning: {left_out}"));
    }
    let mut cluster = state.cluster_copy();
    let explained = cluster
        .ledger()
        .uid_of(key)
        .and_then(|uid| explain(&mut cluster, &uid, options));
    match explained {
        Some(explanation) => Ok(explanation),
        None => Err(ExplainError::UnknownPod(why_unknown(
            dump.pod(key)?.as_ref(),
            key,
            cluster.ledger().policy(),
        ))),
    }
}

/// Why the ledger has no such pod.
fn why_unknown(pod: Option<&Pod>, key: &PodKey, policy: &Policy) -> String {
    let Some(pod) = pod else {
        return format!("the dump has no pod {key}; write NAMESPACE/NAME, and dump with -A");
    };
    if objects::is_finished(pod) {
        return format!("{key} has ended: it has no GPU and requests none");
    }
    if objects::is_deleted_without_node(pod) {
        return format!(
            "{key} is being deleted and has no node: kube-scheduler does not place it any more"
        );
    }
    match objects::demand(pod, policy) {
        Err(RequestError::NoVram) => format!(
            "{key} is none of Stowage's: no container of it asks for stowage.dev/vram, nor a device plugin for a GPU; add it to the container's \
             resources.limits, such as stowage.dev/vram: 40Gi"
        ),
        Err(error) => format!("{key} cannot be understood, and so fits nowhere: {error}"),
        Ok(_) => {
            format!(
                "{key} has no UID that can be read; dump it with `kubectl get nodes,pods -A -o yaml`"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::ids::NodeName;

    #[test]
    fn the_query_to_a_server_is_escaped() {
        let (pod, node) = (PodKey::parse("a&b", "c?d").unwrap(), "n#1");
        let options = ShownNodes::Node(NodeName::parse(node).unwrap());
        assert_eq!(
            explain_path(&pod, &options),
            "/v1/explain?pod=a%26b/c%3Fd&node=n%231"
        );
    }
}
