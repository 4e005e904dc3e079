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

use crate::service::Service;
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
pub(crate) const GOOD_FOR: Millis = Millis::seconds(60);
/// How long a rejection is cached: an agent tries every second, and the cause may be fixed meanwhile.
pub(crate) const BAD_FOR: Millis = Millis::seconds(5);
/// How long after an acceptance expired its token is reviewed before new ones, and [counts as accepted](Reviews::last_accepted).
const GOOD_BEFORE: Millis = Millis::seconds(15 * 60);

/// The limits of one address.
#[derive(Debug, Clone, Copy)]
pub struct ReviewBounds {
    /// Good answers cached, at some 220 bytes each. Tokens beyond this are reviewed each time.
    pub good: usize,
    /// Bad answers cached.
    pub bad: usize,
    /// Reviews of tokens that were not good before, waiting or in progress.
    pub open: usize,
    /// Of those, in progress at one time. As many again for the other tokens.
    pub at_once: usize,
    /// Rate limit of new tokens from one source: the interval, and the burst.
    pub per_source: Rate,
    /// Rate limit of new tokens from all sources together.
    pub in_all: Rate,
}

#[derive(Debug, Clone, Copy)]
pub struct Rate {
    pub every: Millis,
    pub burst: u64,
}

/// The subject of a review: a token, with what it is to give access to.
pub(crate) type ReviewKey = [u8; 32];

pub fn key(token: &str, to_open: &str) -> ReviewKey {
    let mut digest = Sha256::new();
    digest.update((to_open.len() as u64).to_le_bytes());
    digest.update(to_open);
    digest.update(token);
    digest.finalize().into()
}

/// The API server's answer, and for how much longer the token is valid if that is known.
pub(crate) type ReviewAnswer<V> = Result<(V, Option<Millis>), AuthError>;

pub struct Reviews<V> {
    /// The address' label in metrics.
    address: &'static str,
    service: Arc<Service>,
    bounds: ReviewBounds,
    /// The runtime that sends the reviews, if it is not the address' own: its connections serve others too, and must not be
    /// driven by a low-priority thread.
    home: Option<Handle>,
    known: Mutex<ReviewCache<V>>,
    new: Semaphore,
    again: Semaphore,
    /// Called with each outcome, for metrics.
    outcome: fn(&Service, &str),
}

struct ReviewCache<V> {
    good: HashMap<ReviewKey, (V, Moment)>,
    bad: HashMap<ReviewKey, (AuthError, Moment)>,
    open: HashMap<ReviewKey, Arc<OpenReview<V>>>,
    /// Open reviews of tokens that were not good before.
    open_new: usize,
    /// When the next new token is within the rate limit, for each source and for all.
    sources: HashMap<IpAddr, Moment>,
    all: Moment,
    swept: Moment,
}

type OpenReview<V> = watch::Sender<Option<Result<V, AuthError>>>;

impl<V: Clone + Send + Sync + 'static> Reviews<V> {
    /// If called inside a tokio runtime, that runtime sends the reviews; otherwise the one that serves the address.
    pub fn new(
        address: &'static str,
        service: Arc<Service>,
        bounds: ReviewBounds,
        outcome: fn(&Service, &str),
    ) -> Arc<Self> {
        let known = ReviewCache {
            good: HashMap::new(),
            bad: HashMap::new(),
            open: HashMap::new(),
            open_new: 0,
            sources: HashMap::new(),
            all: Moment(0),
            swept: Moment(0),
        };
        Arc::new(Self {
            address,
            service,
            home: Handle::try_current().ok(),
            known: Mutex::new(known),
            new: Semaphore::new(bounds.at_once),
            again: Semaphore::new(bounds.at_once),
            bounds,
            outcome,
        })
    }

    /// The cached answer for this key, or the answer of `ask`.
    pub async fn verdict(
        self: &Arc<Self>,
        key: ReviewKey,
        source: IpAddr,
        ask: impl FnOnce() -> BoxFuture<'static, ReviewAnswer<V>>,
    ) -> Result<V, AuthError> {
        let mut answer = {
            let (now, mut known) = (self.service.now(), self.known.lock());
            if let Some((value, _)) = known.good.get(&key).filter(|(_, until)| now < *until) {
                return Ok(value.clone());
            }
            if let Some((error, _)) = known.bad.get(&key).filter(|(_, until)| now < *until) {
                return Err(error.clone());
            }
            match known.open.get(&key) {
                Some(open) => open.subscribe(),
                None => self.begin(&mut known, key, source, now, ask)?,
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
    pub fn last_good(&self, key: &ReviewKey) -> Option<V> {
        let (now, known) = (self.service.now(), self.known.lock());
        let (value, until) = known.good.get(key)?;
        (now < *until + GOOD_BEFORE).then(|| value.clone())
    }

    fn begin(
        self: &Arc<Self>,
        known: &mut ReviewCache<V>,
        key: ReviewKey,
        source: IpAddr,
        now: Moment,
        ask: impl FnOnce() -> BoxFuture<'static, ReviewAnswer<V>>,
    ) -> Result<watch::Receiver<Option<Result<V, AuthError>>>, AuthError> {
        known.sweep(now);
        let is_new = !known.good.contains_key(&key);
        if is_new && let Err(bound) = known.admit(source, now, &self.bounds) {
            self.service
                .metrics
                .edge
                .turned_away
                .with_label_values(&[self.address, bound])
                .inc();
            return Err(AuthError::Crowded);
        }
        known.open_new += usize::from(is_new);
        let (open, answer) = watch::channel(None);
        let open = Arc::new(open);
        known.open.insert(key, open.clone());
        let asking = self.clone().ask(key, is_new, open, ask());
        match &self.home {
            Some(home) => drop(home.spawn(asking)),
            None => drop(tokio::spawn(asking)),
        }
        Ok(answer)
    }

    /// Once started, a review runs to its end even if no request waits any more: an agent's timeout is shorter than a slow API
    /// server's answer.
    async fn ask(
        self: Arc<Self>,
        key: ReviewKey,
        is_new: bool,
        open: Arc<OpenReview<V>>,
        asking: BoxFuture<'static, ReviewAnswer<V>>,
    ) {
        let Some(_turn) = self.turn(key, is_new, &open).await else {
            return;
        };
        let answer = AssertUnwindSafe(asking).catch_unwind().await;
        // Left open, the review would never be started again.
        let answer =
            answer.unwrap_or_else(|_| Err(AuthError::Unavailable("the check failed".into())));
        (self.outcome)(
            &self.service,
            answer.as_ref().err().map_or("accepted", AuthError::code),
        );
        let verdict = answer
            .as_ref()
            .map(|(value, _)| value.clone())
            .map_err(Clone::clone);
        self.settle(key, is_new, answer);
        open.send_replace(Some(verdict));
    }

    /// `None` if no request waits any more: then the review is dropped.
    async fn turn(
        &self,
        key: ReviewKey,
        is_new: bool,
        open: &OpenReview<V>,
    ) -> Option<SemaphorePermit<'_>> {
        let lane = if is_new { &self.new } else { &self.again };
        loop {
            tokio::select! {
                turn = lane.acquire() => return Some(turn.expect("the semaphore is never closed")),
                () = open.closed() => {
                    let mut known = self.known.lock();
                    // A request may have arrived meanwhile.
                    if open.is_closed() {
                        known.close(key, is_new);
                        (self.outcome)(&self.service, "abandoned");
                        return None;
                    }
                }
            }
        }
    }

    fn settle(&self, key: ReviewKey, is_new: bool, answer: ReviewAnswer<V>) {
        let (now, mut known) = (self.service.now(), self.known.lock());
        known.close(key, is_new);
        match answer {
            Ok((value, remaining)) => {
                let until = now + remaining.map_or(GOOD_FOR, |remaining| remaining.min(GOOD_FOR));
                known.bad.remove(&key);
                if known.good.len() < self.bounds.good || known.good.contains_key(&key) {
                    known.good.insert(key, (value, until));
                } else {
                    self.service
                        .metrics
                        .edge
                        .turned_away
                        .with_label_values(&[self.address, "remembered"])
                        .inc();
                }
            }
            Err(AuthError::Unavailable(_)) => {}
            Err(error) => {
                known.good.remove(&key);
                if known.bad.len() < self.bounds.bad {
                    known.bad.insert(key, (error, now + BAD_FOR));
                }
            }
        }
    }

    #[cfg(test)]
    pub fn remembered(&self) -> [usize; 3] {
        let known = self.known.lock();
        [known.good.len(), known.bad.len(), known.open.len()]
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
        if self.open_new >= bounds.open {
            return Err("open-reviews");
        }
        let of_source = self.sources.get(&source).copied().unwrap_or(now);
        let of_source = bounds
            .per_source
            .next(of_source, now)
            .ok_or("reviews-per-source")?;
        let of_all = bounds.in_all.next(self.all, now).ok_or("reviews")?;
        self.all = of_all;
        // No more sources than reviews within a burst's time: the others are removed.
        self.sources.insert(source, of_source);
        Ok(())
    }

    /// Removes expired entries, once a second at the most.
    fn sweep(&mut self, now: Moment) {
        if now < self.swept + Millis::seconds(1) {
            return;
        }
        self.swept = now;
        self.good.retain(|_, (_, until)| now < *until + GOOD_BEFORE);
        self.bad.retain(|_, (_, until)| now < *until);
        self.sources.retain(|_, next| now < *next);
    }
}

impl Rate {
    /// When the next one is within the limit, or `None` if this one comes too soon. `due`: when this one is within the limit.
    fn next(self, due: Moment, now: Moment) -> Option<Moment> {
        let due = due.max(now);
        (due <= now + Millis(self.every.0 * self.burst.saturating_sub(1))).then(|| due + self.every)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_lets_a_burst_through_and_then_one_at_a_time() {
        let rate = Rate {
            every: Millis(100),
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
        assert_eq!(key("token", "page"), key("token", "page"));
        assert_ne!(key("token", "page"), key("tokenp", "age"));
        assert_ne!(key("token", "page"), key("token", "pages"));
    }
}
