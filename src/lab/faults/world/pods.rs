//! What happens to pods: they arrive, start, end, are edited, deleted and recreated.

use super::budgets::is_guarded;
use super::*;
use tokio::task::JoinHandle;

/// The most pods that wait at once.
const MAX_WAITING_PODS: usize = 16;

/// A pod that is none of Stowage's, and how often its status changes.
const CHANGING_POD: &str = "changing";
const STATUS_CHANGE_INTERVAL: Duration = Duration::from_millis(300);

/// Pods of a group, which are bound all or not at all.
pub(crate) const GROUP_SIZE: usize = 2;

/// A pod that was created under the name of another. kube-scheduler takes it up soon.
pub(crate) struct RecreatedPod {
    pub pod: String,
    /// It can run nowhere else.
    pub node: Option<String>,
    pub at: Instant,
}

/// The template that a pod was created from.
fn template(pod: &Value) -> Value {
    let mut spec = pod["spec"].clone();
    spec.as_object_mut()
        .expect("a pod has one")
        .remove("nodeName");
    let mut annotations = json!({});
    for annotation in ["stowage.dev/gpus", "stowage.dev/exclusive"] {
        if pod["metadata"]["annotations"][annotation].is_string() {
            annotations[annotation] = pod["metadata"]["annotations"][annotation].clone();
        }
    }
    let metadata = json!({ "name": pod_name(pod), "annotations": annotations, "labels": pod["metadata"]["labels"] });
    json!({ "metadata": metadata, "spec": spec })
}

/// For how many steps a pod runs in the mean. What a budget guards serves for long.
fn mean_lifetime_steps(pod: &Value) -> usize {
    if is_guarded(pod) { 800 } else { 40 }
}

pub(crate) fn is_group_member(pod: &Value) -> bool {
    pod["metadata"]["labels"]["stowage.dev/group"].is_string()
}

/// Creates a pod that asks for no GPU, and lets it change until the task is aborted.
pub(crate) fn keep_changing(api: &Arc<ApiServer>) -> JoinHandle<()> {
    let spec = json!({ "schedulerName": "default-scheduler", "containers": [{ "name": "other", "image": "other" }] });
    api.create(
        "pods",
        json!({ "metadata": { "name": CHANGING_POD }, "spec": spec }),
    )
    .expect("its name is free");
    let api = api.clone();
    tokio::spawn(async move {
        for restarts in 1.. {
            tokio::time::sleep(STATUS_CHANGE_INTERVAL).await;
            let status = json!({ "status": { "message": format!("restarted {restarts} times") } });
            api.patch_status(&format!("pods/default/{CHANGING_POD}"), &status)
                .expect("it is there");
        }
    })
}

impl FaultyCluster {
    /// All pods that are meant for Stowage.
    pub(super) fn pods(&self) -> Vec<Arc<Value>> {
        self.api
            .list("pods")
            .into_iter()
            .filter(|pod| pod["metadata"]["name"] != CHANGING_POD)
            .collect()
    }

    pub(super) fn create_drawn_pods(&mut self) {
        if self.waiting_pods().len() >= MAX_WAITING_PODS || self.dice.below(3) > 0 {
            return;
        }
        self.pods_created += 1;
        let name = format!("p{:03}", self.pods_created);
        if self.features.has_groups && self.dice.below(8) == 0 {
            let group = format!("g{:03}", self.pods_created);
            return (0..GROUP_SIZE)
                .for_each(|member| self.create_pod(&format!("{name}-{member}"), Some(&group)));
        }
        self.create_pod(&name, None);
    }

    fn create_pod(&mut self, name: &str, group: Option<&str>) {
        let gib = [10, 20, 40, 45, 60, 72][self.dice.below(6)];
        let mut annotations = json!({});
        let mut requested_gib = gib;
        if self.dice.below(6) == 0 {
            annotations["stowage.dev/gpus"] = json!("2");
            requested_gib = 2 * gib;
        }
        if self.dice.below(6) == 0 {
            annotations["stowage.dev/exclusive"] = json!("true");
        }
        let priority = [-10, -10, 0, 100, 200][self.dice.below(5)];
        let is_gated = self.dice.below(5) < 2 || group.is_some();
        let gates = if is_gated {
            json!([{ "name": "stowage.dev/plan" }])
        } else {
            json!([])
        };
        let resources = json!({ "limits": { "stowage.dev/vram": format!("{requested_gib}Gi") }, "requests": { "cpu": "1" } });
        let spec = json!({
            "schedulerName": "stowage", "priority": priority, "schedulingGates": gates,
            "terminationGracePeriodSeconds": 2,
            "containers": [{ "name": "engine", "image": "engine", "resources": resources }],
        });
        let mut labels = json!({});
        if self.features.has_budget && priority < 0 && self.dice.below(2) == 0 {
            labels["guarded"] = json!("yes");
        }
        if let Some(group) = group {
            labels["stowage.dev/group"] = json!(group);
            annotations["stowage.dev/group-min"] = json!(GROUP_SIZE.to_string());
        }
        let mut metadata = json!({ "name": name, "annotations": annotations, "labels": labels });
        if self.dice.below(60) == 0 && self.try_inject(FaultKind::Finalizer) {
            metadata["finalizers"] = json!(["example.com/never"]);
        }
        self.api
            .create("pods", json!({ "metadata": metadata, "spec": spec }))
            .expect("its name is free");
    }

    pub(super) fn waiting_pods(&self) -> Vec<Arc<Value>> {
        let waits = |pod: &Arc<Value>| {
            pod["spec"]["nodeName"].is_null() && pod["metadata"]["deletionTimestamp"].is_null()
        };
        self.pods().into_iter().filter(waits).collect()
    }

    /// Edits or recreates a random pod, as its owner may.
    pub(super) fn edit_and_recreate_pods(&mut self) {
        if self.dice.below(50) == 0
            && let Some(name) = self.random_waiting_pod()
            && self.try_inject(FaultKind::Edit)
        {
            let note = format!("{}", self.dice.below(1000));
            let exclusive = if self.dice.below(2) == 0 {
                json!("true")
            } else {
                Value::Null
            };
            let annotations =
                json!({ "example.com/note": note, "stowage.dev/exclusive": exclusive });
            self.log(format!("{name} is edited: {annotations}"));
            let patch = json!({ "metadata": { "annotations": annotations } });
            self.api
                .patch(&format!("pods/default/{name}"), &patch)
                .expect("it is there");
        }
        if self.dice.below(40) == 0
            && let Some(name) = self.pod_to_recreate()
            && self.try_inject(FaultKind::Recreation)
        {
            self.recreate(name);
        }
    }

    /// By its controller, with the same template or another one. Its volume may be on the node to which the first one was to go.
    fn recreate(&mut self, name: String) {
        self.log(format!("{name} is deleted, and created again"));
        let path = format!("pods/default/{name}");
        let before = self.api.get(&path).expect("it is there");
        self.api.delete_now(&path).expect("it is there");
        match self.dice.below(2) {
            0 => self.create_pod(&name, None),
            _ => {
                _ = self
                    .api
                    .create("pods", template(&before))
                    .expect("its name is free")
            }
        }
        let node = self
            .writes
            .bindings
            .node_of(before["metadata"]["uid"].as_str().unwrap_or_default());
        let node = node.filter(|_| self.dice.below(2) == 0);
        self.recreated.push_back(RecreatedPod {
            pod: name,
            node,
            at: Instant::now(),
        });
    }

    /// Often it is one that kube-scheduler is just binding.
    fn pod_to_recreate(&mut self) -> Option<String> {
        let requested_uids = if self.dice.below(2) == 0 {
            self.writes.bindings.requested_uids()
        } else {
            BTreeSet::new()
        };
        let is_alone =
            |pod: &Value| pod["metadata"]["finalizers"].is_null() && !is_group_member(pod);
        let one = self.random_pod(|pod| {
            is_alone(pod)
                && requested_uids.contains(pod["metadata"]["uid"].as_str().unwrap_or_default())
        });
        one.or_else(|| self.random_pod(is_alone))
    }

    fn random_waiting_pod(&mut self) -> Option<String> {
        self.random_pod(|pod| pod["spec"]["nodeName"].is_null())
    }

    fn random_pod(&mut self, is_meant: impl Fn(&Value) -> bool) -> Option<String> {
        let pods: Vec<Arc<Value>> = self
            .pods()
            .into_iter()
            .filter(|pod| is_meant(pod))
            .collect();
        let index = self.dice.below(pods.len());
        pods.get(index).map(|pod| pod_name(pod))
    }

    /// The kubelets: pods start, end if they may, and terminate when they are deleted.
    pub(super) fn run_pods(&mut self, may_end: bool) {
        for pod in self.pods() {
            let path = format!("pods/default/{}", pod_name(&pod));
            if pod["metadata"]["deletionTimestamp"].is_string() {
                if self.dice.below(4) == 0 {
                    self.finish(&pod, &path);
                }
                continue;
            }
            if !self.has_machine(&pod) {
                continue;
            }
            match pod["status"]["phase"].as_str() {
                Some("Running") if may_end && self.dice.below(mean_lifetime_steps(&pod)) == 0 => {
                    self.api.delete(&path).expect("it is there");
                }
                Some("Running" | "Failed") => {}
                _ if self.dice.below(12) == 0 => {
                    let conditions = json!([{ "type": "Ready", "status": "True" }]);
                    let status = json!({ "phase": "Running", "conditions": conditions });
                    self.api
                        .patch_status(&path, &json!({ "status": status }))
                        .expect("it is there");
                }
                _ => {}
            }
        }
    }

    /// Its containers have ended. The object stays as long as it has a finalizer.
    fn finish(&self, pod: &Value, path: &str) {
        let is_kept = pod["metadata"]["finalizers"]
            .as_array()
            .is_some_and(|kept| !kept.is_empty());
        if is_kept && pod["spec"]["nodeName"].is_string() && pod["status"]["phase"] != "Failed" {
            let status = json!({ "status": { "phase": "Failed" } });
            self.api.patch_status(path, &status).expect("it is there");
        }
        self.api.delete_now(path).expect("it is there");
    }

    pub(super) fn delete_now(&self, pod: &Value) {
        self.finish(pod, &format!("pods/default/{}", pod_name(pod)));
    }
}
