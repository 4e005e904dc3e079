//! A kubelet for tests: a real pod-resources server on a unix socket of its own.

use super::pod_resources::api::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use super::pod_resources::api::{
    CdiDevice, ClaimResource, ContainerDevices, ContainerResources, DynamicResource,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Request, Response, Status};

type ListAnswer = Result<ListPodResourcesResponse, Status>;

/// Dropping it takes the socket away.
pub struct FakeKubelet {
    folder: TempDir,
    lister: Lister,
    task: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct Lister {
    answer: Arc<Mutex<ListAnswer>>,
    list_calls: Arc<Mutex<u32>>,
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        *self.list_calls.lock() += 1;
        self.answer.lock().clone().map(Response::new)
    }
}

impl FakeKubelet {
    /// One that has handed out these devices.
    pub fn start(pods: Vec<PodResources>) -> Self {
        let mut kubelet = Self::stopped();
        kubelet.set_answer(Ok(pods));
        kubelet.restart();
        kubelet
    }

    /// One whose socket is not there.
    pub fn stopped() -> Self {
        let answer = Arc::new(Mutex::new(Ok(ListPodResourcesResponse::default())));
        let folder = tempfile::tempdir().unwrap();
        Self {
            folder,
            lister: Lister {
                answer,
                list_calls: Arc::default(),
            },
            task: None,
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("kubelet.sock")
    }

    pub fn set_answer(&mut self, pods: Result<Vec<PodResources>, Status>) {
        *self.lister.answer.lock() =
            pods.map(|pod_resources| ListPodResourcesResponse { pod_resources });
    }

    pub fn list_calls(&self) -> u32 {
        *self.lister.list_calls.lock()
    }

    /// The socket file stays, as after a crash.
    pub async fn stop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            let _ = task.await;
        }
    }

    pub fn restart(&mut self) {
        let _ = std::fs::remove_file(self.socket());
        let listener = UnixListener::bind(self.socket()).unwrap();
        self.task = Some(tokio::spawn(serve(
            listener,
            PodResourcesListerServer::new(self.lister.clone()),
        )));
    }
}

/// Its connections are its own: they end with it.
async fn serve(listener: UnixListener, service: PodResourcesListerServer<Lister>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let service = TowerToHyperService::new(service.clone());
        connections.spawn(async move {
            let server = auto::Builder::new(TokioExecutor::new()).http2_only();
            let _ = server.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// A pod with one container that was given these.
pub fn pod_with_devices(
    namespace: &str,
    name: &str,
    resource: &str,
    device_ids: &[&str],
) -> PodResources {
    let devices = ContainerDevices {
        resource_name: resource.into(),
        device_ids: device_ids.iter().map(ToString::to_string).collect(),
    };
    let container = ContainerResources {
        name: "engine".into(),
        devices: vec![devices],
        ..ContainerResources::default()
    };
    PodResources {
        name: name.into(),
        namespace: namespace.into(),
        containers: vec![container],
    }
}

/// A pod with one container whose claim a DRA driver fulfilled with this device.
pub fn pod_with_claim(
    namespace: &str,
    name: &str,
    driver: &str,
    device: &str,
    cdi: &str,
) -> PodResources {
    let claimed = ClaimResource {
        cdi_devices: vec![CdiDevice { name: cdi.into() }],
        driver_name: driver.into(),
        device_name: device.into(),
    };
    let container = ContainerResources {
        name: "engine".into(),
        dynamic_resources: vec![DynamicResource {
            claim_resources: vec![claimed],
        }],
        ..ContainerResources::default()
    };
    PodResources {
        name: name.into(),
        namespace: namespace.into(),
        containers: vec![container],
    }
}
