//! The stand-in kubelets: pods run, end in their grace period, and capacity becomes allocatable.

use serde_json::json;
use std::time::Duration;
use stowage::demo::api_server::ApiServer;
use stowage::demo::kubelet::{Config, Kubelet};

#[tokio::test]
async fn a_bound_pod_runs_and_a_deleted_one_ends() {
    let api = ApiServer::start().await.unwrap();
    let config = Config { grace_second: Duration::from_millis(1), ..Config::default() };
    let _kubelet = Kubelet::start(api.client("kubelet").unwrap(), config);
    api.create("pods", json!({"metadata": {"name": "a"}, "spec": {"containers": []}})).unwrap();
    api.bind("pods/default/a", &json!({"target": {"name": "n"}})).unwrap();
    let running =
        api.until(|api| api.get("pods/default/a").filter(|pod| pod["status"]["phase"] == "Running")).await;
    let conditions = running["status"]["conditions"].as_array().unwrap();
    assert!(conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True"));
    assert!(conditions.iter().any(|condition| condition["type"] == "PodScheduled"), "the old ones are kept");
    api.delete("pods/default/a").unwrap();
    assert!(api.get("pods/default/a").is_some(), "its grace period is not over");
    api.until(|api| api.get("pods/default/a").is_none().then_some(())).await;
}

#[tokio::test]
async fn capacity_that_is_patched_in_becomes_allocatable() {
    let api = ApiServer::start().await.unwrap();
    let _kubelet = Kubelet::start(api.client("kubelet").unwrap(), Config::default());
    api.create("nodes", json!({"metadata": {"name": "n"}, "status": {"capacity": {"cpu": "4"}}})).unwrap();
    api.patch_status("nodes/n", &json!({"status": {"capacity": {"stowage.dev/vram": "80Gi"}}})).unwrap();
    let node = api.until(|api| {
        api.get("nodes/n").filter(|node| node["status"]["allocatable"]["stowage.dev/vram"] == "80Gi")
    });
    assert_eq!(node.await["status"]["allocatable"]["cpu"], "4");
}
