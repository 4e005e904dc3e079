//! What a day comes to.

use super::Team;
use super::account::{Quota, UsageAccount};
use super::guarantee::Guarantees;
use crate::simulate::fleet::scenarios::running_jobs::RunningJobs;
use crate::simulate::fleet::scenarios::{Curve, quantile};
use crate::simulate::fleet::stage::START;
use stowage_scheduling::units::Moment;

pub struct DayTotals {
    pub running: RunningJobs,
    pub account: UsageAccount,
    pub guarantees: Guarantees,
    /// GPU-hours of engines that answer.
    pub served_gpu_hours: f64,
    /// Seconds until the first start, by team.
    waits_s: [Vec<f64>; 3],
    /// GPUs of each team, by the hour.
    curves: [Vec<(f64, f64)>; 3],
}

impl DayTotals {
    pub fn new(quotas: [Quota; 3], gpus: u64) -> Self {
        Self {
            running: RunningJobs::default(),
            account: UsageAccount::new(quotas, gpus as u32, START),
            guarantees: Guarantees::default(),
            served_gpu_hours: 0.0,
            waits_s: Default::default(),
            curves: Default::default(),
        }
    }

    /// It came then, and starts now, or the day ends before it does.
    pub fn record_wait(&mut self, team: Team, came: Moment, now: Moment) {
        self.waits_s[team as usize].push(now.since(came).0 as f64 / 1000.0);
    }

    pub fn record_usage(&mut self, team: Team, hour: f64, gpus: u32) {
        self.curves[team as usize].push((hour, f64::from(gpus)));
    }

    /// In the order of the scenario's figures.
    pub fn figures(&mut self, evictions: u64) -> Vec<f64> {
        let completed = self.served_gpu_hours + self.running.saved_gpu_hours;
        let [met, p99, longest] = self.guarantees.figures();
        let [inference, training, experiments] =
            Team::ALL.map(|team| quantile(&mut self.waits_s[team as usize], 0.95));
        vec![
            met,
            p99,
            longest,
            self.account.for_one.jain(),
            self.account.for_one.borrowed(),
            self.account.for_one.evenly_borrowed(),
            self.account.for_one.most_evenly_borrowed(),
            self.account.for_any.jain(),
            completed,
            100.0 * self.running.lost_gpu_hours / completed,
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
            x_label: "hour of the day",
            points,
        };
        names.into_iter().zip(self.curves).map(curve).collect()
    }
}
