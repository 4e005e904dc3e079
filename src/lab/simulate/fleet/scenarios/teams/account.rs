//! Sums over the day: what teams borrow while they compete, and what is idle while work waits.

use super::Team;
use std::collections::BTreeMap;
use stowage_scheduling::units::Moment;

/// A team's share of the pool by the policy, in GPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quota {
    pub guarantee: u32,
    pub limit: u32,
    pub weight: u32,
}

/// The pool's usage between two events.
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolSnapshot {
    pub free: u32,
    /// GPUs of each team's pods.
    pub used: [u32; 3],
    /// GPUs of pods that were bound while no two teams competed: no borrower is evicted for another.
    pub uncontested: [u32; 3],
    /// A pod waits that its team's limit allows.
    pub has_waiting_pod: bool,
    /// Teams with a pod that waits to borrow.
    pub competing: [bool; 3],
    /// Those whose pod asks for one GPU: what becomes free GPU by GPU is of no use to others.
    pub competing_for_one: [bool; 3],
}

/// By the teams that compete: what they borrow meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Competition {
    by_teams: BTreeMap<[bool; 3], Borrowed>,
}

/// GPU-hours over weight, of each team.
#[derive(Debug, Default)]
struct Borrowed {
    gpu_hours: [f64; 3],
    /// GPU-hours over weight if those GPUs were split as evenly as whole ones can be, but for uncontested ones.
    most_even: [f64; 3],
}

pub(crate) struct UsageAccount {
    quotas: [Quota; 3],
    since: Moment,
    snapshot: PoolSnapshot,
    pub for_any: Competition,
    pub for_one: Competition,
    /// GPU time, all and idle, while a pod waits.
    waiting_gpu_hours: f64,
    idle_gpu_hours: f64,
    pub gpus: u32,
}

impl UsageAccount {
    pub fn new(quotas: [Quota; 3], gpus: u32, now: Moment) -> Self {
        let snapshot = PoolSnapshot {
            free: gpus,
            ..PoolSnapshot::default()
        };
        Self {
            quotas,
            since: now,
            snapshot,
            for_any: Competition::default(),
            for_one: Competition::default(),
            waiting_gpu_hours: 0.0,
            idle_gpu_hours: 0.0,
            gpus,
        }
    }

    /// Counts the time until now by the last snapshot, and takes the new one.
    pub fn advance(&mut self, now: Moment, snapshot: PoolSnapshot) {
        let hours = now.since(self.since).0 as f64 / 3.6e6;
        let before = std::mem::replace(&mut self.snapshot, snapshot);
        self.since = now;
        if before.has_waiting_pod {
            self.waiting_gpu_hours += hours * f64::from(self.gpus);
            self.idle_gpu_hours += hours * f64::from(before.free);
        }
        let beyond = |gpus: [u32; 3]| {
            Team::ALL.map(|team| {
                gpus[team as usize].saturating_sub(self.quotas[team as usize].guarantee)
            })
        };
        let weights = self.quotas.map(|quota| quota.weight);
        let loans = Loans {
            borrowed: beyond(before.used),
            settled: beyond(before.uncontested),
            weights,
        };
        self.for_any.count(before.competing, hours, &loans);
        self.for_one.count(before.competing_for_one, hours, &loans);
    }

    /// Whether teams compete for one GPU.
    pub(crate) fn is_contested(&self) -> bool {
        are_competing(self.snapshot.competing_for_one)
    }

    /// GPU time that is idle while a pod waits, in percent.
    pub fn idle(&self) -> f64 {
        100.0 * self.idle_gpu_hours / self.waiting_gpu_hours.max(f64::MIN_POSITIVE)
    }
}

impl Competition {
    fn count(&mut self, teams: [bool; 3], hours: f64, loans: &Loans) {
        if !are_competing(teams) {
            return;
        }
        let sums = self.by_teams.entry(teams).or_default();
        add(
            &mut sums.gpu_hours,
            hours,
            per_weight(only_of_teams(teams, loans.borrowed), loans.weights),
        );
        add(
            &mut sums.most_even,
            hours,
            per_weight(loans.most_even(teams), loans.weights),
        );
    }

    /// GPU-hours over weight that the teams borrow while they compete.
    pub fn borrowed(&self) -> f64 {
        self.by_teams
            .values()
            .map(|borrowed| borrowed.gpu_hours.iter().sum::<f64>())
            .sum()
    }

    /// GPU-hours that are borrowed evenly: for each set of competing teams, times its Jain's index.
    pub(crate) fn evenly_borrowed(&self) -> f64 {
        self.times_jain(|borrowed| &borrowed.gpu_hours)
    }

    /// GPU-hours borrowed evenly if contested whole GPUs were split as evenly as can be at each moment.
    pub(crate) fn most_evenly_borrowed(&self) -> f64 {
        self.times_jain(|borrowed| &borrowed.most_even)
    }

    fn times_jain(&self, split: impl Fn(&Borrowed) -> &[f64; 3]) -> f64 {
        let of = |(teams, borrowed): (&[bool; 3], &Borrowed)| {
            let shares = split(borrowed)
                .iter()
                .zip(teams)
                .filter(|(_, competes)| **competes);
            let shares: Vec<f64> = shares.map(|(sum, _)| *sum).collect();
            borrowed.gpu_hours.iter().sum::<f64>() * jain(&shares)
        };
        self.by_teams.iter().map(of).sum()
    }

    /// Jain's index over the sets of teams that compete, by what they borrow: where nothing is there to borrow, nothing is shared.
    /// 1 if teams never compete.
    pub(crate) fn jain(&self) -> f64 {
        let borrowed = self.borrowed();
        if borrowed > 0.0 {
            self.evenly_borrowed() / borrowed
        } else {
            1.0
        }
    }
}

fn only_of_teams(teams: [bool; 3], borrowed: [u32; 3]) -> [u32; 3] {
    std::array::from_fn(|team| if teams[team] { borrowed[team] } else { 0 })
}

fn per_weight(gpus: [u32; 3], weights: [u32; 3]) -> [f64; 3] {
    std::array::from_fn(|team| f64::from(gpus[team]) / f64::from(weights[team]))
}

fn add(sums: &mut [f64; 3], hours: f64, shares: [f64; 3]) {
    sums.iter_mut()
        .zip(shares)
        .for_each(|(sum, share)| *sum += hours * share);
}

/// What teams have beyond their guarantees, in GPUs.
struct Loans {
    borrowed: [u32; 3],
    settled: [u32; 3],
    weights: [u32; 3],
}

impl Loans {
    /// What these teams borrow, split so that Jain's index is the highest. What is settled stays.
    fn most_even(&self, teams: [bool; 3]) -> [u32; 3] {
        let gpus: u32 = only_of_teams(teams, self.borrowed).iter().sum();
        let index = |split: &[u32; 3]| {
            let shares = per_weight(*split, self.weights);
            let shares: Vec<f64> = (0..3)
                .filter(|team| teams[*team])
                .map(|team| shares[team])
                .collect();
            jain(&shares)
        };
        let may_have = |team: usize, gpus: u32| {
            if teams[team] {
                gpus >= self.settled[team]
            } else {
                gpus == 0
            }
        };
        let splits =
            (0..=gpus).flat_map(|first| (0..=gpus - first).map(move |second| (first, second)));
        let splits = splits.map(|(first, second)| [first, second, gpus - first - second]);
        let among = splits.filter(|split| (0..3).all(|team| may_have(team, split[team])));
        among
            .max_by(|a, b| index(a).total_cmp(&index(b)))
            .unwrap_or(only_of_teams(teams, self.borrowed))
    }
}

fn are_competing(teams: [bool; 3]) -> bool {
    teams.iter().filter(|competes| **competes).count() >= 2
}

/// (Σx)² ÷ (n·Σx²): 1 if all have the same, 1/n if one has all.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares): (f64, f64) = shares.iter().fold((0.0, 0.0), |(sum, squares), share| {
        (sum + share, squares + share * share)
    });
    if squares > 0.0 {
        sum * sum / (shares.len() as f64 * squares)
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::units::Millis;

    #[test]
    fn jain_s_index_is_one_for_equal_shares_and_one_in_n_if_one_has_all() {
        assert_eq!(jain(&[2.0, 2.0, 2.0]), 1.0);
        assert_eq!(jain(&[3.0, 0.0, 0.0]), 1.0 / 3.0);
        assert_eq!(jain(&[0.0, 0.0]), 1.0);
    }

    #[test]
    fn whole_gpus_are_split_as_evenly_as_weights_allow_and_what_is_settled_stays() {
        let split = |teams, borrowed, settled| {
            Loans {
                borrowed,
                settled,
                weights: [2, 2, 1],
            }
            .most_even(teams)
        };
        assert_eq!(split([false, true, true], [3, 2, 5], [0; 3]), [0, 5, 2]);
        assert_eq!(split([true, true, false], [0, 4, 3], [0; 3]), [2, 2, 0]);
        assert_eq!(split([true; 3], [0, 0, 5], [0; 3]), [2, 2, 1]);
        assert_eq!(split([true; 3], [0, 0, 5], [0, 0, 3]), [1, 1, 3]);
        assert_eq!(split([true; 3], [0; 3], [0; 3]), [0; 3]);
    }

    #[test]
    fn only_time_in_which_work_waits_or_teams_compete_counts() {
        let quota = Quota {
            guarantee: 2,
            limit: 8,
            weight: 2,
        };
        let mut account = UsageAccount::new([quota; 3], 8, Moment(0));
        let hour = |n: u64| Moment(0) + Millis::seconds(n * 3600);
        let competes = PoolSnapshot {
            free: 0,
            used: [4, 4, 0],
            has_waiting_pod: true,
            competing: [true, true, false],
            ..PoolSnapshot::default()
        };
        account.advance(hour(1), competes);
        account.advance(
            hour(2),
            PoolSnapshot {
                free: 4,
                used: [4, 0, 0],
                has_waiting_pod: true,
                ..PoolSnapshot::default()
            },
        );
        account.advance(hour(3), PoolSnapshot::default());
        assert_eq!(
            (
                account.idle(),
                account.for_any.borrowed(),
                account.for_any.jain()
            ),
            (25.0, 2.0, 1.0)
        );
    }
}
