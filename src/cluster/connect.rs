//! A client of the API server, set up as a scheduler needs it.
//!
//! Nothing here asks the API server anything yet.

use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use std::error::Error;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

/// A server that takes longer to accept a connection is as good as away; a Binding waits no longer either.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{path}: {reason}")]
    Kubeconfig { path: String, reason: String },
    #[error(
        "there is no kubeconfig here, nor a pod's service account; name the cluster with --kubeconfig FILE"
    )]
    Nowhere,
    #[error(
        "the kubeconfig in KUBECONFIG or ~/.kube/config: {reason}; repair it, or name another with --kubeconfig FILE"
    )]
    Usual { reason: String },
    #[error("the API server's client could not be set up: {0}")]
    Client(#[from] Box<kube::Error>),
}

/// A client by a kubeconfig's current context, or by what the surroundings say: `KUBECONFIG`, `~/.kube/config`, or the pod's
/// service account.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    let config = match kubeconfig {
        Some(path) => from_file(path).await?,
        None => Config::infer().await.map_err(|error| nowhere(&error))?,
    };
    Ok(Client::try_from(tuned(config)).map_err(Box::new)?)
}

/// The client neither throttles nor repeats anything by itself: every write here knows what its failure means, and one
/// that is repeated behind its back may arrive after the lease has passed on.
pub fn tuned(mut config: Config) -> Config {
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config
}

async fn from_file(path: &Path) -> Result<Config, ConnectError> {
    let failed = |error: KubeconfigError| {
        let path = path.display().to_string();
        match error {
            // The path stands before it.
            KubeconfigError::ReadConfig(error, _) => {
                ConnectError::Kubeconfig { path, reason: error.to_string() }
            }
            error => ConnectError::Kubeconfig { path, reason: error.to_string() },
        }
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(failed)
}

/// Outside a pod what matters is the kubeconfig: whether there is none, or what is wrong with it.
fn nowhere(error: &InferConfigError) -> ConnectError {
    match error.source().and_then(|source| source.downcast_ref::<KubeconfigError>()) {
        None | Some(KubeconfigError::FindPath) => ConnectError::Nowhere,
        Some(KubeconfigError::ReadConfig(error, _)) if error.kind() == ErrorKind::NotFound => {
            ConnectError::Nowhere
        }
        // Behind its first line, a parser draws the place.
        Some(error) => {
            ConnectError::Usual { reason: error.to_string().lines().next().unwrap_or_default().into() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_with_tls_makes_a_client_and_one_that_is_missing_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        let missing = connect(Some(&path)).await.err().unwrap();
        assert!(missing.to_string().starts_with(path.to_str().unwrap()), "{missing}");
        std::fs::write(&path, KUBECONFIG).unwrap();
        assert_eq!(connect(Some(&path)).await.unwrap().default_namespace(), "team-a");
    }

    const KUBECONFIG: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts: [{ name: here, context: { cluster: one, user: me, namespace: team-a } }]
clusters: [{ name: one, cluster: { server: 'https://127.0.0.1:6443' } }]
users: [{ name: me, user: { token: none } }]
";
}
