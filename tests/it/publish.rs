//! The agent's publisher against real extenders' addresses, plain and with TLS.

use crate::agent_auth::GuardedReports;
use crate::client::NOBODYS;
use crate::served::{Served, ServedCluster, endpoints, eventually, report};
use crate::tls::{Ca, TlsFixture};
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stowage_agent::publish::{Destination, PublishOutcome, Publisher};
use stowage_report::NodeReport;
use stowage_server::extender::server;
use stowage_server::extender::tls::{ServerFiles, from_pem, load_server};
use tokio_util::sync::CancellationToken;

/// Timeout of a publication: longer than one takes on a busy machine, so that only a server that never answers meets it.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(60);

/// An agent, and a runtime for it.
struct PublishingAgent {
    publisher: Publisher,
    runtime: tokio::runtime::Runtime,
    sequence: u64,
}

impl PublishingAgent {
    fn of(extenders: &[String], token_file: Option<PathBuf>, ca: Option<PathBuf>) -> Self {
        let extenders: Vec<Destination> =
            extenders.iter().map(|text| text.parse().unwrap()).collect();
        let publisher = Publisher::new(extenders, token_file, ca)
            .unwrap()
            .with_replica_timeout(PUBLISH_TIMEOUT);
        Self {
            publisher,
            runtime: tokio::runtime::Runtime::new().unwrap(),
            sequence: 0,
        }
    }

    /// Sends the next report of a node; what became of it at each replica, in order of their names.
    fn publish(&mut self, node: &str) -> Vec<PublishOutcome> {
        self.sequence += 1;
        let report: NodeReport =
            serde_json::from_value(report(node, "agent", self.sequence, 2)).unwrap();
        self.runtime
            .block_on(self.publisher.publish(report, Instant::now()));
        self.publisher
            .state()
            .replicas
            .into_values()
            .map(|replica| replica.latest)
            .collect()
    }
}

fn served() -> Served {
    ServedCluster::with_gpus(&[("node-a", 1)]).serve()
}

fn agents_url(served: &Served) -> String {
    format!("http://{}", served.agents)
}

fn unreachable(outcome: &PublishOutcome) -> &str {
    match outcome {
        PublishOutcome::Unreachable { reason } => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_report_reaches_every_replica_and_a_dead_replica_delays_none() {
    let (one, other) = (served(), served());
    let dead = format!("http://127.0.0.1:{NOBODYS}");
    let mut agent = PublishingAgent::of(
        &[agents_url(&one), agents_url(&other), dead.clone()],
        None,
        None,
    );
    for _ in 0..2 {
        agent.publish("node-a");
    }
    let state = agent.publisher.state();
    assert_eq!((state.replicas.len(), state.problems.len()), (3, 0));
    for (name, replica) in &state.replicas {
        if name.starts_with(&format!("{dead} ")) {
            assert!(
                unreachable(&replica.latest).contains("refused"),
                "{replica:?}"
            );
            assert_eq!((replica.accepted, replica.failed), (0, 2));
        } else {
            assert_eq!(
                (&replica.latest, replica.accepted),
                (&PublishOutcome::Accepted, 2)
            );
        }
    }
    assert_eq!(
        (one.charged("node-a").len(), other.charged("node-a").len()),
        (2, 2)
    );
}

#[test]
fn a_replica_that_never_answers_times_out() {
    let (live, hung) = (served(), TcpListener::bind("127.0.0.1:0").unwrap());
    let hung_at = format!("http://{}", hung.local_addr().unwrap());
    let mut agent = PublishingAgent::of(&[agents_url(&live), hung_at.clone()], None, None);
    agent.publisher = agent
        .publisher
        .with_replica_timeout(Duration::from_millis(100));
    eventually("the live one accepts and the hung one is given up", || {
        agent.publish("node-a");
        let state = agent.publisher.state();
        let (hung, live): (Vec<_>, Vec<_>) = state
            .replicas
            .iter()
            .partition(|(name, _)| name.starts_with(&hung_at));
        hung.iter().for_each(|(_, hung)| {
            assert!(unreachable(&hung.latest).contains("no answer within 100ms"))
        });
        !hung.is_empty()
            && live
                .iter()
                .any(|(_, live)| live.latest == PublishOutcome::Accepted)
    });
}

#[test]
fn a_report_older_than_the_known_one_is_dropped_and_not_refused() {
    let served = served();
    let mut agent = PublishingAgent::of(&[agents_url(&served)], None, None);
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Accepted]);
    agent.sequence = 0;
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Dropped]);
    let [PublishOutcome::Refused { status, reason }] = &agent.publish("node-z")[..] else {
        panic!("it is unknown")
    };
    assert_eq!(status.as_u16(), 422);
    assert!(reason.contains("no node \"node-z\""), "{reason}");
}

#[test]
fn each_report_carries_the_current_token_of_the_file() {
    let (guarded, files) = (GuardedReports::start(), TlsFixture::new());
    let token = files.write("token", "");
    let mut agent = PublishingAgent::of(&[agents_url(&guarded.served)], Some(token), None);
    let unsent = agent.publish("node-a");
    let [PublishOutcome::Unsent { reason }] = &unsent[..] else {
        panic!("{unsent:?}")
    };
    assert!(reason.contains("should hold a token"), "{reason}");
    assert!(agent.publisher.state().problems.contains(reason));
    let refused = |outcomes: Vec<PublishOutcome>| match &outcomes[..] {
        [PublishOutcome::Refused { status, reason }] => (status.as_u16(), reason.clone()),
        other => panic!("{other:?}"),
    };
    files.write("token", "made-up");
    assert_eq!(refused(agent.publish("node-a")).0, 401);
    files.write("token", &guarded.token("node-b"));
    let (status, reason) = refused(agent.publish("node-a"));
    assert!(
        status == 403 && reason.contains("an agent on node-b, which cannot speak for node-a"),
        "{reason}"
    );
    files.write("token", &format!("{}\n", guarded.token("node-a")));
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Accepted]);
    assert_eq!(agent.publisher.state().problems.len(), 0);
}

#[test]
fn with_tls_reports_go_only_to_a_server_with_a_valid_certificate_of_its_name() {
    let [ours, theirs] = ["ours", "theirs"].map(Ca::new);
    let (served, files, stop) = (served(), TlsFixture::new(), CancellationToken::new());
    let open = |server: &str| {
        let server = ours.issue_for(server);
        let cert = files.write("tls.crt", &server.cert);
        let key = files.write("tls.key", &server.key);
        let (mut endpoints, [_, address, _]) = endpoints();
        endpoints.agents.tls = Some(load_server(&ServerFiles { cert, key }).unwrap());
        (
            served.spawn(server::serve(
                served.extender.clone(),
                endpoints,
                stop.clone(),
            )),
            address,
        )
    };
    let (serving, address) = open("localhost");
    let ca = files.write("ours.crt", &ours.pem);
    let publish = |extender: String, ca: &PathBuf| {
        PublishingAgent::of(&[extender], None, Some(ca.clone()))
            .publish("node-a")
            .pop()
            .unwrap()
    };
    let named = format!("https://localhost:{}", address.port());
    let mut agent = PublishingAgent::of(&[named], None, Some(ca.clone()));
    // A name may stand for an IPv6 address as well, where no server listens.
    assert!(agent.publish("node-a").contains(&PublishOutcome::Accepted));
    let other_name = publish(format!("https://{address}"), &ca);
    assert!(
        unreachable(&other_name).contains("not valid for name"),
        "{other_name:?}"
    );
    let other_ca = publish(
        format!("https://{address}"),
        &files.write("theirs.crt", &theirs.pem),
    );
    assert!(
        unreachable(&other_ca).contains("UnknownIssuer"),
        "{other_ca:?}"
    );
    let plain = publish(format!("https://{}", served.agents), &ca);
    assert!(
        unreachable(&plain).contains("Connect"),
        "no TLS there: {plain:?}"
    );
    drop(agent);
    stop.cancel();
    served.run(serving).unwrap().unwrap();
}

#[test]
fn an_agent_waits_for_its_ca_and_trusts_another_from_the_next_report_on() {
    let ([old, new], files) = (["old", "new"].map(Ca::new), TlsFixture::new());
    let (served, stop) = (served(), CancellationToken::new());
    let of = |ca: &Ca| {
        let server = ca.issue_for("127.0.0.1");
        from_pem(&server.cert, &server.key).unwrap()
    };
    let (mut endpoints, [_, address, _]) = endpoints();
    let tls = of(&old);
    endpoints.agents.tls = Some(tls.clone());
    let serving = served.spawn(server::serve(
        served.extender.clone(),
        endpoints,
        stop.clone(),
    ));
    let missing = files.write("ca.crt", "");
    std::fs::remove_file(&missing).unwrap();
    let mut agent = PublishingAgent::of(&[format!("https://{address}")], None, Some(missing));
    assert!(
        unreachable(&agent.publish("node-a")[0]).contains("UnknownIssuer"),
        "it trusts nobody yet"
    );
    let problems = agent.publisher.state().problems;
    assert!(
        problems
            .first()
            .unwrap()
            .contains("cannot read the extenders' CA"),
        "{problems:?}"
    );
    files.write("ca.crt", &old.pem);
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Accepted]);
    // The next CA is published, and then it signs; the connection that is there is used no more.
    files.write("ca.crt", &format!("{}{}", old.pem, new.pem));
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Accepted]);
    tls.replace(&of(&new));
    files.write("ca.crt", &new.pem);
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Accepted]);
    // A file that breaks changes nothing.
    files.write(
        "ca.crt",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    assert_eq!(agent.publish("node-a"), [PublishOutcome::Accepted]);
    let state = agent.publisher.state();
    let counts: Vec<_> = state
        .replicas
        .values()
        .map(|one| (one.accepted, one.failed))
        .collect();
    assert_eq!((counts, state.problems.len()), (vec![(4, 1)], 1));
    drop(agent);
    stop.cancel();
    served.run(serving).unwrap().unwrap();
}
