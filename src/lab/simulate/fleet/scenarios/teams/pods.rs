//! The teams' pods: what they use of quotas, which wait and which borrow.

use super::account::{PoolSnapshot, Quota};
use super::{POD_VRAM, Team, Timer};
use crate::simulate::fleet::engines::ModelShape;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::running_jobs::Job;
use crate::simulate::fleet::stage::Stage;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::{ModelId, PodUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Moment;

/// The two PriorityClasses.
const GUARANTEED_PRIORITY: i32 = 100;
const BORROWING_PRIORITY: i32 = 0;
/// Priorities of the teams, where each has one for all that it does.
const TEAM_PRIORITIES: [i32; 3] = [100, 50, 0];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PriorityScheme {
    ByGuarantee,
    ByTeam,
}

impl PriorityScheme {
    pub fn priority_of(self, team: Team, is_within: bool) -> i32 {
        match self {
            Self::ByTeam => TEAM_PRIORITIES[team as usize],
            Self::ByGuarantee if is_within => GUARANTEED_PRIORITY,
            Self::ByGuarantee => BORROWING_PRIORITY,
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct TeamPod {
    pub team: Team,
    pub gpus: u32,
    /// Whether it fitted into its team's guarantee when it was created.
    pub is_guaranteed: bool,
    /// In order of creation.
    pub sequence: u64,
    /// When its job came, until it runs; `None` for a job that has run before.
    pub waiting_since: Option<Moment>,
    /// `None` for an engine.
    pub job: Option<Job>,
    pub bound_at: Option<Moment>,
    /// It was bound while no two teams competed.
    pub is_uncontested: bool,
    pub ready_at: Option<Moment>,
    pub is_terminating: bool,
}

impl TeamPod {
    pub fn is_waiting(&self) -> bool {
        self.bound_at.is_none() && !self.is_terminating
    }

    /// GPU-hours of an engine that answers.
    pub fn served_gpu_hours(&self, now: Moment) -> f64 {
        let since = self.ready_at.filter(|_| self.job.is_none());
        since.map_or(0.0, |since| {
            f64::from(self.gpus) * now.since(since).0 as f64 / 3.6e6
        })
    }
}

pub(crate) struct TeamPods {
    pub all: BTreeMap<PodUid, TeamPod>,
    pub quotas: [Quota; 3],
}

impl TeamPods {
    pub fn new(policy: &Policy) -> Self {
        Self {
            all: BTreeMap::new(),
            quotas: Team::ALL.map(|team| quota(policy, team)),
        }
    }

    fn pods_of(&self, team: Team) -> impl Iterator<Item = (&PodUid, &TeamPod)> {
        self.all.iter().filter(move |(_, pod)| pod.team == team)
    }

    /// GPUs of the team's pods that have some.
    pub fn used_gpus(&self, team: Team) -> u32 {
        self.pods_of(team)
            .filter(|(_, pod)| pod.bound_at.is_some())
            .map(|(_, pod)| pod.gpus)
            .sum()
    }

    fn uncontested_gpus(&self, team: Team) -> u32 {
        self.pods_of(team)
            .filter(|(_, pod)| pod.bound_at.is_some() && pod.is_uncontested)
            .map(|(_, pod)| pod.gpus)
            .sum()
    }

    pub(crate) fn pending_jobs(&self, team: Team) -> usize {
        self.pods_of(team)
            .filter(|(_, pod)| pod.job.is_some() && pod.is_waiting())
            .count()
    }

    /// GPUs of the team's guarantee that neither its bound pods nor its waiting guaranteed pods use.
    pub(crate) fn guarantee_left(&self, team: Team) -> u32 {
        let waiting = self
            .pods_of(team)
            .filter(|(_, pod)| pod.is_waiting() && pod.is_guaranteed);
        let promised: u32 = waiting.map(|(_, pod)| pod.gpus).sum();
        self.quotas[team as usize]
            .guarantee
            .saturating_sub(self.used_gpus(team) + promised)
    }

    /// The oldest pod that waits to borrow although it fits into the guarantee by now.
    pub(crate) fn next_to_promote(&self, team: Team) -> Option<PodUid> {
        let left = self.guarantee_left(team);
        let waiting = self
            .pods_of(team)
            .filter(|(_, pod)| pod.is_waiting() && !pod.is_guaranteed);
        let fitting = waiting.filter(|(_, pod)| pod.gpus <= left);
        fitting
            .min_by_key(|(_, pod)| pod.sequence)
            .map(|(uid, _)| uid.clone())
    }

    /// Engines in the order in which they are let go: those that wait, then those that borrow, the youngest first.
    pub fn engines(&self) -> Vec<PodUid> {
        let engines = self
            .all
            .iter()
            .filter(|(_, pod)| pod.job.is_none() && !pod.is_terminating);
        let mut engines: Vec<(&PodUid, &TeamPod)> = engines.collect();
        engines.sort_by_key(|(_, pod)| {
            (
                pod.bound_at.is_some(),
                pod.is_guaranteed,
                Reverse(pod.sequence),
            )
        });
        engines.into_iter().map(|(uid, _)| uid.clone()).collect()
    }

    /// Of each team's pods those of the highest priority use its guarantee first, then those that have run longest. Pods that
    /// leave give back what they borrow.
    pub fn borrowing(&self, stage: &Stage<'_, Timer>) -> BTreeSet<PodUid> {
        let mut left = self.quotas.map(|quota| quota.guarantee);
        let mut bound: Vec<(Reverse<i32>, Moment, PodUid)> = Vec::new();
        for (uid, pod) in self.all.iter().filter(|(_, pod)| !pod.is_terminating) {
            let priority = stage.pod(uid).map_or(0, |pod| pod.spec.priority);
            bound.extend(
                pod.bound_at
                    .map(|since| (Reverse(priority), since, uid.clone())),
            );
        }
        bound.sort_unstable();
        let mut borrows = |uid: &PodUid| {
            let pod = &self.all[uid];
            let left = &mut left[pod.team as usize];
            let remaining = left.checked_sub(pod.gpus);
            *left = remaining.unwrap_or(*left);
            remaining.is_none()
        };
        bound
            .into_iter()
            .map(|(.., uid)| uid)
            .filter(|uid| borrows(uid))
            .collect()
    }

    pub fn snapshot(&self, stage: &Stage<'_, Timer>) -> PoolSnapshot {
        let free = stage
            .machines
            .iter()
            .map(|machine| machine.free_gpus().count() as u32)
            .sum();
        let used = Team::ALL.map(|team| self.used_gpus(team));
        let settled = Team::ALL.map(|team| self.uncontested_gpus(team));
        let mut snapshot = PoolSnapshot {
            free,
            used,
            uncontested: settled,
            ..PoolSnapshot::default()
        };
        for pod in self.all.values().filter(|pod| pod.is_waiting()) {
            let (quota, with) = (
                self.quotas[pod.team as usize],
                used[pod.team as usize] + pod.gpus,
            );
            if with <= quota.limit {
                snapshot.has_waiting_pod = true;
                let borrows = with > quota.guarantee;
                snapshot.competing[pod.team as usize] |= borrows;
                snapshot.competing_for_one[pod.team as usize] |= borrows && pod.gpus == 1;
            }
        }
        snapshot
    }
}

/// The tenant's quota in the policy.
fn quota(policy: &Policy, team: Team) -> Quota {
    let tenant = policy
        .tenants()
        .iter()
        .find(|tenant| tenant.name == team.name());
    let tenant = tenant.expect("the policy has a tenant for each team");
    Quota {
        guarantee: (tenant.guarantee.milli_gpus / 1000) as u32,
        limit: (tenant.limit.milli_gpus.expect("the policy limits GPUs") / 1000) as u32,
        weight: tenant.weight,
    }
}

pub fn manifest(team: Team, gpus: u32, priority: i32, is_job: bool) -> PodSpec {
    let vram = POD_VRAM.times(u64::from(gpus));
    let model = || ModelId::parse(ModelShape::QWEN_32B.name).expect("it is a name");
    let plain = match is_job {
        true => PodSpec::plain(team.name(), vram),
        false => PodSpec::serving(team.name(), model(), ModelShape::QWEN_32B.weights, vram),
    };
    PodSpec {
        priority,
        gpus,
        ..plain
    }
}
