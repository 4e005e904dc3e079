//! Access to the operators' pages: clients with a token that the API server accepts and allows to see the page, or every client
//! if the operator says so.
//!
//! Access to a page about the whole cluster is checked by its path, as a non-resource URL; access to a page about one pod as
//! `get pods`: of all namespaces, of its own, or of that one. `/healthz` and `/readyz` need no access: a kubelet has no token.

use super::request::BadRequest;
use super::token_reviews;
use super::token_reviews::{Rate, ReviewBounds, Reviews};
use crate::service::ServerState;
use axum::http::{HeaderMap, header};
use futures::FutureExt;
use std::net::IpAddr;
use std::sync::Arc;
use stowage_kubernetes_objects::port::{AuthError, OperatorPage, PageAuthority};
use stowage_scheduling::explaining::PodAccess;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::units::Millis;

/// Users' tokens come from any issuer, with groups in them: as long as a head may be.
const MAX_TOKEN_BYTES: usize = 8 << 10;

/// Some users and some Prometheus servers, each with a few pages and pods.
const REVIEW_BOUNDS: ReviewBounds = ReviewBounds {
    max_accepted: 1024,
    max_rejected: 1024,
    max_open: 64,
    max_concurrent: 4,
    per_source: Rate {
        interval: Millis(500),
        burst: 20,
    },
    total: Rate {
        interval: Millis(100),
        burst: 50,
    },
};

/// The path of the metrics page. While the API server is silent, a client that was admitted a short time ago may still read it, so
/// that somebody is alerted.
pub const METRICS: &str = "/metrics";

/// Which clients are admitted.
#[derive(Clone)]
pub enum PageAuth {
    /// Every client. For loopback only.
    Anyone,
    Token(Arc<PageGuard>),
}

/// Tokens, and the pages they give access to.
pub struct PageGuard {
    authority: Arc<dyn PageAuthority>,
    reviews: Arc<Reviews<()>>,
    state: Arc<ServerState>,
}

impl PageAuth {
    pub fn new(authority: Arc<dyn PageAuthority>, state: Arc<ServerState>) -> Self {
        let count = |state: &ServerState, outcome: &str| {
            state
                .metrics
                .edge
                .page_reviews
                .with_label_values(&[outcome])
                .inc();
        };
        Self::Token(Arc::new(PageGuard {
            authority,
            reviews: Reviews::new("operators", state.clone(), REVIEW_BOUNDS, count),
            state,
        }))
    }

    /// Checks whether the client that sent this head may see the page.
    pub async fn admit(
        &self,
        headers: &HeaderMap,
        source: IpAddr,
        operator_page: OperatorPage,
    ) -> Result<(), BadRequest> {
        let Self::Token(guard) = self else {
            return Ok(());
        };
        let token = bearer_token(headers)
            .filter(|token| token.len() <= MAX_TOKEN_BYTES)
            .ok_or_else(no_token)?;
        let (authority, owned_token) = (guard.authority.clone(), token.to_owned());
        let key = token_reviews::review_key(token, &operator_page.to_string());
        let was_accepted_before = operator_page == OperatorPage::Cluster(METRICS)
            && guard.reviews.last_accepted(&key).is_some();
        // A scrape does not wait for an API server that is known to be silent.
        if was_accepted_before
            && guard
                .state
                .api_server_contact
                .unreachable_for(guard.state.now())
                .is_some()
        {
            return Ok(());
        }
        let ask = || {
            async move { Ok(((), authority.may_see(&owned_token, &operator_page).await?)) }.boxed()
        };
        match guard.reviews.review(key, source, ask).await {
            Err(AuthError::Unavailable(_)) if was_accepted_before => Ok(()),
            verdict => verdict.map_err(|error| to_bad_request(&error)),
        }
    }

    /// The pods that the client may see, if this is one of them. The widest access is reviewed first: most clients are operators,
    /// and a client that may see a namespace is not reviewed again for each of its pods.
    pub async fn pod_access(
        &self,
        headers: &HeaderMap,
        source: IpAddr,
        pod: &PodKey,
    ) -> Result<PodAccess, BadRequest> {
        let wider = [
            (PodAccess::All, OperatorPage::Pods(None)),
            (
                PodAccess::Namespace,
                OperatorPage::Pods(Some(pod.namespace.clone())),
            ),
        ];
        for (access, operator_page) in wider {
            match self.admit(headers, source, operator_page).await {
                Ok(()) => return Ok(access),
                Err(BadRequest::Forbidden { .. }) => {}
                Err(refused) => return Err(refused),
            }
        }
        self.admit(headers, source, OperatorPage::Pod(pod.clone()))
            .await
            .map(|()| PodAccess::Own)
    }
}

/// The token of a head that has one.
pub fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers
        .get(header::AUTHORIZATION)?
        .to_str()
        .ok()?
        .split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn no_token() -> BadRequest {
    BadRequest::Unauthorized {
        code: "no-token",
        message: "no token: send Authorization: Bearer and a token for the API server, such as kubectl create token prints \
                  (stowage explain --token-file)"
            .into(),
    }
}

/// The answer to a rejected token, on any address.
pub fn to_bad_request(error: &AuthError) -> BadRequest {
    let (code, message) = (error.code(), error.to_string());
    match error {
        AuthError::Invalid(_)
        | AuthError::WrongAudience { .. }
        | AuthError::Malformed(_)
        | AuthError::Expired => BadRequest::Unauthorized { code, message },
        AuthError::WrongAccount { .. } | AuthError::NoNode | AuthError::NotAllowed { .. } => {
            BadRequest::Forbidden { code, message }
        }
        AuthError::Unavailable(_) => BadRequest::Undecided { code, message },
        AuthError::Crowded => BadRequest::Crowded { code, message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::BoxFuture;
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicBool, Ordering};
    use stowage_scheduling::policy::Policy;

    /// Every answer is good at that moment only, until nothing is answered.
    #[derive(Default)]
    struct SilentApiServer {
        is_silent: AtomicBool,
    }

    impl PageAuthority for SilentApiServer {
        fn may_see<'a>(
            &'a self,
            token: &'a str,
            _: &'a OperatorPage,
        ) -> BoxFuture<'a, Result<Option<Millis>, AuthError>> {
            let answer = match (self.is_silent.load(Ordering::Relaxed), token) {
                (true, _) => Err(AuthError::Unavailable("no answer".into())),
                (false, "bad") => Err(AuthError::Invalid("unknown".into())),
                (false, _) => Ok(Some(Millis(0))),
            };
            std::future::ready(answer).boxed()
        }
    }

    #[tokio::test]
    async fn metrics_are_read_while_the_api_server_is_silent_by_clients_that_it_admitted_before() {
        let api_server = Arc::new(SilentApiServer::default());
        let auth = PageAuth::new(
            api_server.clone(),
            ServerState::with_stopped_clock(Policy::default()),
        );
        let status = async |token: &str, path: &'static str| {
            let headers = [(
                header::AUTHORIZATION,
                format!("Bearer {token}").parse().unwrap(),
            )];
            let operator_page = OperatorPage::Cluster(path);
            let admitted = auth
                .admit(
                    &headers.into_iter().collect(),
                    Ipv4Addr::LOCALHOST.into(),
                    operator_page,
                )
                .await;
            admitted.err().map_or("admitted", |refused| refused.code())
        };
        for (token, path) in [
            ("good", METRICS),
            ("good", "/v1/models"),
            ("other", "/v1/models"),
        ] {
            assert_eq!(status(token, path).await, "admitted");
        }
        assert_eq!(status("bad", METRICS).await, "invalid-token");
        api_server.is_silent.store(true, Ordering::Relaxed);
        assert_eq!(status("good", METRICS).await, "admitted");
        assert_eq!(status("good", "/v1/models").await, "token-unchecked");
        assert_eq!(
            status("other", METRICS).await,
            "token-unchecked",
            "admitted to another page"
        );
        assert_eq!(status("new", METRICS).await, "token-unchecked");
        assert_eq!(
            status("bad", METRICS).await,
            "invalid-token",
            "what was bad stays so"
        );
    }

    /// A role may name single pods: `resourceNames`.
    struct OnePod;

    impl PageAuthority for OnePod {
        fn may_see<'a>(
            &'a self,
            _: &'a str,
            operator_page: &'a OperatorPage,
        ) -> BoxFuture<'a, Result<Option<Millis>, AuthError>> {
            let is_it =
                *operator_page == OperatorPage::Pod(PodKey::parse("team-a", "llm-0").unwrap());
            let refused = AuthError::NotAllowed {
                user: "jane".into(),
                what: operator_page.to_string(),
            };
            std::future::ready(is_it.then_some(None).ok_or(refused)).boxed()
        }
    }

    #[tokio::test]
    async fn access_to_one_pod_gives_no_access_to_others_of_its_namespace() {
        let auth = PageAuth::new(
            Arc::new(OnePod),
            ServerState::with_stopped_clock(Policy::default()),
        );
        let headers: HeaderMap = [(header::AUTHORIZATION, "Bearer good".parse().unwrap())]
            .into_iter()
            .collect();
        let code = async |pod: &str| {
            let operator_page = OperatorPage::Pod(PodKey::parse("team-a", pod).unwrap());
            let admitted = auth
                .admit(&headers, Ipv4Addr::LOCALHOST.into(), operator_page)
                .await;
            admitted.err().map_or("admitted", |refused| refused.code())
        };
        assert_eq!(code("llm-0").await, "admitted");
        for other in ["llm-1", "llm-01", "llm"] {
            assert_eq!(code(other).await, "not-allowed", "{other}");
        }
        assert_eq!(code("llm-0").await, "admitted");
    }
}
