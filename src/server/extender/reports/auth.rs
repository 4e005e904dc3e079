//! Authentication of reports: a client needs an agent's token and reports for that agent's own node; or any client may report,
//! if the operator says so.
//!
//! An [`AgentAuthority`] reviews a token once, and the answer is remembered for a while ([`Reviews`]): agents report every
//! second, and their tokens change every hour. A token that is invalid by its own claims is rejected without a review.

use crate::extender::page_auth::{bearer_token, to_bad_request};
use crate::extender::request::BadRequest;
use crate::extender::token_reviews;
use crate::extender::token_reviews::{Rate, ReviewBounds, Reviews};
use crate::service::ServerState;
use axum::http::HeaderMap;
use futures::FutureExt;
use std::net::IpAddr;
use std::sync::Arc;
use stowage_kubernetes_objects::port::{AgentAuthority, AgentNode, AuthError};
use stowage_scheduling::units::Millis;

/// Kubernetes' tokens have about 1,200 bytes; the longest names add some more.
const MAX_TOKEN_BYTES: usize = 2 << 10;

/// Remembers four times the agents of the largest clusters, in fifteen megabytes. New tokens: all of 5,000 agents within half a
/// minute of a start, 32 at once so that the API server keeps capacity for others; a node presents one an hour, and a NAT some
/// more.
pub(super) const REVIEW_BOUNDS: ReviewBounds = ReviewBounds {
    max_accepted: 65_536,
    max_rejected: 4096,
    max_open: 1024,
    max_concurrent: 32,
    per_source: Rate {
        interval: Millis(100),
        burst: 100,
    },
    total: Rate {
        interval: Millis(5),
        burst: 1000,
    },
};

/// Which clients are admitted.
#[derive(Clone)]
pub enum AgentAuth {
    /// Every client. For loopback only.
    Anyone,
    /// Clients with an agent's token.
    Token(Arc<TokenGuard>),
}

/// The sender of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sender {
    Anyone,
    AgentOn(AgentNode),
}

impl AgentAuth {
    /// Authenticates a request by its head.
    pub async fn admit(&self, headers: &HeaderMap, source: IpAddr) -> Result<Sender, BadRequest> {
        let Self::Token(guard) = self else {
            return Ok(Sender::Anyone);
        };
        let token = bearer_token(headers).ok_or_else(no_token)?;
        guard
            .review(token, source)
            .await
            .map(Sender::AgentOn)
            .map_err(|error| to_bad_request(&error))
    }
}

fn no_token() -> BadRequest {
    BadRequest::Unauthorized {
        code: "no-token",
        message:
            "no token: send Authorization: Bearer and the agent's projected service account token \
                  (stowage agent --token-file)"
                .into(),
    }
}

pub(super) type AgentReviewResult = Result<AgentNode, AuthError>;

/// Tokens, and their review results.
pub struct TokenGuard {
    authority: Arc<dyn AgentAuthority>,
    pub(super) reviews: Arc<Reviews<AgentNode>>,
}

impl TokenGuard {
    /// If called inside a tokio runtime, that runtime sends the reviews; otherwise the one that serves the agents.
    pub fn new(authority: Arc<dyn AgentAuthority>, state: Arc<ServerState>) -> Arc<Self> {
        let count = |state: &ServerState, outcome: &str| {
            state
                .metrics
                .token_reviews
                .with_label_values(&[outcome])
                .inc();
        };
        Arc::new(Self {
            authority,
            reviews: Reviews::new("agents", state, REVIEW_BOUNDS, count),
        })
    }

    pub(super) async fn review(&self, token: &str, source: IpAddr) -> AgentReviewResult {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(AuthError::Malformed("it is longer than 2 KiB"));
        }
        if let Some(error) = self.authority.reject_without_review(token) {
            return Err(error);
        }
        let (authority, owned_token) = (self.authority.clone(), token.to_owned());
        let ask = || {
            async move {
                authority
                    .review(&owned_token)
                    .await
                    .map(|agent| (agent.node, agent.remaining))
            }
            .boxed()
        };
        self.reviews
            .review(token_reviews::review_key(token, "reports"), source, ask)
            .await
    }
}
