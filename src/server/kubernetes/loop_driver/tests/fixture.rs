//! A planner on a small cluster, and the pods and nodes as its watches show them.

use super::*;
use stowage_scheduling::ids::{GpuUuid, NodeName};
use stowage_scheduling::verbs::wait::Reserve;
use tokio::sync::oneshot;

pub(crate) struct PlannerFixture {
    pub state: Arc<ServerState>,
    pub recorder: Arc<Recorder>,
    pub index: ClusterIndex,
    pub planner: LoopDriver,
    pub pods: Vec<Value>,
    unplannable_pods: Vec<(PodUid, PodKey, WaitReason)>,
}

impl PlannerFixture {
    /// Nodes with one 80 GiB GPU each, of which 72 GiB are allocatable.
    pub fn new(nodes: &[&str]) -> Self {
        Self::with_policy(Policy::default(), nodes)
    }

    pub fn with_policy(policy: Policy, nodes: &[&str]) -> Self {
        let state = ServerState::with_stopped_clock(policy);
        let recorder = Arc::new(Recorder::default());
        let mut index = ClusterIndex::default();
        let nodes = nodes
            .iter()
            .map(|name| serde_json::from_value(node(name)).unwrap());
        index.replace_nodes(&state, &nodes.collect::<Vec<_>>());
        index.replace_pods(&state, &[]);
        state.lead_from_the_start();
        let mut planner = LoopDriver::new(state.clone(), recorder.clone());
        // What a new leader supposes of pods that it finds has other tests.
        planner.control_loop = ControlLoop::with_known_refusals(SharedCluster(state.clone()));
        Self {
            state,
            recorder,
            index,
            planner,
            pods: Vec::new(),
            unplannable_pods: Vec::new(),
        }
    }

    /// This replica begins to lead, and its lists show this pod as another leader left it.
    pub fn take_over(&mut self, pod: Value) {
        self.state.set_tenure(Tenure::Standby);
        self.show(pod);
        self.state.lead_from_the_start();
    }

    pub fn show(&mut self, pod: Value) {
        let read = serde_json::from_value(pod.clone()).unwrap();
        self.index.apply_pod(&self.state, &read);
        self.pods
            .retain(|known| known["metadata"]["name"] != pod["metadata"]["name"]);
        self.pods.push(pod);
    }

    pub fn pod(&self, name: &str) -> Value {
        self.pods
            .iter()
            .find(|pod| pod["metadata"]["name"] == name)
            .unwrap()
            .clone()
    }

    /// kube-scheduler asks about the pod, which the watch need not have shown, and is told that no node fits.
    pub fn refuse(&mut self, pod: Value) {
        let pod = serde_json::from_value(pod).unwrap();
        let (uid, key) = objects::identity(&pod).unwrap();
        let demand =
            objects::classified_demand(&pod, |traits| self.state.classify(traits)).unwrap();
        let disruption = Some(objects::disruption(&pod, self.state.clock.wall()));
        let request = VerbRequest {
            uid: uid.clone(),
            key,
            demand,
            waiting: objects::waiting(&pod),
            disruption,
        };
        let mut cluster = self.state.cluster();
        cluster.apply(FilterAsked(request));
        let snapshot = cluster.snapshot();
        let asked = Some(snapshot.node_set(0..snapshot.nodes().len()));
        cluster.apply(FilterDecided {
            uid,
            answer: FilterAnswer::Refused {
                queried_nodes: asked,
            },
        });
    }

    pub fn delete(&mut self, name: &str) {
        let pod = serde_json::from_value(self.pod(name)).unwrap();
        self.index.delete_pod(&self.state, &pod);
    }

    /// Advances the clock, which does not advance by itself.
    pub fn advance_seconds(&mut self, seconds: u64) {
        let later = self.planner.now() + Millis::seconds(seconds);
        self.planner.control_loop.expire(later, true);
        self.planner.carry_out_acts();
    }

    /// Passes the next unplannable pods to the next tick.
    pub fn collect_unplannable_pods(&mut self) {
        let after = self.planner.control_loop.unplannable_pods_after().cloned();
        self.unplannable_pods = self
            .index
            .unplannable_pods_after(after.as_ref(), UNPLANNABLE_PER_TICK);
    }

    /// One tick, without waiting for its writes.
    pub(crate) fn begin_tick(&mut self) {
        let is_leading = self.state.leadership.is_open();
        let unplannable_pods = std::mem::take(&mut self.unplannable_pods);
        self.planner
            .tick(self.planner.now(), is_leading, unplannable_pods);
    }

    /// Runs one tick, shows its writes in the watch at once, and returns them as text.
    pub async fn tick(&mut self) -> Vec<String> {
        let mut written = self.tick_without_watch().await;
        for line in &written {
            if let Some((name, node)) = nomination(line) {
                self.show_nominated(name, node);
            }
            if !*self.recorder.is_unreachable.lock() {
                self.show_condition(line);
            }
        }
        self.planner.control_loop.remove_gates(self.planner.now());
        self.planner.carry_out_acts();
        written.extend(self.settle().await);
        written
    }

    /// What is written within so many seconds, a tick in each.
    pub(crate) async fn written_within(&mut self, seconds: u64) -> Vec<String> {
        let mut written = Vec::new();
        for _ in 0..seconds {
            self.advance_seconds(1);
            written.extend(self.tick().await);
        }
        written
    }

    /// Runs one tick whose writes the watch does not show yet, and returns them as text.
    pub(crate) async fn tick_without_watch(&mut self) -> Vec<String> {
        self.begin_tick();
        self.settle().await
    }

    /// Waits until the planning run has ended.
    pub(crate) async fn finish_planning_run(&mut self) {
        while self.planner.control_loop.is_planning() {
            self.planner.handle_next_result().await;
        }
    }

    /// Waits until the pressure check has ended. The evictions that it orders are not sent yet.
    pub(crate) async fn finish_pressure_check(&mut self) {
        while self.planner.control_loop.is_checking_pressure() {
            self.planner.handle_next_result().await;
        }
    }

    /// What is written until nothing is under way.
    pub async fn settle(&mut self) -> Vec<String> {
        self.planner.settle().await;
        self.recorder.written()
    }

    pub(crate) fn show_nominated(&mut self, name: &str, node: &str) {
        let mut pod = self.pod(name);
        pod["status"]["nominatedNodeName"] = json!(node);
        self.show(pod);
    }

    /// The condition that the line is about, if it is about one.
    pub(crate) fn show_condition(&mut self, line: &str) {
        let Some((name, what)) = line.split_once(": ") else {
            return;
        };
        let condition = if what.starts_with("hold") {
            let Some(written) = self.recorder.reservations.lock().get(name).cloned() else {
                return;
            };
            let Reservation {
                node,
                devices,
                victims,
                deadline,
            } = written;
            // The service's clock stands still, and is what deadlines are read by.
            let left = deadline.since(self.state.now());
            let deadline =
                jiff::Timestamp::now() + jiff::SignedDuration::from_millis(left.0 as i64);
            reserved(
                &json!({ "node": node, "devices": devices, "victims": victims, "deadline": deadline }),
            )
        } else if what.starts_with("end hold") {
            json!({ "type": "stowage.dev/Reserved", "status": "False" })
        } else if what.starts_with("evict") {
            evicted("True")
        } else if what == "stays" {
            evicted("False")
        } else {
            return;
        };
        // Some tests forget the pods that they show.
        let Some(mut pod) = self
            .pods
            .iter()
            .find(|pod| pod["metadata"]["name"] == name)
            .cloned()
        else {
            return;
        };
        let mut conditions = pod["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions.retain(|known| known["type"] != condition["type"]);
        conditions.push(condition);
        pod["status"]["conditions"] = conditions.into();
        self.show(pod);
    }
}

pub fn reserved(message: &Value) -> Value {
    json!({ "type": "stowage.dev/Reserved", "status": "True", "message": message.to_string() })
}

pub fn evicted(status: &str) -> Value {
    json!({ "type": "stowage.dev/DisruptionTarget", "status": status })
}

/// The pod and the node, if the line is about a nomination.
pub fn nomination(line: &str) -> Option<(&str, &str)> {
    let (name, what) = line.split_once(": ")?;
    let (_, node) = what.split_once("nominate ")?;
    Some((name, node.split(',').next()?))
}

pub fn node(name: &str) -> Value {
    let labels = json!({
        "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.product": "H100",
    });
    let allocatable =
        json!({ "cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": "72Gi" });
    json!({ "metadata": { "name": name, "labels": labels }, "status": { "allocatable": allocatable } })
}

/// A condition that reserves the node's only GPU for so long from now on, as the API server shows it.
pub(crate) fn reservation_observed(victims: &[&str], seconds: i64) -> Value {
    reservation_until(
        victims,
        &(jiff::Timestamp::now() + jiff::SignedDuration::from_secs(seconds)).to_string(),
    )
}

pub(crate) fn reservation_until(victims: &[&str], deadline: &str) -> Value {
    let devices = [stowage_scheduling::ids::GpuUuid::from_index(0)];
    let message =
        json!({ "node": "n", "devices": devices, "victims": victims, "deadline": deadline });
    json!([reserved(&message)])
}

pub fn uid(name: &str) -> PodUid {
    PodUid::parse(&format!("uid-{name}")).unwrap()
}

pub fn waiting(name: &str, gib: u64, priority: i32) -> Value {
    let resources = json!({ "limits": { "stowage.dev/vram": format!("{gib}Gi") } });
    json!({
        "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}"), "labels": {} },
        "spec": {
            "schedulerName": "stowage", "priority": priority,
            "containers": [{ "name": "engine", "resources": resources }],
        },
        "status": {},
    })
}

pub fn gated(name: &str, gib: u64, priority: i32) -> Value {
    let mut pod = waiting(name, gib, priority);
    pod["spec"]["schedulingGates"] = json!([{ "name": "stowage.dev/plan" }]);
    pod
}

pub fn bound(name: &str, node: &str, gib: u64, priority: i32) -> Value {
    let mut pod = waiting(name, gib, priority);
    pod["spec"]["nodeName"] = json!(node);
    pod["metadata"]["annotations"] =
        json!({ "stowage.dev/devices": "0", "stowage.dev/vram-granted": (gib << 30).to_string() });
    let devices = stowage_scheduling::ids::GpuUuid::from_index(0);
    pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(devices.as_str());
    pod
}

pub fn member(name: &str, gib: u64, group: &str, size: u32) -> Value {
    let mut pod = gated(name, gib, 100);
    pod["metadata"]["labels"]["stowage.dev/group"] = json!(group);
    pod["metadata"]["annotations"] = json!({ "stowage.dev/group-min": size.to_string() });
    pod
}

pub fn reservation_for(bench: &PlannerFixture, name: &str) -> Reservation {
    bench
        .state
        .cluster()
        .ledger()
        .reservation_status_of(&uid(name))
        .unwrap()
        .reservation
}

pub(crate) fn reserve_as_the_preempt_verb(bench: &PlannerFixture, name: &str, victim: &str) {
    let mut cluster = bench.state.cluster();
    let reservation = Reservation {
        node: NodeName::parse("n").unwrap(),
        devices: [GpuUuid::from_index(0)].into(),
        victims: [uid(victim)].into(),
        deadline: cluster.ledger().now() + Millis::seconds(60),
    };
    cluster
        .apply(Reserve {
            uid: uid(name),
            reservation,
        })
        .unwrap();
}

/// The pod's next write is under way, and answered when the test answers.
pub(crate) async fn stall_write(bench: &mut PlannerFixture) -> oneshot::Sender<()> {
    let (answer, stalled) = oneshot::channel();
    *bench.recorder.stalled_status_write.lock() = Some(stalled);
    bench.begin_tick();
    bench.finish_planning_run().await;
    while bench.recorder.stalled_status_write.lock().is_some() {
        tokio::task::yield_now().await;
    }
    answer
}
