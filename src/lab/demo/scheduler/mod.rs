//! A stand-in for kube-scheduler: the behavior of v1.36 that an extender and an API server can observe, as
//! docs/inside/kube-scheduler.md records it.
//!
//! One task owns all state: it applies watch events, then runs one scheduling cycle at a time; binds run beside it. Only the
//! observations are shared.
//!
//! ```text
//!  watches ─► events ─► view, queue ─► cycle (filters, extender, scores, preemption) ─► writing (condition,
//!                ▲                                                                        nomination, victims)
//!                └───────────────── bind, in the background ◄── assume ◄── CycleResult::Place
//! ```
//!
//! Left out: affinity, spread, ports, volumes, claims, budgets (the dry run reports no violations), other
//! profiles, more than one extender, and gzip.

pub mod config;
mod cycle;
mod events;
mod extender;
mod filters;
mod go_json;
mod message;
mod objects;
pub mod observations;
mod preemption;
mod quantity;
mod queue;
pub mod trial;
mod view;
mod writing;

use super::watching::{self, WatchNotice};
use config::SchedulerConfig;
use cycle::{Cycle, CycleMemory, CycleNomination, CycleResult};
use events::SchedulerState;
use extender::ExtenderClient;
use filters::Rejector;
use objects::SchedulerPod;
use observations::SchedulerObservations;
use queue::ClusterEvent;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use writing::SchedulingFailure;

/// A running scheduler; dropping it stops it.
pub struct StandInScheduler {
    observations: Arc<SchedulerObservations>,
    task: JoinHandle<()>,
}

impl StandInScheduler {
    /// Starts it as a client of an API server. Must be called inside a tokio runtime.
    pub fn start(client: kube::Client, config: SchedulerConfig) -> Self {
        let observations = Arc::new(SchedulerObservations::default());
        let task = tokio::spawn(SchedulerLoop::new(client, config, observations.clone()).run());
        Self { observations, task }
    }

    pub fn observations(&self) -> &Arc<SchedulerObservations> {
        &self.observations
    }
}

impl Drop for StandInScheduler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Messages to the one task.
enum SchedulerMessage {
    Node(WatchNotice),
    Pod(WatchNotice),
    Bound {
        uid: String,
        result: Result<(), String>,
    },
}

struct SchedulerLoop {
    client: kube::Client,
    config: SchedulerConfig,
    extender: Arc<ExtenderClient>,
    observations: Arc<SchedulerObservations>,
    state: SchedulerState,
    memory: CycleMemory,
    sender: mpsc::UnboundedSender<SchedulerMessage>,
    messages: mpsc::UnboundedReceiver<SchedulerMessage>,
    /// Pumps and binds; they end with this.
    tasks: JoinSet<()>,
    binds: Arc<Semaphore>,
    binds_in_flight: usize,
}

impl SchedulerLoop {
    fn new(
        client: kube::Client,
        config: SchedulerConfig,
        observations: Arc<SchedulerObservations>,
    ) -> Self {
        let (sender, messages) = mpsc::unbounded_channel();
        Self {
            client,
            extender: Arc::new(ExtenderClient::new(
                config.extender.clone(),
                observations.clone(),
            )),
            observations,
            state: SchedulerState::new(),
            memory: CycleMemory::seeded(config.seed),
            sender,
            messages,
            tasks: JoinSet::new(),
            binds: Arc::new(Semaphore::new(config.concurrent_binds.max(1))),
            binds_in_flight: 0,
            config,
        }
    }

    async fn run(mut self) {
        let nodes = watching::core_resource("Node", "nodes");
        let pods = watching::core_resource("Pod", "pods");
        self.tasks.spawn(watching::forward_watch(
            self.client.clone(),
            nodes,
            self.sender.clone(),
            SchedulerMessage::Node,
        ));
        self.tasks.spawn(watching::forward_watch(
            self.client.clone(),
            pods,
            self.sender.clone(),
            SchedulerMessage::Pod,
        ));
        loop {
            while let Ok(message) = self.messages.try_recv() {
                self.handle_message(message).await;
            }
            let now = Instant::now();
            self.state.queue.flush_unschedulable(now, &self.config);
            let next = if self.state.is_synced() {
                self.state.queue.pop(now)
            } else {
                None
            };
            match next {
                Some(uid) => self.schedule_one(&uid).await,
                None => self.wait().await,
            }
        }
    }

    /// Waits for a message, for a back-off to end, or for an unschedulable pod's timeout.
    async fn wait(&mut self) {
        let idle = self.state.is_synced() && self.binds_in_flight == 0;
        self.observations
            .update_progress(|progress| progress.is_idle = idle);
        let deadline = self.state.queue.next_deadline(&self.config);
        let sleep = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let message = tokio::select! {
            message = self.messages.recv() => message,
            () = sleep => None,
        };
        self.observations
            .update_progress(|progress| progress.is_idle = false);
        if let Some(message) = message {
            self.handle_message(message).await;
        }
        while self.tasks.try_join_next().is_some() {}
    }

    async fn handle_message(&mut self, message: SchedulerMessage) {
        let now = Instant::now();
        match message {
            SchedulerMessage::Node(notice) => {
                self.state
                    .apply_node_notice(notice, &self.observations, now)
            }
            SchedulerMessage::Pod(notice) => {
                self.state
                    .apply_pod_notice(notice, &self.config, &self.observations, now)
            }
            SchedulerMessage::Bound { uid, result } => self.finish_bind(&uid, result).await,
        }
    }

    async fn schedule_one(&mut self, uid: &str) {
        let Some(pod) = self.state.cache.pod(uid).cloned() else {
            self.state.queue.remove(uid);
            return;
        };
        self.observations
            .record_outcome(pod.full_name(), |outcome| outcome.attempts += 1);
        let cycle = Cycle {
            pod: &pod,
            cache: &self.state.cache,
            config: &self.config,
            extender: &self.extender,
            memory: &mut self.memory,
        };
        match cycle.run().await {
            CycleResult::Fits { node } => self.assume_and_bind(pod, node),
            CycleResult::Error { message } => self.handle_error(&pod, &message).await,
            CycleResult::Unschedulable {
                message,
                rejectors,
                nomination,
            } => {
                self.handle_unschedulable(&pod, &message, rejectors, nomination)
                    .await;
            }
        }
    }

    /// Assumes the pod on its node and binds it in the background.
    fn assume_and_bind(&mut self, pod: Arc<SchedulerPod>, node: String) {
        self.state.cache.assume(&pod.uid, &node);
        self.binds_in_flight += 1;
        let (client, extender) = (self.client.clone(), self.extender.clone());
        let (binds, sender) = (self.binds.clone(), self.sender.clone());
        self.tasks.spawn(async move {
            let _permit = binds.acquire().await;
            let result = writing::bind(&client, &extender, &pod, &node).await;
            // The scheduler may have stopped meanwhile; then the message is dropped.
            let _ = sender.send(SchedulerMessage::Bound {
                uid: pod.uid.clone(),
                result,
            });
        });
    }

    async fn finish_bind(&mut self, uid: &str, result: Result<(), String>) {
        self.binds_in_flight -= 1;
        let Err(message) = result else {
            return;
        };
        self.state.cache.forget(uid);
        self.state
            .queue
            .requeue_all(ClusterEvent::BoundPodDeleted, Instant::now());
        if let Some(pod) = self.state.cache.pod(uid).cloned() {
            self.handle_error(&pod, &message).await;
        }
    }

    /// A SchedulerError: retried without an event.
    async fn handle_error(&mut self, pod: &SchedulerPod, message: &str) {
        self.state
            .queue
            .add_to_error_back_off(&pod.uid, Instant::now(), &self.config);
        self.report_failure(
            pod,
            SchedulingFailure {
                reason: "SchedulerError",
                message,
                nomination: Some(None),
            },
        )
        .await;
    }

    async fn handle_unschedulable(
        &mut self,
        pod: &SchedulerPod,
        message: &str,
        rejectors: BTreeSet<Rejector>,
        nomination: CycleNomination,
    ) {
        self.state
            .queue
            .add_unschedulable(&pod.uid, rejectors, Instant::now(), &self.config);
        let nominated = match &nomination {
            CycleNomination::Keep => None,
            CycleNomination::Clear => Some(None),
            CycleNomination::Preempt(candidate) => Some(Some(candidate.node.as_str())),
        };
        if let CycleNomination::Preempt(candidate) = &nomination {
            self.observations
                .record_outcome(pod.full_name(), |outcome| outcome.preemptions += 1);
            writing::evict(&self.client, pod, candidate, &self.state.cache).await;
        }
        self.report_failure(
            pod,
            SchedulingFailure {
                reason: "Unschedulable",
                message,
                nomination: nominated,
            },
        )
        .await;
    }

    async fn report_failure(&mut self, pod: &SchedulerPod, failure: SchedulingFailure<'_>) {
        if let Some(nomination) = failure.nomination {
            self.state
                .cache
                .nominate(&pod.uid, nomination.map(str::to_owned));
        }
        self.observations
            .record_outcome(pod.full_name(), |outcome| {
                outcome.reason = Some(failure.reason);
                outcome.message = Some(failure.message.to_owned());
            });
        writing::report_failure(&self.client, pod, &failure).await;
    }
}
