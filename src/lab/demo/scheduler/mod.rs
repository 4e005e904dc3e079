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
use observations::Observations;
use queue::Waker;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use writing::SchedulingFailure;

/// A running scheduler; dropping it stops it.
pub struct StandInScheduler {
    observations: Arc<Observations>,
    task: JoinHandle<()>,
}

impl StandInScheduler {
    /// Starts it as a client of an API server. Must be called inside a tokio runtime.
    pub fn start(client: kube::Client, config: SchedulerConfig) -> Self {
        let observations = Arc::new(Observations::default());
        let task = tokio::spawn(SchedulerLoop::new(client, config, observations.clone()).run());
        Self { observations, task }
    }

    pub fn observations(&self) -> &Arc<Observations> {
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
    observations: Arc<Observations>,
    cluster: SchedulerState,
    memory: CycleMemory,
    sender: mpsc::UnboundedSender<SchedulerMessage>,
    messages: mpsc::UnboundedReceiver<SchedulerMessage>,
    /// Pumps and binds; they end with this.
    tasks: JoinSet<()>,
    binds: Arc<Semaphore>,
    binds_on_their_way: usize,
}

impl SchedulerLoop {
    fn new(client: kube::Client, config: SchedulerConfig, observations: Arc<Observations>) -> Self {
        let (sender, messages) = mpsc::unbounded_channel();
        Self {
            client,
            extender: Arc::new(ExtenderClient::new(
                config.extender.clone(),
                observations.clone(),
            )),
            observations,
            cluster: SchedulerState::new(),
            memory: CycleMemory::seeded(config.seed),
            sender,
            messages,
            tasks: JoinSet::new(),
            binds: Arc::new(Semaphore::new(config.concurrent_binds.max(1))),
            binds_on_their_way: 0,
            config,
        }
    }

    async fn run(mut self) {
        let nodes = watching::core("Node", "nodes");
        let pods = watching::core("Pod", "pods");
        self.tasks.spawn(watching::pump(
            self.client.clone(),
            nodes,
            self.sender.clone(),
            SchedulerMessage::Node,
        ));
        self.tasks.spawn(watching::pump(
            self.client.clone(),
            pods,
            self.sender.clone(),
            SchedulerMessage::Pod,
        ));
        loop {
            while let Ok(message) = self.messages.try_recv() {
                self.take(message).await;
            }
            let now = Instant::now();
            self.cluster.queue.flush(now, &self.config);
            let next = if self.cluster.is_synced() {
                self.cluster.queue.pop(now)
            } else {
                None
            };
            match next {
                Some(uid) => self.attempt(&uid).await,
                None => self.wait().await,
            }
        }
    }

    /// Waits for a message, for a back-off to end, or for an unschedulable pod's timeout.
    async fn wait(&mut self) {
        let idle = self.cluster.is_synced() && self.binds_on_their_way == 0;
        self.observations.step(|progress| progress.idle = idle);
        let deadline = self.cluster.queue.next_deadline(&self.config);
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
        self.observations.step(|progress| progress.idle = false);
        if let Some(message) = message {
            self.take(message).await;
        }
        while self.tasks.try_join_next().is_some() {}
    }

    async fn take(&mut self, message: SchedulerMessage) {
        let now = Instant::now();
        match message {
            SchedulerMessage::Node(notice) => {
                self.cluster.node_notice(notice, &self.observations, now)
            }
            SchedulerMessage::Pod(notice) => {
                self.cluster
                    .pod_notice(notice, &self.config, &self.observations, now)
            }
            SchedulerMessage::Bound { uid, result } => self.bind_ended(&uid, result).await,
        }
    }

    async fn attempt(&mut self, uid: &str) {
        let Some(pod) = self.cluster.view.pod(uid).cloned() else {
            self.cluster.queue.remove(uid);
            return;
        };
        self.observations
            .record(pod.full_name(), |outcome| outcome.attempts += 1);
        let cycle = Cycle {
            pod: &pod,
            view: &self.cluster.view,
            config: &self.config,
            extender: &self.extender,
            memory: &mut self.memory,
        };
        match cycle.run().await {
            CycleResult::Place { node } => self.place(pod, node),
            CycleResult::Failed { message } => self.failed(&pod, &message).await,
            CycleResult::Unfit {
                message,
                rejectors,
                nomination,
            } => {
                self.unfit(&pod, &message, rejectors, nomination).await;
            }
        }
    }

    /// Assumes the pod on its node and binds it in the background.
    fn place(&mut self, pod: Arc<SchedulerPod>, node: String) {
        self.cluster.view.assume(&pod.uid, &node);
        self.binds_on_their_way += 1;
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

    async fn bind_ended(&mut self, uid: &str, result: Result<(), String>) {
        self.binds_on_their_way -= 1;
        let Err(message) = result else {
            return;
        };
        self.cluster.view.forget(uid);
        self.cluster.queue.wake_all(Waker::PodGone, Instant::now());
        if let Some(pod) = self.cluster.view.pod(uid).cloned() {
            self.failed(&pod, &message).await;
        }
    }

    /// A SchedulerError: retried without an event.
    async fn failed(&mut self, pod: &SchedulerPod, message: &str) {
        self.cluster
            .queue
            .failed(&pod.uid, Instant::now(), &self.config);
        self.report(
            pod,
            SchedulingFailure {
                reason: "SchedulerError",
                message,
                nomination: Some(None),
            },
        )
        .await;
    }

    async fn unfit(
        &mut self,
        pod: &SchedulerPod,
        message: &str,
        rejectors: BTreeSet<Rejector>,
        nomination: CycleNomination,
    ) {
        self.cluster
            .queue
            .refused(&pod.uid, rejectors, Instant::now(), &self.config);
        let nominated = match &nomination {
            CycleNomination::Keep => None,
            CycleNomination::Clear => Some(None),
            CycleNomination::Preempt(candidate) => Some(Some(candidate.node.as_str())),
        };
        if let CycleNomination::Preempt(candidate) = &nomination {
            self.observations
                .record(pod.full_name(), |outcome| outcome.preemptions += 1);
            writing::evict(&self.client, pod, candidate, &self.cluster.view).await;
        }
        self.report(
            pod,
            SchedulingFailure {
                reason: "Unschedulable",
                message,
                nomination: nominated,
            },
        )
        .await;
    }

    async fn report(&mut self, pod: &SchedulerPod, failure: SchedulingFailure<'_>) {
        if let Some(nomination) = failure.nomination {
            self.cluster
                .view
                .nominate(&pod.uid, nomination.map(str::to_owned));
        }
        self.observations.record(pod.full_name(), |outcome| {
            outcome.reason = Some(failure.reason);
            outcome.message = Some(failure.message.to_owned());
        });
        writing::report_failure(&self.client, pod, &failure).await;
    }
}
