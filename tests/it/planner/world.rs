//! The cluster of these tests, and pods to put there.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use stowage_kubernetes_objects as objects;
use stowage_lab::demo::machine::DemoMachine;
use stowage_lab::demo::scheduler::observations::Verb;
use stowage_lab::demo::setup::Setup;
use stowage_lab::demo::termination;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;

/// Longer than anything here takes on a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(90);

/// GPUs of 80 GiB, of which 72 are allocatable.
pub const fn machine(node: &'static str, gpus: u32) -> DemoMachine {
    DemoMachine {
        node,
        model: "H100",
        gpu_count: gpus,
        gib_per_gpu: 80,
        models: &[],
    }
}

pub struct PlannerCluster {
    setup: Setup,
    policy: Policy,
}

impl PlannerCluster {
    pub async fn new(machines: &[DemoMachine]) -> Self {
        Self::with_policy(Policy::default(), machines).await
    }

    /// Reservations end so soon after their victims should be gone that a test can wait for it.
    pub async fn with_short_deadlines(machines: &[DemoMachine]) -> Self {
        let mut policy = Policy::default();
        policy.preemption.reservation_slack = Millis::seconds(3);
        Self::with_policy(policy, machines).await
    }

    async fn with_policy(mut policy: Policy, machines: &[DemoMachine]) -> Self {
        // An agent's last report stays valid, however late a busy machine makes the next one.
        policy.telemetry.fresh = Millis::seconds(24 * 3600);
        policy.telemetry.stale = Millis::seconds(48 * 3600);
        Self {
            setup: Setup::with_policy(policy.clone(), machines).await.unwrap(),
            policy,
        }
    }

    pub fn setup(&self) -> &Setup {
        &self.setup
    }

    /// Kills Stowage, and starts another that knows only what the API server keeps.
    pub async fn restart(self) -> Self {
        let setup = self
            .setup
            .restart_stowage(self.policy.clone())
            .await
            .unwrap();
        Self { setup, ..self }
    }

    pub async fn stop(self) {
        self.setup.stop().await.unwrap();
    }

    pub fn create(&self, pod: Value) {
        self.setup.api.create("pods", pod).unwrap();
    }

    /// Creates them one after the other, each when the one before runs: their GPUs follow from the order.
    pub async fn fill(&self, pods: impl IntoIterator<Item = Value>) {
        for pod in pods {
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            self.create(pod);
            self.wait_for(&format!("{name} runs"), |world| {
                world.pod(&name)?["status"]["phase"]
                    .as_str()
                    .map(str::to_owned)
                    .filter(|phase| phase == "Running")
            })
            .await;
        }
    }

    pub fn pod(&self, name: &str) -> Option<Value> {
        self.setup
            .api
            .get(&format!("pods/default/{name}"))
            .map(|pod| Value::clone(&pod))
    }

    pub fn pods(&self) -> BTreeSet<String> {
        let pods = self.setup.api.list("pods").into_iter();
        pods.map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Pods that are being deleted.
    pub fn terminating_pods(&self) -> BTreeSet<String> {
        let leaves = |name: &String| {
            self.pod(name)
                .is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
        };
        self.pods().into_iter().filter(leaves).collect()
    }

    /// Ends the pods that are being deleted, and returns their names.
    pub fn finish_termination(&self) -> BTreeSet<String> {
        let leaving = self.terminating_pods();
        leaving.iter().for_each(|name| {
            self.setup
                .api
                .delete_now(&format!("pods/default/{name}"))
                .unwrap()
        });
        leaving
    }

    pub fn node_of(&self, name: &str) -> Option<String> {
        Some(self.pod(name)?["spec"]["nodeName"].as_str()?.to_owned())
    }

    pub fn devices_of(&self, name: &str) -> Option<String> {
        Some(
            self.pod(name)?["metadata"]["annotations"]["stowage.dev/devices"]
                .as_str()?
                .to_owned(),
        )
    }

    pub fn condition(&self, name: &str, kind: &str) -> Option<Value> {
        let pod = self.pod(name)?;
        let mut conditions = pod["status"]["conditions"].as_array()?.iter();
        conditions
            .find(|condition| condition["type"] == kind)
            .cloned()
    }

    pub fn is_refused(&self, name: &str) -> bool {
        self.condition(name, "PodScheduled")
            .is_some_and(|condition| condition["reason"] == "Unschedulable")
    }

    pub fn is_gated(&self, name: &str) -> bool {
        let gates = self
            .pod(name)
            .map(|pod| pod["spec"]["schedulingGates"].clone());
        gates.is_some_and(|gates| gates.as_array().is_some_and(|gates| !gates.is_empty()))
    }

    /// The reason in the condition that says how far the planner is with a gated pod.
    pub fn planned(&self, name: &str) -> Option<String> {
        Some(
            self.condition(name, objects::PLACED_CONDITION)?["reason"]
                .as_str()?
                .to_owned(),
        )
    }

    pub fn reservation_count(&self) -> u64 {
        self.setup
            .stowage
            .state
            .cluster()
            .ledger()
            .totals()
            .reservations
    }

    /// The number of accepted writes of a kind. A reservation whose pod was bound counts two: taken, and ended.
    pub fn writes(&self, kind: &str) -> u64 {
        self.setup
            .stowage
            .state
            .metrics
            .writes
            .with_label_values(&[kind, "written"])
            .get()
    }

    /// So many writes of a kind are accepted in the end, and no more. They are counted when their answers are in, and what
    /// follows from a write may be seen before that.
    pub async fn wait_for_writes(&self, kind: &str, count: u64) {
        self.wait_until(&format!("{count} writes of {kind} are counted"), |world| {
            world.writes(kind) >= count
        })
        .await;
        assert_eq!(self.writes(kind), count, "{kind}");
    }

    /// The scheduler's calls about a pod: the verb, and how many nodes it was about.
    pub fn calls(&self, name: &str) -> Vec<(Verb, usize)> {
        let calls = self
            .setup
            .scheduler
            .observations()
            .calls_for(&format!("default/{name}"));
        calls
            .into_iter()
            .map(|call| (call.verb, call.nodes))
            .collect()
    }

    /// Polls until there is an answer.
    pub async fn wait_for<T>(&self, what: &str, mut look: impl FnMut(&Self) -> Option<T>) -> T {
        let looked = async {
            loop {
                match look(self) {
                    Some(answer) => return answer,
                    None => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        let Ok(answer) = tokio::time::timeout(TEST_TIMEOUT, looked).await else {
            let pods: Vec<Value> = self
                .pods()
                .iter()
                .filter_map(|name| self.pod(name))
                .collect();
            panic!("it never came that {what}: {pods:#?}");
        };
        answer
    }

    pub async fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        self.wait_for(what, |world| is_so(world).then_some(()))
            .await;
    }

    /// Its node, once it is bound.
    pub async fn wait_until_bound(&self, name: &str) -> String {
        self.wait_for(&format!("{name} is bound"), |world| world.node_of(name))
            .await
    }

    /// The scheduler has seen every pod as it is now, and has nothing to do.
    pub async fn wait_until_scheduler_is_idle(&self) {
        let version = |pod: &Value| {
            pod["metadata"]["resourceVersion"]
                .as_str()
                .unwrap()
                .parse()
                .unwrap()
        };
        self.wait_until("the scheduler rests", |world| {
            let progress = world.setup.scheduler.observations().progress();
            let latest: u64 = world
                .setup
                .api
                .list("pods")
                .iter()
                .map(|pod| version(pod))
                .max()
                .unwrap_or(0);
            progress.is_idle && progress.pods_version >= latest
        })
        .await;
    }

    /// Every agent has reported so often: whatever follows from a report would have followed.
    pub async fn wait_for_reports(&self) {
        let latest = |world: &Self| -> BTreeMap<NodeName, u64> {
            let all = world.setup.stowage.board.all().into_iter();
            all.map(|(node, latest)| (node, latest.report.sequence))
                .collect()
        };
        let nodes = self.setup.api.list("nodes").len();
        let before = self.wait_for("every agent has reported", |world| {
            Some(latest(world)).filter(|known| known.len() == nodes)
        });
        let before = before.await;
        self.wait_until("the agents report", |world| {
            latest(world)
                .iter()
                .all(|(node, sequence)| *sequence >= before[node] + 6)
        })
        .await;
    }
}

/// Preemptible, and not an engine.
pub fn job(name: &str, gib: u64) -> Value {
    pod(name, gib, -10)
}

/// Of a priority that may preempt jobs.
pub fn serving(name: &str, gib: u64) -> Value {
    pod(name, gib, 100)
}

fn pod(name: &str, gib: u64, priority: i64) -> Value {
    let resources =
        json!({ "limits": { "stowage.dev/vram": format!("{gib}Gi") }, "requests": { "cpu": "1" } });
    json!({
        "metadata": { "name": name, "namespace": "default", "annotations": {}, "labels": {} },
        "spec": {
            "schedulerName": "stowage",
            "priority": priority,
            "terminationGracePeriodSeconds": 2,
            "containers": [{ "name": "engine", "image": "engine", "resources": resources }],
        },
    })
}

/// Behind the planner's gate.
pub fn gated(mut pod: Value) -> Value {
    pod["spec"]["schedulingGates"] = json!([{ "name": objects::PLAN_GATE }]);
    pod
}

/// It takes its time to die, and its processes take theirs to give memory back.
pub fn with_slow_termination(mut pod: Value) -> Value {
    pod["metadata"]["annotations"][termination::TERMINATION_MILLIS] = json!("1500");
    pod["metadata"]["annotations"][termination::MEMORY_DELAY_MILLIS] = json!("1500");
    pod
}

/// It dies when the test says so, and not before.
pub fn with_termination_on_request(mut pod: Value) -> Value {
    pod["metadata"]["annotations"][termination::TERMINATION_MILLIS] = json!(termination::FOR_EVER);
    pod
}

pub fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}
