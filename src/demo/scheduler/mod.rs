//! A stand-in kube-scheduler: what an extender and an API server see of v1.36's, as EXTENDER.md records it.
//!
//! One task owns all state: it takes in the watches' news, then runs one scheduling cycle at a time; binds run
//! beside it. Nothing is shared but the observations.
//!
//! ```text
//!  watches ─► events ─► view, queue ─► cycle (filters, extender, scores, preemption) ─► writing (condition,
//!                ▲                                                                        nomination, victims)
//!                └───────────────── bind, in the background ◄── assume ◄── Verdict::Place
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

use super::watching::{self, Notice};
use config::Config;
use cycle::{Cycle, Memory, Nomination, Verdict};
use events::Cluster;
use extender::Extender;
use filters::Rejector;
use objects::Pod;
use observations::Observations;
use queue::Waker;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use writing::Failure;

/// A running scheduler; dropping it stops it.
pub struct Scheduler {
    observations: Arc<Observations>,
    task: JoinHandle<()>,
}

impl Scheduler {
    /// Starts it as a client of an API server. Must be called inside a tokio runtime.
    pub fn start(client: kube::Client, config: Config) -> Self {
        let observations = Arc::new(Observations::default());
        let task = tokio::spawn(Run::new(client, config, observations.clone()).run());
        Self { observations, task }
    }

    pub fn observations(&self) -> &Arc<Observations> {
        &self.observations
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What reaches the one task.
enum Message {
    Node(Notice),
    Pod(Notice),
    Bound { uid: String, result: Result<(), String> },
}

struct Run {
    client: kube::Client,
    config: Config,
    extender: Arc<Extender>,
    observations: Arc<Observations>,
    cluster: Cluster,
    memory: Memory,
    sender: mpsc::UnboundedSender<Message>,
    messages: mpsc::UnboundedReceiver<Message>,
    /// Pumps and binds; they end with this.
    tasks: JoinSet<()>,
    binds: Arc<Semaphore>,
    binds_on_their_way: usize,
}

impl Run {
    fn new(client: kube::Client, config: Config, observations: Arc<Observations>) -> Self {
        let (sender, messages) = mpsc::unbounded_channel();
        Self {
            client,
            extender: Arc::new(Extender::new(config.extender.clone(), observations.clone())),
            observations,
            cluster: Cluster::new(),
            memory: Memory::seeded(config.seed),
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
        self.tasks.spawn(watching::pump(self.client.clone(), nodes, self.sender.clone(), Message::Node));
        self.tasks.spawn(watching::pump(self.client.clone(), pods, self.sender.clone(), Message::Pod));
        loop {
            while let Ok(message) = self.messages.try_recv() {
                self.take(message).await;
            }
            let now = Instant::now();
            self.cluster.queue.flush(now, &self.config);
            let next = if self.cluster.is_synced() { self.cluster.queue.pop(now) } else { None };
            match next {
                Some(uid) => self.attempt(&uid).await,
                None => self.wait().await,
            }
        }
    }

    /// Waits for news, for a back-off to end, or for a sleeper's time.
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

    async fn take(&mut self, message: Message) {
        let now = Instant::now();
        match message {
            Message::Node(notice) => self.cluster.node_notice(notice, &self.observations, now),
            Message::Pod(notice) => self.cluster.pod_notice(notice, &self.config, &self.observations, now),
            Message::Bound { uid, result } => self.bind_ended(&uid, result).await,
        }
    }

    async fn attempt(&mut self, uid: &str) {
        let Some(pod) = self.cluster.view.pod(uid).cloned() else {
            self.cluster.queue.remove(uid);
            return;
        };
        self.observations.record(pod.full_name(), |outcome| outcome.attempts += 1);
        let cycle = Cycle {
            pod: &pod,
            view: &self.cluster.view,
            config: &self.config,
            extender: &self.extender,
            memory: &mut self.memory,
        };
        match cycle.run().await {
            Verdict::Place { node } => self.place(pod, node),
            Verdict::Failed { message } => self.failed(&pod, &message).await,
            Verdict::Unfit { message, rejectors, nomination } => {
                self.unfit(&pod, &message, rejectors, nomination).await;
            }
        }
    }

    /// Assumes the pod on its node and binds it in the background.
    fn place(&mut self, pod: Arc<Pod>, node: String) {
        self.cluster.view.assume(&pod.uid, &node);
        self.binds_on_their_way += 1;
        let (client, extender) = (self.client.clone(), self.extender.clone());
        let (binds, sender) = (self.binds.clone(), self.sender.clone());
        self.tasks.spawn(async move {
            let _permit = binds.acquire().await;
            let result = writing::bind(&client, &extender, &pod, &node).await;
            // The scheduler may have stopped meanwhile; nobody is left to be told.
            let _ = sender.send(Message::Bound { uid: pod.uid.clone(), result });
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

    /// A SchedulerError: retried by itself.
    async fn failed(&mut self, pod: &Pod, message: &str) {
        self.cluster.queue.failed(&pod.uid, Instant::now(), &self.config);
        self.report(pod, Failure { reason: "SchedulerError", message, nomination: Some(None) }).await;
    }

    async fn unfit(
        &mut self,
        pod: &Pod,
        message: &str,
        rejectors: BTreeSet<Rejector>,
        nomination: Nomination,
    ) {
        self.cluster.queue.refused(&pod.uid, rejectors, Instant::now(), &self.config);
        let nominated = match &nomination {
            Nomination::Keep => None,
            Nomination::Clear => Some(None),
            Nomination::Preempt(candidate) => Some(Some(candidate.node.as_str())),
        };
        if let Nomination::Preempt(candidate) = &nomination {
            self.observations.record(pod.full_name(), |outcome| outcome.preemptions += 1);
            writing::evict(&self.client, pod, candidate, &self.cluster.view).await;
        }
        self.report(pod, Failure { reason: "Unschedulable", message, nomination: nominated }).await;
    }

    async fn report(&mut self, pod: &Pod, failure: Failure<'_>) {
        if let Some(nomination) = failure.nomination {
            self.cluster.view.nominate(&pod.uid, nomination.map(str::to_owned));
        }
        self.observations.record(pod.full_name(), |outcome| {
            outcome.reason = Some(failure.reason);
            outcome.message = Some(failure.message.to_owned());
        });
        writing::report_failure(&self.client, pod, &failure).await;
    }
}
