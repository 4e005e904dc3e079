//! Authentication of reports: agents with a token of their own, each for its own node, as the stand-in API server reviews tokens.

use crate::client::{Client, HttpAnswer, post_head};
use crate::served::{Served, ServedCluster, endpoints, node, report};
use crate::tls::{Ca, TlsFixture};
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_lab::demo::api_server::ApiServer;
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};
use stowage_server::extender::server;
use stowage_server::extender::tls::{ServerFiles, load_server};
use stowage_server::kubernetes::{AgentAccount, TokenReviews};
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

pub const ACCOUNT: &str = "kube-system/stowage-agent";
pub const AUDIENCE: &str = "stowage.dev/reports";

/// A Stowage that has tokens reviewed by a stand-in API server, and knows `node-a` and `node-b`.
pub struct GuardedReports {
    pub served: Served,
    pub api: ApiServer,
    _runtime: Runtime,
}

impl GuardedReports {
    pub fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let api = runtime.block_on(ApiServer::start()).unwrap();
        let account = AgentAccount::new(AUDIENCE, "kube-system", "stowage-agent");
        let client = {
            let _inside = runtime.enter();
            api.client("stowage").unwrap()
        };
        let mut cluster = ServedCluster::with_gpus(&[]);
        let created = |name| Value::clone(&api.create("nodes", node(name)).unwrap());
        cluster.nodes.extend(["node-a", "node-b"].map(created));
        cluster.authority = Some(Arc::new(TokenReviews::new(client, account)));
        Self {
            served: cluster.serve(),
            api,
            _runtime: runtime,
        }
    }

    /// A token of the agent on that node.
    pub fn token(&self, node: &str) -> String {
        self.api.issue_token(ACCOUNT, Some(node), AUDIENCE)
    }

    fn post(&self, token: &str, body: &Value) -> HttpAnswer {
        let line = format!("Authorization: Bearer {token}");
        Client::connect(self.served.agents).post_with("/v1/reports", &line, body.to_string())
    }

    /// Refused before its body counts for anything; with its reason.
    fn expect_refusal(&self, status: u16, code: &str, line: &str) -> String {
        let (ledger, count) = (
            self.served.ledger(),
            self.served.bad_requests("reports", code),
        );
        let body = report("node-a", "boot", 1, 1).to_string();
        let answer = Client::connect(self.served.agents).post_with("/v1/reports", line, body);
        assert_eq!(answer.status, status, "{}", answer.text());
        assert_eq!(
            self.served.bad_requests("reports", code),
            count + 1,
            "{code} is not counted"
        );
        assert_eq!(self.served.ledger(), ledger);
        answer.json()["Error"].as_str().unwrap().to_owned()
    }

    fn review_count(&self) -> u64 {
        self.api.calls().count("create", "tokenreviews")
    }
}

fn accepted_answer(accepted: u64) -> Value {
    json!({ "accepted": accepted, "dropped": 0 })
}

#[test]
fn an_agent_reports_for_its_own_node_only() {
    let guarded = GuardedReports::start();
    let token = guarded.token("node-a");
    assert_eq!(
        guarded.post(&token, &report("node-a", "boot", 1, 2)).json(),
        accepted_answer(1)
    );
    let other = guarded.post(&token, &report("node-b", "boot", 1, 2));
    assert_eq!(other.status, 403);
    assert!(
        other
            .text()
            .contains("an agent on node-a, which cannot speak for node-b"),
        "{}",
        other.text()
    );
    assert_eq!(guarded.served.bad_requests("reports", "wrong-node"), 1);
    let unknown = guarded.post(&token, &report("node-z", "boot", 1, 2));
    assert_eq!(
        unknown.status, 403,
        "not even whether there is such a node is told"
    );
    let batch = json!([
        report("node-b", "boot", 1, 2),
        report("node-a", "boot", 2, 3)
    ]);
    let answer = guarded.post(&token, &batch);
    assert_eq!(
        (answer.status, &answer.json()["accepted"]),
        (200, &json!(1)),
        "{}",
        answer.text()
    );
    assert_eq!(answer.json()["refused"][0]["code"], "wrong-node");
    assert_eq!(
        (
            guarded.served.charged("node-a").len(),
            guarded.served.charged("node-b").len()
        ),
        (3, 0)
    );
}

/// The stand-in API server puts the UID of the Node into a token, as Kubernetes does.
#[test]
fn an_agent_of_another_node_object_of_the_name_does_not_count_yet() {
    let guarded = GuardedReports::start();
    let present = guarded.token("node-a");
    guarded.api.delete_now("nodes/node-a").unwrap();
    guarded.api.create("nodes", node("node-a")).unwrap();
    let coming = guarded.token("node-a");
    let early = guarded.post(&coming, &report("node-a", "boot-2", 1, 2));
    assert_eq!(early.status, 422, "{}", early.text());
    assert_eq!(guarded.served.bad_requests("reports", "replaced-node"), 1);
    assert_eq!(
        guarded
            .post(&present, &report("node-a", "boot", 1, 2))
            .json(),
        accepted_answer(1)
    );
}

#[test]
fn a_report_without_a_valid_token_is_refused() {
    let guarded = GuardedReports::start();
    for line in [
        "X: y",
        "Authorization: Basic YTpi",
        "Authorization: Bearer",
        "Authorization: Bearer  ",
    ] {
        let error = guarded.expect_refusal(401, "no-token", line);
        assert!(error.contains("--token-file"), "{error}");
    }
    let endless = format!("Authorization: Bearer {}", "x".repeat(9000));
    guarded.expect_refusal(401, "malformed-token", &endless);
    let made_up = guarded.expect_refusal(401, "malformed-token", "Authorization: Bearer made-up");
    assert!(
        made_up.contains("three parts of a JSON Web Token"),
        "{made_up}"
    );
    for (status, code, token) in [
        (
            401,
            "wrong-audience",
            guarded.api.issue_token(ACCOUNT, Some("node-a"), "vault"),
        ),
        (
            403,
            "wrong-account",
            guarded
                .api
                .issue_token("team-a/stowage-agent", Some("node-a"), AUDIENCE),
        ),
    ] {
        let error = guarded.expect_refusal(status, code, &format!("Authorization: Bearer {token}"));
        assert!(
            error.contains("vault") || error.contains("team-a"),
            "{error}"
        );
    }
    assert_eq!(guarded.review_count(), 0, "nothing to ask about");

    let api = &guarded.api;
    let expired = guarded.token("node-a");
    api.revoke_token(&expired);
    let cases = [
        (
            401,
            "invalid-token",
            format!("{}x", guarded.token("node-a")),
            "invalid bearer token",
        ),
        (
            401,
            "invalid-token",
            expired,
            "service account token has expired",
        ),
        (
            403,
            "no-node-in-token",
            api.issue_token(ACCOUNT, None, AUDIENCE),
            "names no node",
        ),
    ];
    for (status, code, token, reason) in cases {
        let error = guarded.expect_refusal(status, code, &format!("Authorization: Bearer {token}"));
        assert!(error.contains(reason), "{error}");
        assert!(!error.contains(&token), "a token is never shown: {error}");
    }
    let metric = "stowage_agent_token_reviews_total{outcome=\"invalid-token\"}";
    assert_eq!(guarded.served.metric(metric), 2);
}

#[test]
fn the_body_of_an_unauthenticated_request_is_not_read() {
    let guarded = GuardedReports::start();
    let mut client = Client::connect(guarded.served.agents);
    client
        .write(post_head("/v1/reports", "Content-Length: 73400320").as_bytes())
        .unwrap();
    assert_eq!(client.read_answer().unwrap().status, 401);
    let line = format!(
        "Content-Length: 73400320\r\nAuthorization: Bearer {}",
        guarded.token("node-a")
    );
    let mut client = Client::connect(guarded.served.agents);
    client
        .write(post_head("/v1/reports", &line).as_bytes())
        .unwrap();
    assert_eq!(client.read_answer().unwrap().status, 413);
}

#[test]
fn while_the_api_server_fails_known_agents_report_and_unknown_ones_get_an_error() {
    let guarded = GuardedReports::start();
    let [known, unknown] = ["node-a", "node-b"].map(|node| guarded.token(node));
    for sequence in 1..=5 {
        assert_eq!(
            guarded
                .post(&known, &report("node-a", "boot", sequence, 1))
                .json(),
            accepted_answer(1)
        );
    }
    assert_eq!(guarded.review_count(), 1, "five reports, one question");
    guarded
        .api
        .faults()
        .fail_next(Operation::TokenReview, 2, InjectedFault::Fails);
    assert_eq!(
        guarded.post(&known, &report("node-a", "boot", 6, 1)).json(),
        accepted_answer(1)
    );
    let error = guarded.expect_refusal(
        503,
        "token-unchecked",
        &format!("Authorization: Bearer {unknown}"),
    );
    assert!(
        error.contains("cannot be checked now") && error.contains("a fault was ordered"),
        "{error}"
    );
    guarded.expect_refusal(
        503,
        "token-unchecked",
        &format!("Authorization: Bearer {unknown}"),
    );
    assert_eq!(
        guarded
            .post(&unknown, &report("node-b", "boot", 1, 1))
            .json(),
        accepted_answer(1),
        "as soon as it is back"
    );
}

#[test]
fn an_old_or_replayed_report_is_dropped_with_any_token() {
    let guarded = GuardedReports::start();
    let token = guarded.token("node-a");
    assert_eq!(
        guarded.post(&token, &report("node-a", "boot", 2, 1)).json(),
        accepted_answer(1)
    );
    for sequence in [2, 1] {
        let answer = guarded.post(&token, &report("node-a", "boot", sequence, 4));
        assert_eq!(answer.json(), json!({ "accepted": 0, "dropped": 1 }));
    }
    assert_eq!(guarded.served.charged("node-a").len(), 1);
}

#[test]
fn the_agents_address_has_a_server_certificate_and_requires_no_client_certificate() {
    let (ca, files, guarded) = (Ca::new("ca"), TlsFixture::new(), GuardedReports::start());
    let server = ca.issue_for("127.0.0.1");
    let cert = files.write("tls.crt", &server.cert);
    let key = files.write("tls.key", &server.key);
    let (mut endpoints, [_, address, _]) = endpoints();
    endpoints.agents.tls = Some(load_server(&ServerFiles { cert, key }).unwrap());
    let stop = CancellationToken::new();
    let served = &guarded.served;
    let serving = served.spawn(server::serve(
        served.extender.clone(),
        endpoints,
        stop.clone(),
    ));
    let line = format!("Authorization: Bearer {}", guarded.token("node-a"));
    let mut agent = crate::tls::connect(address, &ca.pem, None);
    let answer = agent.post_with(
        "/v1/reports",
        &line,
        report("node-a", "boot", 1, 2).to_string(),
    );
    assert_eq!(answer.json(), accepted_answer(1));
    drop(agent);
    stop.cancel();
    served.run(serving).unwrap().unwrap();
}
