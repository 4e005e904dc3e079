//! A Binding is one write, and every answer to it has its outcome.

use super::*;

#[tokio::test]
async fn a_bind_is_one_write_and_reads_nothing() {
    let server = server_with_nodes(&["a"]).await;
    let replica = TestReplica::acting(&server).await;
    create_pod(&server, "p", 20);
    let order = replica.assume("p", "a").await;
    let reads = server.calls().reads_by("stowage");
    assert_eq!(
        replica.control_plane.bind(&order).await,
        BindOutcome::Written
    );
    assert_eq!(server.calls().reads_by("stowage"), reads);
    assert_eq!(
        server.calls().count_by("stowage", "create", "pods/binding"),
        1
    );

    let pod = server.get("pods/default/p").unwrap();
    assert_eq!(pod["spec"]["nodeName"], "a");
    let annotations = &pod["metadata"]["annotations"];
    assert_eq!(
        annotations["stowage.dev/devices"],
        order.placement.devices[0].as_str()
    );
    assert_eq!(
        annotations["stowage.dev/vram-granted"],
        Bytes::gib(20).0.to_string()
    );
    let on_record = replica
        .control_plane
        .read_pod(&order.key)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(on_record.uid, order.uid);
    assert_eq!(on_record.node, Some(node_name("a")));
    assert_eq!(on_record.devices, Some(order.placement.devices.clone()));
    eventually("the watch confirms it", || {
        matches!(replica.phase("p"), Some(PodPhase::Bound(_)))
    })
    .await;
    replica.stop().await;
}

#[tokio::test]
async fn every_binding_response_has_its_outcome() {
    let server = server_with_nodes(&["a", "b"]).await;
    let replica = TestReplica::acting(&server).await;
    create_pod(&server, "p", 20);
    let order = replica.assume("p", "a").await;
    let bind = async |order: &BindOrder| replica.control_plane.bind(order).await;

    server
        .faults()
        .fail_next(Operation::Binding, 1, InjectedFault::Fails);
    assert!(
        matches!(bind(&order).await, BindOutcome::Unknown { .. }),
        "500"
    );
    let hung = replica
        .bind_without_answer(&server, &order, InjectedFault::Hangs)
        .await;
    assert!(matches!(hung, BindOutcome::Unknown { .. }), "no answer");
    let other = BindOrder {
        uid: PodUid::parse("another").unwrap(),
        ..order.clone()
    };
    assert_eq!(
        bind(&other).await,
        BindOutcome::Conflict,
        "the name stands for another pod"
    );
    let mut missing = order.clone();
    missing.key.name = "nobody".into();
    assert!(
        matches!(bind(&missing).await, BindOutcome::Refused { .. }),
        "404"
    );
    assert_eq!(
        server.get("pods/default/p").unwrap()["spec"]["nodeName"],
        Value::Null
    );

    bind_without_stowage(&server, "p", "b");
    assert_eq!(
        bind(&order).await,
        BindOutcome::Conflict,
        "bound by someone else"
    );
    let writes = server.calls().count("create", "pods/binding");
    replica.service.set_tenure(Tenure::Standby);
    assert!(
        matches!(bind(&order).await, BindOutcome::Refused { .. }),
        "another replica leads"
    );
    assert_eq!(
        server.calls().count("create", "pods/binding"),
        writes,
        "nothing was sent"
    );
    assert_eq!(replica.control_plane.read_pod(&missing.key).await, Ok(None));
    replica.stop().await;
}
