//! Pods behind the gate whose volumes the API server shows later than the pods: the watches are not in step, and the claim of an
//! ephemeral volume is created after its pod.

use super::*;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;

fn with_claim(name: &str) -> Value {
    let mut pod = gated(name, 50, 0);
    pod["spec"]["volumes"] =
        json!([{ "name": "weights", "persistentVolumeClaim": { "claimName": "weights" } }]);
    pod
}

fn show_claim(bench: &mut PlannerFixture) {
    let claim = json!({
        "metadata": { "name": "weights", "namespace": "default" },
        "spec": { "storageClassName": "disks" },
    });
    let class = json!({
        "metadata": { "name": "disks" },
        "provisioner": "disk.example.com", "volumeBindingMode": "WaitForFirstConsumer",
    });
    let claim: PersistentVolumeClaim = serde_json::from_value(claim).unwrap();
    let class: StorageClass = serde_json::from_value(class).unwrap();
    bench.index.apply_storage(&bench.state, &claim);
    bench.index.apply_storage(&bench.state, &class);
}

#[tokio::test]
async fn a_pod_whose_claim_is_not_shown_yet_keeps_its_gate_and_is_placed_when_it_is() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(with_claim("a"));
    assert_eq!(
        bench.tick().await,
        Vec::<String>::new(),
        "the watch of claims may be behind"
    );
    show_claim(&mut bench);
    bench.advance_seconds(5);
    assert_eq!(bench.tick().await, ["a: nominate n, placed", "a: lift"]);
}

#[tokio::test]
async fn a_pod_whose_claim_is_never_shown_is_left_to_the_scheduler_in_the_end() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench.show(with_claim("a"));
    let mut written = Vec::new();
    for _ in 0..7 {
        written.extend(bench.tick().await);
        bench.advance_seconds(5);
    }
    assert_eq!(written.len(), 3, "{written:?}");
    assert!(
        written[0].starts_with("a: waits: the planner does not support"),
        "{written:?}"
    );
    assert_eq!(written[1..], ["a: released", "a: lift"]);
}

#[tokio::test]
async fn a_pod_with_a_claim_does_not_wait_for_volumes_that_may_not_be_read() {
    let mut bench = PlannerFixture::new(&["n"]);
    bench
        .state
        .refused_reads
        .record_failure("persistentvolumes", Some(403), bench.state.now());
    bench.show(with_claim("a"));
    assert_eq!(bench.tick().await, ["a: released", "a: lift"]);
}
