//! The pool over a day: the teams' queues, their pods, and the sums.

use super::account::{Account, Quota, Standing};
use super::demand::Demand;
use super::guarantee::{Guarantees, obstacle};
use super::{GRANT, Team, Timer};
use crate::ids::{ModelId, PodUid};
use crate::lab::simulate::fleet::engines::ModelShape;
use crate::lab::simulate::fleet::pods::PodSpec;
use crate::lab::simulate::fleet::scenarios::running_jobs::{Job, RunningJobs};
use crate::lab::simulate::fleet::scenarios::{Curve, Played, quantile};
use crate::lab::simulate::fleet::stage::{Happening, START, Stage};
use crate::scheduling::policy::Policy;
use crate::units::{Millis, Moment};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Jobs that a team's queue keeps pending.
const PENDING: usize = 8;
/// The two PriorityClasses.
const GUARANTEED: i32 = 100;
const BORROWING: i32 = 0;
/// Of each team, where it has one priority for all that it does.
const OF_TEAMS: [i32; 3] = [100, 50, 0];
const MINUTE: Millis = Millis::seconds(60);
/// A moment after the longest cycle.
const IS_LATE: Millis = Millis::seconds(6);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priorities {
    OfGuarantees,
    OfTeams,
}

pub struct Pool {
    stage: Stage<'static, Timer>,
    policy: Policy,
    priorities: Priorities,
    quotas: [Quota; 3],
    demand: Demand,
    /// The time of day at the beginning.
    begins: Moment,
    queues: [VecDeque<QueuedJob>; 3],
    pods: BTreeMap<PodUid, TeamPod>,
    created: u64,
    running: RunningJobs,
    account: Account,
    guarantees: Guarantees,
    /// GPU-hours of engines that answer.
    served: f64,
    waits: [Vec<f64>; 3],
    curves: [Vec<(f64, f64)>; 3],
}

struct QueuedJob {
    job: Job,
    /// `None` once it has run: what counts is its first start.
    came: Option<Moment>,
}

struct TeamPod {
    team: Team,
    gpus: u32,
    /// It fitted into its team's guarantee when it was created.
    is_within: bool,
    number: u64,
    came: Option<Moment>,
    /// `None` for an engine.
    job: Option<Job>,
    bound: Option<Moment>,
    ready: Option<Moment>,
    is_leaving: bool,
}

impl TeamPod {
    fn waits(&self) -> bool {
        self.bound.is_none() && !self.is_leaving
    }
}

impl Pool {
    pub fn new(stage: Stage<'static, Timer>, policy: Policy, priorities: Priorities, seed: u64) -> Self {
        let quotas = Team::ALL.map(|team| quota(&policy, team));
        Self {
            account: Account::new(quotas, stage.machines.gpus() as u32, START),
            stage,
            policy,
            priorities,
            quotas,
            demand: Demand::drawn(seed),
            begins: Moment::default(),
            queues: Default::default(),
            pods: BTreeMap::new(),
            created: 0,
            running: RunningJobs::default(),
            guarantees: Guarantees::default(),
            served: 0.0,
            waits: Default::default(),
            curves: Default::default(),
        }
    }

    pub fn play(mut self, begins: u64, hours: u64) -> Played {
        self.begins = Moment(begins * 3_600_000);
        let end = START + Millis::seconds(hours * 3600);
        for (place, arrival) in self.demand.arrivals.iter().enumerate() {
            if arrival.at >= self.begins {
                self.stage.at(START + arrival.at.since(self.begins), Timer::Comes(place));
            }
        }
        self.stage.at(START, Timer::Minute);
        while let Some(happened) = self.stage.next(end) {
            self.tell(happened);
            self.submit();
            let standing = self.standing();
            self.account.stands(self.stage.now(), standing);
        }
        self.close(end);
        self.played()
    }

    fn tell(&mut self, happened: Happening<Timer>) {
        let now = self.stage.now();
        match happened {
            Happening::Timer(Timer::Minute) => self.minute(now),
            Happening::Timer(Timer::Comes(place)) => {
                let arrival = self.demand.arrivals[place];
                let queued = QueuedJob { job: arrival.job, came: Some(now) };
                self.queues[arrival.team as usize].push_back(queued);
            }
            Happening::Timer(Timer::Job(timer)) => {
                if let Some(uid) = self.running.tell(timer, &mut self.stage) {
                    self.pods.remove(&uid);
                }
            }
            Happening::Timer(Timer::IsLate(uid)) => {
                let borrowing = self.borrowing();
                self.guarantees.is_late(&uid, || obstacle(&uid, &self.stage, &self.policy, &borrowing));
            }
            Happening::Bound(uid) => self.bound(&uid, now),
            Happening::Ready(uid) => {
                let Some(pod) = self.pods.get_mut(&uid) else { return };
                pod.ready = Some(now);
                if let Some(job) = pod.job {
                    self.running.begin(&uid, job, &mut self.stage);
                }
            }
            Happening::Leaving(uid) => self.leaving(&uid, now),
            Happening::Gone(uid) => drop(self.pods.remove(&uid)),
        }
    }

    fn bound(&mut self, uid: &PodUid, now: Moment) {
        let devices = self.stage.pod(uid).and_then(|pod| pod.bound.as_ref()).map(|bound| bound.devices.clone());
        let Some(pod) = self.pods.get_mut(uid) else { return };
        pod.bound = Some(now);
        if let Some(came) = pod.came.take() {
            self.waits[pod.team as usize].push(now.since(came).0 as f64 / 1000.0);
        }
        self.guarantees.binds(uid, &devices.unwrap_or_default(), now);
    }

    /// Its job comes first again; an engine is created again by the next minute.
    fn leaving(&mut self, uid: &PodUid, now: Moment) {
        if let Some(pod) = self.stage.pod(uid)
            && let Some(bound) = &pod.bound
        {
            self.guarantees.vacates(&bound.devices, now, now + pod.spec.grace);
        }
        let Some(pod) = self.pods.get_mut(uid) else { return };
        pod.is_leaving = true;
        if let Some(job) = self.running.evict(uid, now).or(pod.job) {
            self.queues[pod.team as usize].push_front(QueuedJob { job, came: pod.came });
        }
        self.served += pod.served(now);
        pod.ready = None;
    }

    fn minute(&mut self, now: Moment) {
        let wanted = self.demand.engines(self.begins + now.since(START)) as usize;
        let mut engines: Vec<(&PodUid, &TeamPod)> =
            self.pods.iter().filter(|(_, pod)| pod.job.is_none() && !pod.is_leaving).collect();
        // Those that wait go first, then those that borrow, the youngest first.
        engines.sort_by_key(|(_, pod)| (pod.bound.is_some(), pod.is_within, Reverse(pod.number)));
        let surplus = engines.len().saturating_sub(wanted);
        let missing = wanted.saturating_sub(engines.len());
        let let_go: Vec<PodUid> = engines.into_iter().take(surplus).map(|(uid, _)| uid.clone()).collect();
        for uid in let_go {
            self.remove(&uid, now);
        }
        (0..missing).for_each(|_| self.create(Team::Inference, None, Some(now)));
        let at = self.begins.0 as f64 / 3.6e6 + now.since(START).0 as f64 / 3.6e6;
        for team in Team::ALL {
            self.curves[team as usize].push((at, f64::from(self.used(team))));
        }
        self.stage.at(now + MINUTE, Timer::Minute);
    }

    /// Its owner deletes it.
    fn remove(&mut self, uid: &PodUid, now: Moment) -> Option<TeamPod> {
        let pod = self.pods.remove(uid)?;
        self.served += pod.served(now);
        self.guarantees.ends(uid, now);
        self.stage.finish(uid);
        Some(pod)
    }

    /// What waits is created, as far as queues keep it pending; and created again once its guarantee has room for it.
    fn submit(&mut self) {
        for team in Team::ALL {
            let pending = self.pods.values().filter(|pod| pod.team == team && pod.job.is_some() && pod.waits());
            for _ in pending.count()..PENDING {
                let Some(QueuedJob { job, came }) = self.queues[team as usize].pop_front() else { break };
                self.create(team, Some(job), came);
            }
            while self.priorities == Priorities::OfGuarantees
                && let Some(uid) = self.to_promote(team)
            {
                let pod = self.remove(&uid, self.stage.now()).expect("it waits");
                self.create(team, pod.job, pod.came);
            }
        }
    }

    /// The oldest pod that waits to borrow although it fits into the guarantee by now.
    fn to_promote(&self, team: Team) -> Option<PodUid> {
        let left = self.guarantee_left(team);
        let waiting = self.pods.iter().filter(|(_, pod)| pod.team == team && pod.waits() && !pod.is_within);
        let fitting = waiting.filter(|(_, pod)| pod.gpus <= left);
        fitting.min_by_key(|(_, pod)| pod.number).map(|(uid, _)| uid.clone())
    }

    fn create(&mut self, team: Team, job: Option<Job>, came: Option<Moment>) {
        let now = self.stage.now();
        let gpus = job.map_or(1, |job| job.gpus);
        let is_within = gpus <= self.guarantee_left(team);
        let priority = match self.priorities {
            Priorities::OfTeams => OF_TEAMS[team as usize],
            Priorities::OfGuarantees if is_within => GUARANTEED,
            Priorities::OfGuarantees => BORROWING,
        };
        let vram = GRANT.times(u64::from(gpus));
        let plain = match job {
            Some(_) => PodSpec::plain(team.name(), vram),
            None => {
                let model = ModelId::parse(ModelShape::QWEN_32B.name).expect("it is a name");
                PodSpec::serving(team.name(), model, ModelShape::QWEN_32B.weights, vram)
            }
        };
        let uid = self.stage.submit(PodSpec { priority, gpus, ..plain });
        if is_within {
            self.guarantees.opens(&uid, now);
            self.stage.at(now + IS_LATE, Timer::IsLate(uid.clone()));
        }
        self.created += 1;
        let number = self.created;
        let pod = TeamPod { team, gpus, is_within, number, came, job, bound: None, ready: None, is_leaving: false };
        self.pods.insert(uid, pod);
    }

    /// GPUs of the team's pods that have some.
    fn used(&self, team: Team) -> u32 {
        self.pods.values().filter(|pod| pod.team == team && pod.bound.is_some()).map(|pod| pod.gpus).sum()
    }

    /// Of the team's guarantee, beside its pods that have GPUs and those that wait for it.
    fn guarantee_left(&self, team: Team) -> u32 {
        let pods = self.pods.values().filter(|pod| pod.team == team && pod.waits() && pod.is_within);
        let promised: u32 = pods.map(|pod| pod.gpus).sum();
        self.quotas[team as usize].guarantee.saturating_sub(self.used(team) + promised)
    }

    /// Of each team's pods those of the highest priority use its guarantee first, then those that have run longest.
    fn borrowing(&self) -> BTreeSet<PodUid> {
        let mut left = self.quotas.map(|quota| quota.guarantee);
        let mut bound: Vec<(Reverse<i32>, Moment, &PodUid, &TeamPod)> = Vec::new();
        for (uid, pod) in &self.pods {
            let priority = self.stage.pod(uid).map_or(0, |pod| pod.spec.priority);
            bound.extend(pod.bound.map(|since| (Reverse(priority), since, uid, pod)));
        }
        bound.sort_by_key(|(priority, since, uid, _)| (*priority, *since, (*uid).clone()));
        let mut borrowing = BTreeSet::new();
        for (.., uid, pod) in bound {
            let left = &mut left[pod.team as usize];
            match left.checked_sub(pod.gpus) {
                Some(rest) => *left = rest,
                None => drop(borrowing.insert(uid.clone())),
            }
        }
        borrowing
    }

    fn standing(&self) -> Standing {
        let free = self.stage.machines.iter().map(|machine| machine.free_gpus().count() as u32).sum();
        let used = Team::ALL.map(|team| self.used(team));
        let mut standing = Standing { free, used, ..Standing::default() };
        for pod in self.pods.values().filter(|pod| pod.waits()) {
            let (quota, with) = (self.quotas[pod.team as usize], used[pod.team as usize] + pod.gpus);
            if with <= quota.limit {
                standing.waits = true;
                standing.competing[pod.team as usize] |= with > quota.guarantee;
            }
        }
        standing
    }

    fn close(&mut self, end: Moment) {
        self.account.stands(end, Standing::default());
        self.running.close(end);
        self.guarantees.close(end);
        self.served += self.pods.values().map(|pod| pod.served(end)).sum::<f64>();
        // What has not run by the end has waited until then.
        let queued = Team::ALL.into_iter().zip(&self.queues);
        let queued = queued.flat_map(|(team, queue)| queue.iter().map(move |queued| (team, queued.came)));
        let pending = self.pods.values().map(|pod| (pod.team, pod.came));
        for (team, came) in queued.chain(pending) {
            self.waits[team as usize].extend(came.map(|came| end.since(came).0 as f64 / 1000.0));
        }
    }

    fn played(self) -> Played {
        let Self { stage, running, account, mut guarantees, served, mut waits, curves, .. } = self;
        let completed = served + running.kept;
        let [met, p99, longest] = guarantees.figures();
        let [inference, training, experiments] = Team::ALL.map(|team| quantile(&mut waits[team as usize], 0.95));
        let names = ["GPUs of inference", "GPUs of training", "GPUs of experiments"];
        let curve = |(name, points)| Curve { name, x: "hour of the day", points };
        Played {
            figures: vec![
                met,
                p99,
                longest,
                account.jain(),
                account.competing_hours(),
                completed,
                100.0 * running.lost / completed,
                inference,
                training,
                experiments,
                account.idle(),
                stage.evictions as f64,
            ],
            curves: names.into_iter().zip(curves).map(curve).collect(),
            broken: stage.broken,
            notes: vec![guarantees.said()],
        }
    }
}

impl TeamPod {
    /// GPU-hours of an engine that answers.
    fn served(&self, now: Moment) -> f64 {
        let since = self.ready.filter(|_| self.job.is_none());
        since.map_or(0.0, |since| f64::from(self.gpus) * now.since(since).0 as f64 / 3.6e6)
    }
}

/// The tenant's quota in the policy.
fn quota(policy: &Policy, team: Team) -> Quota {
    let tenant = policy.tenants().iter().find(|tenant| tenant.name == team.name());
    let tenant = tenant.expect("the policy has a tenant for each team");
    Quota {
        guarantee: (tenant.guarantee.milli_gpus / 1000) as u32,
        limit: (tenant.limit.milli_gpus.expect("the policy limits GPUs") / 1000) as u32,
        weight: tenant.weight,
    }
}
