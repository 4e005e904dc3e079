//! Who may report: whoever shows a token of an agent, for the agent's own node; or anyone, where the operator says so.
//!
//! What a token says is asked of an [`AgentAuthority`] once and then remembered for a while: agents report every second, and
//! their tokens change every hour. Tokens are kept in memory only, and never shown or logged.

use crate::control_plane::{AgentAuthority, AgentIdentity, AuthError};
use crate::extender::request::BadRequest;
use crate::ids::NodeName;
use crate::service::Service;
use crate::units::{Millis, Moment};
use axum::http::{HeaderMap, header};
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

/// How long a good token is not asked about again: a token that was revoked, or whose pod is gone, opens for as long.
pub(super) const GOOD_FOR: Millis = Millis::seconds(60);
/// How long a bad one is not: an agent tries every second, and what was wrong may be put right.
pub(super) const BAD_FOR: Millis = Millis::seconds(5);
/// Tokens remembered: three times the agents of the largest clusters, at about 1.5 KiB each.
pub(super) const REMEMBERED: usize = 16_384;
/// Kubernetes' tokens have about 1,200 bytes.
const MAX_TOKEN: usize = 8 << 10;
/// Questions to the API server at one time, so that a start with thousands of agents leaves it air.
const AT_ONCE: usize = 32;

/// Who is let in.
#[derive(Clone)]
pub enum AgentAuth {
    /// Everyone. For loopback only.
    Anyone,
    /// Who has a token of an agent.
    Token(Arc<TokenGuard>),
}

/// Who sends a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sender {
    Anyone,
    AgentOn(NodeName),
}

impl AgentAuth {
    /// Whose request this is, by its head.
    pub async fn admit(&self, headers: &HeaderMap) -> Result<Sender, BadRequest> {
        match self {
            Self::Anyone => Ok(Sender::Anyone),
            Self::Token(guard) => guard.verdict(token(headers)?).await.map(Sender::AgentOn).map_err(refusal),
        }
    }
}

fn token(headers: &HeaderMap) -> Result<&str, BadRequest> {
    let missing = || BadRequest::Unauthorized {
        code: "no-token",
        message: "no token: send Authorization: Bearer and the agent's projected service account token \
                  (stowage agent --token-file)"
            .into(),
    };
    let value = headers.get(header::AUTHORIZATION).ok_or_else(missing)?.to_str().map_err(|_| missing())?;
    let (scheme, token) = value.split_once(' ').ok_or_else(missing)?;
    let token = token.trim();
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() || token.len() > MAX_TOKEN {
        return Err(missing());
    }
    Ok(token)
}

fn refusal(error: AuthError) -> BadRequest {
    let (code, message) = (error.code(), error.to_string());
    match error {
        AuthError::Invalid(_) | AuthError::WrongAudience { .. } => BadRequest::Unauthorized { code, message },
        AuthError::WrongAccount { .. } | AuthError::NoNode => BadRequest::Forbidden { code, message },
        AuthError::Unavailable(_) => BadRequest::Undecided { code, message },
    }
}

pub(super) type Verdict = Result<NodeName, AuthError>;

/// Tokens, and what was found out about them.
pub struct TokenGuard {
    authority: Arc<dyn AgentAuthority>,
    service: Arc<Service>,
    /// The runtime that asks the API server, if it is not the agents' own: its connections serve others too, and are not to be
    /// driven by the agents' thread.
    home: Option<Handle>,
    /// The standard library's hasher has a key: who makes up tokens cannot make them collide.
    known: Mutex<HashMap<Box<str>, Known>>,
    turns: Semaphore,
}

enum Known {
    /// Being asked about, once for all who wait.
    Asked(Shared<BoxFuture<'static, Verdict>>),
    Settled {
        verdict: Verdict,
        until: Moment,
    },
}

impl TokenGuard {
    /// Called inside a tokio runtime, that one will ask; else whichever serves the agents.
    pub fn new(authority: Arc<dyn AgentAuthority>, service: Arc<Service>) -> Arc<Self> {
        let (known, turns) = (Mutex::default(), Semaphore::new(AT_ONCE));
        Arc::new(Self { authority, service, home: Handle::try_current().ok(), known, turns })
    }

    pub(super) async fn verdict(self: &Arc<Self>, token: &str) -> Verdict {
        let asked = {
            let mut known = self.known.lock();
            match known.get(token) {
                Some(Known::Settled { verdict, until }) if self.service.now() < *until => {
                    return verdict.clone();
                }
                Some(Known::Asked(asked)) => asked.clone(),
                _ => {
                    self.make_room(&mut known)?;
                    let asked = self.ask(token);
                    known.insert(token.into(), Known::Asked(asked.clone()));
                    asked
                }
            }
        };
        asked.await
    }

    /// Asks whether or not anyone stays to hear the answer: an agent's patience is shorter than a slow API server's.
    fn ask(self: &Arc<Self>, token: &str) -> Shared<BoxFuture<'static, Verdict>> {
        let (guard, token) = (self.clone(), Box::<str>::from(token));
        let asking = async move {
            let reviewed = {
                let _turn = guard.turns.acquire().await.expect("the semaphore is never closed");
                AssertUnwindSafe(guard.authority.review(&token)).catch_unwind().await
            };
            // Left open, the question would never be asked again.
            let reviewed =
                reviewed.unwrap_or_else(|_| Err(AuthError::Unavailable("the check failed".into())));
            guard.settle(token, reviewed)
        };
        let asking = match &self.home {
            Some(home) => home.spawn(asking),
            None => tokio::spawn(asking),
        };
        let ended = |joined: Result<Verdict, _>| {
            joined.unwrap_or_else(|_| Err(AuthError::Unavailable("the question was dropped".into())))
        };
        asking.map(ended).boxed().shared()
    }

    fn settle(&self, token: Box<str>, reviewed: Result<AgentIdentity, AuthError>) -> Verdict {
        let outcome = reviewed.as_ref().err().map_or("accepted", AuthError::code);
        self.service.metrics.token_reviews.with_label_values(&[outcome]).inc();
        let lasts = match &reviewed {
            Ok(agent) => Some(agent.remaining.map_or(GOOD_FOR, |remaining| remaining.min(GOOD_FOR))),
            Err(AuthError::Unavailable(_)) => None,
            Err(_) => Some(BAD_FOR),
        };
        let verdict = reviewed.map(|agent| agent.node);
        let mut known = self.known.lock();
        match lasts {
            Some(lasts) => {
                let settled = Known::Settled { verdict: verdict.clone(), until: self.service.now() + lasts };
                known.insert(token, settled);
            }
            None => drop(known.remove(&token)),
        }
        verdict
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.known.lock().len()
    }

    /// Forgets what has run out; if that is not enough, the bad ones, then the good: whoever made up so many asks again.
    fn make_room(&self, known: &mut HashMap<Box<str>, Known>) -> Result<(), AuthError> {
        let now = self.service.now();
        let keeps: [&dyn Fn(&Known) -> bool; 3] = [
            &|known| !matches!(known, Known::Settled { until, .. } if *until <= now),
            &|known| !matches!(known, Known::Settled { verdict: Err(_), .. }),
            &|known| matches!(known, Known::Asked(_)),
        ];
        for keep in keeps {
            if known.len() < REMEMBERED {
                return Ok(());
            }
            known.retain(|_, known| keep(known));
        }
        match known.len() < REMEMBERED {
            true => Ok(()),
            false => Err(AuthError::Unavailable(format!("{REMEMBERED} tokens are being checked already"))),
        }
    }
}
