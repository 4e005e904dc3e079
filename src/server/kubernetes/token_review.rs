//! Reviews agents' tokens with the API server: `TokenReview`, one request per token.
//!
//! Nothing is cached here, and nothing about reports is known: the caller decides how often to ask.

use super::request::within;
use futures::future::BoxFuture;
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{
    TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo,
};
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Deserialize;
use std::time::Duration;
use stowage_kubernetes_objects::port::{AgentAuthority, AgentIdentity, AgentNode, AuthError};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Millis;

/// The API server's extra fields for the node of the pod that a token was issued for; Kubernetes 1.30 and newer.
const NODE_CLAIM: &str = "authentication.kubernetes.io/node-name";
const NODE_UID_CLAIM: &str = "authentication.kubernetes.io/node-uid";
/// Time limit of a review. Agents retry every second, so a slower review is abandoned.
pub(super) const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// The properties of an agent's token.
#[derive(Debug, Clone)]
pub struct AgentAccount {
    pub audience: String,
    /// `system:serviceaccount:namespace:name`.
    pub user: String,
}

impl AgentAccount {
    pub fn new(audience: &str, namespace: &str, name: &str) -> Self {
        Self {
            audience: audience.into(),
            user: format!("system:serviceaccount:{namespace}:{name}"),
        }
    }
}

pub struct TokenReviews {
    client: Client,
    account: AgentAccount,
}

impl TokenReviews {
    pub fn new(client: Client, account: AgentAccount) -> Self {
        Self { client, account }
    }

    async fn review_token(&self, token: &str) -> Result<TokenReviewStatus, AuthError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                audiences: Some(vec![self.account.audience.clone()]),
                token: token.to_owned(),
            },
            ..TokenReview::default()
        };
        let (reviews, params) = (
            Api::<TokenReview>::all(self.client.clone()),
            PostParams::default(),
        );
        let answer = within(REVIEW_TIMEOUT, reviews.create(&params, &review))
            .await
            .map_err(unavailable)?;
        answer
            .status
            .ok_or_else(|| unavailable("the API server's answer has no status"))
    }
}

impl AgentAuthority for TokenReviews {
    fn reject_without_review(&self, token: &str) -> Option<AuthError> {
        local_rejection(token, &self.account, jiff::Timestamp::now())
    }

    fn review<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<AgentIdentity, AuthError>> {
        Box::pin(async move {
            let node = AgentNode {
                issued: issued_at(token),
                ..node_from_review(self.review_token(token).await?, &self.account)?
            };
            Ok(AgentIdentity {
                node,
                remaining: remaining_validity(token, jiff::Timestamp::now()),
            })
        })
    }
}

pub(super) fn unavailable(why: impl std::fmt::Display) -> AuthError {
    AuthError::Unavailable(why.to_string())
}

fn node_from_review(
    status: TokenReviewStatus,
    account: &AgentAccount,
) -> Result<AgentNode, AuthError> {
    if status.authenticated != Some(true) {
        let why = status.error.filter(|error| !error.is_empty());
        return Err(AuthError::Invalid(
            why.unwrap_or_else(|| "it gives no reason".into()),
        ));
    }
    // An API server without audience support returns none, and has checked none.
    let audiences = status.audiences.unwrap_or_default();
    if !audiences.contains(&account.audience) {
        return Err(AuthError::WrongAudience {
            expected: account.audience.clone(),
            actual: audiences,
        });
    }
    let UserInfo {
        username, extra, ..
    } = status.user.unwrap_or_default();
    let actual = username.unwrap_or_default();
    if actual != account.user {
        return Err(AuthError::WrongAccount {
            expected: account.user.clone(),
            actual,
        });
    }
    let mut extra = extra.unwrap_or_default();
    let mut single_value = |claim| {
        extra
            .remove(claim)
            .and_then(|values| <[String; 1]>::try_from(values).ok())
    };
    let name = single_value(NODE_CLAIM)
        .and_then(|[name]| NodeName::parse(&name).ok())
        .ok_or(AuthError::NoNode)?;
    Ok(AgentNode {
        name,
        uid: single_value(NODE_UID_CLAIM).map(|[uid]| uid.into()),
        issued: None,
    })
}

/// How wrong this machine's clock may be before it rejects valid tokens.
const MAX_CLOCK_SKEW_SECONDS: i64 = 3600;

/// Why a token cannot be an agent's, without asking the API server: it is no JSON Web Token, or its claims name another
/// audience or a time in the past. The API server verifies its signature, so this saves reviews and proves nothing.
fn local_rejection(token: &str, account: &AgentAccount, now: jiff::Timestamp) -> Option<AuthError> {
    let Some([_, claims, _]) = token_parts(token) else {
        return Some(AuthError::Malformed(
            "it has not the three parts of a JSON Web Token",
        ));
    };
    let Some(Claims {
        aud: Some(audiences),
        exp: Some(exp),
        sub: Some(user),
        ..
    }) = decode_claims(claims)
    else {
        return Some(AuthError::Malformed(
            "it lacks its audience, its subject or its expiry",
        ));
    };
    let audiences = audiences.all();
    if !audiences.contains(&account.audience) {
        return Some(AuthError::WrongAudience {
            expected: account.audience.clone(),
            actual: audiences,
        });
    }
    if user != account.user {
        return Some(AuthError::WrongAccount {
            expected: account.user.clone(),
            actual: user,
        });
    }
    (exp.saturating_add(MAX_CLOCK_SKEW_SECONDS) < now.as_second()).then_some(AuthError::Expired)
}

#[derive(Deserialize)]
struct Claims {
    aud: Option<Audiences>,
    exp: Option<i64>,
    iat: Option<i64>,
    sub: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Some(Vec<String>),
}

impl Audiences {
    fn all(self) -> Vec<String> {
        match self {
            Self::One(audience) => vec![audience],
            Self::Some(audiences) => audiences,
        }
    }
}

/// Header, claims and signature.
fn token_parts(token: &str) -> Option<[&str; 3]> {
    let mut parts = token.split('.');
    let three = [parts.next()?, parts.next()?, parts.next()?];
    (parts.next().is_none() && three.iter().all(|part| !part.is_empty())).then_some(three)
}

fn decode_claims(claims: &str) -> Option<Claims> {
    // JSON Web Tokens are base64 of another alphabet than Kubernetes' bytes, and without padding.
    let claims = claims.replace('-', "+").replace('_', "/");
    let padded = format!("{claims}{}", &"==="[..(4 - claims.len() % 4) % 4]);
    let ByteString(claims) = serde_json::from_value(padded.into()).ok()?;
    serde_json::from_slice(&claims).ok()
}

/// How long a token claims to be valid from `now`. The API server decides whether it is: this can only shorten the time.
pub(super) fn remaining_validity(token: &str, now: jiff::Timestamp) -> Option<Millis> {
    let [_, claims, _] = token_parts(token)?;
    let exp = decode_claims(claims)?.exp?;
    Some(Millis::seconds(
        u64::try_from(exp.saturating_sub(now.as_second())).unwrap_or(0),
    ))
}

/// When a token that the API server has verified was issued, if it says.
fn issued_at(token: &str) -> Option<i64> {
    let [_, claims, _] = token_parts(token)?;
    decode_claims(claims)?.iat
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn account() -> AgentAccount {
        AgentAccount::new("stowage.dev/reports", "kube-system", "stowage-agent")
    }

    fn status(edit: impl FnOnce(&mut serde_json::Value)) -> TokenReviewStatus {
        let mut status = json!({
            "authenticated": true,
            "audiences": ["stowage.dev/reports"],
            "user": {
                "username": "system:serviceaccount:kube-system:stowage-agent",
                "extra": { NODE_CLAIM: ["node-a"] },
            },
        });
        edit(&mut status);
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn an_agents_token_names_its_node() {
        let node = |edit: &dyn Fn(&mut serde_json::Value)| {
            let AgentNode { name, uid, .. } = node_from_review(status(edit), &account()).unwrap();
            (name.to_string(), uid.as_deref().map(str::to_owned))
        };
        assert_eq!(
            node(&|_| {}),
            ("node-a".into(), None),
            "the Node was gone when the token was issued"
        );
        let with_uid = |status: &mut serde_json::Value| {
            status["user"]["extra"][NODE_UID_CLAIM] = json!(["uid-a"]);
        };
        assert_eq!(node(&with_uid), ("node-a".into(), Some("uid-a".into())));
    }

    #[test]
    fn a_token_that_lacks_anything_opens_nothing() {
        let code = |edit: &dyn Fn(&mut serde_json::Value)| {
            node_from_review(status(edit), &account())
                .map_err(|error| error.code())
                .unwrap_err()
        };
        assert_eq!(
            code(&|s| s["authenticated"] = json!(false)),
            "invalid-token"
        );
        assert_eq!(
            code(&|s| drop(s.as_object_mut().unwrap().remove("authenticated"))),
            "invalid-token"
        );
        assert_eq!(
            code(&|s| s["audiences"] = json!(["https://kubernetes.default.svc"])),
            "wrong-audience"
        );
        assert_eq!(
            code(&|s| drop(s.as_object_mut().unwrap().remove("audiences"))),
            "wrong-audience"
        );
        assert_eq!(
            code(&|s| s["user"]["username"] = json!("system:admin")),
            "wrong-account"
        );
        assert_eq!(
            code(&|s| s["user"]["username"] = json!("system:serviceaccount:team-a:stowage-agent")),
            "wrong-account"
        );
        assert_eq!(
            code(&|s| s["user"]["extra"] = json!({})),
            "no-node-in-token"
        );
        assert_eq!(
            code(&|s| s["user"]["extra"][NODE_CLAIM] = json!(["a", "b"])),
            "no-node-in-token"
        );
        assert_eq!(
            code(&|s| s["user"]["extra"][NODE_CLAIM] = json!([""])),
            "no-node-in-token"
        );
    }

    fn signed_by_nobody(claims: &serde_json::Value) -> String {
        let serde_json::Value::String(text) = json!(ByteString(claims.to_string().into_bytes()))
        else {
            unreachable!("bytes are text in JSON")
        };
        format!(
            "h.{}.s",
            text.replace('+', "-").replace('/', "_").replace('=', "")
        )
    }

    #[test]
    fn a_token_with_impossible_claims_is_refused_without_a_token_review() {
        let now = jiff::Timestamp::from_second(1_000_000).unwrap();
        let user = "system:serviceaccount:kube-system:stowage-agent";
        let code = |claims: serde_json::Value| {
            local_rejection(&signed_by_nobody(&claims), &account(), now).map(|error| error.code())
        };
        assert_eq!(
            code(json!({ "aud": ["stowage.dev/reports"], "exp": 1_000_600, "sub": user })),
            None
        );
        assert_eq!(
            code(json!({ "aud": "stowage.dev/reports", "exp": 1_000_600, "sub": user })),
            None
        );
        assert_eq!(
            code(json!({ "aud": ["stowage.dev/reports"], "exp": 999_000, "sub": user })),
            None,
            "this machine's clock may be ahead"
        );
        assert_eq!(
            code(json!({ "aud": ["stowage.dev/reports"], "exp": 996_000, "sub": user })),
            Some("expired-token")
        );
        assert_eq!(
            code(json!({ "aud": ["vault"], "exp": 1_000_600, "sub": user })),
            Some("wrong-audience")
        );
        assert_eq!(
            code(
                json!({ "aud": ["stowage.dev/reports"], "exp": 1_000_600, "sub": "system:admin" })
            ),
            Some("wrong-account")
        );
        assert_eq!(
            code(json!({ "exp": 1_000_600, "sub": user })),
            Some("malformed-token")
        );
        for token in ["", "secret", "a.b", "a.b.c", "a.b.c.d", "a..c"] {
            let refused = local_rejection(token, &account(), now).map(|error| error.code());
            assert_eq!(refused, Some("malformed-token"), "{token}");
        }
    }

    #[test]
    fn a_token_says_when_it_was_issued_or_does_not() {
        assert_eq!(
            issued_at(&signed_by_nobody(&json!({ "iat": 1_000_000 }))),
            Some(1_000_000)
        );
        for token in [
            &signed_by_nobody(&json!({})),
            &signed_by_nobody(&json!({ "iat": "now" })),
            "opaque",
        ] {
            assert_eq!(issued_at(token), None);
        }
    }

    #[test]
    fn a_token_that_says_when_it_ends_is_not_good_for_longer() {
        let now = jiff::Timestamp::from_second(1_000_000).unwrap();
        // {"exp":1000030} and {"exp":999999}, as base64url without padding.
        assert_eq!(
            remaining_validity("h.eyJleHAiOjEwMDAwMzB9.s", now),
            Some(Millis::seconds(30))
        );
        assert_eq!(
            remaining_validity("h.eyJleHAiOjk5OTk5OX0.s", now),
            Some(Millis(0))
        );
        for opaque in [
            "secret",
            "a.b.c",
            "a..c",
            "",
            "h.e30.s",
            "h.eyJleHAiOiJub3cifQ.s",
        ] {
            assert_eq!(remaining_validity(opaque, now), None, "{opaque}");
        }
    }
}
