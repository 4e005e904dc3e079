//! An engine sleeps beside the real scheduler: the node's capacity rises, opportunistic pods fill its VRAM, it asks to wake, and
//! they are gone before it is told that it may.

use super::fleet::{node, pod};
use super::processes::eventually;
use super::world::{RealControlPlane, amount};
use super::{ALWAYS, GIB, annotation, name_of, pods, submit, wait_until_all_bound};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use stowage_kubernetes_objects as objects;

const POLICY: &str = "apiVersion: stowage.dev/v1alpha1
kind: SchedulingPolicy
planning:
  lending: { after: 1s, margin: 1Gi }
classes:
  - name: serving
    sleeping: lend
";

#[tokio::test(flavor = "multi_thread")]
async fn opportunistic_pods_borrow_a_sleeping_engines_vram_and_leave_before_it_wakes() {
    let gpus = node("a", 1, 81_559, "NVIDIA-H100-80GB-HBM3");
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("policy.yaml"), POLICY).unwrap();
    let serve = [&ALWAYS[..], &["--policy", folder.path().to_str().unwrap()]].concat();
    let Some(mut world) = RealControlPlane::start_all(vec![gpus.clone()], &serve).await else {
        return;
    };
    world.begin_scheduling().await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    let engines: Api<Pod> = Api::default_namespaced(world.client.clone());
    let capacity = async || amount(&nodes.get("a").await.unwrap(), "capacity");
    submit(
        &world.client,
        &[pod("engine", 60, &json!({}), "stowage-serving")],
    )
    .await;
    let engine = wait_until_all_bound(&mut world, 1).await.pop().unwrap();
    let uid = engine.metadata.uid.clone().unwrap();
    let awake = capacity().await;

    // Of 60 GiB it uses 3 and keeps 4: 56 are lent.
    world.report_engine(&gpus.uuid(0), &uid, 3 << 10, "sleeping");
    let jobs: Vec<Pod> = (0..3)
        .map(|n| pod(&format!("job-{n}"), 20, &json!({}), "stowage-opportunistic"))
        .collect();
    submit(&world.client, &jobs).await;
    let bound = wait_until_all_bound(&mut world, 4).await;
    let lent = capacity().await;
    assert_eq!(lent - awake, 56 * GIB, "kube-scheduler sees what is lent");
    let borrows =
        |pod: &&Pod| annotation(pod, objects::binding_annotations::BORROWED_FROM) == Some(&uid);
    let borrowers: Vec<&str> = bound.iter().filter(borrows).map(name_of).collect();
    assert_eq!(
        borrowers.len(),
        3,
        "11 GiB were free: each of 20 GiB borrows"
    );

    let request = json!({ "metadata": { "annotations": { objects::user_annotations::WAKE_REQUESTED: "first" } } });
    engines
        .patch("engine", &PatchParams::default(), &Patch::Merge(&request))
        .await
        .unwrap();
    let answer = eventually("the engine is told that it may wake", async || {
        world.check();
        let pod = engines.get("engine").await.ok()?;
        let conditions = pod.status?.conditions?;
        let mut told = conditions
            .into_iter()
            .filter(|one| one.type_ == objects::WAKEABLE_CONDITION);
        told.find(|one| one.status == "True")
    })
    .await;
    assert_eq!(answer.message.as_deref(), Some("first"));
    let left: Vec<String> = pods(&world.client)
        .await
        .iter()
        .map(|pod| name_of(pod).to_owned())
        .collect();
    let stay = left.iter().filter(|name| name.starts_with("job-")).count();
    assert_eq!(
        stay, 0,
        "its whole grant is free, and 11 GiB are too little for a job: {left:?}"
    );
    world.report_engine(&gpus.uuid(0), &uid, 58 << 10, "serving");
    eventually("the capacity is what it was", async || {
        (capacity().await == awake).then_some(())
    })
    .await;
    assert_eq!(world.count("stowage_wakes_total", "wakeable").await, 1);
    assert_eq!(world.count("stowage_wakes_total", "unasked").await, 0);
    println!("borrowed: {borrowers:?}; {}", world.versions());
}
