//! The number drives the replicas, and the replicas carry the load: a fluid model of engines that batch continuously.
//!
//! Requests come at a rate, each is worked on for a fixed time, and a replica works on so many at once as its KV cache holds.
//! The rest wait. A replica that is asked for answers after its start time. This is no forecast of any engine: it shows that the
//! loop settles, does not swing, and does not run away while replicas start.

use super::*;
use crate::policy::AutoscalingRules;
use crate::units::{Millis, Moment};

/// Requests that a replica's KV cache holds.
const SLOTS: f64 = 20.0;
/// How long each is worked on, in seconds.
const SERVICE: f64 = 15.0;
/// Between two evaluations, as an HPA's.
const EVERY: u64 = 15;

struct Loop {
    scaling: ModelScaling,
    rules: AutoscalingRules,
    start: u64,
    serving: u32,
    /// When each replica that starts answers.
    starting: Vec<u64>,
    waiting: f64,
    running: f64,
    desired: Vec<u32>,
    longest_queue: f64,
}

impl Loop {
    fn new(serving: u32, start: u64) -> Self {
        Self {
            scaling: ModelScaling::default(),
            rules: AutoscalingRules::default(),
            start,
            serving,
            starting: Vec::new(),
            waiting: 0.0,
            running: f64::from(serving) * SLOTS * 0.7,
            desired: Vec::new(),
            longest_queue: 0.0,
        }
    }

    /// `replicas` is the load: how many replicas would be full with it.
    fn run(mut self, seconds: u64, replicas: impl Fn(u64) -> f64) -> Self {
        for now in 0..seconds {
            self.step(now, replicas(now));
            if now % EVERY == 0 {
                self.evaluate(now);
            }
        }
        self
    }

    fn step(&mut self, now: u64, replicas: f64) {
        let before = self.starting.len();
        self.starting.retain(|ready| *ready > now);
        self.serving += (before - self.starting.len()) as u32;
        self.running -= self.running / SERVICE;
        self.waiting += replicas * SLOTS / SERVICE;
        let free = (f64::from(self.serving) * SLOTS - self.running).max(0.0);
        let admitted = self.waiting.min(free);
        (self.running, self.waiting) = (self.running + admitted, self.waiting - admitted);
        self.longest_queue = self.longest_queue.max(self.waiting);
    }

    fn evaluate(&mut self, now: u64) {
        let serving = self.serving;
        let kv_cache = (self.running / SLOTS * 1000.0) as u64;
        let of = |sum| ReportedSum {
            sum,
            replicas: serving,
        };
        let load = ModelLoad {
            serving,
            starting: self.starting.len() as u32,
            kv_cache: of(kv_cache),
            waiting: of(self.waiting as u64),
            running: of(self.running as u64),
            ready_in: Millis::seconds(self.start),
            ..ModelLoad::default()
        };
        let desired = self
            .scaling
            .decide(&self.rules, &load, Moment(0) + Millis::seconds(now))
            .replicas;
        self.desired.push(desired);
        while serving + (self.starting.len() as u32) < desired {
            self.starting.push(now + self.start);
        }
        // An HPA removes pods that start before those that serve.
        while self.serving + self.starting.len() as u32 > desired {
            match self.starting.pop() {
                Some(_) => {}
                None => self.serving -= 1,
            }
        }
        self.running = self.running.min(f64::from(self.serving) * SLOTS);
    }

    fn last_hour(&self) -> &[u32] {
        &self.desired[self.desired.len() - (3600 / EVERY) as usize..]
    }

    fn most(&self) -> u32 {
        self.desired.iter().copied().max().unwrap()
    }
}

#[test]
fn a_step_of_the_load_settles_without_swinging_however_slowly_replicas_start() {
    for start in [10, 60, 180, 600] {
        let ended = Loop::new(3, start).run(4 * 3600, |now| if now < 600 { 2.0 } else { 10.0 });
        // 10 full replicas are 14.3 at the target; the tolerance leaves 13.
        let last = ended.last_hour();
        assert!(
            last.windows(2).all(|pair| pair[0] == pair[1]),
            "start {start} s: {last:?}"
        );
        assert!((13..=16).contains(&last[0]), "start {start} s: {}", last[0]);
        // After ten minutes at a third of what the load needs, thousands of requests wait, and are to be worked off, too.
        let factor = if start < 600 { 2 } else { 3 };
        assert!(
            ended.most() <= factor * last[0],
            "start {start} s: {} at most, {} in the end",
            ended.most(),
            last[0]
        );
        assert!(
            ended.waiting < 1.0,
            "start {start} s: {} still wait",
            ended.waiting
        );
    }
}

#[test]
fn a_falling_load_settles_too() {
    let ended = Loop::new(30, 60).run(4 * 3600, |now| if now < 600 { 20.0 } else { 3.0 });
    let last = ended.last_hour();
    assert!(
        last.iter().all(|replicas| *replicas == last[0]) && (4..=5).contains(&last[0]),
        "{last:?}"
    );
    assert!(
        ended.longest_queue < 1.0,
        "no request waited for a replica that was gone"
    );
}

#[test]
fn a_rise_over_half_an_hour_makes_no_request_wait_for_long() {
    let rise = |now: u64| 4.0 + (now.saturating_sub(600) as f64 / 1800.0).min(1.0) * 16.0;
    let queue = |look_ahead| {
        let mut driven = Loop::new(6, 120);
        driven.rules.look_ahead = look_ahead;
        driven.run(2 * 3600, rise).longest_queue
    };
    let (with, without) = (queue(Millis::seconds(300)), queue(Millis(0)));
    assert!(
        with < 1.0,
        "{with} requests waited with the trend, {without} without"
    );
    assert!(without >= with);
}

#[test]
fn a_day_and_a_night_are_followed() {
    let day = |now: u64| 10.0 - 8.0 * (now as f64 / 86_400.0 * std::f64::consts::TAU).cos();
    let ended = Loop::new(4, 90).run(86_400, day);
    let turns = ended
        .desired
        .windows(2)
        .filter(|pair| pair[1] < pair[0])
        .count();
    assert!((24..=28).contains(&ended.most()), "{}", ended.most());
    assert!(*ended.desired.last().unwrap() <= 5 && ended.longest_queue < 1.0);
    assert!(turns <= 30, "it fell {turns} times");
}
