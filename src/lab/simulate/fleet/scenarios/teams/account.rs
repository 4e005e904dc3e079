//! Sums over the day: what teams borrow while they compete, and what is idle while work waits.

use super::Team;
use crate::units::Moment;
use std::collections::BTreeMap;

/// A team's share of the pool by the policy, in GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Quota {
    pub guarantee: u32,
    pub limit: u32,
    pub weight: u32,
}

/// How things stand between two happenings.
#[derive(Debug, Clone, Copy, Default)]
pub struct Standing {
    pub free: u32,
    /// GPUs of each team's pods.
    pub used: [u32; 3],
    /// A pod waits that its team's limit allows.
    pub waits: bool,
    /// Teams with a pod that waits to borrow.
    pub competing: [bool; 3],
    /// Those whose pod asks for one GPU: what comes free GPU by GPU is of no use to others.
    pub competing_for_one: [bool; 3],
}

/// By the teams that compete: for how long, and what each borrows of it over its weight.
#[derive(Debug, Default)]
pub struct Competition {
    borrowed: BTreeMap<[bool; 3], (f64, [f64; 3])>,
}

pub struct Account {
    quotas: [Quota; 3],
    since: Moment,
    standing: Standing,
    pub for_any: Competition,
    pub for_one: Competition,
    /// GPU time, all and idle, while a pod waits.
    all: f64,
    idle: f64,
    pub gpus: u32,
}

impl Account {
    pub fn new(quotas: [Quota; 3], gpus: u32, now: Moment) -> Self {
        let standing = Standing { free: gpus, ..Standing::default() };
        Self {
            quotas,
            since: now,
            standing,
            for_any: Competition::default(),
            for_one: Competition::default(),
            all: 0.0,
            idle: 0.0,
            gpus,
        }
    }

    /// It stood as before until now, and stands so from now on.
    pub fn stands(&mut self, now: Moment, standing: Standing) {
        let hours = now.since(self.since).0 as f64 / 3.6e6;
        let before = std::mem::replace(&mut self.standing, standing);
        self.since = now;
        if before.waits {
            self.all += hours * f64::from(self.gpus);
            self.idle += hours * f64::from(before.free);
        }
        let borrowed = Team::ALL.map(|team| {
            let quota = self.quotas[team as usize];
            f64::from(before.used[team as usize].saturating_sub(quota.guarantee)) / f64::from(quota.weight)
        });
        self.for_any.count(before.competing, hours, borrowed);
        self.for_one.count(before.competing_for_one, hours, borrowed);
    }

    /// In hundredths.
    pub fn idle(&self) -> f64 {
        100.0 * self.idle / self.all.max(f64::MIN_POSITIVE)
    }
}

impl Competition {
    fn count(&mut self, teams: [bool; 3], hours: f64, borrowed: [f64; 3]) {
        if teams.iter().filter(|competes| **competes).count() < 2 {
            return;
        }
        let (time, sums) = self.borrowed.entry(teams).or_default();
        *time += hours;
        sums.iter_mut().zip(borrowed).for_each(|(sum, borrowed)| *sum += hours * borrowed);
    }

    pub fn hours(&self) -> f64 {
        self.borrowed.values().map(|(time, _)| time).sum()
    }

    /// Jain's index of the teams that compete, for each such set of teams; their mean, by time. 1 if teams never compete.
    pub fn jain(&self) -> f64 {
        let hours = self.hours();
        let of = |(teams, (time, sums)): (&[bool; 3], &(f64, [f64; 3]))| {
            let shares: Vec<f64> =
                sums.iter().zip(teams).filter(|(_, competes)| **competes).map(|(sum, _)| *sum).collect();
            time * jain(&shares)
        };
        if hours > 0.0 { self.borrowed.iter().map(of).sum::<f64>() / hours } else { 1.0 }
    }
}

/// (Σx)² ÷ (n·Σx²): 1 if all have the same, 1/n if one has all.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares): (f64, f64) =
        shares.iter().fold((0.0, 0.0), |(sum, squares), share| (sum + share, squares + share * share));
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Millis;

    #[test]
    fn jain_s_index_is_one_for_equal_shares_and_one_in_n_if_one_has_all() {
        assert_eq!(jain(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(jain(&[3.0, 0.0, 0.0]), 1.0 / 3.0);
        assert_eq!(jain(&[0.0, 0.0]), 1.0);
    }

    #[test]
    fn only_time_in_which_work_waits_or_teams_compete_counts() {
        let quota = Quota { guarantee: 2, limit: 8, weight: 2 };
        let mut account = Account::new([quota; 3], 8, Moment(0));
        let hour = |n: u64| Moment(0) + Millis::seconds(n * 3600);
        let competes = Standing {
            free: 0,
            used: [4, 4, 0],
            waits: true,
            competing: [true, true, false],
            ..Standing::default()
        };
        account.stands(hour(1), competes);
        account.stands(hour(2), Standing { free: 4, used: [4, 0, 0], waits: true, ..Standing::default() });
        account.stands(hour(3), Standing::default());
        assert_eq!((account.idle(), account.for_any.hours(), account.for_any.jain()), (25.0, 1.0, 1.0));
    }
}
