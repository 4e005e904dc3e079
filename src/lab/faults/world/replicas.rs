//! The replicas' processes: how one starts, and how one ends.

use super::agents::AUDIENCE;
use super::*;
use crate::extender::Extender;
use crate::extender::reports::{AgentAuth, TokenGuard};
use crate::extender::request::RequestLimits;
use crate::extender::server::{agents_router, scheduler_router};
use crate::kubernetes::{self, AgentAccount, ClusterOptions, LeadWith, LeaseName, TokenReviews};
use crate::scheduling::policy::{ConflictRule, Consolidation, WhenIncomplete};
use crate::service::WorkPlace;
use crate::units::Millis;

/// Longer than a write is waited for.
const STOPS_WITHIN: Duration = Duration::from_secs(60);

impl FaultyCluster {
    pub(super) fn start(&mut self, host: usize) {
        self.processes += 1;
        let client = format!("{}-{}", HOSTS[host], self.processes);
        let slow_plans = !self.history.without.contains(&FaultKind::SlowPlan);
        let lasts = if slow_plans { drawn_duration } else { no_time };
        let service =
            Service::simulated(clock::time_of(host), WorkPlace::InTurn { lasts }, self.policy.clone());
        let lead_with = match self.mode {
            LeadershipMode::KubeScheduler => {
                let lease = LeaseName::of_kube_scheduler();
                LeadWith::KubeScheduler { lease, hostname: HOSTS[host].into() }
            }
            LeadershipMode::OwnLease => {
                LeadWith::Lease { lease: LeaseName::own("stowage"), identity: HOSTS[host].into() }
            }
        };
        let bug = self.history.planted;
        let times = if bug == Some(PlantedBug::ShortWriteTimes) {
            WriteTimes::of(Duration::from_millis(100))
        } else {
            self.times
        };
        let nonce = format!("process-{}", self.processes);
        let options = ClusterOptions { times, nonce, ..ClusterOptions::new(lead_with, client.clone()) };
        let shutdown = CancellationToken::new();
        let server = match bug {
            Some(bug) => bug.between(self.api.router()),
            None => self.api.router(),
        };
        let server = self.writes.watching(&client, server);
        let connection = self.api.client_in_process_by(&client, self.times, server);
        let account = AgentAccount::new(AUDIENCE, "kube-system", "stowage-agent");
        let authority = Arc::new(TokenReviews::new(connection.clone(), account));
        let agent_auth = AgentAuth::Token(TokenGuard::new(authority, service.clone()));
        let (control_plane, tasks) =
            kubernetes::start(connection, service.clone(), options, shutdown.clone());
        let extender = Extender::new(service.clone(), control_plane, RequestLimits::default())
            .with_agent_auth(agent_auth);
        self.say(format!("{client} starts"));
        let (verbs, reports) = (scheduler_router(extender.clone()), agents_router(extender));
        self.replicas[host] = Some(RunningReplica {
            client,
            service,
            verbs,
            reports,
            tasks,
            shutdown,
            started: Instant::now(),
        });
    }

    /// The pod is gone, with the scheduler in it.
    pub(super) fn kill(&mut self, host: usize) {
        if self.replicas[host].is_none() || !self.happens(FaultKind::Kill) {
            return;
        }
        let Some(replica) = self.replicas[host].take() else { return };
        self.say(format!("{} is killed", replica.client));
        self.note_audit(&replica);
        die(&self.api, replica);
        self.returns[host] =
            Some(Instant::now() + between(&mut self.dice, Duration::from_secs(1), Duration::from_secs(30)));
    }

    /// Stowage's container ends and starts again; its scheduler is not affected.
    pub(super) fn restart(&mut self, host: usize) {
        if self.replicas[host].is_none() || !self.happens(FaultKind::Restart) {
            return;
        }
        let Some(replica) = self.replicas[host].take() else { return };
        self.say(format!("{} dies, and its container starts again", replica.client));
        self.note_audit(&replica);
        die(&self.api, replica);
        self.start(host);
    }

    /// It ends in order, and gives its Lease up.
    pub(super) fn stop(&mut self, host: usize) {
        if self.replicas[host].is_none() || !self.happens(FaultKind::Stop) {
            return;
        }
        let Some(mut replica) = self.replicas[host].take() else { return };
        self.say(format!("{} is told to stop", replica.client));
        self.note_audit(&replica);
        replica.shutdown.cancel();
        let (task_notes, client) = (self.task_notes.clone(), replica.client.clone());
        tokio::spawn(async move {
            let ends = async { while replica.tasks.join_next().await.is_some() {} };
            if tokio::time::timeout(STOPS_WITHIN, ends).await.is_err() {
                let what = format!("{client} was told to stop, and still runs after {STOPS_WITHIN:?}");
                task_notes.lock().broken.push(what);
            }
        });
        if let Some(schedulers) = &mut self.schedulers {
            schedulers.give_up(&self.api, host);
        }
        self.returns[host] =
            Some(Instant::now() + between(&mut self.dice, Duration::from_secs(1), Duration::from_secs(20)));
    }
}

/// The process is gone: it hears and sends nothing more.
pub fn die(api: &ApiServer, mut replica: RunningReplica) {
    api.connections().cut_off(&replica.client);
    replica.service.leadership.set_stopping();
    replica.tasks.abort_all();
}

/// The policies that a history swaps. Pages of engines are not played, and each has the headroom that the oracle knows.
pub fn policy(number: usize, features: WorldFeatures) -> Policy {
    let mut policy = Policy::default();
    policy.conflicts = ConflictRule::EvictUnstarted;
    let mut classes = policy.classes().to_vec();
    classes.iter_mut().for_each(|class| class.engine &= features.has_engines);
    if features.has_groups {
        policy.planning.groups.when_incomplete = WhenIncomplete::Evict;
    }
    let mut policy = policy.with_classes(classes).expect("the default classes are valid");
    match number {
        0 => {}
        1 => policy.scoring.shortlist = 1,
        2 => policy.preemption.reservation_slack = Millis::seconds(10),
        _ => {
            policy.preemption.reservation_slack = Millis::seconds(60);
            // Pods are relisted. None is moved: they have no controllers.
            policy.planning.consolidation = Some(Consolidation { gain: Millis::seconds(3600) });
        }
    }
    policy
}

/// Most plans are ready at once, and some take long.
fn drawn_duration() -> Duration {
    match fastrand::u8(..) {
        0..200 => no_time(),
        200..245 => Duration::from_millis(fastrand::u64(..500)),
        _ => Duration::from_millis(fastrand::u64(500..4000)),
    }
}

fn no_time() -> Duration {
    Duration::from_millis(1)
}
