//! Shadow mode under the real scheduler, with the shipped configuration for it.

use super::processes::eventually;
use super::world::RealControlPlane;
use crate::device_plugin::{GPU, plugin_node, pod_requesting};
use crate::served::{pod, policy_without_engines};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::sync::Arc;
use stowage_scheduling::policy::Mode;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::shadow::NO_VRAM_IN_SHADOW;
use stowage_server::extender::{Extender, server};
use stowage_server::kubernetes;
use stowage_server::kubernetes::{ClusterOptions, LeadWith};
use stowage_server::service::ServerState;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Stowage in this process, in shadow mode, on the cluster's address for the verbs.
struct Shadow {
    service: Arc<ServerState>,
    _tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Drop for Shadow {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Shadow {
    async fn start(world: &RealControlPlane) -> Self {
        let mut policy = policy_without_engines();
        policy.mode = Mode::Shadow;
        let service = ServerState::new(policy);
        let stop = CancellationToken::new();
        let options = ClusterOptions::new(LeadWith::FromTheStart, "stowage".into());
        let (control_plane, tasks) =
            kubernetes::start(world.client.clone(), service.clone(), options, stop.clone());
        let router = server::scheduler_router(Extender::new(
            service.clone(),
            control_plane,
            RequestLimits::default(),
        ));
        let listener = TcpListener::bind(("127.0.0.1", world.ports.verbs)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let serving = async { axum::serve(listener, router).await.unwrap() };
        tokio::spawn(stop.clone().run_until_cancelled_owned(serving));
        eventually("the gate opens", async || {
            service.leadership.is_open().then_some(())
        })
        .await;
        Self {
            service,
            _tasks: tasks,
            stop,
        }
    }

    fn count(&self, verb: &str, outcomes: &[&str]) -> u64 {
        outcomes
            .iter()
            .map(|outcome| {
                self.service
                    .metrics
                    .shadow
                    .with_label_values(&[verb, outcome])
                    .get()
            })
            .sum()
    }
}

async fn create_nodes(world: &RealControlPlane) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    for (name, gpus) in [("a", 8), ("b", 2)] {
        let mut node = plugin_node(name, GPU, gpus);
        // Left over from days on which Stowage enforced: the scheduler thinks there is some.
        node["status"]["capacity"]["stowage.dev/vram"] = json!("100Gi");
        node["status"]["allocatable"]["stowage.dev/vram"] = json!("100Gi");
        node["status"]["conditions"] =
            json!([{ "type": "Ready", "status": "True", "reason": "KubeletReady" }]);
        let status = Patch::Merge(json!({ "status": node["status"] }));
        nodes
            .create(
                &PostParams::default(),
                &serde_json::from_value(node).unwrap(),
            )
            .await
            .unwrap();
        nodes
            .patch_status(name, &PatchParams::default(), &status)
            .await
            .unwrap();
    }
}

async fn create(world: &RealControlPlane, mut pod: Value) {
    let metadata = pod["metadata"].as_object_mut().unwrap();
    metadata.remove("uid");
    pod["spec"]["containers"][0]["image"] = json!("engine");
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    pods.create(
        &PostParams::default(),
        &serde_json::from_value(pod).unwrap(),
    )
    .await
    .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_scheduler_binds_without_gpus_beside_a_shadow_that_records_every_decision() {
    let Some(mut world) = RealControlPlane::start().await else {
        return;
    };
    world.install();
    create_nodes(&world).await;
    let shadow = Shadow::start(&world).await;
    world.start_scheduler_with("overlays/shadow/kube-scheduler-config.yaml");
    for number in 0..4 {
        create(&world, pod_requesting(&format!("gpu-{number}"), GPU, 2)).await;
    }
    create(&world, pod_requesting("huge", GPU, 9)).await;
    create(&world, pod("vram", "10Gi")).await;
    let pods: Api<Pod> = Api::default_namespaced(world.client.clone());
    let refusal = eventually(
        "four pods are bound, and the one that asks for VRAM is refused",
        async || {
            world.check();
            let all = pods.list(&Default::default()).await.ok()?;
            let is_bound = |pod: &&Pod| {
                pod.spec
                    .as_ref()
                    .is_some_and(|spec| spec.node_name.is_some())
            };
            let bound: Vec<&Pod> = all.iter().filter(is_bound).collect();
            assert!(
                bound.iter().all(|pod| pod.metadata.annotations.is_none()),
                "a plain Binding"
            );
            let vram = pods.get("vram").await.ok()?;
            let message = vram
                .status?
                .conditions?
                .into_iter()
                .find_map(|condition| condition.message)?;
            (bound.len() == 4).then_some(message)
        },
    );
    let refusal = refusal.await;
    assert!(refusal.contains(NO_VRAM_IN_SHADOW), "{refusal}");
    eventually("each bind is compared", async || {
        (shadow.count("bind", &["same", "different"]) == 4).then_some(())
    })
    .await;
    assert_eq!(
        shadow.count("bind", &["would-reject", "not-asked", "refused"]),
        0
    );
    assert!(shadow.count("filter", &["same"]) >= 1 && shadow.count("filter", &["refused"]) >= 1);
    let totals = shadow.service.cluster().ledger().totals();
    assert_eq!(
        (
            totals.bound,
            totals.unplaced,
            totals.reservations,
            totals.soft_reservations
        ),
        (4, 0, 0, 0)
    );
    println!("4 pods bound past a shadow; {}", world.versions());
}
