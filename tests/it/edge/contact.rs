//! A replica's readiness when the API server has been unreachable for a while.

use crate::client::{Client, TEST_TIMEOUT};
use crate::served::{endpoints, policy_without_engines};
use std::time::{Duration, Instant};
use stowage_lab::demo::api_server::ApiServer;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::{Extender, server};
use stowage_server::kubernetes;
use stowage_server::kubernetes::{ClusterOptions, LeadWith};
use stowage_server::service::ServerState;
use tokio_util::sync::CancellationToken;

/// The status of `/readyz` once it is this one, and its text.
fn until(status: u16, operators: std::net::SocketAddr) -> String {
    let started = Instant::now();
    loop {
        let answer = Client::connect(operators).get("/readyz");
        if answer.status == status {
            return answer.text().to_owned();
        }
        assert!(
            started.elapsed() < TEST_TIMEOUT,
            "still {}: {}",
            answer.status,
            answer.text()
        );
        std::thread::park_timeout(Duration::from_millis(100));
    }
}

#[test]
fn a_replica_without_its_api_server_is_not_ready_and_not_synced() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let api = runtime.block_on(ApiServer::start()).unwrap();
    let (service, stop) = (
        ServerState::new(policy_without_engines()),
        CancellationToken::new(),
    );
    let options = ClusterOptions::new(LeadWith::FromTheStart, "stowage".into());
    let client = api.client("stowage").unwrap();
    let (control_plane, _tasks) = kubernetes::start(client, service.clone(), options, stop.clone());
    let (endpoints, [.., operators]) = endpoints();
    let extender = Extender::new(service, control_plane, RequestLimits::default());
    runtime.spawn(server::serve(extender, endpoints, stop.clone()));
    // It is ready as soon as its ledger is complete, whether or not it leads yet.
    until(200, operators);
    drop(api);
    let text = until(503, operators);
    assert!(
        text.contains("the API server has not answered for"),
        "{text}"
    );
    let mut client = Client::connect(operators);
    assert!(
        client
            .get_page("/metrics")
            .text()
            .contains("\nstowage_synced 0\n")
    );
    assert_eq!(
        client.get("/healthz").status,
        200,
        "a restart would not bring it back"
    );
    stop.cancel();
}
