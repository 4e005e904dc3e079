//! A way to the operators' address of the leader's pod through the API server, as `kubectl port-forward` opens one.

use super::cluster_credentials::NAMESPACE;
use anyhow::{Context, Result, bail};
use futures::FutureExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::Portforwarder;
use kube::{Api, Client, Error};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stowage_server::service::host_of_holder;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

/// The Lease of the shipped manifests.
const LEASE: &str = "stowage-scheduler";
/// The port of the operators' address in the shipped manifests.
const PORT: u16 = 9445;
/// Time to read the Lease and to open a forward, of which each takes a round trip or two.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A port-forward on loopback, for as long as the process runs. Each connection goes to the leader of its moment.
#[derive(Clone)]
pub struct LeaderForward {
    pub address: SocketAddr,
    state: Arc<Mutex<ForwardState>>,
}

#[derive(Default)]
struct ForwardState {
    pod: String,
    /// Why the last connection could not be forwarded.
    problem: Option<String>,
}

impl LeaderForward {
    pub async fn open(client: Client) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let forward = Self {
            address: listener.local_addr()?,
            state: Arc::default(),
        };
        // What is wrong shows before anything is asked.
        let first = forward.connect(&client).await?;
        tokio::spawn(forward.clone().serve(listener, client, first));
        Ok(forward)
    }

    /// The pod of the last connection.
    pub fn pod_name(&self) -> String {
        self.read(|state| format!("{NAMESPACE}/{}", state.pod))
    }

    /// Why the last connection could not be forwarded, if that was so.
    pub fn problem(&self) -> Option<String> {
        self.read(|state| state.problem.clone())
    }

    fn read<T>(&self, read: impl FnOnce(&mut ForwardState) -> T) -> T {
        read(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn serve(self, listener: TcpListener, client: Client, first: Portforwarder) {
        let mut opened = Some(first);
        while let Ok((connection, _)) = listener.accept().await {
            let (forward, client, opened) = (self.clone(), client.clone(), opened.take());
            tokio::spawn(async move {
                let forwarder = match opened {
                    Some(forwarder) => Ok(forwarder),
                    None => forward.connect(&client).await,
                };
                match forwarder {
                    Ok(forwarder) => forward.forward(connection, forwarder).await,
                    Err(error) => forward.read(|state| state.problem = Some(format!("{error:#}"))),
                }
            });
        }
    }

    async fn connect(&self, client: &Client) -> Result<Portforwarder> {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, self.connect_to_leader(client));
        connected.await.unwrap_or_else(|_| {
            bail!(
                "the API server has not opened a port-forward within {} s",
                CONNECT_TIMEOUT.as_secs()
            )
        })
    }

    async fn connect_to_leader(&self, client: &Client) -> Result<Portforwarder> {
        let pod = leader_pod(client).await?;
        self.read(|state| state.pod.clone_from(&pod));
        let pods = Api::<Pod>::namespaced(client.clone(), NAMESPACE);
        let forwarder = pods.portforward(&pod, &[PORT]).await;
        forwarder.map_err(Self::innermost).with_context(|| {
            format!(
                "no port-forward to the leader's pod, {NAMESPACE}/{pod}, which the Lease {NAMESPACE}/{LEASE} names: it needs `get` and \
                 `create` of pods/portforward. Or reach its operators' address otherwise, and name it with --server"
            )
        })
    }

    /// The API server's own words; the library's have the code and the reason around them.
    fn innermost(error: Error) -> anyhow::Error {
        match error {
            Error::Api(status) => anyhow::anyhow!("{}", status.message),
            error => error.into(),
        }
    }

    async fn forward(self, mut connection: TcpStream, mut forwarder: Portforwarder) {
        let (Some(mut stream), Some(error)) =
            (forwarder.take_stream(PORT), forwarder.take_error(PORT))
        else {
            return;
        };
        let mut error = error.boxed().fuse();
        self.read(|state| state.problem = None);
        let problem = tokio::select! {
            // The cause before the end that it brings.
            biased;
            Some(problem) = &mut error => Some(problem),
            _ = copy_bidirectional(&mut connection, &mut stream) => error.now_or_never().flatten(),
        };
        if problem.is_some() {
            self.read(|state| state.problem = problem);
        }
        forwarder.abort();
    }
}

/// The pod whose kube-scheduler holds the Lease: its host name begins the holder's identity.
async fn leader_pod(client: &Client) -> Result<String> {
    let leases = Api::<Lease>::namespaced(client.clone(), NAMESPACE);
    let lease = leases.get(LEASE).await.map_err(LeaderForward::innermost).with_context(|| {
        format!(
            "the leader is not found, because the Lease {NAMESPACE}/{LEASE} of the shipped manifests cannot be read: is this Stowage's \
             cluster (--context, --kubeconfig), and may you `get` that Lease? Or name the operators' address with --server"
        )
    })?;
    let holder = lease
        .spec
        .and_then(|spec| spec.holder_identity)
        .unwrap_or_default();
    let host = host_of_holder(&holder);
    if host.is_empty() {
        bail!(
            "nobody holds the Lease {NAMESPACE}/{LEASE}, so no replica leads: see kubectl -n {NAMESPACE} get pods -l \
             app.kubernetes.io/name=stowage. One that stands by can be asked with --server"
        );
    }
    Ok(host.to_owned())
}
