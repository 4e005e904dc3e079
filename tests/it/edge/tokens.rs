//! S3: invalid tokens cost the API server next to nothing, and delay no agent's report.

use super::source::{ATTACKER, ClientAddress};
use crate::agent_auth::{ACCOUNT, AUDIENCE, GuardedReports};
use crate::client::Client;
use crate::served::report;
use serde_json::{Value, json};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use stowage_lab::demo::api_server::faults::{InjectedFault, Operation};

const INVALID_TOKENS: usize = 20_000;
const THREADS: usize = 8;
/// About so many new tokens may one source ask at once, and about one more after each pause.
const TOKEN_BURST: u64 = 100;
const TOKEN_REFILL_INTERVAL: Duration = Duration::from_millis(100);
/// The agent's reports to each of its tokens.
const RENEWED_EVERY: u64 = 50;

/// A well-formed token without a valid signature.
fn forged(n: usize) -> String {
    let user = ACCOUNT.replace('/', ":");
    let claims = json!({
        "aud": [AUDIENCE], "exp": 4_000_000_000_u64, "iss": "https://kubernetes.default.svc", "jti": n.to_string(),
        "sub": format!("system:serviceaccount:{user}"),
        "kubernetes.io": { "node": { "name": "node-a" } },
    });
    let part = |value: &Value| {
        let Value::String(text) = json!(k8s_openapi::ByteString(value.to_string().into_bytes()))
        else {
            unreachable!("bytes are text in JSON")
        };
        text.replace('+', "-").replace('/', "_").replace('=', "")
    };
    format!(
        "{}.{}.c2lnbmF0dXJl",
        part(&json!({ "alg": "RS256", "kid": "k" })),
        part(&claims)
    )
}

/// Half of them are no tokens at all, half have the form of an agent's.
fn invalid_token(n: usize) -> String {
    if n.is_multiple_of(2) {
        forged(n)
    } else {
        format!("made-up-{n}")
    }
}

fn attack(guarded: &GuardedReports, tokens: impl Iterator<Item = String>) {
    let source = ClientAddress::at(ATTACKER);
    let mut client: Option<Client<TcpStream>> = None;
    for token in tokens {
        let line = format!("Authorization: Bearer {token}");
        let body = report("node-a", "evil", 1, 1).to_string();
        let mut connected = client
            .take()
            .unwrap_or_else(|| source.client(guarded.served.agents));
        let answer = connected.try_post_with("/v1/reports", &line, body.as_bytes());
        // A connection that was closed is opened again, and its token counts as shown.
        if let Ok(answer) = answer {
            assert_ne!(answer.status, 200, "a made-up token was let in");
            client = Some(connected);
        }
    }
}

#[test]
fn twenty_thousand_invalid_tokens_delay_no_agents_report() {
    let guarded = GuardedReports::start();
    // An API server that has something else to do.
    guarded.api.faults().fail_next(
        Operation::TokenReview,
        2 * INVALID_TOKENS,
        InjectedFault::AnswersLate(Duration::from_millis(5)),
    );
    let known = guarded.token("node-a");
    let genuine = |token: &str, node: &str, sequence: u64| {
        let line = format!("Authorization: Bearer {token}");
        let body = report(node, "boot", sequence, 2).to_string();
        let answer = Client::connect(guarded.served.agents).post_with("/v1/reports", &line, body);
        assert_eq!(
            answer.json(),
            json!({ "accepted": 1, "dropped": 0 }),
            "report {sequence} of {node}"
        );
    };
    genuine(&known, "node-a", 1);
    let began = Instant::now();
    let (is_over, guarded) = (AtomicBool::new(false), &guarded);
    std::thread::scope(|scope| {
        let attackers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let tokens = (thread..INVALID_TOKENS).step_by(THREADS).map(invalid_token);
                scope.spawn(move || attack(guarded, tokens))
            })
            .collect();
        let agent = scope.spawn(|| {
            for sequence in 2.. {
                // Its token is renewed now and then, and is unknown each time.
                let is_renewed = sequence % RENEWED_EVERY == 0;
                let token = if is_renewed {
                    &guarded.token("node-b")
                } else {
                    &known
                };
                let node = if is_renewed { "node-b" } else { "node-a" };
                genuine(token, node, sequence);
                if is_over.load(Ordering::Relaxed) {
                    return sequence;
                }
            }
            unreachable!("there is no last number")
        });
        attackers
            .into_iter()
            .for_each(|attacker| attacker.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
        let reports = agent.join().unwrap();
        assert!(reports > 2);
        // What the attacker's source may ask in the time that this took, and the agent's new tokens.
        let pauses =
            u64::try_from(began.elapsed().as_millis() / TOKEN_REFILL_INTERVAL.as_millis()).unwrap();
        let most = 2 * TOKEN_BURST + pauses + reports / RENEWED_EVERY;
        let reviews = guarded.api.calls().count("create", "tokenreviews");
        assert!(
            reviews < most,
            "{reviews} questions to the API server, of {most}"
        );
    });
}
