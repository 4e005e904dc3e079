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
    pub interrupted: Option<&'a AtomicBool>,
}

/// What came of a campaign.
#[derive(Debug)]
pub struct CampaignResult {
    pub tally: FaultTally,
    /// The first of the histories that failed, in the order of the seeds.
    pub failed: Option<(History, HistoryRun)>,
    pub took: Duration,
}

/// Plays the histories until one fails. `seen` is told how many have been played.
pub fn play_all(
    histories: impl Iterator<Item = History> + Send,
    rules: &CampaignRules<'_>,
    seen: impl Fn(u64) + Sync,
) -> CampaignResult {
    let began = Instant::now();
    let histories = Mutex::new(histories.enumerate());
    let reached = Mutex::new((FaultTally::default(), None::<(usize, History, HistoryRun)>));
    let next = || {
        let is_over = reached.lock().1.is_some()
            || rules
                .interrupted
                .is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
            || rules.limit.is_some_and(|limit| began.elapsed() >= limit);
        if is_over {
            None
        } else {
            histories.lock().next()
        }
    };
    let work = || {
        while let Some((place, history)) = next() {
            let run = play(&history);
            let mut reached = reached.lock();
            reached.0 += run.tally.clone();
            let is_first = reached.1.as_ref().is_none_or(|(known, ..)| place < *known);
            if is_first && !run.broken.is_empty() {
                reached.1 = Some((place, history, run));
            }
            seen(reached.0.histories);
        }
    };
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let (tally, failed) = reached.into_inner();
    CampaignResult {
        tally,
        failed: failed.map(|(_, history, run)| (history, run)),
        took: began.elapsed(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_campaign_begins_no_history() {
        let interrupted = AtomicBool::new(true);
        let rules = CampaignRules {
            interrupted: Some(&interrupted),
            ..CampaignRules::default()
        };
        let result = play_all((0..9).map(History::of), &rules, |_| ());
        assert_eq!(result.tally.histories, 0);
        assert!(result.failed.is_none());
    }
}
