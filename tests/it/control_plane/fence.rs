//! The optional fence at the API server: it refuses Bindings and reservations of another transition than the Lease's, whichever
//! process sends them as Stowage and however late.

use super::fleet::{node, pod};
use super::leading::{LEASE, serve_beside_its_scheduler};
use super::processes::eventually;
use super::world::{RealControlPlane, manifest};
use super::{submit, wait_until_all_bound};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_server::kubernetes;

const LEASE_CHANGED_HANDS: &str = "the Lease has passed on";

struct FencedCluster {
    world: RealControlPlane,
    /// With the rights of Stowage's service account, and so of its kube-scheduler.
    stowage: Client,
}

impl FencedCluster {
    async fn start() -> Option<Self> {
        let world = RealControlPlane::start().await?;
        world.install();
        install_fence_policy(&world);
        let stowage = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
            .await
            .unwrap();
        Some(Self { world, stowage })
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.world.client.clone(), "kube-system")
    }

    /// The Lease with so many transitions; the epoch of its holder.
    async fn lease(&self, transitions: i32) -> String {
        let object = json!({
            "metadata": { "name": "stowage-scheduler" },
            "spec": { "holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": transitions },
        });
        let create = async || {
            let lease = serde_json::from_value(object.clone()).unwrap();
            self.leases().create(&PostParams::default(), &lease).await
        };
        let lease = match create().await {
            Ok(lease) => lease,
            Err(_) => {
                let patch = Patch::Merge(&object);
                self.leases()
                    .patch("stowage-scheduler", &PatchParams::default(), &patch)
                    .await
                    .unwrap()
            }
        };
        format!("{}/{transitions}/nonce", lease.metadata.uid.unwrap())
    }

    /// A Binding as Stowage writes it; nothing comes of it.
    async fn bind(&self, annotations: &Value) -> Result<(), String> {
        let pods: Api<Pod> = Api::default_namespaced(self.stowage.clone());
        let binding = json!({
            "metadata": { "name": "waits", "annotations": annotations },
            "target": { "kind": "Node", "name": "n" },
        });
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let bound: kube::Result<Value> = pods
            .create_subresource("binding", "waits", &dry_run, &binding)
            .await;
        bound.map(drop).map_err(|error| error.to_string())
    }

    async fn bind_as(&self, epoch: &str) -> Result<(), String> {
        self.bind(&json!({ "stowage.dev/devices": "GPU-1", "stowage.dev/leader-epoch": epoch }))
            .await
    }

    async fn condition(&self, condition: Value) -> Result<(), String> {
        let pods: Api<Pod> = Api::default_namespaced(self.stowage.clone());
        let patch = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
        let patched = pods
            .patch_status("waits", &PatchParams::default(), &patch)
            .await;
        patched.map(drop).map_err(|error| error.to_string())
    }

    async fn reserve_as(&self, epoch: &str) -> Result<(), String> {
        let message =
            json!({ "node": "n", "devices": ["GPU-1"], "victims": [], "epoch": epoch }).to_string();
        self.condition(
            json!({ "type": "stowage.dev/Reserved", "status": "True", "message": message }),
        )
        .await
    }
}

/// Puts up the fence.
fn install_fence_policy(world: &RealControlPlane) {
    let applied = world.kubectl(&[
        "apply",
        "-f",
        manifest("components/leader-fence/leader-fence.yaml")
            .to_str()
            .unwrap(),
    ]);
    assert!(applied.is_success, "{}", applied.output);
}

fn assert_refused(outcome: Result<(), String>, reason: &str) {
    let said = outcome.expect_err(reason);
    assert!(said.contains(reason), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fence_refuses_writes_decided_before_the_lease_changed_hands() {
    let Some(fenced) = FencedCluster::start().await else {
        return;
    };
    submit(
        &fenced.world.client,
        &[pod("waits", 20, &json!({}), "stowage-serving")],
    )
    .await;
    let first = fenced.lease(3).await;
    eventually("the fence is up", async || {
        fenced.bind_as("none/3/nonce").await.err()
    })
    .await;
    fenced.bind_as(&first).await.unwrap();
    fenced.reserve_as(&first).await.unwrap();
    let uid = first.split('/').next().unwrap();
    let others = [
        "none/3/nonce".to_owned(),
        format!("{uid}/2/nonce"),
        format!("{uid}/30/nonce"),
        String::new(),
    ];
    for other in &others {
        assert_refused(fenced.bind_as(other).await, LEASE_CHANGED_HANDS);
        assert_refused(fenced.reserve_as(other).await, LEASE_CHANGED_HANDS);
    }
    assert_refused(
        fenced
            .bind(&json!({ "stowage.dev/devices": "GPU-1" }))
            .await,
        LEASE_CHANGED_HANDS,
    );

    let second = fenced.lease(4).await;
    eventually("the old epoch is refused", async || {
        fenced.bind_as(&first).await.err()
    })
    .await;
    assert_refused(fenced.bind_as(&first).await, LEASE_CHANGED_HANDS);
    assert_refused(
        fenced.reserve_as(&format!("{first}-late")).await,
        LEASE_CHANGED_HANDS,
    );
    // Earlier reservations stand, and can be ended and written beside.
    let beside = json!({ "type": "PodScheduled", "status": "False" });
    fenced.condition(beside.clone()).await.unwrap();
    fenced
        .condition(json!({ "type": "stowage.dev/Reserved", "status": "False" }))
        .await
        .unwrap();
    fenced.bind_as(&second).await.unwrap();
    fenced.reserve_as(&second).await.unwrap();

    // The fence does not affect kube-scheduler with the same identity.
    fenced.bind(&json!({})).await.unwrap();
    // Without the Lease it affects no client: neither kubelets, nor other schedulers, nor Stowage.
    fenced
        .leases()
        .delete("stowage-scheduler", &DeleteParams::default())
        .await
        .unwrap();
    eventually("without it there is no fence", async || {
        fenced.bind_as("none/0/nonce").await.ok()
    })
    .await;
    fenced.condition(beside).await.unwrap();
    let third = fenced.lease(4).await;
    eventually("the Lease made again is another", async || {
        fenced.bind_as(&second).await.err()
    })
    .await;
    assert_refused(fenced.bind_as(&second).await, LEASE_CHANGED_HANDS);
    fenced.bind_as(&third).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn stowage_binds_with_the_fence_installed() {
    let nodes = vec![node("a", 2, 81_559, "NVIDIA-H100-80GB-HBM3")];
    let serve = serve_beside_its_scheduler();
    let serve: Vec<&str> = serve.iter().map(String::as_str).collect();
    let Some(mut world) = RealControlPlane::start_all(nodes, &serve).await else {
        return;
    };
    install_fence_policy(&world);
    world.begin_scheduling().await;
    submit(
        &world.client,
        &[pod("first", 20, &json!({}), "stowage-serving")],
    )
    .await;
    wait_until_all_bound(&mut world, 1).await;
    // Another process, another holder, one transition more.
    world.scheduler.take().expect("it runs").kill();
    world.start_scheduler();
    submit(
        &world.client,
        &[pod("second", 20, &json!({}), "stowage-serving")],
    )
    .await;
    let bound = wait_until_all_bound(&mut world, 2).await;
    let (namespace, name) = LEASE.split_once('/').unwrap();
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), namespace);
    let lease = leases.get(name).await.unwrap();
    let epoch = |transitions| format!("{}/{transitions}/", lease.metadata.uid.as_deref().unwrap());
    for (name, transitions) in [("first", 0), ("second", 1)] {
        let pod = bound
            .iter()
            .find(|pod| super::name_of(pod) == name)
            .unwrap();
        let written = super::annotation(pod, "stowage.dev/leader-epoch").unwrap_or_default();
        assert!(
            written.starts_with(&epoch(transitions)),
            "{name}: {written}"
        );
    }
}
