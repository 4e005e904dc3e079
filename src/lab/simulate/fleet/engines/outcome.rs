//! What a stretch of time, or its end, makes of the requests in an engine.

use super::latency::{Slo, SloTally};
use super::requests::Requests;

/// Requests that an engine had when it was killed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct AbortedRequests {
    pub waiting: Requests,
    /// They had begun: what they computed is lost.
    pub running: Requests,
}

/// What happened in a stretch of time.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutcome {
    /// Requests that came and are too long for the engine's KV cache.
    pub refused: f64,
    /// Requests that were admitted from the queue, by time to first token in seconds.
    pub first_tokens: Vec<(f64, f64)>,
    /// Requests that were completed, by time per output token in seconds.
    pub completed: Vec<(f64, f64)>,
    /// Of these, those that took more than twice as long for a token as they would have beside no neighbor.
    pub slowed: f64,
    pub prompt_tokens: f64,
    pub output_tokens: f64,
    /// The share of the time in which the GPU has any kernel running: what its utilization counter shows.
    pub busy_share: f64,
}

impl StepOutcome {
    pub fn completions(&self) -> f64 {
        self.completed.iter().map(|(_, requests)| requests).sum()
    }

    pub fn admitted(&self) -> f64 {
        self.first_tokens.iter().map(|(_, requests)| requests).sum()
    }

    pub fn add_to(&self, tally: &mut SloTally, slo: &Slo) {
        self.first_tokens
            .iter()
            .for_each(|(ttft_s, requests)| tally.first_tokens(slo, *ttft_s, *requests));
        self.completed
            .iter()
            .for_each(|(tpot_s, requests)| tally.completed(slo, *tpot_s, *requests));
    }
}
