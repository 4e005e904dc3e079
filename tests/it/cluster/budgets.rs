//! Disruption budgets reach the ledger by a separate watch, for which a replica may lack the rights.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disruption_budgets_are_watched() {
    let server = server_with_nodes(&["a"]).await;
    let replica = TestReplica::acting(&server).await;
    eventually("budgets are read", || {
        replica.service.cluster().ledger().are_budgets_known()
    })
    .await;
    let budget = json!({
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "chat"}}},
    });
    server.create("poddisruptionbudgets", budget).unwrap();
    eventually("the budget is seen", || {
        replica.service.cluster().ledger().budgets().len() == 1
    })
    .await;
    server.delete("poddisruptionbudgets/default/chat").unwrap();
    eventually("it is gone", || {
        replica.service.cluster().ledger().budgets().is_empty()
    })
    .await;
    replica.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_rights_to_read_budgets_a_replica_starts_and_knows_that_they_are_unknown() {
    let server = server_with_nodes(&["a"]).await;
    server
        .faults()
        .fail_next(Operation::ListBudgets, 1000, InjectedFault::Forbids);
    let replica = TestReplica::acting(&server).await;
    assert!(!replica.service.cluster().ledger().are_budgets_known());
    server.faults().clear();
    eventually("they are read after all", || {
        replica.service.cluster().ledger().are_budgets_known()
    })
    .await;
    replica.stop().await;
}
