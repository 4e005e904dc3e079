//! What a day comes to.

use super::Team;
use super::account::{Account, Quota};
use super::guarantee::Guarantees;
use crate::simulate::fleet::scenarios::running_jobs::RunningJobs;
use crate::simulate::fleet::scenarios::{Curve, quantile};
use crate::simulate::fleet::stage::START;
use stowage_scheduling::units::Moment;

pub struct Sums {
    pub running: RunningJobs,
    pub account: Account,
    pub guarantees: Guarantees,
    /// GPU-hours of engines that answer.
    pub served: f64,
    /// Seconds until the first start, by team.
    waits: [Vec<f64>; 3],
    /// GPUs of each team, by the hour.
    curves: [Vec<(f64, f64)>; 3],
}

impl Sums {
    pub fn new(quotas: [Quota; 3], gpus: u64) -> Self {
        Self {
            running: RunningJobs::default(),
            account: Account::new(quotas, gpus as u32, START),
            guarantees: Guarantees::default(),
            served: 0.0,
            waits: Default::default(),
            curves: Default::default(),
        }
    }

    /// It came then, and starts now, or the day ends before it does.
    pub fn waited(&mut self, team: Team, came: Moment, now: Moment) {
        self.waits[team as usize].push(now.since(came).0 as f64 / 1000.0);
    }

    pub fn draw(&mut self, team: Team, hour: f64, gpus: u32) {
        self.curves[team as usize].push((hour, f64::from(gpus)));
    }

    /// In the order of the scenario's figures.
    pub fn figures(&mut self, evictions: u64) -> Vec<f64> {
        let completed = self.served + self.running.kept;
        let [met, p99, longest] = self.guarantees.figures();
        let [inference, training, experiments] =
            Team::ALL.map(|team| quantile(&mut self.waits[team as usize], 0.95));
        vec![
            met,
            p99,
            longest,
            self.account.for_one.jain(),
            self.account.for_one.borrowed(),
            self.account.for_one.evenly(),
            self.account.for_one.most_evenly(),
            self.account.for_any.jain(),
            completed,
            100.0 * self.running.lost / completed,
            inference,
            training,
            experiments,
            self.account.idle(),
            evictions as f64,
        ]
    }

    pub fn curves(self) -> Vec<Curve> {
        let names = [
            "GPUs of inference",
            "GPUs of training",
            "GPUs of experiments",
        ];
        let curve = |(name, points)| Curve {
            name,
            x: "hour of the day",
            points,
        };
        names.into_iter().zip(self.curves).map(curve).collect()
    }
}
