//! Amounts of requests, and those that wait, by age.

use std::collections::VecDeque;

/// Requests of one mean size. An amount: 0.25 requests are one every fourth time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Requests {
    pub count: f64,
    /// Tokens, on average.
    pub prompt: f64,
    pub output: f64,
    /// How long they have waited elsewhere, in seconds, on average.
    pub waited_s: f64,
}

/// Tokens in the KV cache for a request that decodes: its prompt and, on average, half of its output.
pub(crate) fn kv_tokens(prompt: f64, output: f64) -> f64 {
    (prompt + output / 2.0).max(1.0)
}

impl Requests {
    /// Every request has a token to read and one to write; what is no number counts as nothing.
    pub fn new(count: f64, prompt: f64, output: f64) -> Self {
        let finite = |n: f64, least: f64| if n.is_finite() { n.max(least) } else { least };
        Self {
            count: finite(count, 0.0),
            prompt: finite(prompt, 1.0),
            output: finite(output, 1.0),
            waited_s: 0.0,
        }
    }

    /// This share of the requests.
    pub fn scaled(self, share: f64) -> Self {
        Self {
            count: self.count * share,
            ..self
        }
    }

    pub fn plus(self, other: Self) -> Self {
        let count = self.count + other.count;
        if count <= 0.0 {
            return Self::default();
        }
        let mean = |a: f64, b: f64| (a * self.count + b * other.count) / count;
        Self {
            count,
            prompt: mean(self.prompt, other.prompt),
            output: mean(self.output, other.output),
            waited_s: mean(self.waited_s, other.waited_s),
        }
    }
}

/// Requests that wait, first come, first served. A time is in seconds on the owner's clock.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Queue {
    /// With the time at which they came, were `waited_s` nothing.
    cohorts: VecDeque<(f64, Requests)>,
    count: f64,
}

/// Amounts below this are rounding.
const ROUNDING: f64 = 1e-9;

impl Queue {
    pub fn push(&mut self, now_s: f64, requests: Requests) {
        if requests.count <= 0.0 {
            return;
        }
        self.count += requests.count;
        self.cohorts.push_back((now_s, requests));
    }

    pub fn count(&self) -> f64 {
        self.count
    }

    /// The oldest, at most so many, and how long they have waited.
    pub fn pop(
        &mut self,
        now_s: f64,
        max_count: impl Fn(&Requests) -> f64,
    ) -> Option<(f64, Requests)> {
        self.merge_rounding();
        let (came_s, cohort) = self.cohorts.front_mut()?;
        let taken = Requests {
            count: max_count(cohort).min(cohort.count),
            ..*cohort
        };
        if taken.count <= ROUNDING {
            return None;
        }
        let waited_s = (now_s - *came_s).max(0.0) + cohort.waited_s;
        cohort.count -= taken.count;
        self.count = (self.count - taken.count).max(0.0);
        if cohort.count <= ROUNDING && self.cohorts.len() == 1 {
            self.cohorts.clear();
            let left = std::mem::take(&mut self.count);
            return Some((
                waited_s,
                Requests {
                    count: taken.count + left,
                    waited_s: 0.0,
                    ..taken
                },
            ));
        }
        Some((
            waited_s,
            Requests {
                waited_s: 0.0,
                ..taken
            },
        ))
    }

    /// Rounding at the front would keep all behind it waiting: it goes with the next.
    fn merge_rounding(&mut self) {
        while self.cohorts.len() > 1 && self.cohorts[0].1.count <= ROUNDING {
            let rounding = self
                .cohorts
                .pop_front()
                .map_or(0.0, |(_, cohort)| cohort.count);
            self.cohorts[0].1.count += rounding;
        }
    }

    /// All of them, with what they have waited.
    pub fn take_all(&mut self, now_s: f64) -> Requests {
        self.count = 0.0;
        let aged = |(came_s, cohort): (f64, Requests)| Requests {
            waited_s: cohort.waited_s + (now_s - came_s).max(0.0),
            ..cohort
        };
        self.cohorts
            .drain(..)
            .map(aged)
            .fold(Requests::default(), Requests::plus)
    }
}
