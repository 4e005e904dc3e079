//! The pool over a day: the teams' queues, their pods, and the sums.

use super::account::Standing;
use super::demand::Demand;
use super::guarantee::{LOOK, obstacle};
use super::pods::{Priorities, TeamPod, TeamPods, manifest};
use super::sums::Sums;
use super::{Team, Timer};
use crate::simulate::fleet::scenarios::Played;
use crate::simulate::fleet::scenarios::running_jobs::Job;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::VecDeque;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Millis, Moment};

/// Jobs that a team's queue keeps pending.
const PENDING: usize = 8;
const MINUTE: Millis = Millis::seconds(60);

pub struct Pool {
    stage: Stage<'static, Timer>,
    policy: Policy,
    priorities: Priorities,
    demand: Demand,
    /// The time of day at the beginning.
    begins: Moment,
    queues: [VecDeque<QueuedJob>; 3],
    pods: TeamPods,
    created: u64,
    sums: Sums,
}

struct QueuedJob {
    job: Job,
    /// `None` once it has run: what counts is its first start.
    came: Option<Moment>,
}

impl Pool {
    pub fn new(
        stage: Stage<'static, Timer>,
        policy: Policy,
        priorities: Priorities,
        seed: u64,
    ) -> Self {
        let pods = TeamPods::new(&policy);
        Self {
            sums: Sums::new(pods.quotas, stage.machines.gpus()),
            stage,
            policy,
            priorities,
            demand: Demand::drawn(seed),
            begins: Moment::default(),
            queues: Default::default(),
            pods,
            created: 0,
        }
    }

    pub fn play(mut self, begins: u64, hours: u64) -> Played {
        self.begins = Moment(begins * 3_600_000);
        let end = START + Millis::seconds(hours * 3600);
        for (place, arrival) in self.demand.arrivals.iter().enumerate() {
            if arrival.at >= self.begins {
                self.stage
                    .at(START + arrival.at.since(self.begins), Timer::Comes(place));
            }
        }
        self.stage.at(START, Timer::Minute);
        while let Some(happened) = self.stage.next(end) {
            self.tell(happened);
            self.submit();
            let standing = self.pods.standing(&self.stage);
            self.sums.account.stands(self.stage.now(), standing);
        }
        self.close(end);
        self.played()
    }

    fn tell(&mut self, happened: ScenarioEvent<Timer>) {
        let now = self.stage.now();
        match happened {
            ScenarioEvent::Timer(Timer::Minute) => self.minute(now),
            ScenarioEvent::Timer(Timer::Comes(place)) => {
                let arrival = self.demand.arrivals[place];
                let queued = QueuedJob {
                    job: arrival.job,
                    came: Some(now),
                };
                self.queues[arrival.team as usize].push_back(queued);
            }
            ScenarioEvent::Timer(Timer::Job(timer)) => {
                if let Some(uid) = self.sums.running.tell(timer, &mut self.stage) {
                    self.pods.all.remove(&uid);
                }
            }
            ScenarioEvent::Timer(Timer::Waits(uid)) if self.sums.guarantees.waits(&uid) => {
                let borrowing = self.pods.borrowing(&self.stage);
                let obstacle = obstacle(&uid, &self.stage, &self.policy, &borrowing);
                self.sums.guarantees.has_waited(&uid, LOOK, obstacle);
                self.stage.at(now + LOOK, Timer::Waits(uid));
            }
            ScenarioEvent::Timer(Timer::Waits(_)) => {}
            ScenarioEvent::Bound(uid) => self.bound(&uid, now),
            ScenarioEvent::Ready(uid) => {
                let Some(pod) = self.pods.all.get_mut(&uid) else {
                    return;
                };
                pod.ready = Some(now);
                if let Some(job) = pod.job {
                    self.sums.running.begin(&uid, job, &mut self.stage);
                }
            }
            ScenarioEvent::Leaving(uid) => self.leaving(&uid, now),
            ScenarioEvent::Gone(uid) => drop(self.pods.all.remove(&uid)),
        }
    }

    fn bound(&mut self, uid: &PodUid, now: Moment) {
        let devices = self
            .stage
            .pod(uid)
            .and_then(|pod| pod.bound.as_ref())
            .map(|bound| bound.devices.clone());
        let Some(pod) = self.pods.all.get_mut(uid) else {
            return;
        };
        pod.bound = Some(now);
        pod.is_settled = !self.sums.account.is_contested();
        if let Some(came) = pod.came.take() {
            self.sums.waited(pod.team, came, now);
        }
        self.sums
            .guarantees
            .binds(uid, &devices.unwrap_or_default(), now);
    }

    /// Its job comes first again; an engine is created again by the next minute.
    fn leaving(&mut self, uid: &PodUid, now: Moment) {
        if let Some(pod) = self.stage.pod(uid)
            && let Some(bound) = &pod.bound
        {
            self.sums
                .guarantees
                .vacates(&bound.devices, now, now + pod.spec.grace);
        }
        let Some(pod) = self.pods.all.get_mut(uid) else {
            return;
        };
        pod.is_leaving = true;
        if let Some(job) = self.sums.running.evict(uid, now).or(pod.job) {
            self.queues[pod.team as usize].push_front(QueuedJob {
                job,
                came: pod.came,
            });
        }
        self.sums.served += pod.served(now);
        pod.ready = None;
    }

    fn minute(&mut self, now: Moment) {
        let wanted = self.demand.engines(self.begins + now.since(START)) as usize;
        let engines = self.pods.engines();
        for uid in engines.iter().take(engines.len().saturating_sub(wanted)) {
            self.remove(uid, now);
        }
        let missing = wanted.saturating_sub(engines.len());
        (0..missing).for_each(|_| self.create(Team::Inference, None, Some(now)));
        let hour = self.begins.0 as f64 / 3.6e6 + now.since(START).0 as f64 / 3.6e6;
        for team in Team::ALL {
            self.sums.draw(team, hour, self.pods.used(team));
        }
        self.stage.at(now + MINUTE, Timer::Minute);
    }

    /// Its owner deletes it.
    fn remove(&mut self, uid: &PodUid, now: Moment) -> Option<TeamPod> {
        let pod = self.pods.all.remove(uid)?;
        self.sums.served += pod.served(now);
        self.sums.guarantees.ends(uid, now);
        self.stage.finish(uid);
        Some(pod)
    }

    /// What waits is created, as far as queues keep it pending; and created again once its guarantee has room for it.
    fn submit(&mut self) {
        for team in Team::ALL {
            for _ in self.pods.pending_jobs(team)..PENDING {
                let Some(QueuedJob { job, came }) = self.queues[team as usize].pop_front() else {
                    break;
                };
                self.create(team, Some(job), came);
            }
            while self.priorities == Priorities::OfGuarantees
                && let Some(uid) = self.pods.to_promote(team)
            {
                let pod = self.remove(&uid, self.stage.now()).expect("it waits");
                self.create(team, pod.job, pod.came);
            }
        }
    }

    fn create(&mut self, team: Team, job: Option<Job>, came: Option<Moment>) {
        let now = self.stage.now();
        let gpus = job.map_or(1, |job| job.gpus);
        let is_within = gpus <= self.pods.guarantee_left(team);
        let priority = self.priorities.of(team, is_within);
        let uid = self
            .stage
            .submit(manifest(team, gpus, priority, job.is_some()));
        if is_within {
            self.sums.guarantees.opens(&uid, now);
            self.stage.at(now + LOOK, Timer::Waits(uid.clone()));
        }
        self.created += 1;
        let number = self.created;
        let pod = TeamPod {
            team,
            gpus,
            is_within,
            number,
            came,
            job,
            bound: None,
            is_settled: false,
            ready: None,
            is_leaving: false,
        };
        self.pods.all.insert(uid, pod);
    }

    fn close(&mut self, end: Moment) {
        self.sums.account.stands(end, Standing::default());
        self.sums.running.close(end);
        self.sums.guarantees.close(end);
        self.sums.served += self
            .pods
            .all
            .values()
            .map(|pod| pod.served(end))
            .sum::<f64>();
        // What has not run by the end has waited until then.
        let queued = Team::ALL.into_iter().zip(&self.queues);
        let queued =
            queued.flat_map(|(team, queue)| queue.iter().map(move |queued| (team, queued.came)));
        let pending = self.pods.all.values().map(|pod| (pod.team, pod.came));
        for (team, came) in queued.chain(pending) {
            came.into_iter()
                .for_each(|came| self.sums.waited(team, came, end));
        }
    }

    fn played(mut self) -> Played {
        let figures = self.sums.figures(self.stage.evictions);
        let notes = vec![self.sums.guarantees.said()];
        Played {
            figures,
            notes,
            curves: self.sums.curves(),
            broken: self.stage.broken,
        }
    }
}
