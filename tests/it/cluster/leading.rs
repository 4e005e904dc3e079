//! Which replica leads: by the kube-scheduler's Lease, or by its own.

use super::*;

fn neighbors_lease(holder: &str, renewed: i64, seconds: i32) -> Value {
    let renewed = jiff::Timestamp::from_second(renewed).unwrap();
    json!({ "spec": {
        "holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": format!("{renewed:.6}"),
    } })
}

#[tokio::test]
async fn leadership_follows_the_kube_schedulers_lease_and_ends_when_it_is_lost_or_expires() {
    let server = server_with_nodes(&["a"]).await;
    let path = "leases/kube-system/kube-scheduler";
    let mut lease = neighbors_lease("stowage-0_1b2c", 1000, 12);
    lease["metadata"] = json!({ "name": "kube-scheduler" });
    server.create("leases/kube-system", lease).unwrap();
    let name = LeaseName::for_kube_scheduler();
    let lead_with = LeadWith::KubeScheduler {
        lease: name,
        hostname: "stowage-0".into(),
    };
    let replica = TestReplica::start(&server, "stowage", lead_with);
    let leadership = &replica.service.leadership;
    let looks = || server.calls().count("get", "leases");
    eventually("it is looked at", || looks() >= 2 && leadership.is_synced()).await;
    assert!(!leadership.is_open(), "no renewal was seen yet");

    let leading = || replica.service.metrics.leading.get();
    let mut renewed = 1002;
    eventually(
        "the gate opens once nothing of another leader can land",
        || {
            renewed += 1;
            server
                .patch(path, &neighbors_lease("stowage-0_1b2c", renewed, 12))
                .unwrap();
            leadership.is_open() && leading() == 1
        },
    )
    .await;
    // Without renewals it does not stay open for long.
    eventually("the gate shuts without renewals", || !leadership.is_open()).await;

    eventually("the gate opens again", || {
        renewed += 1;
        server
            .patch(path, &neighbors_lease("stowage-0_1b2c", renewed, 15))
            .unwrap();
        leadership.is_open()
    })
    .await;
    server
        .patch(path, &neighbors_lease("stowage-1_77", renewed + 1, 15))
        .unwrap();
    eventually("the gate shuts for another holder", || {
        !leadership.is_open() && leading() == 0
    })
    .await;
    replica.stop().await;
}

#[tokio::test]
async fn one_of_two_replicas_leads_and_the_other_takes_over_when_it_stops() {
    let server = server_with_nodes(&["a"]).await;
    let lead_with = |name: &str| LeadWith::Lease {
        lease: LeaseName::for_stowage("stowage"),
        identity: name.into(),
    };
    let first = TestReplica::start(&server, "first", lead_with("first"));
    eventually("the first leads", || first.service.leadership.is_open()).await;
    let second = TestReplica::start(&server, "second", lead_with("second"));
    let looks = || server.calls().count_by("second", "get", "leases");
    eventually("the second looks twice", || {
        looks() >= 2 && second.service.leadership.is_synced()
    })
    .await;
    assert!(first.service.leadership.is_open() && !second.service.leadership.is_open());
    assert_eq!(
        second
            .service
            .leadership
            .reason_not_leading()
            .map(|reason| reason.contains("does not lead")),
        Some(true)
    );
    first.stop().await;
    eventually("the second leads", || second.service.leadership.is_open()).await;
    let lease = server.get("leases/stowage/stowage").unwrap();
    assert!(
        lease["spec"]["holderIdentity"]
            .as_str()
            .unwrap()
            .starts_with("second_"),
        "{lease}"
    );
    second.stop().await;
}
