//! The stand-in kubelets: pods run, end in their grace period, and capacity becomes allocatable.

use serde_json::json;
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::kubelet::{Kubelet, KubeletConfig};
use stowage_lab::demo::termination;

#[tokio::test]
async fn a_bound_pod_runs_and_a_deleted_one_ends() {
    let api = ApiServer::start().await.unwrap();
    let config = KubeletConfig {
        grace_second: Duration::from_millis(1),
        ..KubeletConfig::default()
    };
    let _kubelet = Kubelet::start(api.client("kubelet").unwrap(), config);
    api.create(
        "pods",
        json!({"metadata": {"name": "a"}, "spec": {"containers": []}}),
    )
    .unwrap();
    api.bind("pods/default/a", &json!({"target": {"name": "n"}}))
        .unwrap();
    let running = api
        .until(|api| {
            api.get("pods/default/a")
                .filter(|pod| pod["status"]["phase"] == "Running")
        })
        .await;
    let conditions = running["status"]["conditions"].as_array().unwrap();
    assert!(
        conditions
            .iter()
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    );
    assert!(
        conditions
            .iter()
            .any(|condition| condition["type"] == "PodScheduled"),
        "the old ones are kept"
    );
    api.delete("pods/default/a").unwrap();
    assert!(
        api.get("pods/default/a").is_some(),
        "its grace period is not over"
    );
    api.until(|api| api.get("pods/default/a").is_none().then_some(()))
        .await;
}

/// A grace period that no test outlives, so that what ends before it ended by itself.
const LONG_GRACE_PERIOD: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn a_pod_terminates_after_the_delay_it_declares() {
    let api = ApiServer::start().await.unwrap();
    let config = KubeletConfig {
        grace_second: LONG_GRACE_PERIOD,
        ..KubeletConfig::default()
    };
    let _kubelet = Kubelet::start(api.client("kubelet").unwrap(), config);
    for (name, takes) in [("soon", "1"), ("never", termination::FOR_EVER)] {
        let metadata =
            json!({"name": name, "annotations": {termination::TERMINATION_MILLIS: takes}});
        api.create(
            "pods",
            json!({"metadata": metadata, "spec": {"containers": []}}),
        )
        .unwrap();
        api.bind(
            &format!("pods/default/{name}"),
            &json!({"target": {"name": "n"}}),
        )
        .unwrap();
        api.delete(&format!("pods/default/{name}")).unwrap();
    }
    api.until(|api| api.get("pods/default/soon").is_none().then_some(()))
        .await;
    assert!(api.get("pods/default/never").unwrap()["metadata"]["deletionTimestamp"].is_string());
    api.delete_now("pods/default/never").unwrap();
    assert!(
        api.get("pods/default/never").is_none(),
        "who is forced goes at once"
    );
}

#[tokio::test]
async fn patched_capacity_becomes_allocatable() {
    let api = ApiServer::start().await.unwrap();
    let _kubelet = Kubelet::start(api.client("kubelet").unwrap(), KubeletConfig::default());
    api.create(
        "nodes",
        json!({"metadata": {"name": "n"}, "status": {"capacity": {"cpu": "4"}}}),
    )
    .unwrap();
    api.patch_status(
        "nodes/n",
        &json!({"status": {"capacity": {"stowage.dev/vram": "80Gi"}}}),
    )
    .unwrap();
    let node = api.until(|api| {
        api.get("nodes/n")
            .filter(|node| node["status"]["allocatable"]["stowage.dev/vram"] == "80Gi")
    });
    assert_eq!(node.await["status"]["allocatable"]["cpu"], "4");
}
