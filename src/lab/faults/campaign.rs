//! Histories of many seeds, on all cores, until one fails, the seeds end, or the time does.

use super::tally::FaultTally;
use super::{History, HistoryRun, play};
use crate::campaign::{CampaignResult, CampaignRules};

/// Plays the histories until one fails. `seen` is told how many have been played.
pub fn play_all(
    histories: impl Iterator<Item = History> + Send,
    rules: &CampaignRules<'_>,
    seen: impl Fn(u64) + Sync,
) -> CampaignResult<FaultTally, (History, HistoryRun)> {
    let play = |history: History| {
        let run = play(&history);
        (
            run.tally.clone(),
            (!run.broken.is_empty()).then_some((history, run)),
        )
    };
    rules.play_all(histories, play, |tally: &FaultTally| seen(tally.histories))
}
