//! How long a bind takes, from kube-scheduler's request to its answer, beside a bare Binding on the same API server.
//!
//! Three writers take turns, so that each meets the same API server: Stowage, asked as kube-scheduler asks; this test with the
//! Binding that Stowage would write; and this test with nothing but the pod and its node, as kube-scheduler's own plugin does it.

use super::{ALWAYS, H100, MIB, create_all, quantile};
use crate::control_plane::fleet::{GpuNode, node, pod};
use crate::control_plane::processes::{TestProcess, eventually};
use crate::control_plane::world::RealControlPlane;
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_server::kubernetes;

type HttpClient = hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>;

const NODES: usize = 100;
const BINDS: usize = 1_000;
/// Binds at once: one after the other, and as many as kube-scheduler has under way when it is busy.
const AT_ONCE: [usize; 2] = [1, 8];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Writer {
    Stowage,
    SameBinding,
    BareBinding,
}

const WRITERS: [Writer; 3] = [Writer::Stowage, Writer::SameBinding, Writer::BareBinding];

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement of a minute; prints a table"]
async fn binds_beside_bare_bindings() {
    let nodes: Vec<GpuNode> = (0..NODES)
        .map(|i| node(&format!("n{i:02}"), 8, MIB, H100))
        .collect();
    let Some(mut world) = RealControlPlane::start_all(nodes, &ALWAYS).await else {
        return;
    };
    world.begin_scheduling().await;
    world.stop_kubelets();
    // From here on this test binds.
    world
        .scheduler
        .take()
        .into_iter()
        .for_each(TestProcess::kill);
    let binder = Binder::new(&world).await;
    println!("{}; milliseconds:", world.versions());
    println!(
        "| at once | writer | binds | p50 | p90 | p99 | longest |\n|---|---|---|---|---|---|---|"
    );
    for at_once in AT_ONCE {
        let mut took = binder.bind_all(&world, at_once).await;
        for writer in WRITERS {
            let times = took.get_mut(&writer).unwrap();
            times.sort_unstable();
            let [p50, p90, p99, longest] = [0.5, 0.9, 0.99, 1.0].map(|part| quantile(times, part));
            println!(
                "| {at_once} | {writer:?} | {} | {p50:.2} | {p90:.2} | {p99:.2} | {longest:.2} |",
                times.len()
            );
        }
    }
    world.check();
}

struct Binder {
    /// With Stowage's own rights, and connections as it makes them.
    client: Client,
    http: HttpClient,
    bind: String,
}

impl Binder {
    async fn new(world: &RealControlPlane) -> Self {
        let client = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
            .await
            .unwrap();
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Self {
            client,
            http,
            bind: format!("http://127.0.0.1:{}/scheduler/bind", world.ports.verbs),
        }
    }

    /// How long each bind took, by writer.
    async fn bind_all(
        &self,
        world: &RealControlPlane,
        at_once: usize,
    ) -> BTreeMap<Writer, Vec<Duration>> {
        let pods = WRITERS
            .iter()
            .flat_map(|writer| (0..BINDS).map(move |i| (*writer, i)));
        let name = |writer: Writer, i: usize| format!("{writer:?}-{at_once}-{i:04}").to_lowercase();
        let asks = |(writer, i): (Writer, usize)| {
            let mut pod = pod(&name(writer, i), 10, &json!({}), "stowage-opportunistic");
            // The ledger has no entry for a pod that asks for no VRAM.
            let resources = &mut pod.spec.as_mut().unwrap().containers[0].resources;
            resources.take_if(|_| writer != Writer::Stowage);
            pod
        };
        create_all(&world.client, pods.map(asks).collect(), 8).await;
        let uids = self.uids(at_once).await;
        eventually("Stowage has seen them all", async || {
            (world.count("stowage_ledger_pods", "waiting").await as usize >= BINDS).then_some(())
        })
        .await;
        let began = Instant::now();
        let binds = (0..BINDS).flat_map(|i| WRITERS.map(|writer| (writer, i)));
        let binds = stream::iter(binds).map(|(writer, i)| {
            let (name, uids) = (name(writer, i), &uids);
            async move {
                let (uid, node) = (&uids[&name], format!("n{:02}", i % NODES));
                let started = Instant::now();
                self.bind(writer, &name, uid, &node).await;
                let took = started.elapsed();
                if took > Duration::from_millis(20) {
                    println!(
                        "at {:.3} s {name} took {took:.1?}",
                        (started - began).as_secs_f64()
                    );
                }
                (writer, took)
            }
        });
        let mut took: BTreeMap<Writer, Vec<Duration>> = BTreeMap::new();
        let binds: Vec<_> = binds.buffer_unordered(at_once).collect().await;
        binds
            .into_iter()
            .for_each(|(writer, time)| took.entry(writer).or_default().push(time));
        took
    }

    async fn uids(&self, at_once: usize) -> BTreeMap<String, String> {
        let pods: Api<Pod> = Api::default_namespaced(self.client.clone());
        let pods = pods
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .into_iter();
        let identity = |pod: Pod| (pod.metadata.name.unwrap(), pod.metadata.uid.unwrap());
        pods.map(identity)
            .filter(|(name, _)| name.contains(&format!("-{at_once}-")))
            .collect()
    }

    async fn bind(&self, writer: Writer, name: &str, uid: &str, node: &str) {
        match writer {
            Writer::Stowage => self.ask_stowage(name, uid, node).await,
            Writer::SameBinding => self.post(name, uid, node, annotations()).await,
            Writer::BareBinding => self.post(name, uid, node, json!({})).await,
        }
    }

    async fn ask_stowage(&self, name: &str, uid: &str, node: &str) {
        let asked =
            json!({ "PodName": name, "PodNamespace": "default", "PodUID": uid, "Node": node });
        let request = http::Request::post(&self.bind)
            .body(Full::new(asked.to_string().into()))
            .unwrap();
        let answer = self.http.request(request).await.unwrap();
        let answer = answer.into_body().collect().await.unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert!(
            [&Value::Null, &json!("")].contains(&&answer["Error"]),
            "{name}: {answer}"
        );
    }

    async fn post(&self, name: &str, uid: &str, node: &str, annotations: Value) {
        let pods: Api<Pod> = Api::default_namespaced(self.client.clone());
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": { "name": name, "uid": uid, "annotations": annotations },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        });
        pods.create_subresource::<_, Value>("binding", name, &PostParams::default(), &binding)
            .await
            .unwrap();
    }
}

/// As many and as long as those of Stowage.
fn annotations() -> Value {
    json!({
        "stowage.dev/devices": "GPU-00000000-0000-4000-8000-000000000000",
        "stowage.dev/vram-granted": "10737418240",
        "stowage.dev/gpu-memory-fraction": "0.12",
        "stowage.dev/visible-devices": "runtime.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000",
        "stowage.dev/leader-epoch": "00000000-0000-4000-8000-000000000000/0/0123456789abcdef",
        "nvidia.cdi.k8s.io/container.engine": "runtime.nvidia.com/gpu=GPU-00000000-0000-4000-8000-000000000000",
    })
}
