//! Two pods on one overallocated GPU: one Binding was written late, and no check refused it. Against the stand-in API server,
//! which accepts every Binding.

use crate::served::gpu_labels;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use stowage_lab::demo::api_server::ApiServer;
use stowage_policy_file::{SourceText, load};
use stowage_scheduling::policy::Policy;
use stowage_server::kubernetes;
use stowage_server::kubernetes::{ClusterOptions, LeadWith, LeaseName};
use stowage_server::service::ServerState;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Longer than anything here takes on a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A replica beside an API server with one node of two GPUs of 80 GiB.
struct AuditedReplica {
    server: ApiServer,
    service: Arc<ServerState>,
    _tasks: JoinSet<()>,
    _stop: DropGuard,
}

impl AuditedReplica {
    async fn start(lead_with: LeadWith, policy: &str) -> Self {
        let server = ApiServer::start().await.unwrap();
        server
            .create(
                "nodes",
                json!({ "metadata": { "name": "a", "labels": gpu_labels(2) } }),
            )
            .unwrap();
        let service = ServerState::new(policy_of(policy));
        let stop = CancellationToken::new();
        let (client, options) = (
            server.client("stowage").unwrap(),
            ClusterOptions::new(lead_with, "stowage".into()),
        );
        let (_, tasks) = kubernetes::start(client, service.clone(), options, stop.clone());
        eventually("the watches have synced", || service.leadership.is_synced()).await;
        Self {
            server,
            service,
            _tasks: tasks,
            _stop: stop.drop_guard(),
        }
    }

    /// A pod on GPU 0, as a Binding of Stowage's leaves it: `granted` with its share of the GPU's 80 GiB.
    fn create_bound_pod(&self, name: &str, granted: u64, exclusive: bool) {
        let limits = json!({ "limits": { "stowage.dev/vram": format!("{granted}Gi") } });
        let spec = json!({ "schedulerName": "stowage", "containers": [{ "name": "engine", "resources": limits }] });
        self.server
            .create(
                "pods",
                json!({ "metadata": { "name": name }, "spec": spec }),
            )
            .unwrap();
        let mut annotations = json!({
            "stowage.dev/devices": "index-0",
            "stowage.dev/vram-granted": (granted << 30).to_string(),
            "stowage.dev/gpu-memory-fraction": format!("0.{:02}", granted * 100 / 80),
        });
        if exclusive {
            annotations["stowage.dev/exclusive-granted"] = json!("true");
        }
        let binding =
            json!({ "metadata": { "annotations": annotations }, "target": { "name": "a" } });
        self.server
            .bind(&format!("pods/default/{name}"), &binding)
            .unwrap();
    }

    fn runs(&self, name: &str) {
        let status =
            json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
        self.server
            .patch_status(
                &format!("pods/default/{name}"),
                &json!({ "status": status }),
            )
            .unwrap();
    }

    fn gauge(&self, kind: &str) -> Option<String> {
        let text = self.service.metrics.render();
        let name = format!("stowage_gpu_conflicts{{kind=\"{kind}\"}} ");
        text.lines()
            .find_map(|line| line.strip_prefix(&name).map(str::to_owned))
    }

    /// The pods with an Event about a conflict, in order of name, and its text.
    fn recorded_events(&self) -> Vec<(String, String)> {
        let events = self.server.list("events");
        let about = events
            .iter()
            .filter(|event| event["reason"] == "StowageGpuConflict");
        let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
        let mut told: Vec<_> = about
            .map(|event| (text(&event["regarding"]["name"]), text(&event["note"])))
            .collect();
        told.sort();
        told
    }

    fn is_leaving(&self, name: &str) -> bool {
        let pod = self.server.get(&format!("pods/default/{name}"));
        pod.is_none_or(|pod| pod["metadata"]["deletionTimestamp"].is_string())
    }
}

fn policy_of(text: &str) -> Policy {
    let text = format!("kind: SchedulingPolicy\n{text}");
    let sources = [SourceText::new("policy.yaml", text)];
    load(&sources).expect("the policy is sound").policy
}

/// Polls. There is no notification of a metric's change.
async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let looking = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TEST_TIMEOUT, looking)
        .await
        .unwrap_or_else(|_| panic!("timed out: {what}"));
}

#[tokio::test]
async fn two_pods_bound_to_one_gpu_are_counted_and_each_gets_an_event_about_the_other() {
    let world = AuditedReplica::start(LeadWith::FromTheStart, "").await;
    assert_eq!(
        world.gauge("overcommitted").as_deref(),
        Some("0"),
        "shown before the first"
    );
    world.create_bound_pod("early", 60, false);
    world.create_bound_pod("late", 50, false);
    eventually("the GPU is counted", || {
        world.gauge("overcommitted").as_deref() == Some("1")
    })
    .await;
    eventually("both are told", || world.recorded_events().len() == 2).await;
    let told = world.recorded_events();
    assert_eq!([&*told[0].0, &*told[1].0], ["early", "late"]);
    for (_, text) in &told {
        for part in [
            "default/early",
            "60.0 GiB",
            "default/late",
            "50.0 GiB",
            "110.0 GiB",
            "80.0 GiB",
            "node a",
        ] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
    assert!(
        !world.is_leaving("early") && !world.is_leaving("late"),
        "the default only reports"
    );
    world.server.delete_now("pods/default/late").unwrap();
    eventually("it is over", || {
        world.gauge("overcommitted").as_deref() == Some("0")
    })
    .await;
}

#[tokio::test]
async fn evict_unstarted_evicts_the_pod_that_has_not_started_even_if_it_was_bound_first() {
    let world = AuditedReplica::start(LeadWith::FromTheStart, "conflicts: evict-unstarted").await;
    world.create_bound_pod("waiting-for-its-image", 60, false);
    world.create_bound_pod("running", 60, false);
    world.runs("running");
    eventually("it leaves", || world.is_leaving("waiting-for-its-image")).await;
    assert!(!world.is_leaving("running"));
    let conditions = world
        .server
        .get("pods/default/waiting-for-its-image")
        .map(|pod| pod["status"].clone());
    let text = conditions.unwrap().to_string();
    assert!(
        text.contains("\"GpuConflict\"") && text.contains("default/running"),
        "{text}"
    );
}

#[tokio::test]
async fn a_standby_counts_a_pod_beside_an_exclusive_one_and_records_no_event() {
    // That Lease has no holder.
    let standby = LeadWith::KubeScheduler {
        lease: LeaseName::for_kube_scheduler(),
        hostname: "another".into(),
    };
    let world = AuditedReplica::start(standby, "conflicts: evict-unstarted").await;
    world.create_bound_pod("exclusive", 70, true);
    world.create_bound_pod("beside", 2, false);
    eventually("the GPU is counted", || {
        world.gauge("exclusive-shared").as_deref() == Some("1")
    })
    .await;
    world.server.delete_now("pods/default/exclusive").unwrap();
    eventually("a later look finds one pod", || {
        world.gauge("exclusive-shared").as_deref() == Some("0")
    })
    .await;
    assert!(world.recorded_events().is_empty() && !world.is_leaving("beside"));
}
