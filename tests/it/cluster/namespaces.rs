//! The labels of namespaces reach the cluster by a watch of their own, which runs while a policy asks for them.

use super::*;
use stowage_policy_file::{SourceText, load};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::vocabulary::classification::PodTraits;

fn selecting() -> Policy {
    let text = "kind: SchedulingPolicy\nclasses: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
    load(&[SourceText::new("policy.yaml", text)])
        .unwrap()
        .policy
}

fn namespace(team: &str) -> Value {
    json!({"metadata": {"name": "chat", "labels": {"team": team}}})
}

fn class_of_chat(service: &ServerState) -> String {
    let chat = PodTraits {
        namespace: "chat".into(),
        ..PodTraits::default()
    };
    let cluster = service.cluster();
    cluster
        .ledger()
        .policy()
        .class(cluster.ledger().policy().classify(&chat).class)
        .name
        .clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespace_labels_are_watched_while_a_policy_selects_by_them() {
    let server = server_with_nodes(&["a"]).await;
    server.create("namespaces", namespace("a")).unwrap();
    let replica = TestReplica::acting(&server).await;
    let service = &replica.service;
    assert!(
        service.cluster().ledger().namespaces().is_empty(),
        "nothing asks for them"
    );
    assert!(
        !service.set_policy(selecting()),
        "the policy before stays until they are known"
    );
    eventually("they are listed", || service.namespaces_listed()).await;
    assert!(service.set_policy(selecting()));
    assert_eq!(class_of_chat(service), "own");
    server.delete("namespaces/chat").unwrap();
    eventually("it is gone", || class_of_chat(service) == "serving").await;
    server.create("namespaces", namespace("a")).unwrap();
    eventually("it is there again", || class_of_chat(service) == "own").await;
    assert!(service.leadership.is_open(), "all the while");
    service.set_policy(policy_without_engines());
    // As the watch of policy files does, which knows whether another policy waits for them.
    service.want_namespaces(service.reads_namespaces());
    eventually("nothing asks for them any more", || {
        service.cluster().ledger().namespaces().is_empty()
    })
    .await;
    replica.stop().await;
}
