//! Many games, on several threads, until one fails, there are no more, or the time is over. A game is what a seed draws: a history
//! of [`faults`](super::faults), a sequence of [`decisions`](super::simulate::decisions).

use parking_lot::Mutex;
use std::ops::AddAssign;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a campaign is played.
#[derive(Debug, Clone, Copy, Default)]
pub struct CampaignRules<'a> {
    /// Games at once; as many as there are processors, if it does not say.
    pub jobs: Option<usize>,
    /// No game begins after that.
    pub limit: Option<Duration>,
    /// No game begins once it is true.
    pub interrupted: Option<&'a AtomicBool>,
}

/// What came of a campaign.
#[derive(Debug)]
pub struct CampaignResult<T, F> {
    pub tally: T,
    /// Of the games that were seen to fail the first, in order.
    pub failed: Option<F>,
    pub took: Duration,
}

impl CampaignRules<'_> {
    pub fn jobs(&self) -> usize {
        self.jobs
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Plays the games, which answer their tallies and how they failed, until one fails. `seen` is told what was reached.
    pub fn play_all<G, T: Default + AddAssign + Send, F: Send>(
        &self,
        games: impl Iterator<Item = G> + Send,
        play: impl Fn(G) -> (T, Option<F>) + Sync,
        seen: impl Fn(&T) + Sync,
    ) -> CampaignResult<T, F> {
        let began = Instant::now();
        let games = Mutex::new(games.enumerate());
        let reached = Mutex::new((T::default(), None::<(usize, F)>));
        let next = || {
            let is_over = reached.lock().1.is_some()
                || self
                    .interrupted
                    .is_some_and(|interrupted| interrupted.load(Ordering::Relaxed))
                || self.limit.is_some_and(|limit| began.elapsed() >= limit);
            if is_over { None } else { games.lock().next() }
        };
        let work = || {
            while let Some((place, game)) = next() {
                let (tally, failed) = play(game);
                let mut reached = reached.lock();
                reached.0 += tally;
                let is_first = reached.1.as_ref().is_none_or(|(known, _)| place < *known);
                if let Some(failed) = failed.filter(|_| is_first) {
                    reached.1 = Some((place, failed));
                }
                seen(&reached.0);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.jobs() {
                scope.spawn(work);
            }
        });
        let (tally, failed) = reached.into_inner();
        CampaignResult {
            tally,
            failed: failed.map(|(_, failed)| failed),
            took: began.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_game_that_fails_ends_the_campaign_and_what_was_played_is_added_up() {
        let rules = CampaignRules {
            jobs: Some(2),
            ..CampaignRules::default()
        };
        let play = |game: u64| (1, (game >= 7).then_some(game));
        let result = rules.play_all(0.., play, |_| ());
        assert_eq!(result.failed, Some(7));
        assert!((8..=9).contains(&result.tally), "{}", result.tally);
    }

    #[test]
    fn an_interrupted_campaign_begins_no_game() {
        let interrupted = AtomicBool::new(true);
        let rules = CampaignRules {
            interrupted: Some(&interrupted),
            ..CampaignRules::default()
        };
        let result = rules.play_all(0.., |game: u64| (1u64, Some(game)), |_| ());
        assert_eq!((result.tally, result.failed), (0, None));
    }
}
