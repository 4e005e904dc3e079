//! The pool over a day: the teams' queues, their pods, and the sums.

use super::account::PoolSnapshot;
use super::demand::TeamDemand;
use super::guarantee::{CHECK_INTERVAL, obstacle};
use super::pods::{PriorityScheme, TeamPod, TeamPods, manifest};
use super::sums::DayTotals;
use super::{Team, Timer};
use crate::simulate::fleet::scenarios::VariantRun;
use crate::simulate::fleet::scenarios::running_jobs::Job;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::VecDeque;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Millis, Moment};

/// Jobs that a team's queue keeps pending.
const PENDING_JOBS_PER_TEAM: usize = 8;
const MINUTE: Millis = Millis::seconds(60);

pub struct Pool {
    stage: Stage<'static, Timer>,
    policy: Policy,
    priorities: PriorityScheme,
    demand: TeamDemand,
    /// The time of day at the beginning.
    time_of_day: Moment,
    queues: [VecDeque<QueuedJob>; 3],
    pods: TeamPods,
    pods_created: u64,
    totals: DayTotals,
}

struct QueuedJob {
    job: Job,
    /// `None` once it has run: what counts is its first start.
    waiting_since: Option<Moment>,
}

impl Pool {
    pub fn new(
        stage: Stage<'static, Timer>,
        policy: Policy,
        priorities: PriorityScheme,
        seed: u64,
    ) -> Self {
        let pods = TeamPods::new(&policy);
        Self {
            totals: DayTotals::new(pods.quotas, stage.machines.gpus()),
            stage,
            policy,
            priorities,
            demand: TeamDemand::draw(seed),
            time_of_day: Moment::default(),
            queues: Default::default(),
            pods,
            pods_created: 0,
        }
    }

    pub fn play(mut self, begins: u64, hours: u64) -> VariantRun {
        self.time_of_day = Moment(begins * 3_600_000);
        let end = START + Millis::seconds(hours * 3600);
        for (index, arrival) in self.demand.arrivals.iter().enumerate() {
            if arrival.at >= self.time_of_day {
                self.stage.schedule_timer(
                    START + arrival.at.since(self.time_of_day),
                    Timer::JobArrives(index),
                );
            }
        }
        self.stage.schedule_timer(START, Timer::Minute);
        while let Some(happened) = self.stage.next(end) {
            self.handle_event(happened);
            self.submit_queued();
            let snapshot = self.pods.snapshot(&self.stage);
            self.totals.account.advance(self.stage.now(), snapshot);
        }
        self.finish(end);
        self.into_run()
    }

    fn handle_event(&mut self, happened: ScenarioEvent<Timer>) {
        let now = self.stage.now();
        match happened {
            ScenarioEvent::Timer(Timer::Minute) => self.run_minute(now),
            ScenarioEvent::Timer(Timer::JobArrives(index)) => {
                let arrival = self.demand.arrivals[index];
                let queued = QueuedJob {
                    job: arrival.job,
                    waiting_since: Some(now),
                };
                self.queues[arrival.team as usize].push_back(queued);
            }
            ScenarioEvent::Timer(Timer::Job(timer)) => {
                if let Some(uid) = self.totals.running.handle_timer(timer, &mut self.stage) {
                    self.pods.all.remove(&uid);
                }
            }
            ScenarioEvent::Timer(Timer::RecheckWaiting(uid))
                if self.totals.guarantees.is_waiting(&uid) =>
            {
                let borrowing = self.pods.borrowing(&self.stage);
                let obstacle = obstacle(&uid, &self.stage, &self.policy, &borrowing);
                self.totals
                    .guarantees
                    .record_obstacle(&uid, CHECK_INTERVAL, obstacle);
                self.stage
                    .schedule_timer(now + CHECK_INTERVAL, Timer::RecheckWaiting(uid));
            }
            ScenarioEvent::Timer(Timer::RecheckWaiting(_)) => {}
            ScenarioEvent::Bound(uid) => self.record_bound(&uid, now),
            ScenarioEvent::Ready(uid) => {
                let Some(pod) = self.pods.all.get_mut(&uid) else {
                    return;
                };
                pod.ready_at = Some(now);
                if let Some(job) = pod.job {
                    self.totals.running.start_job(&uid, job, &mut self.stage);
                }
            }
            ScenarioEvent::Terminating(uid) => self.record_terminating(&uid, now),
            ScenarioEvent::Deleted(uid) => drop(self.pods.all.remove(&uid)),
        }
    }

    fn record_bound(&mut self, uid: &PodUid, now: Moment) {
        let devices = self
            .stage
            .pod(uid)
            .and_then(|pod| pod.binding.as_ref())
            .map(|bound| bound.devices.clone());
        let Some(pod) = self.pods.all.get_mut(uid) else {
            return;
        };
        pod.bound_at = Some(now);
        pod.is_uncontested = !self.totals.account.is_contested();
        if let Some(came) = pod.waiting_since.take() {
            self.totals.record_wait(pod.team, came, now);
        }
        self.totals
            .guarantees
            .record_bound(uid, &devices.unwrap_or_default(), now);
    }

    /// Its job comes first again; an engine is created again by the next minute.
    fn record_terminating(&mut self, uid: &PodUid, now: Moment) {
        if let Some(pod) = self.stage.pod(uid)
            && let Some(bound) = &pod.binding
        {
            self.totals
                .guarantees
                .record_vacating(&bound.devices, now, now + pod.spec.grace);
        }
        let Some(pod) = self.pods.all.get_mut(uid) else {
            return;
        };
        pod.is_terminating = true;
        if let Some(job) = self.totals.running.handle_eviction(uid, now).or(pod.job) {
            self.queues[pod.team as usize].push_front(QueuedJob {
                job,
                waiting_since: pod.waiting_since,
            });
        }
        self.totals.served_gpu_hours += pod.served_gpu_hours(now);
        pod.ready_at = None;
    }

    fn run_minute(&mut self, now: Moment) {
        let wanted = self.demand.engines(self.time_of_day + now.since(START)) as usize;
        let engines = self.pods.engines();
        for uid in engines.iter().take(engines.len().saturating_sub(wanted)) {
            self.remove(uid, now);
        }
        let missing = wanted.saturating_sub(engines.len());
        (0..missing).for_each(|_| self.create(Team::Inference, None, Some(now)));
        let hour = self.time_of_day.0 as f64 / 3.6e6 + now.since(START).0 as f64 / 3.6e6;
        for team in Team::ALL {
            self.totals
                .record_usage(team, hour, self.pods.used_gpus(team));
        }
        self.stage.schedule_timer(now + MINUTE, Timer::Minute);
    }

    /// Its owner deletes it.
    fn remove(&mut self, uid: &PodUid, now: Moment) -> Option<TeamPod> {
        let pod = self.pods.all.remove(uid)?;
        self.totals.served_gpu_hours += pod.served_gpu_hours(now);
        self.totals.guarantees.stop_waiting(uid, now);
        self.stage.finish(uid);
        Some(pod)
    }

    /// What waits is created, as far as queues keep it pending; and created again once its guarantee has room for it.
    fn submit_queued(&mut self) {
        for team in Team::ALL {
            for _ in self.pods.pending_jobs(team)..PENDING_JOBS_PER_TEAM {
                let Some(QueuedJob {
                    job,
                    waiting_since: came,
                }) = self.queues[team as usize].pop_front()
                else {
                    break;
                };
                self.create(team, Some(job), came);
            }
            while self.priorities == PriorityScheme::ByGuarantee
                && let Some(uid) = self.pods.next_to_promote(team)
            {
                let pod = self.remove(&uid, self.stage.now()).expect("it waits");
                self.create(team, pod.job, pod.waiting_since);
            }
        }
    }

    fn create(&mut self, team: Team, job: Option<Job>, came: Option<Moment>) {
        let now = self.stage.now();
        let gpus = job.map_or(1, |job| job.gpus);
        let is_within = gpus <= self.pods.guarantee_left(team);
        let priority = self.priorities.priority_of(team, is_within);
        let uid = self
            .stage
            .submit(manifest(team, gpus, priority, job.is_some()));
        if is_within {
            self.totals.guarantees.start_waiting(&uid, now);
            self.stage
                .schedule_timer(now + CHECK_INTERVAL, Timer::RecheckWaiting(uid.clone()));
        }
        self.pods_created += 1;
        let number = self.pods_created;
        let pod = TeamPod {
            team,
            gpus,
            is_guaranteed: is_within,
            sequence: number,
            waiting_since: came,
            job,
            bound_at: None,
            is_uncontested: false,
            ready_at: None,
            is_terminating: false,
        };
        self.pods.all.insert(uid, pod);
    }

    fn finish(&mut self, end: Moment) {
        self.totals.account.advance(end, PoolSnapshot::default());
        self.totals.running.count_unfinished(end);
        self.totals.guarantees.finish(end);
        self.totals.served_gpu_hours += self
            .pods
            .all
            .values()
            .map(|pod| pod.served_gpu_hours(end))
            .sum::<f64>();
        // What has not run by the end has waited until then.
        let queued = Team::ALL.into_iter().zip(&self.queues);
        let queued = queued
            .flat_map(|(team, queue)| queue.iter().map(move |queued| (team, queued.waiting_since)));
        let pending = self
            .pods
            .all
            .values()
            .map(|pod| (pod.team, pod.waiting_since));
        for (team, came) in queued.chain(pending) {
            came.into_iter()
                .for_each(|came| self.totals.record_wait(team, came, end));
        }
    }

    fn into_run(mut self) -> VariantRun {
        let figures = self.totals.figures(self.stage.evictions);
        let notes = vec![self.totals.guarantees.summary()];
        VariantRun {
            figures,
            notes,
            curves: self.totals.curves(),
            violations: self.stage.violations,
        }
    }
}
