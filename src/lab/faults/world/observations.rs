//! What the API server's objects and the machines show after each step, and what must not be among it.

use super::super::machines::GPU_CAPACITY_BYTES;
use super::super::oracle::{
    allocations, granted_per_gpu, is_engine, is_granted_exclusive, is_starting, over_allocated,
    pod_name, requested_gpus, reservations_by_pod,
};
use super::*;

/// Beyond the latest landing of a Binding: how long one is written after its decision, an agent's period, and how long a report is
/// fresh.
const MAX_BINDING_DECISION_AGE: Duration = Duration::from_secs(18);

/// By the shortest start that the policies expect, an engine has its GPU's start gate for twice 20 s at least, from when its Binding
/// is known to have landed. The oracle may see a landing some seconds after the leader does.
const MIN_START_GATE: Duration = Duration::from_secs(35);

impl FaultyCluster {
    pub(super) fn observe(&mut self) {
        self.take_task_reports();
        self.observe_bindings(&self.pods());
        self.check_reported_bindings();
        let pods = self.pods_on_machines();
        for (pod, devices) in reservations_by_pod(&pods) {
            if self
                .observed_reservations
                .insert((pod.clone(), devices.clone()))
            {
                self.tally.reservations += 1;
                self.log(format!("{pod} holds {devices:?}"));
            }
        }
        self.observe_writes();
        if self.is_new_term() {
            self.confirm_listed_reservations();
        }
        self.check_late_reservations(&pods);
        for pod in &pods {
            self.observe_eviction(pod);
        }
        self.check_allocations(&pods);
        self.record_term();
        self.last_check = Instant::now();
        self.tally.steps += 1;
    }

    /// Records the writes of pods since the last check: a reservation may be over by the next one.
    pub(super) fn observe_writes(&mut self) {
        let since = std::mem::replace(&mut self.checked_revision, self.api.revision());
        let (before, after): (Vec<_>, Vec<_>) =
            self.api.writes_after("pods", since).into_iter().unzip();
        let gone = before
            .into_iter()
            .zip(&after)
            .filter(|(_, after)| after.is_none());
        for uid in
            gone.filter_map(|(before, _)| before?["metadata"]["uid"].as_str().map(str::to_owned))
        {
            self.deleted_at.insert(uid, Instant::now());
        }
        self.observe_reservations(&after.into_iter().flatten().collect::<Vec<_>>());
    }

    fn take_task_reports(&mut self) {
        let task_notes = std::mem::take(&mut *self.task_reports.lock());
        self.lines.extend(task_notes.lines);
        for broken in task_notes
            .violations
            .into_iter()
            .chain(self.writes.bindings.take_violations())
        {
            self.fail(broken);
        }
        (0..task_notes.lost_calls).for_each(|_| self.tally.count_fault(FaultKind::LostCall));
        for (verb, count) in task_notes.answers {
            *self.tally.answers.entry(verb).or_default() += count;
        }
        for (count, preemptor) in task_notes.guarded_victims {
            self.check_disruptions(count, &preemptor);
        }
        for (uid, priority, preemptor) in task_notes.preempted_victims {
            self.record_preemption(uid, priority, preemptor);
        }
        self.reported_bindings.extend(task_notes.reported_bindings);
    }

    pub(super) fn fail(&mut self, what: String) {
        self.log(format!("BROKEN: {what}"));
        self.violations.push(what);
    }

    fn observe_bindings(&mut self, pods: &[Arc<Value>]) {
        for pod in pods {
            let written = &pod["metadata"]["annotations"];
            let (Some(node), Some(devices)) = (
                pod["spec"]["nodeName"].as_str(),
                written["stowage.dev/devices"].as_str(),
            ) else {
                continue;
            };
            let placement = format!("{node}/{devices}");
            let uid = pod["metadata"]["uid"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            match self
                .observed_placements
                .insert(uid.clone(), placement.clone())
            {
                None => {
                    self.bound_at.insert(uid, Instant::now());
                    self.tally.bound += 1;
                    let epoch = written["stowage.dev/leader-epoch"]
                        .as_str()
                        .unwrap_or("none");
                    if self.committed_in_another_term(Some(epoch)) {
                        self.check_commit(&format!("the Binding of {}", pod_name(pod)));
                    }
                    self.tally
                        .epochs
                        .insert(format!("{}: {epoch}", self.history.seed));
                    self.log(format!(
                        "{} is bound to {placement} in {epoch}",
                        pod_name(pod)
                    ));
                    self.check_grant(pod);
                    self.check_machine(pod);
                    let there = self.pods_on_machines();
                    // One that lands late may name GPUs that are gone with their machine.
                    if there
                        .iter()
                        .any(|one| one["metadata"]["uid"] == pod["metadata"]["uid"])
                    {
                        self.check_memory(pod, &there);
                        self.check_start(pod, &there);
                    }
                }
                Some(before) if before != placement => {
                    self.fail(format!("{}: {before} became {placement}", pod_name(pod)));
                }
                Some(_) => {}
            }
        }
    }

    /// A pod that kube-scheduler was told is bound is, or was.
    fn check_reported_bindings(&mut self) {
        for ReportedBinding { pod, uid, node } in std::mem::take(&mut self.reported_bindings) {
            let observed_node = self
                .observed_placements
                .get(&uid)
                .and_then(|placement| placement.split('/').next());
            if observed_node != Some(&node) {
                let lie = format!(
                    "{pod} was said to be bound to {node}, and is bound to {observed_node:?}"
                );
                self.fail(lie);
            }
        }
    }

    /// A Binding grants what its own pod asks for, not what another pod of its name asked for.
    fn check_grant(&mut self, pod: &Value) {
        let ((gpus, bytes), granted) = (requested_gpus(pod), granted_per_gpu(pod));
        let has = super::super::oracle::devices_of(pod).map_or(0, |(_, gpus)| gpus.len() as u64);
        let is_right = gpus == has
            && granted.is_some_and(|granted| granted == bytes || is_granted_exclusive(pod));
        if !is_right {
            self.fail(format!(
                "{} asks for {gpus} × {bytes} bytes and is granted {has} × {granted:?}",
                pod_name(pod)
            ));
        }
    }

    /// A process that has outlived its pod, and that sound agents have shown for long enough, has its memory: no Binding may
    /// promise it to others.
    fn check_memory(&mut self, pod: &Value, pods: &[Arc<Value>]) {
        if !self.has_agents || self.has_proxy {
            return;
        }
        let long_ago = clock::elapsed()
            .saturating_sub(self.times.max_commit_delay() + MAX_BINDING_DECISION_AGE);
        let since = |started: Instant| started.duration_since(self.started_at) <= long_ago;
        let knows = self
            .replicas
            .iter()
            .flatten()
            .all(|replica| since(replica.started));
        let Some((node, gpus)) = super::super::oracle::devices_of(pod) else {
            return;
        };
        let is_sound = self
            .agents
            .iter()
            .enumerate()
            .any(|(index, agent)| node_name(index) == node && agent.is_healthy_since(long_ago));
        if !knows || !is_sound {
            return;
        }
        let promises = allocations(pods);
        let mut wrong = Vec::new();
        for gpu in gpus {
            let left_over = self
                .machines
                .processes_on(&node, gpu)
                .filter(|(_, process)| {
                    process
                        .ended_and_freed
                        .is_some_and(|(ended, _)| ended <= long_ago)
                });
            let left_over: u64 = left_over.map(|(_, process)| process.used_per_gpu).sum();
            let promised: u64 = promises
                .get(&format!("{node}/{gpu}"))
                .into_iter()
                .flatten()
                .map(|part| part.usable_bytes)
                .sum();
            if left_over > 0 {
                self.tally.bound_beside_ended_process += 1;
            }
            if left_over > 0 && promised + left_over > GPU_CAPACITY_BYTES {
                wrong.push(format!(
                    "{node}/{gpu} has {left_over} bytes of ended pods, which its agent shows, and {promised} are promised"
                ));
            }
        }
        wrong.into_iter().for_each(|what| self.fail(what));
    }

    /// No engine begins to start on a GPU beside one that has begun a moment ago and is not ready.
    fn check_start(&mut self, pod: &Value, pods: &[Arc<Value>]) {
        if !self.features.has_engines || self.has_proxy || !is_engine(pod) {
            return;
        }
        let Some((node, gpus)) = super::super::oracle::devices_of(pod) else {
            return;
        };
        let starts_too = |other: &&Arc<Value>| {
            let uid = other["metadata"]["uid"].as_str().unwrap_or_default();
            let is_new = self
                .bound_at
                .get(uid)
                .is_some_and(|at| at.elapsed() < MIN_START_GATE);
            let is_there =
                super::super::oracle::devices_of(other).is_some_and(|(node_of_other, on)| {
                    node_of_other == node && on.iter().any(|gpu| gpus.contains(gpu))
                });
            is_new && is_there && is_starting(other) && uid != pod["metadata"]["uid"]
        };
        let beside: Vec<String> = pods
            .iter()
            .filter(starts_too)
            .map(|other| pod_name(other))
            .collect();
        self.tally.engine_starts += 1;
        if !beside.is_empty() {
            self.fail(format!(
                "{} begins to start on a GPU of {beside:?}, which start",
                pod_name(pod)
            ));
        }
    }

    fn check_allocations(&mut self, pods: &[Arc<Value>]) {
        for (gpu, on_it) in over_allocated(pods) {
            let what = format!("{gpu} is promised twice: {on_it:?}");
            if !self.observed_over_allocations.insert(what.clone()) {
                continue;
            }
            if self.has_proxy {
                self.log(what);
                self.tally.over_allocated_by_proxy += 1;
            } else {
                self.fail(what);
            }
        }
    }

    pub(super) fn record_audit(&mut self, replica: &RunningReplica) {
        let found = audit_count(replica, "stowage_gpu_conflicts_detected_total");
        if !self.has_proxy && found > 0 {
            self.fail(format!(
                "{} reports {found} conflicts between bound pods that are none",
                replica.client
            ));
        }
        self.tally.over_allocations_reported += found;
        self.tally.over_allocation_evictions += replica
            .state
            .metrics
            .over_allocations
            .evictions
            .with_label_values(&["written"])
            .get();
    }
}

/// What a replica's audit says of bound pods that cannot all be where they are.
pub(super) fn audit_count(replica: &RunningReplica, family: &str) -> u64 {
    let kinds =
        ["overcommitted", "exclusive-shared"].map(|kind| format!("{family}{{kind=\"{kind}\"}}"));
    let text = replica.state.metrics.render();
    let lines = text
        .lines()
        .filter(|line| kinds.iter().any(|kind| line.starts_with(kind)));
    lines
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
        .sum()
}
