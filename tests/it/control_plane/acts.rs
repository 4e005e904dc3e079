//! The planner's writes on a real API server, with the rights of the shipped manifests: their effect, and what the admission
//! policy denies to every user, Stowage included.

use super::key;
use super::processes::{TEST_TIMEOUT, eventually};
use super::world::RealControlPlane;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionCondition, EvictionOutcome, EvictionReason, PlanState, StatusChange,
    WakeAnswer,
};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::policy::{Class, Policy, Protection};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::observe::PodObserved;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_server::kubernetes;
use stowage_server::kubernetes::events::EventRecorder;
use stowage_server::kubernetes::{ApiControlPlane, CDI_KIND};
use stowage_server::service::ServerState;

const RESERVED_CONDITION: &str = objects::RESERVED_CONDITION;
const ONLY_STOWAGE_WRITES: &str = "only Stowage writes them";

/// A cluster with the manifests applied; its owner, and Stowage.
struct InstalledCluster {
    world: RealControlPlane,
    owner: Client,
    stowage: Client,
    control_plane: ApiControlPlane,
    service: Arc<ServerState>,
}

impl InstalledCluster {
    async fn start() -> Option<Self> {
        let world = RealControlPlane::start().await?;
        world.install();
        let stowage = kubernetes::connect(Some(&world.service_account()), WriteTimes::default())
            .await
            .unwrap();
        let service = ServerState::new(Policy::default());
        service.lead_from_the_start();
        let (notices, _) = EventRecorder::new(service.clone());
        let control_plane = ApiControlPlane::new(
            stowage.clone(),
            service.clone(),
            notices,
            CDI_KIND.into(),
            WriteTimes::from_deadline(TEST_TIMEOUT),
        );
        Some(Self {
            owner: world.client.clone(),
            world,
            stowage,
            control_plane,
            service,
        })
    }

    fn pods(&self) -> Api<Pod> {
        Api::default_namespaced(self.owner.clone())
    }

    async fn create(&self, name: &str, gates: &[&str]) -> PodUid {
        let gates: Vec<Value> = gates.iter().map(|gate| json!({ "name": gate })).collect();
        let pod = json!({
            "metadata": { "name": name, "labels": { "app": name } },
            "spec": {
                "schedulerName": "stowage",
                "schedulingGates": gates,
                "containers": [{ "name": "c", "image": "i" }],
            },
        });
        let pod = serde_json::from_value(pod).unwrap();
        let pod = self
            .pods()
            .create(&PostParams::default(), &pod)
            .await
            .unwrap();
        PodUid::parse(&pod.metadata.uid.unwrap()).unwrap()
    }

    async fn run(&self, name: &str) -> PodUid {
        let uid = self.create(name, &[]).await;
        let binding =
            json!({ "metadata": { "name": name }, "target": { "kind": "Node", "name": "n" } });
        let bound: kube::Result<Value> = self
            .pods()
            .create_subresource("binding", name, &PostParams::default(), &binding)
            .await;
        bound.unwrap();
        let ready = json!({ "type": "Ready", "status": "True" });
        self.status_by(
            &self.owner,
            name,
            json!({ "phase": "Running", "conditions": [ready] }),
        )
        .await
        .unwrap();
        uid
    }

    /// The ledger learns of the pod, as by a watch, and as if it asked for VRAM.
    async fn observe(&self, name: &str) {
        let mut pod = self.pod(name).await;
        pod["spec"]["containers"][0]["resources"]["limits"] = json!({ "stowage.dev/vram": "1Gi" });
        let pod = serde_json::from_value(pod).unwrap();
        let seen = objects::observation(&pod, &Policy::default(), None, jiff::Timestamp::now());
        self.service
            .cluster()
            .apply(PodObserved(seen.expect("it is bound")));
    }

    async fn pod(&self, name: &str) -> Value {
        serde_json::to_value(self.pods().get(name).await.unwrap()).unwrap()
    }

    async fn condition(&self, name: &str, kind: &str) -> Option<Value> {
        let pod = self.pod(name).await;
        let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        conditions
            .find(|condition| condition["type"] == kind)
            .cloned()
    }

    async fn status_by(&self, who: &Client, name: &str, status: Value) -> Result<(), String> {
        let pods: Api<Pod> = Api::default_namespaced(who.clone());
        let patch = Patch::Strategic(json!({ "status": status }));
        let answer = pods
            .patch_status(name, &PatchParams::default(), &patch)
            .await;
        answer.map(drop).map_err(|error| error.to_string())
    }

    async fn patch_by(&self, who: &Client, name: &str, patch: Value) -> Result<(), String> {
        let pods: Api<Pod> = Api::default_namespaced(who.clone());
        let answer = pods
            .patch(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await;
        answer.map(drop).map_err(|error| error.to_string())
    }

    async fn write(
        &self,
        name: &str,
        uid: &PodUid,
        change: StatusChange,
    ) -> Result<(), ControlPlaneError> {
        self.control_plane
            .write_status(&key(name), uid, &change)
            .await
    }

    async fn evict(&self, name: &str, uid: &PodUid) -> EvictionOutcome {
        let why = EvictionReason::Preempted { by: key("urgent") };
        self.control_plane
            .evict(&key(name), uid, &why, &|| true)
            .await
    }
}

fn condition(kind: &str) -> Value {
    json!({ "conditions": [{ "type": kind, "status": "True", "reason": "Test" }] })
}

fn names(gates: &Value) -> Vec<&str> {
    gates
        .as_array()
        .into_iter()
        .flatten()
        .map(|gate| gate["name"].as_str().unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_planners_writes_are_allowed_and_the_admission_policy_allows_nothing_else() {
    let Some(cluster) = InstalledCluster::start().await else {
        return;
    };
    eventually("the admission policy is in force", async || {
        let probe = cluster.create("probe", &[]).await;
        let says = |outcome: Result<(), String>, why| outcome.is_err_and(|said| said.contains(why));
        let reservation = cluster
            .status_by(&cluster.owner, "probe", condition(RESERVED_CONDITION))
            .await;
        let labels = json!({ "metadata": { "labels": { "a": "b" } } });
        let labels = cluster.patch_by(&cluster.stowage, "probe", labels).await;
        cluster
            .pods()
            .delete("probe", &Default::default())
            .await
            .unwrap();
        (says(reservation, ONLY_STOWAGE_WRITES) && says(labels, "must not change a pod's metadata"))
            .then_some(probe)
    })
    .await;
    status_is_written_in_one_change(&cluster).await;
    our_gate_is_removed_and_no_other(&cluster).await;
    victims_are_evicted_as_their_budgets_allow(&cluster).await;
    only_stowage_may_reserve_or_plan(&cluster).await;
    stowage_changes_nothing_else(&cluster).await;
    println!("{}", cluster.world.versions());
}

async fn status_is_written_in_one_change(cluster: &InstalledCluster) {
    let uid = cluster.create("waits", &[objects::PLAN_GATE]).await;
    let node = NodeName::parse("n").unwrap();
    let reservation = Reservation {
        node: node.clone(),
        devices: [GpuUuid::from_index(0)].into(),
        victims: [].into(),
        deadline: cluster.service.now() + Millis::seconds(60),
    };
    let change = StatusChange {
        eviction: Some(EvictionCondition::Cancelled),
        wake: Some(WakeAnswer::Reclaiming),
        ..StatusChange::reservation(reservation)
            .and_nominate(node.clone())
            .and_requeue()
            .and_plan(PlanState::Nominated { node })
    };
    cluster.write("waits", &uid, change).await.unwrap();
    let pod = cluster.pod("waits").await;
    assert_eq!(
        pod["status"]["nominatedNodeName"], "n",
        "on a gated pod, too"
    );
    for kind in objects::CONDITIONS.iter().chain(&["PodScheduled"]) {
        assert!(cluster.condition("waits", kind).await.is_some(), "{kind}");
    }
    cluster
        .write("waits", &uid, StatusChange::clear_nomination())
        .await
        .unwrap();
    assert!(cluster.pod("waits").await["status"]["nominatedNodeName"].is_null());
    let foreign_pod = PodUid::parse("0b6c6bd0-0000-4000-8000-000000000000").unwrap();
    let of_another = cluster
        .write("waits", &foreign_pod, StatusChange::requeue())
        .await;
    assert_eq!(of_another, Err(ControlPlaneError::Gone));
    assert_eq!(
        cluster.write("nobody", &uid, StatusChange::requeue()).await,
        Err(ControlPlaneError::Gone)
    );
}

async fn our_gate_is_removed_and_no_other(cluster: &InstalledCluster) {
    let lift = async |name: &str, uid: &PodUid| {
        cluster
            .control_plane
            .remove_scheduling_gate(&key(name), uid)
            .await
    };
    for (name, gates, left) in [
        ("gated-1", vec![objects::PLAN_GATE], vec![]),
        (
            "gated-2",
            vec!["example.com/quota", objects::PLAN_GATE],
            vec!["example.com/quota"],
        ),
    ] {
        let uid = cluster.create(name, &gates).await;
        let foreign_pod = PodUid::parse("0b6c6bd0-0000-4000-8000-000000000000").unwrap();
        assert_eq!(lift(name, &foreign_pod).await, Err(ControlPlaneError::Gone));
        assert_eq!(
            names(&cluster.pod(name).await["spec"]["schedulingGates"]),
            gates
        );
        for _ in 0..2 {
            lift(name, &uid).await.unwrap();
            assert_eq!(
                names(&cluster.pod(name).await["spec"]["schedulingGates"]),
                left,
                "{name}"
            );
        }
    }
    let other = json!({ "spec": { "schedulingGates": [{ "$patch": "delete", "name": "example.com/quota" }] } });
    let refused = cluster
        .patch_by(&cluster.stowage, "gated-2", other.clone())
        .await
        .unwrap_err();
    assert!(
        refused.contains("only the scheduling gate stowage.dev/plan"),
        "{refused}"
    );
    cluster
        .patch_by(&cluster.owner, "gated-2", other)
        .await
        .expect("its owner may");
}

async fn victims_are_evicted_as_their_budgets_allow(cluster: &InstalledCluster) {
    let uid = cluster.run("victim").await;
    let budget = "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: pdb, namespace: default}, \
                  spec: {minAvailable: 1, selector: {matchLabels: {app: victim}}}}";
    assert!(cluster.world.apply(budget, &[]).is_success);
    // No controller runs here, so none computes the budget's status.
    let outcome = cluster.evict("victim", &uid).await;
    assert!(
        matches!(outcome, EvictionOutcome::TryLater { after: Some(_) }),
        "not counted yet: {outcome:?}"
    );
    let allow = |allowed: u32| {
        let status = json!({ "status": {
            "disruptionsAllowed": allowed, "observedGeneration": 1, "expectedPods": 1, "currentHealthy": 1,
            "desiredHealthy": 1,
        } });
        let patch = [
            "patch",
            "pdb",
            "pdb",
            "--subresource=status",
            "--type=merge",
            "-p",
            &status.to_string(),
        ];
        let patched = cluster.world.kubectl(&patch);
        assert!(patched.is_success, "{}", patched.output);
    };
    allow(0);
    assert_eq!(
        cluster.evict("victim", &uid).await,
        EvictionOutcome::TryLater { after: None }
    );
    let told = cluster
        .condition("victim", objects::DISRUPTION_TARGET_CONDITION)
        .await
        .unwrap();
    assert_eq!(
        (&told["status"], &told["reason"]),
        (&json!("True"), &json!("Preempted"))
    );
    let version = cluster.pod("victim").await["metadata"]["resourceVersion"].clone();
    cluster.evict("victim", &uid).await;
    assert_eq!(
        cluster.pod("victim").await["metadata"]["resourceVersion"],
        version,
        "nothing new is written"
    );

    allow(1);
    let foreign_pod = PodUid::parse("0b6c6bd0-0000-4000-8000-000000000000").unwrap();
    assert_eq!(
        cluster.evict("victim", &foreign_pod).await,
        EvictionOutcome::Gone
    );
    assert!(cluster.pod("victim").await["metadata"]["deletionTimestamp"].is_null());
    assert_eq!(
        cluster.evict("victim", &uid).await,
        EvictionOutcome::Evicted
    );
    let pod = cluster.pod("victim").await;
    assert!(pod["metadata"]["deletionTimestamp"].is_string());
    let target = cluster
        .condition("victim", "DisruptionTarget")
        .await
        .unwrap();
    assert_eq!(target["reason"], "EvictionByEvictionAPI");
    assert_eq!(cluster.evict("nobody", &uid).await, EvictionOutcome::Gone);
    a_pod_that_is_being_deleted_is_told_to_end_sooner(cluster, &uid).await;
}

/// Its budget allows nothing, and is not asked.
async fn a_pod_that_is_being_deleted_is_told_to_end_sooner(
    cluster: &InstalledCluster,
    victim: &PodUid,
) {
    let own_grace = cluster.pod("victim").await["metadata"]["deletionGracePeriodSeconds"].clone();
    assert_eq!(own_grace, 30);
    cluster
        .pods()
        .delete("victim", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    assert_eq!(cluster.evict("victim", victim).await, EvictionOutcome::Gone);
    let uid = cluster.run("victim").await;
    cluster.observe("victim").await;
    cluster
        .pods()
        .delete("victim", &DeleteParams::default().grace_period(31_536_000))
        .await
        .unwrap();
    assert_eq!(
        cluster.evict("victim", &uid).await,
        EvictionOutcome::Evicted
    );
    assert_eq!(
        cluster.pod("victim").await["metadata"]["deletionGracePeriodSeconds"],
        30
    );
    cluster
        .pods()
        .delete("victim", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
}

async fn only_stowage_may_reserve_or_plan(cluster: &InstalledCluster) {
    let uid = cluster.create("forged", &[]).await;
    let owner = &cluster.owner;
    for kind in [
        RESERVED_CONDITION,
        objects::PLACED_CONDITION,
        objects::WAKEABLE_CONDITION,
    ] {
        let refused = cluster
            .status_by(owner, "forged", condition(kind))
            .await
            .unwrap_err();
        assert!(refused.contains(ONLY_STOWAGE_WRITES), "{refused}");
    }
    cluster
        .write("forged", &uid, StatusChange::end_reservation())
        .await
        .unwrap();
    let change = json!({ "conditions": [{ "type": RESERVED_CONDITION, "status": "True" }] });
    let removal = json!({ "conditions": [{ "$patch": "delete", "type": RESERVED_CONDITION }] });
    for forged in [change, removal] {
        let refused = cluster
            .status_by(owner, "forged", forged)
            .await
            .unwrap_err();
        assert!(refused.contains(ONLY_STOWAGE_WRITES), "{refused}");
    }
    // As a kubelet does.
    cluster
        .status_by(owner, "forged", condition("Ready"))
        .await
        .unwrap();
    cluster
        .status_by(owner, "forged", json!({ "phase": "Running" }))
        .await
        .unwrap();
    assert_eq!(
        cluster
            .condition("forged", RESERVED_CONDITION)
            .await
            .unwrap()["status"],
        "False"
    );
}

async fn stowage_changes_nothing_else(cluster: &InstalledCluster) {
    cluster.create("minded", &[objects::PLAN_GATE]).await;
    let stowage = &cluster.stowage;
    // Those that the API server gave it stay.
    let mut tolerations = cluster.pod("minded").await["spec"]["tolerations"].clone();
    tolerations
        .as_array_mut()
        .unwrap()
        .push(json!({ "operator": "Exists", "effect": "NoSchedule" }));
    for (patch, reason) in [
        (
            json!({ "metadata": { "labels": { "a": "b" } } }),
            "must not change a pod's metadata",
        ),
        (
            json!({ "metadata": { "annotations": { "stowage.dev/devices": "GPU-1" } } }),
            "must not change a pod's metadata",
        ),
        (
            json!({ "metadata": { "finalizers": ["example.com/a"] } }),
            "must not change a pod's metadata",
        ),
        (
            json!({ "spec": { "containers": [{ "name": "c", "image": "other" }] } }),
            "only its own scheduling gate",
        ),
        (
            json!({ "spec": { "tolerations": tolerations } }),
            "only its own scheduling gate",
        ),
        (
            json!({ "spec": { "nodeSelector": { "a": "b" } } }),
            "only its own scheduling gate",
        ),
        (
            json!({ "spec": { "activeDeadlineSeconds": 1 } }),
            "only its own scheduling gate",
        ),
    ] {
        let refused = cluster
            .patch_by(stowage, "minded", patch.clone())
            .await
            .unwrap_err();
        assert!(refused.contains(reason), "{patch}: {refused}");
        cluster
            .patch_by(&cluster.owner, "minded", patch.clone())
            .await
            .unwrap_or_else(|why| {
                // The devices are kept to Stowage's Binding by the other policy.
                assert!(
                    patch.to_string().contains("stowage.dev/devices"),
                    "its owner may: {patch}: {why}"
                );
            });
    }
    for (status, reason) in [
        (condition("Ready"), "only the conditions"),
        (
            json!({ "phase": "Failed" }),
            "conditions and the nomination",
        ),
        (
            json!({ "podIP": "10.0.0.1" }),
            "conditions and the nomination",
        ),
        (
            json!({ "reason": "Evicted" }),
            "conditions and the nomination",
        ),
    ] {
        let refused = cluster
            .status_by(stowage, "minded", status.clone())
            .await
            .unwrap_err();
        assert!(refused.contains(reason), "{status}: {refused}");
    }
    // Its neighbor's, with the same identity.
    for allowed in [
        condition("PodScheduled"),
        condition("DisruptionTarget"),
        json!({ "nominatedNodeName": "n" }),
    ] {
        cluster.status_by(stowage, "minded", allowed).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_whose_class_ignores_budgets_is_evicted_despite_one() {
    let Some(cluster) = InstalledCluster::start().await else {
        return;
    };
    let budget = "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: immortal, namespace: default}, \
                  spec: {maxUnavailable: 0, selector: {}}}";
    let applied = cluster.world.apply(budget, &[]);
    assert!(applied.is_success, "{}", applied.output);
    let uid = cluster.run("covered").await;
    cluster.observe("covered").await;
    let refused = cluster.evict("covered", &uid).await;
    assert!(
        matches!(refused, EvictionOutcome::TryLater { .. }),
        "{refused:?}"
    );
    let stays = &cluster.pod("covered").await["metadata"]["deletionTimestamp"];
    assert!(stays.is_null(), "its class honors budgets");

    let policy = Policy::default();
    let ignoring = |class: &Class| Class {
        disruption_budgets: Protection::Ignore,
        ..class.clone()
    };
    let classes = policy.classes().iter().map(ignoring).collect();
    cluster
        .service
        .set_policy(policy.with_classes(classes).unwrap());
    let foreign_pod = PodUid::parse("0b6c6bd0-0000-4000-8000-000000000000").unwrap();
    assert!(!matches!(
        cluster.evict("covered", &foreign_pod).await,
        EvictionOutcome::Evicted
    ));
    assert!(
        cluster.pod("covered").await["metadata"]["deletionTimestamp"].is_null(),
        "another pod of the name"
    );
    assert_eq!(
        cluster.evict("covered", &uid).await,
        EvictionOutcome::Evicted
    );
    assert!(cluster.pod("covered").await["metadata"]["deletionTimestamp"].is_string());
}
