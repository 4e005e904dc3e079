//! Token reviews: each token is reviewed once for all requests that wait for it, cached for a while, and limited.
//!
//! ```text
//!  token ─► known good? known bad? ─► being asked? ─► bounds ─► a turn ─► the API server ─► remembered
//! ```
//!
//! A client that invents tokens cannot crowd out others: good answers, bad answers and reviews in progress are three tables,
//! each with its limit; a token that was good before has a lane of its own; each source has a rate limit for new tokens, and
//! all sources together have a higher one. A review that no request waits for any more is dropped before its turn. Tokens are
//! stored as hashes, and never shown or logged. This module does not know what a token gives access to.

use crate::service::ServerState;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use stowage_kubernetes_objects::port::AuthError;
use stowage_scheduling::units::{Millis, Moment};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// How long an acceptance is cached: a token that was revoked, or whose pod is gone, is accepted for as long.
pub(crate) const ACCEPTED_TTL: Millis = Millis::seconds(60);
/// How long a rejection is cached: an agent tries every second, and the cause may be fixed meanwhile.
pub(crate) const REJECTED_TTL: Millis = Millis::seconds(5);
/// How long after an acceptance expired its token is reviewed before new ones, and counts as accepted.
const FORMERLY_ACCEPTED_FOR: Millis = Millis::seconds(15 * 60);

/// The limits of one address.
#[derive(Debug, Clone, Copy)]
pub struct ReviewBounds {
    /// Good answers cached, at some 220 bytes each. Tokens beyond this are reviewed each time.
    pub max_accepted: usize,
    /// Bad answers cached.
    pub max_rejected: usize,
    /// Reviews of tokens that were not good before, waiting or in progress.
    pub max_open: usize,
    /// Reviews of such tokens in progress at one time. As many again for the other tokens.
    pub max_concurrent: usize,
    /// Rate limit of new tokens from one source: the interval, and the burst.
    pub per_source: Rate,
    /// Rate limit of new tokens from all sources together.
    pub total: Rate,
}

#[derive(Debug, Clone, Copy)]
pub struct Rate {
    pub interval: Millis,
    pub burst: u64,
}

/// The subject of a review: a token, with what it is to give access to.
pub(crate) type ReviewKey = [u8; 32];

pub fn review_key(token: &str, purpose: &str) -> ReviewKey {
    let mut digest = Sha256::new();
    digest.update((purpose.len() as u64).to_le_bytes());
    digest.update(purpose);
    digest.update(token);
    digest.finalize().into()
}

/// The API server's answer, and for how much longer the token is valid if that is known.
pub(crate) type ReviewAnswer<V> = Result<(V, Option<Millis>), AuthError>;

pub struct Reviews<V> {
    /// The address' label in metrics.
    address: &'static str,
    state: Arc<ServerState>,
    bounds: ReviewBounds,
    /// The runtime that sends the reviews, if it is not the address' own: its connections serve others too, and must not be
    /// driven by a low-priority thread.
    runtime: Option<Handle>,
    cache: Mutex<ReviewCache<V>>,
    new_token_slots: Semaphore,
    known_token_slots: Semaphore,
    /// Called with each outcome, for metrics.
    count_outcome: fn(&ServerState, &str),
}

struct ReviewCache<V> {
    accepted: HashMap<ReviewKey, (V, Moment)>,
    rejected: HashMap<ReviewKey, (AuthError, Moment)>,
    open: HashMap<ReviewKey, Arc<OpenReview<V>>>,
    /// Open reviews of tokens that were not good before.
    open_new: usize,
    /// When the next new token is within the rate limit, for each source and for all.
    next_of_source: HashMap<IpAddr, Moment>,
    next_of_all: Moment,
    swept_at: Moment,
}

type OpenReview<V> = watch::Sender<Option<Result<V, AuthError>>>;

impl<V: Clone + Send + Sync + 'static> Reviews<V> {
    /// If called inside a tokio runtime, that runtime sends the reviews; otherwise the one that serves the address.
    pub fn new(
        address: &'static str,
        state: Arc<ServerState>,
        bounds: ReviewBounds,
        outcome: fn(&ServerState, &str),
    ) -> Arc<Self> {
        let cache = ReviewCache {
            accepted: HashMap::new(),
            rejected: HashMap::new(),
            open: HashMap::new(),
            open_new: 0,
            next_of_source: HashMap::new(),
            next_of_all: Moment(0),
            swept_at: Moment(0),
        };
        Arc::new(Self {
            address,
            state,
            runtime: Handle::try_current().ok(),
            cache: Mutex::new(cache),
            new_token_slots: Semaphore::new(bounds.max_concurrent),
            known_token_slots: Semaphore::new(bounds.max_concurrent),
            bounds,
            count_outcome: outcome,
        })
    }

    /// The cached answer for this key, or the answer of `ask`.
    pub async fn review(
        self: &Arc<Self>,
        key: ReviewKey,
        source: IpAddr,
        ask: impl FnOnce() -> BoxFuture<'static, ReviewAnswer<V>>,
    ) -> Result<V, AuthError> {
        let mut answer = {
            let (now, mut cache) = (self.state.now(), self.cache.lock());
            if let Some((value, _)) = cache.accepted.get(&key).filter(|(_, until)| now < *until) {
                return Ok(value.clone());
            }
            if let Some((error, _)) = cache.rejected.get(&key).filter(|(_, until)| now < *until) {
                return Err(error.clone());
            }
            match cache.open.get(&key) {
                Some(open) => open.subscribe(),
                None => self.start_review(&mut cache, key, source, now, ask)?,
            }
        };
        let answered = answer
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|answer| answer.clone());
        answered.unwrap_or_else(|| Err(AuthError::Unavailable("the question was dropped".into())))
    }

    /// What the API server answered last, if that was good and is not long ago: for what has to be seen while it does not answer.
    pub fn last_accepted(&self, key: &ReviewKey) -> Option<V> {
        let (now, cache) = (self.state.now(), self.cache.lock());
        let (value, until) = cache.accepted.get(key)?;
        (now < *until + FORMERLY_ACCEPTED_FOR).then(|| value.clone())
    }

    fn start_review(
        self: &Arc<Self>,
        cache: &mut ReviewCache<V>,
        key: ReviewKey,
        source: IpAddr,
        now: Moment,
        ask: impl FnOnce() -> BoxFuture<'static, ReviewAnswer<V>>,
    ) -> Result<watch::Receiver<Option<Result<V, AuthError>>>, AuthError> {
        cache.remove_expired(now);
        let is_new = !cache.accepted.contains_key(&key);
        if is_new && let Err(bound) = cache.admit(source, now, &self.bounds) {
            self.state
                .metrics
                .edge
                .limited_requests
                .with_label_values(&[self.address, bound])
                .inc();
            return Err(AuthError::Crowded);
        }
        cache.open_new += usize::from(is_new);
        let (open, answer) = watch::channel(None);
        let open = Arc::new(open);
        cache.open.insert(key, open.clone());
        let asking = self.clone().run_review(key, is_new, open, ask());
        match &self.runtime {
            Some(home) => drop(home.spawn(asking)),
            None => drop(tokio::spawn(asking)),
        }
        Ok(answer)
    }

    /// Once started, a review runs to its end even if no request waits any more: an agent's timeout is shorter than a slow API
    /// server's answer.
    async fn run_review(
        self: Arc<Self>,
        key: ReviewKey,
        is_new: bool,
        open: Arc<OpenReview<V>>,
        asking: BoxFuture<'static, ReviewAnswer<V>>,
    ) {
        let Some(_slot) = self.acquire_slot(key, is_new, &open).await else {
            return;
        };
        let answer = AssertUnwindSafe(asking).catch_unwind().await;
        // Left open, the review would never be started again.
        let answer =
            answer.unwrap_or_else(|_| Err(AuthError::Unavailable("the check failed".into())));
        (self.count_outcome)(
            &self.state,
            answer.as_ref().err().map_or("accepted", AuthError::code),
        );
        let verdict = answer
            .as_ref()
            .map(|(value, _)| value.clone())
            .map_err(Clone::clone);
        self.record_answer(key, is_new, answer);
        open.send_replace(Some(verdict));
    }

    /// `None` if no request waits any more: then the review is dropped.
    async fn acquire_slot(
        &self,
        key: ReviewKey,
        is_new: bool,
        open: &OpenReview<V>,
    ) -> Option<SemaphorePermit<'_>> {
        let slots = if is_new {
            &self.new_token_slots
        } else {
            &self.known_token_slots
        };
        loop {
            tokio::select! {
                turn = slots.acquire() => return Some(turn.expect("the semaphore is never closed")),
                () = open.closed() => {
                    let mut cache = self.cache.lock();
                    // A request may have arrived meanwhile.
                    if open.is_closed() {
                        cache.close(key, is_new);
                        (self.count_outcome)(&self.state, "abandoned");
                        return None;
                    }
                }
            }
        }
    }

    fn record_answer(&self, key: ReviewKey, is_new: bool, answer: ReviewAnswer<V>) {
        let (now, mut cache) = (self.state.now(), self.cache.lock());
        cache.close(key, is_new);
        match answer {
            Ok((value, remaining)) => {
                let until =
                    now + remaining.map_or(ACCEPTED_TTL, |remaining| remaining.min(ACCEPTED_TTL));
                cache.rejected.remove(&key);
                if cache.accepted.len() < self.bounds.max_accepted
                    || cache.accepted.contains_key(&key)
                {
                    cache.accepted.insert(key, (value, until));
                } else {
                    self.state
                        .metrics
                        .edge
                        .limited_requests
                        .with_label_values(&[self.address, "remembered"])
                        .inc();
                }
            }
            Err(AuthError::Unavailable(_)) => {}
            Err(error) => {
                cache.accepted.remove(&key);
                if cache.rejected.len() < self.bounds.max_rejected {
                    cache.rejected.insert(key, (error, now + REJECTED_TTL));
                }
            }
        }
    }

    #[cfg(test)]
    pub fn cached_counts(&self) -> [usize; 3] {
        let cache = self.cache.lock();
        [cache.accepted.len(), cache.rejected.len(), cache.open.len()]
    }
}

impl<V> ReviewCache<V> {
    fn close(&mut self, key: ReviewKey, is_new: bool) {
        self.open.remove(&key);
        self.open_new -= usize::from(is_new);
    }

    /// Whether a review of one more new token of this source is within the limits; otherwise which limit it exceeds.
    fn admit(
        &mut self,
        source: IpAddr,
        now: Moment,
        bounds: &ReviewBounds,
    ) -> Result<(), &'static str> {
        if self.open_new >= bounds.max_open {
            return Err("open-reviews");
        }
        let of_source = self.next_of_source.get(&source).copied().unwrap_or(now);
        let of_source = bounds
            .per_source
            .next(of_source, now)
            .ok_or("reviews-per-source")?;
        let of_all = bounds.total.next(self.next_of_all, now).ok_or("reviews")?;
        self.next_of_all = of_all;
        // No more sources than reviews within a burst's time: the others are removed.
        self.next_of_source.insert(source, of_source);
        Ok(())
    }

    /// Removes expired entries, once a second at the most.
    fn remove_expired(&mut self, now: Moment) {
        if now < self.swept_at + Millis::seconds(1) {
            return;
        }
        self.swept_at = now;
        self.accepted
            .retain(|_, (_, until)| now < *until + FORMERLY_ACCEPTED_FOR);
        self.rejected.retain(|_, (_, until)| now < *until);
        self.next_of_source.retain(|_, next| now < *next);
    }
}

impl Rate {
    /// When the next one is within the limit, or `None` if this one comes too soon. `due`: when this one is within the limit.
    fn next(self, due: Moment, now: Moment) -> Option<Moment> {
        let due = due.max(now);
        (due <= now + Millis(self.interval.0 * self.burst.saturating_sub(1)))
            .then(|| due + self.interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_lets_a_burst_through_and_then_one_at_a_time() {
        let rate = Rate {
            interval: Millis(100),
            burst: 3,
        };
        let (mut due, now) = (Moment(0), Moment(10_000));
        for _ in 0..3 {
            due = rate.next(due, now).unwrap();
        }
        assert_eq!(rate.next(due, now), None);
        assert_eq!(rate.next(due, now + Millis(99)), None);
        assert!(rate.next(due, now + Millis(100)).is_some());
    }

    #[test]
    fn a_key_tells_what_is_to_be_opened_from_the_token() {
        assert_eq!(review_key("token", "page"), review_key("token", "page"));
        assert_ne!(review_key("token", "page"), review_key("tokenp", "age"));
        assert_ne!(review_key("token", "page"), review_key("token", "pages"));
    }
}
