//! What Stowage records beside a real kube-scheduler replays to the byte. With `STOWAGE_BLESS` it becomes the recording that
//! [`crate::flight_recorder`] replays where there is no control plane.

use super::fleet::{node, pod};
use super::processes::eventually;
use super::world::RealControlPlane;
use super::{ALWAYS, gated, submit, wait_past_last_start, wait_until_all_bound};
use crate::flight_recorder::{CONTROL_PLANE_RECORDING, stowage};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::DeleteParams;
use serde_json::{Value, json};

const H100: &str = "NVIDIA-H100-80GB-HBM3";
/// A file of a repository.
const MOST_BYTES: u64 = 200 << 10;

#[tokio::test(flavor = "multi_thread")]
async fn what_is_recorded_beside_a_real_scheduler_replays_to_the_byte() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("recording");
    let recorded = directory.to_str().unwrap();
    let nodes = vec![
        node("h100-a", 2, 81_559, H100),
        node("h100-b", 2, 81_559, H100),
        node("l40s-a", 2, 46_068, "NVIDIA-L40S"),
    ];
    let serve = [&ALWAYS[..], &["--record", recorded]].concat();
    let Some(mut world) = RealControlPlane::start_all(nodes, &serve).await else {
        return;
    };
    world.begin_scheduling().await;
    a_story(&mut world).await;
    world.check();
    assert_eq!(
        world
            .count("stowage_recorder_dropped_inputs_total", "")
            .await,
        0
    );
    // Its last checkpoint is what a replay compares the state at the end with.
    world.stowage.take().expect("it runs").terminate();

    let said = stowage(&["replay", recorded, "-o", "json"]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let count = |what: &str| report[what].as_u64().unwrap();
    assert!(
        count("answers") > 10 && count("checkpoints") >= 1,
        "{}",
        said.out
    );
    assert_eq!(
        (count("gaps"), count("unasked"), count("torn")),
        (0, 0, 0),
        "{}",
        said.out
    );
    println!(
        "{} inputs and {} answers; {}",
        count("inputs"),
        count("answers"),
        world.versions()
    );

    if std::env::var_os("STOWAGE_BLESS").is_some() {
        let said = stowage(&["bundle", "--from", recorded, "-f", CONTROL_PLANE_RECORDING]);
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
        assert!(
            std::fs::metadata(CONTROL_PLANE_RECORDING).unwrap().len() < MOST_BYTES,
            "{}",
            said.out
        );
    }
}

/// All verbs and the planner: pods that fit and one that does not, one that preempts, gated ones, and one that leaves.
async fn a_story(world: &mut RealControlPlane) {
    let borrowers = (0..6).map(|i| {
        pod(
            &format!("filler-{i}"),
            30,
            &json!({}),
            "stowage-opportunistic",
        )
    });
    submit(&world.client, &borrowers.collect::<Vec<_>>()).await;
    wait_until_all_bound(world, 6).await;
    wait_past_last_start(&world.client).await;
    submit(
        &world.client,
        &[pod("chat", 60, &json!({}), "stowage-serving")],
    )
    .await;
    is_bound(world, "chat").await;
    let two = json!({ "stowage.dev/gpus": "2" });
    submit(
        &world.client,
        &[
            gated(pod("behind-a-gate", 6, &json!({}), "stowage-serving")),
            pod("wide", 16, &two, "stowage-serving"),
            pod("huge", 90, &json!({}), "stowage-serving"),
        ],
    )
    .await;
    is_bound(world, "behind-a-gate").await;
    is_bound(world, "wide").await;
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    api.delete("wide", &DeleteParams::default()).await.unwrap();
    eventually("a pod that was deleted is gone", async || {
        world.check();
        api.get_opt("wide").await.ok()?.is_none().then_some(())
    })
    .await;
}

async fn is_bound(world: &mut RealControlPlane, name: &str) {
    let api: Api<Pod> = Api::default_namespaced(world.client.clone());
    eventually(&format!("{name} is bound"), async || {
        world.check();
        super::node_of(&api.get(name).await.ok()?).map(|_| ())
    })
    .await;
}
