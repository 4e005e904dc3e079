//! What the teams want over a day, drawn once for all variants.

use super::Team;
use crate::simulate::fleet::scenarios::running_jobs::{Checkpointing, Job};
use crate::simulate::fleet::traffic::{DayOfTraffic, RequestSize, built_in};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Millis, Moment};

/// Engines at the peak.
const MAX_ENGINES: f64 = 8.0;
/// For how long an engine stays after it was last needed: the default of an HPA is five minutes.
const SCALE_DOWN_MINUTES: u64 = 10;

/// Hours at which campaigns of training come, and how many jobs each has.
const CAMPAIGNS: [(f64, usize); 2] = [(9.5, 12), (18.0, 52)];
const TRAINING_WORK: (Millis, Millis) = (Millis::seconds(1800), Millis::seconds(10_800));
/// Hours at which sweeps of experiments come.
const SWEEPS: [f64; 6] = [9.0, 11.0, 14.0, 16.5, 19.0, 22.0];
const JOBS_PER_SWEEP: (usize, usize) = (20, 40);
const EXPERIMENT_WORK: (Millis, Millis) = (Millis::seconds(300), Millis::seconds(2400));
/// Campaigns and sweeps come up to so many hours late.
const MAX_DELAY_HOURS: f64 = 0.75;

/// A job of a team, and the time of day at which it comes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    pub at: Moment,
    pub team: Team,
    pub job: Job,
}

pub struct TeamDemand {
    day: DayOfTraffic,
    /// In order of time.
    pub arrivals: Vec<Arrival>,
}

impl TeamDemand {
    pub fn draw(seed: u64) -> Self {
        let mut draws = Random::seeded(seed, 6);
        let mut arrivals = Vec::new();
        for (hour, jobs) in CAMPAIGNS {
            let at = delayed_time(hour, &mut draws);
            for _ in 0..jobs {
                let gpus = [1, 1, 1, 1, 1, 2, 2, 2, 4, 4][draws.below(10)];
                let job = Job::new(
                    gpus,
                    draws.log_uniform(TRAINING_WORK.0, TRAINING_WORK.1),
                    Checkpointing::Regularly,
                );
                arrivals.push(Arrival {
                    at,
                    team: Team::Training,
                    job,
                });
            }
        }
        for hour in SWEEPS {
            let at = delayed_time(hour, &mut draws);
            for _ in 0..JOBS_PER_SWEEP.0 + draws.below(JOBS_PER_SWEEP.1 - JOBS_PER_SWEEP.0 + 1) {
                let job = Job::new(
                    1,
                    draws.log_uniform(EXPERIMENT_WORK.0, EXPERIMENT_WORK.1),
                    Checkpointing::Regularly,
                );
                arrivals.push(Arrival {
                    at,
                    team: Team::Experiments,
                    job,
                });
            }
        }
        arrivals.sort_by_key(|arrival| arrival.at);
        Self {
            day: built_in::working_day(seed, 1.0, RequestSize::CONVERSATION),
            arrivals,
        }
    }

    /// Engines that inference wants at that time of day.
    pub fn engines(&self, at: Moment) -> u32 {
        let minute = |ago: u64| {
            self.day
                .minute_at(Moment((at.0 + self.day.length().0) - ago * 60_000))
                .requests
        };
        let busiest = (0..SCALE_DOWN_MINUTES).map(minute).fold(0.0, f64::max);
        (MAX_ENGINES * busiest / (60.0 * self.day.peak_per_s()))
            .ceil()
            .clamp(1.0, MAX_ENGINES) as u32
    }
}

fn delayed_time(hour: f64, draws: &mut Random) -> Moment {
    Moment(((hour + MAX_DELAY_HOURS * draws.unit_interval()) * 3.6e6) as u64)
}
