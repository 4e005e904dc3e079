//! Which container has which devices, from the kubelet's pod-resources API (version 1) over its unix socket.
//!
//! It knows what device plugins and DRA drivers allocated, and nothing about GPUs in Stowage's Bindings. Nothing here decides which
//! pod owns a process.

#[rustfmt::skip]
pub mod api;

use super::device_id::{DeviceId, is_gpu_resource};
use hyper_util::rt::TokioIo;
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use stowage_scheduling::ids::PodKey;
use tokio::net::UnixStream;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use api::pod_resources_lister_client::PodResourcesListerClient;
use api::{
    ClaimResource, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources as OfPod,
};

/// Maximum size of a kubelet's answer: its own server's limit is 16 MiB, and a full node takes a hundred KiB.
const MAX_ANSWER: usize = 16 << 20;

/// One entry of allocated GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub key: PodKey,
    /// Such as `nvidia.com/gpu`, or a DRA driver's name.
    pub resource: String,
    /// In the kubelet's order; as it is, what no rule understands.
    pub ids: Vec<Result<DeviceId, String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PodResourcesError {
    #[error(
        "there is no socket of a kubelet at {}: mount its pod-resources folder there, or name it with --pod-resources",
        socket.display()
    )]
    NoSocket { socket: PathBuf },
    #[error("the kubelet did not answer at {} within {} ms", socket.display(), timeout.as_millis())]
    Hangs { socket: PathBuf, timeout: Duration },
    #[error("the kubelet's socket {} gives no answer: {reason}", socket.display())]
    Failed { socket: PathBuf, reason: String },
}

/// Timeouts and pauses.
#[derive(Debug, Clone, Copy)]
struct Timeouts {
    /// Timeout of an answer. A kubelet takes a few milliseconds, and the round that waits for it is due each second.
    response: Duration,
    /// Pause after a failure, so that a kubelet that hangs delays one round in five.
    retry_pause: Duration,
    /// How long its last answer is used: a kubelet that is upgraded is away for half a minute.
    max_age: Duration,
}

const TIMEOUTS: Timeouts = Timeouts {
    response: Duration::from_millis(300),
    retry_pause: Duration::from_secs(5),
    max_age: Duration::from_secs(60),
};

/// The kubelet's list, requested over one connection that is renewed after a failure.
#[derive(Debug)]
pub(crate) struct PodResources {
    socket: PathBuf,
    timeouts: Timeouts,
    channel: Option<Channel>,
    last: Option<(Instant, Vec<Allocation>)>,
    failed: Option<(Instant, PodResourcesError)>,
}

impl PodResources {
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            timeouts: TIMEOUTS,
            channel: None,
            last: None,
            failed: None,
        }
    }

    /// One that waits for an answer longer than a busy machine takes.
    #[cfg(test)]
    pub fn with_long_timeout(socket: PathBuf) -> Self {
        let timeouts = Timeouts {
            response: Duration::from_secs(60),
            ..TIMEOUTS
        };
        Self {
            timeouts,
            ..Self::new(socket)
        }
    }

    /// The allocated devices, as far as they are known, and why they are not known better. Must be called inside a tokio
    /// runtime.
    pub async fn allocations(&mut self) -> (&[Allocation], Option<PodResourcesError>) {
        let is_due = self
            .failed
            .as_ref()
            .is_none_or(|(at, _)| at.elapsed() >= self.timeouts.retry_pause);
        if is_due {
            match self.request_list().await {
                Ok(list) => {
                    self.last = Some((Instant::now(), list));
                    self.failed = None;
                }
                Err(error) => {
                    self.channel = None;
                    self.failed = Some((Instant::now(), error));
                }
            }
        }
        let usable = self
            .last
            .as_ref()
            .filter(|(at, _)| at.elapsed() < self.timeouts.max_age);
        let current = usable.map_or(&[][..], |(_, list)| list);
        (
            current,
            self.failed.as_ref().map(|(_, error)| error.clone()),
        )
    }

    /// Whether there is no kubelet socket.
    pub(crate) fn no_socket(&self) -> Option<PodResourcesError> {
        let no_socket = || PodResourcesError::NoSocket {
            socket: self.socket.clone(),
        };
        (!self.socket.exists()).then(no_socket)
    }

    /// Requests the list now.
    async fn request_list(&mut self) -> Result<Vec<Allocation>, PodResourcesError> {
        // A connection outlives the file: only a new connection needs it.
        if self.channel.is_none()
            && let Some(error) = self.no_socket()
        {
            return Err(error);
        }
        let channel = self
            .channel
            .get_or_insert_with(|| lazy_channel(&self.socket))
            .clone();
        let mut client =
            PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_ANSWER);
        let response = tokio::time::timeout(
            self.timeouts.response,
            client.list(ListPodResourcesRequest {}),
        );
        match response.await {
            Ok(Ok(answer)) => Ok(parse_allocations(answer.into_inner())),
            Ok(Err(status)) => Err(PodResourcesError::Failed {
                socket: self.socket.clone(),
                reason: innermost_cause(&status),
            }),
            Err(_) => {
                let Timeouts {
                    response: timeout, ..
                } = self.timeouts;
                Err(PodResourcesError::Hangs {
                    socket: self.socket.clone(),
                    timeout,
                })
            }
        }
    }
}

/// Nothing is connected before the first call.
fn lazy_channel(socket: &Path) -> Channel {
    let socket = socket.to_path_buf();
    let connect = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // gRPC requires an authority, and a unix socket has none.
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect)
}

/// The innermost error says most: "connection refused" rather than "transport error".
fn innermost_cause(status: &Status) -> String {
    let mut deepest = status.source();
    while let Some(source) = deepest.and_then(|error| error.source()) {
        deepest = Some(source);
    }
    match deepest {
        Some(error) => error.to_string(),
        None => format!("{} ({:?})", status.message(), status.code()),
    }
}

fn parse_allocations(answer: ListPodResourcesResponse) -> Vec<Allocation> {
    answer
        .pod_resources
        .into_iter()
        .flat_map(pod_allocations)
        .collect()
}

/// The GPU allocations of one pod. A pod with an invalid name has none: it could not be matched.
fn pod_allocations(pod: OfPod) -> Vec<Allocation> {
    let Ok(key) = PodKey::parse(&pod.namespace, &pod.name) else {
        return vec![];
    };
    let of_container = |container: ContainerResources| {
        let of_plugins = container.devices.into_iter().map(|devices| {
            let ids = devices
                .device_ids
                .into_iter()
                .map(|id| DeviceId::from_plugin(&id).ok_or(id));
            (devices.resource_name, ids.collect())
        });
        let claimed = container
            .dynamic_resources
            .into_iter()
            .flat_map(|claim| claim.claim_resources);
        of_plugins.chain(
            claimed.map(|claimed| (claimed.driver_name.clone(), vec![claimed_device(claimed)])),
        )
    };
    let of_gpus = pod
        .containers
        .into_iter()
        .flat_map(of_container)
        .filter(|(name, _)| is_gpu_resource(name));
    of_gpus
        .map(|(resource, ids)| Allocation {
            key: key.clone(),
            resource,
            ids,
        })
        .collect()
}

fn claimed_device(claimed: ClaimResource) -> Result<DeviceId, String> {
    let of_cdi = claimed
        .cdi_devices
        .iter()
        .filter_map(|device| Some(device.name.split_once('=')?.1));
    let names = std::iter::once(claimed.device_name.as_str()).chain(of_cdi);
    names
        .into_iter()
        .find_map(DeviceId::from_claim)
        .ok_or(claimed.device_name)
}

#[cfg(test)]
mod tests;
