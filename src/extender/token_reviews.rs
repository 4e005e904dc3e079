//! Questions to the API server about tokens: each asked once for all who wait, remembered for a while, and bounded.
//!
//! ```text
//!  token ─► known good? known bad? ─► being asked? ─► bounds ─► a turn ─► the API server ─► remembered
//! ```
//!
//! Whoever makes tokens up gets nobody else's place: what is good, what is bad and what is being asked are three tables, each
//! with its bound; a token that was good before has a lane of its own; a source may ask about so many new tokens at a time,
//! and all sources together about some more. A question that nobody waits for any more before its turn comes is not asked.
//! Tokens are kept as hashes, and never shown or logged. What a token opens is not known here.

use crate::kubernetes::port::AuthError;
use crate::service::Service;
use crate::units::{Millis, Moment};
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit, watch};

/// How long a good answer is not asked for again: a token that was revoked, or whose pod is gone, opens for as long.
pub const GOOD_FOR: Millis = Millis::seconds(60);
/// How long a bad one is not: an agent tries every second, and what was wrong may be put right.
pub const BAD_FOR: Millis = Millis::seconds(5);
/// For so long after it was good, a token is asked about before those that nobody has seen.
const GOOD_BEFORE: Millis = Millis::seconds(15 * 60);

/// The bounds of one guard.
#[derive(Debug, Clone, Copy)]
pub struct ReviewBounds {
    /// Good answers remembered, at some 150 bytes each. What does not fit is asked about each time.
    pub good: usize,
    /// Bad answers remembered.
    pub bad: usize,
    /// Questions about tokens that were not good before, waiting or under way.
    pub open: usize,
    /// Of those, to the API server at one time. As many of the others.
    pub at_once: usize,
    /// New tokens from one source: one each so often, and so many at once.
    pub per_source: Rate,
    /// And from all sources together.
    pub in_all: Rate,
}

#[derive(Debug, Clone, Copy)]
pub struct Rate {
    pub every: Millis,
    pub burst: u64,
}

/// What is asked about: a token, with what it is to open.
pub type ReviewKey = [u8; 32];

pub fn key(token: &str, to_open: &str) -> ReviewKey {
    let mut digest = Sha256::new();
    digest.update((to_open.len() as u64).to_le_bytes());
    digest.update(to_open);
    digest.update(token);
    digest.finalize().into()
}

/// What the API server says, and for how much longer the token is good if that is known.
pub type ReviewAnswer<V> = Result<(V, Option<Millis>), AuthError>;

pub struct Reviews<V> {
    /// The address' label in metrics.
    address: &'static str,
    service: Arc<Service>,
    bounds: ReviewBounds,
    /// The runtime that asks the API server, if it is not the address' own: its connections serve others too, and are not to
    /// be driven by a thread that steps back.
    home: Option<Handle>,
    known: Mutex<ReviewCache<V>>,
    new: Semaphore,
    again: Semaphore,
    /// Told of each outcome, for metrics.
    outcome: fn(&Service, &str),
}

struct ReviewCache<V> {
    good: HashMap<ReviewKey, (V, Moment)>,
    bad: HashMap<ReviewKey, (AuthError, Moment)>,
    open: HashMap<ReviewKey, Arc<OpenReview<V>>>,
    /// Of the open ones, those about tokens that were not good before.
    open_new: usize,
    /// When the next new token of a source, and of anyone, is in time.
    sources: HashMap<IpAddr, Moment>,
    all: Moment,
    swept: Moment,
}

type OpenReview<V> = watch::Sender<Option<Result<V, AuthError>>>;

impl<V: Clone + Send + Sync + 'static> Reviews<V> {
    /// Called inside a tokio runtime, that one will ask; else whichever serves the address.
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

    /// What is known of this key, or what `ask` finds out about it.
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
        let answered = answer.wait_for(Option::is_some).await.ok().and_then(|answer| answer.clone());
        answered.unwrap_or_else(|| Err(AuthError::Unavailable("the question was dropped".into())))
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
            self.service.metrics.edge.turned_away.with_label_values(&[self.address, bound]).inc();
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

    /// Once its turn has come it is asked to the end, whoever waits: an agent's patience is shorter than a slow API server's.
    async fn ask(
        self: Arc<Self>,
        key: ReviewKey,
        is_new: bool,
        open: Arc<OpenReview<V>>,
        asking: BoxFuture<'static, ReviewAnswer<V>>,
    ) {
        let Some(_turn) = self.turn(key, is_new, &open).await else { return };
        let answer = AssertUnwindSafe(asking).catch_unwind().await;
        // Left open, the question would never be asked again.
        let answer = answer.unwrap_or_else(|_| Err(AuthError::Unavailable("the check failed".into())));
        (self.outcome)(&self.service, answer.as_ref().err().map_or("accepted", AuthError::code));
        let verdict = answer.as_ref().map(|(value, _)| value.clone()).map_err(Clone::clone);
        self.settle(key, is_new, answer);
        open.send_replace(Some(verdict));
    }

    /// `None` if nobody waits any more: then the question is forgotten.
    async fn turn(&self, key: ReviewKey, is_new: bool, open: &OpenReview<V>) -> Option<SemaphorePermit<'_>> {
        let lane = if is_new { &self.new } else { &self.again };
        loop {
            tokio::select! {
                turn = lane.acquire() => return Some(turn.expect("the semaphore is never closed")),
                () = open.closed() => {
                    let mut known = self.known.lock();
                    // Somebody may have come meanwhile.
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

    /// Whether one more new token of this source may be asked about; or which bound it meets.
    fn admit(&mut self, source: IpAddr, now: Moment, bounds: &ReviewBounds) -> Result<(), &'static str> {
        if self.open_new >= bounds.open {
            return Err("open-reviews");
        }
        let of_source = self.sources.get(&source).copied().unwrap_or(now);
        let of_source = bounds.per_source.next(of_source, now).ok_or("reviews-per-source")?;
        let of_all = bounds.in_all.next(self.all, now).ok_or("reviews")?;
        self.all = of_all;
        // No more sources than questions within a burst's time: the others are swept.
        self.sources.insert(source, of_source);
        Ok(())
    }

    /// Forgets what has run out, once a second at the most.
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
    /// When the one after this is in time, or nothing if this one comes too soon. `due`: when this one is in time.
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
        let rate = Rate { every: Millis(100), burst: 3 };
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
