//! Many seeds, on all cores, until one fails, the seeds end, or the time does.

use super::tally::FaultTally;
use super::{History, HistoryRun, play};
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// What came of a campaign.
#[derive(Debug)]
pub struct CampaignResult {
    pub tally: FaultTally,
    /// The first seed, in order, that was seen to fail, and what came of it.
    pub failed: Option<(History, HistoryRun)>,
    pub took: Duration,
}

/// Plays the histories until one fails. `seen` is told how many have been played.
pub fn play_all(
    histories: impl Iterator<Item = History> + Send,
    limit: Option<Duration>,
    seen: impl Fn(u64) + Sync,
) -> CampaignResult {
    let began = Instant::now();
    let histories = Mutex::new(histories);
    let state = Mutex::new((FaultTally::default(), None::<(History, HistoryRun)>));
    let next = || {
        let is_over = state.lock().1.is_some() || limit.is_some_and(|limit| began.elapsed() >= limit);
        if is_over { None } else { histories.lock().next() }
    };
    let work = || {
        while let Some(history) = next() {
            let run = play(&history);
            let mut state = state.lock();
            state.0 += run.tally.clone();
            let is_first = state.1.as_ref().is_none_or(|(failed, _)| history.seed < failed.seed);
            if !run.broken.is_empty() && is_first {
                state.1 = Some((history, run));
            }
            seen(state.0.histories);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(work);
        }
    });
    let (tally, failed) = state.into_inner();
    CampaignResult { tally, failed, took: began.elapsed() }
}
