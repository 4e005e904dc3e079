//! The replicas' processes: how one starts, and how one ends.

use super::agents::AUDIENCE;
use super::*;
use futures::FutureExt;
use stowage_server::extender::Extender;
use stowage_server::extender::reports::{AgentAuth, TokenGuard};
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::server::{agents_router, scheduler_router};
use stowage_server::kubernetes::{
    self, AgentAccount, ClusterOptions, LeadWith, LeaseName, TokenReviews,
};
use stowage_server::service::{SimulatedThreads, WorkExecutor, WorkKind};

/// Longer than a write is waited for.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// A plan that is not stopped lasts beyond that.
const LONG_PLAN: Duration = Duration::from_secs(300);
/// How long most plans take: they are ready at once.
const INSTANT_PLAN: Duration = Duration::from_millis(1);

impl FaultyCluster {
    pub(super) fn start_replica(&mut self, host: usize) {
        self.processes_started += 1;
        let client = format!("{}-{}", HOSTS[host], self.processes_started);
        let slow_plans = !self.history.without.contains(&FaultKind::SlowPlan);
        let plans_for_long = Arc::new(AtomicBool::new(false));
        let for_long = plans_for_long.clone();
        let threads = SimulatedThreads::new(move |kind| match kind {
            WorkKind::Plan if for_long.load(Ordering::Relaxed) => LONG_PLAN,
            _ if slow_plans => random_plan_time(),
            _ => INSTANT_PLAN,
        });
        let work = WorkExecutor::Simulated(threads.clone());
        let (policy, watch) = self.policies.open(host);
        let state = ServerState::simulated(clock::host_time_source(host), work, policy);
        let lead_with = match self.mode {
            LeadershipMode::KubeScheduler => {
                let lease = LeaseName::for_kube_scheduler();
                LeadWith::KubeScheduler {
                    lease,
                    hostname: HOSTS[host].into(),
                }
            }
            LeadershipMode::OwnLease => LeadWith::Lease {
                lease: LeaseName::for_stowage("stowage"),
                identity: HOSTS[host].into(),
            },
        };
        let bug = self.history.planted;
        let times = if bug == Some(PlantedBug::ShortWriteTimes) {
            WriteTimes::from_deadline(Duration::from_millis(100))
        } else {
            self.times
        };
        let nonce = format!("process-{}", self.processes_started);
        let options = ClusterOptions {
            times,
            nonce,
            ..ClusterOptions::new(lead_with, client.clone())
        };
        let shutdown = CancellationToken::new();
        let server = match bug {
            Some(bug) => bug.wrap(self.api.router()),
            None => self.api.router(),
        };
        let server = self.writes.wrap(&client, server);
        let connection = self.api.in_process_client(&client, self.times, server);
        let account = AgentAccount::new(AUDIENCE, "kube-system", "stowage-agent");
        let authority = Arc::new(TokenReviews::new(connection.clone(), account));
        let agent_auth = AgentAuth::Token(TokenGuard::new(authority, state.clone()));
        let (control_plane, mut tasks) =
            kubernetes::start(connection, state.clone(), options, shutdown.clone());
        let watching = watch.run(state.clone(), control_plane.clone(), None);
        tasks.spawn(
            shutdown
                .clone()
                .run_until_cancelled_owned(watching)
                .map(drop),
        );
        let extender = Extender::new(state.clone(), control_plane, RequestLimits::default())
            .with_agent_auth(agent_auth);
        self.log(format!("{client} starts"));
        let (verbs, reports) = (scheduler_router(extender.clone()), agents_router(extender));
        self.replicas[host] = Some(RunningReplica {
            client,
            state,
            scheduler_router: verbs,
            agent_router: reports,
            tasks,
            threads,
            is_planning_slowly: plans_for_long,
            shutdown,
            started: Instant::now(),
        });
    }

    /// The pod is gone, with the scheduler in it.
    pub(super) fn kill(&mut self, host: usize) {
        if self.replicas[host].is_none() || !self.try_inject(FaultKind::Kill) {
            return;
        }
        let Some(replica) = self.replicas[host].take() else {
            return;
        };
        self.log(format!("{} is killed", replica.client));
        self.record_audit(&replica);
        kill_process(&self.api, replica);
        self.replica_returns_at[host] = Some(
            Instant::now()
                + random_duration(
                    &mut self.dice,
                    Duration::from_secs(1),
                    Duration::from_secs(30),
                ),
        );
    }

    /// Stowage's container ends and starts again; its scheduler is not affected.
    pub(super) fn restart(&mut self, host: usize) {
        if self.replicas[host].is_none() || !self.try_inject(FaultKind::Restart) {
            return;
        }
        let Some(replica) = self.replicas[host].take() else {
            return;
        };
        self.log(format!(
            "{} dies, and its container starts again",
            replica.client
        ));
        self.record_audit(&replica);
        kill_process(&self.api, replica);
        self.start_replica(host);
    }

    /// It ends in order, and gives its Lease up.
    pub(super) async fn stop(&mut self, host: usize) {
        if self.replicas[host].is_none() || !self.try_inject(FaultKind::Stop) {
            return;
        }
        if self.dice.below(2) == 0 && !self.history.without.contains(&FaultKind::SlowPlan) {
            self.slow_down_plans(host).await;
        }
        let Some(mut replica) = self.replicas[host].take() else {
            return;
        };
        self.log(format!("{} is told to stop", replica.client));
        self.record_audit(&replica);
        replica.shutdown.cancel();
        let (task_notes, client) = (self.task_reports.clone(), replica.client.clone());
        tokio::spawn(async move {
            let ends = async {
                while replica.tasks.join_next().await.is_some() {}
                // The process ends after its threads.
                while replica.threads.running() > 0 {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            if tokio::time::timeout(SHUTDOWN_TIMEOUT, ends).await.is_err() {
                let what =
                    format!("{client} was told to stop, and still runs after {SHUTDOWN_TIMEOUT:?}");
                task_notes.lock().violations.push(what);
            }
        });
        if let Some(schedulers) = &mut self.schedulers {
            schedulers.release(&self.api, host);
        }
        self.replica_returns_at[host] = Some(
            Instant::now()
                + random_duration(
                    &mut self.dice,
                    Duration::from_secs(1),
                    Duration::from_secs(20),
                ),
        );
    }

    /// Makes the replica's next plans take minutes.
    async fn slow_down_plans(&mut self, host: usize) {
        if let Some(replica) = &self.replicas[host] {
            replica.is_planning_slowly.store(true, Ordering::Relaxed);
            self.log(format!("{} plans for long", replica.client));
        }
        for _ in 0..3 {
            self.wait_step().await;
        }
    }
}

/// The process is gone: it hears and sends nothing more.
pub fn kill_process(api: &ApiServer, mut replica: RunningReplica) {
    api.connections().cut_off(&replica.client);
    replica.state.leadership.set_stopping();
    replica.tasks.abort_all();
    replica.threads.abort_all();
}

/// Most plans are ready at once, and some take long.
fn random_plan_time() -> Duration {
    match fastrand::u8(..) {
        0..200 => INSTANT_PLAN,
        200..245 => Duration::from_millis(fastrand::u64(..500)),
        _ => Duration::from_millis(fastrand::u64(500..4000)),
    }
}
