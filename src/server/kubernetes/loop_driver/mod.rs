//! Drives the core's control loop over the API server: passes it the time and the answers, and carries out its acts. Each write is
//! a task, and plans and checks for engine pressure run on threads of their own, so nothing else waits for them.
//!
//! Nothing here decides: what to write is the loop's, and whether it still holds is asked of the core when it is sent
//! ([`mod@carry_out`]).

mod carry_out;
mod notices;

#[cfg(test)]
mod tests;

use crate::kubernetes::watch::STORAGE_RESOURCES;
use crate::service::{HeavyWork, ServerState, SharedCluster, WorkKind};
use carry_out::carry_out;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::control_loop::{
    ControlLoop, EdgeFacts, FoundPressure, LoopAction, PlanningJob, PodWrite, RunEnd, WriteOutcome,
};
use stowage_scheduling::ids::{PodKey, PodUid};
use stowage_scheduling::planning::{Plan, WaitReason};
use stowage_scheduling::policy::ConflictRule;
use stowage_scheduling::units::Moment;
use tokio::task::{Id, JoinHandle, JoinSet};
use tracing::error;

pub(super) struct LoopDriver {
    state: Arc<ServerState>,
    control_plane: Arc<dyn ControlPlane>,
    pub control_loop: ControlLoop<SharedCluster>,
    writes: JoinSet<WriteOutcome>,
    /// The writes in progress.
    writes_in_progress: FxHashMap<Id, PodWrite>,
    plan: PlanTask,
    pressure_check: Option<JoinHandle<FoundPressure>>,
    /// Name of the pod on which planning panics, in tests.
    #[cfg(test)]
    panics_on: Option<&'static str>,
}

impl LoopDriver {
    pub fn new(state: Arc<ServerState>, control_plane: Arc<dyn ControlPlane>) -> Self {
        Self {
            control_loop: ControlLoop::new(SharedCluster(state.clone())),
            state,
            control_plane,
            writes: JoinSet::new(),
            writes_in_progress: FxHashMap::default(),
            plan: PlanTask::default(),
            pressure_check: None,
            #[cfg(test)]
            panics_on: None,
        }
    }

    /// `unplannable_pods` are the next ones after [`ControlLoop::unplannable_pods_after`].
    pub fn tick(
        &mut self,
        now: Moment,
        is_leading: bool,
        unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>,
    ) {
        let facts = match is_leading {
            true => self.facts(now, unplannable_pods),
            false => EdgeFacts::default(),
        };
        self.control_loop.tick(now, is_leading, facts);
        self.carry_out_acts();
        if is_leading {
            let waiting = self.state.cluster().ledger().pending_count();
            self.state.metrics.planner.waiting.set(waiting as i64);
        }
    }

    fn facts(&self, now: Moment, unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>) -> EdgeFacts {
        let conflict_rule = self.state.cluster().ledger().policy().conflicts;
        let victims = match conflict_rule {
            ConflictRule::EvictUnstarted => self.state.over_allocations().victims(now),
            ConflictRule::Report => Vec::new(),
        };
        EdgeFacts {
            over_allocation_victims: victims.into_iter().map(|one| one.uid).collect(),
            lacks_volumes: STORAGE_RESOURCES
                .iter()
                .any(|what| self.state.refused_reads.is_refused(what)),
            unplannable_pods,
        }
    }

    /// Waits until a write, the planning run or a pressure check ends, and handles its result. Never ends while none is in
    /// progress.
    pub async fn handle_next_result(&mut self) {
        tokio::select! {
            biased;
            outcome = next_outcome(&mut self.writes, &mut self.writes_in_progress) => {
                self.control_loop.handle_write_outcome(outcome, self.now());
            }
            ended = self.plan.end() => {
                self.control_loop.handle_run_end(ended, self.state.leadership.is_open(), self.now());
            }
            found = end_of_pressure_check(&mut self.pressure_check) => self.control_loop.handle_pressure(found),
        }
        self.carry_out_acts();
    }

    /// Handles what is in progress until nothing is.
    #[cfg(test)]
    pub async fn settle(&mut self) {
        self.carry_out_acts();
        while !self.control_loop.is_idle() {
            self.handle_next_result().await;
        }
    }

    /// Carries out the loop's acts.
    pub fn carry_out_acts(&mut self) {
        while let Some(act) = self.control_loop.next_action() {
            match act {
                LoopAction::Write(write) => self.send(write),
                LoopAction::Event(event) => self.control_plane.record_event(event),
                LoopAction::Plan(job) => self.begin_plan(job),
                LoopAction::StopPlanning => self.plan.stop(),
                LoopAction::CheckPressure(job) => {
                    let work = &self.state.heavy_work;
                    let check = work.spawn_in_background(WorkKind::Relief, move || job.run());
                    self.pressure_check = Some(check);
                }
                LoopAction::Record(notice) => self.report(notice),
            }
        }
    }

    fn send(&mut self, write: PodWrite) {
        let sent = write.clone();
        let (state, control_plane) = (self.state.clone(), self.control_plane.clone());
        let task = self
            .writes
            .spawn(async move { carry_out(write, &state, &*control_plane).await });
        self.writes_in_progress.insert(task.id(), sent);
    }

    fn begin_plan(&mut self, job: PlanningJob) {
        #[cfg(test)]
        let panics_on = self.panics_on;
        self.plan.begin(&self.state.heavy_work, move |is_stopped| {
            #[cfg(test)]
            assert!(
                !job.pods()
                    .iter()
                    .any(|pod| Some(&*pod.key.name) == panics_on),
                "planted"
            );
            job.run(is_stopped)
        });
    }

    /// The ledger's clock, by which acts are due.
    fn now(&self) -> Moment {
        self.state.cluster().ledger().now()
    }
}

/// The result of the next write that ends. Never ends while none is in progress.
async fn next_outcome(
    writes: &mut JoinSet<WriteOutcome>,
    writes_in_progress: &mut FxHashMap<Id, PodWrite>,
) -> WriteOutcome {
    loop {
        let Some(done) = writes.join_next_with_id().await else {
            return std::future::pending().await;
        };
        let id = match &done {
            Ok((id, _)) => *id,
            Err(error) => error.id(),
        };
        let Some(write) = writes_in_progress.remove(&id) else {
            continue;
        };
        return done.map_or_else(|_| write.into_panicked(), |(_, outcome)| outcome);
    }
}

/// Result of the pressure check in progress, `None` if it failed. Never ends while none is in progress.
async fn end_of_pressure_check(
    pressure_check: &mut Option<JoinHandle<FoundPressure>>,
) -> Option<FoundPressure> {
    let Some(task) = pressure_check else {
        return std::future::pending().await;
    };
    let found = task.await;
    *pressure_check = None;
    found
        .inspect_err(|error| error!(%error, "could not check the engines for pressure"))
        .ok()
}

/// The planning run in progress. One that is not needed any more is stopped: the process does not end before its threads do.
#[derive(Debug, Default)]
struct PlanTask {
    task: Option<JoinHandle<Plan>>,
    /// When set, the run ends at the next node that it considers.
    stop: Arc<AtomicBool>,
}

impl PlanTask {
    /// `plan` gets a function that says whether to stop. It does not run on the threads that answer filter.
    fn begin(
        &mut self,
        work: &HeavyWork,
        plan: impl FnOnce(&dyn Fn() -> bool) -> Plan + Send + 'static,
    ) {
        self.stop = Arc::default();
        let stop = self.stop.clone();
        let plan = move || plan(&|| stop.load(Ordering::Relaxed));
        self.task = Some(work.spawn_stoppable(WorkKind::Plan, self.stop.clone(), plan));
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Never ends while no run is in progress.
    async fn end(&mut self) -> RunEnd {
        let Some(task) = &mut self.task else {
            return std::future::pending().await;
        };
        let done = task.await;
        self.task = None;
        done.map_or(RunEnd::Failed, RunEnd::Planned)
    }
}

impl Drop for PlanTask {
    fn drop(&mut self) {
        self.stop();
    }
}
