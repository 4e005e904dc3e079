//! Histories of many seeds, on several threads, until one fails, the seeds end, or the time does.

use super::tally::FaultTally;
use super::{History, HistoryRun, play};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a campaign is played.
#[derive(Debug, Clone, Copy, Default)]
pub struct CampaignRules<'a> {
    /// No history begins after that.
    pub limit: Option<Duration>,
    /// No history begins once it is true.
    pub is_interrupted: Option<&'a AtomicBool>,
}

/// What came of a campaign.
#[derive(Debug)]
pub struct CampaignResult {
    pub tally: FaultTally,
    /// The first of the histories that failed, in the order of the seeds.
    pub failure: Option<(History, HistoryRun)>,
    pub elapsed: Duration,
}

/// Plays the histories until one fails. `on_progress` is told how many have been played.
pub fn play_all(
    histories: impl Iterator<Item = History> + Send,
    rules: &CampaignRules<'_>,
    on_progress: impl Fn(u64) + Sync,
) -> CampaignResult {
    let started = Instant::now();
    let histories = Mutex::new(histories.enumerate());
    let progress = Mutex::new((FaultTally::default(), None::<(usize, History, HistoryRun)>));
    let next = || {
        let is_over = progress.lock().1.is_some()
            || rules
                .is_interrupted
                .is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
            || rules.limit.is_some_and(|limit| started.elapsed() >= limit);
        if is_over {
            None
        } else {
            histories.lock().next()
        }
    };
    let work = || {
        while let Some((index, history)) = next() {
            let run = play(&history);
            let mut reached = progress.lock();
            reached.0 += run.tally.clone();
            let is_first = reached
                .1
                .as_ref()
                .is_none_or(|(first_failed, ..)| index < *first_failed);
            if is_first && !run.violations.is_empty() {
                reached.1 = Some((index, history, run));
            }
            on_progress(reached.0.histories);
        }
    };
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let (tally, failed) = progress.into_inner();
    CampaignResult {
        tally,
        failure: failed.map(|(_, history, run)| (history, run)),
        elapsed: started.elapsed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_campaign_begins_no_history() {
        let interrupted = AtomicBool::new(true);
        let rules = CampaignRules {
            is_interrupted: Some(&interrupted),
            ..CampaignRules::default()
        };
        let result = play_all((0..9).map(History::from_seed), &rules, |_| ());
        assert_eq!(result.tally.histories, 0);
        assert!(result.failure.is_none());
    }
}
