//! Nodes come, are deleted, mostly with their machines, and come back under their names with other GPUs.

use super::*;

/// Longer than a watch's death stays unnoticed, and a Binding may land after its decision: nobody takes the old machine for the
/// new one by then.
const NODE_OBSERVED_AFTER: Duration = Duration::from_secs(80);

/// How long a machine goes on without its Node, at most. A replica that has just started, and knows neither machine, counts its
/// reports after half a minute.
const MAX_LINGER: Duration = Duration::from_secs(25);

impl FaultyCluster {
    pub(super) fn create_node(&mut self, n: usize) {
        let node = node_name(n);
        let amounts = json!({ "cpu": "64", "memory": "512Gi", "pods": "110", "stowage.dev/vram": format!("{}Gi", 72 * GPUS) });
        let machine = format!("{node}-{}", self.machines.generation(&node));
        let mut info = json!({ "machineID": machine, "systemUUID": machine });
        for field in [
            "architecture",
            "bootID",
            "containerRuntimeVersion",
            "kernelVersion",
            "kubeProxyVersion",
            "kubeletVersion",
            "operatingSystem",
            "osImage",
        ] {
            info[field] = json!("");
        }
        let status = json!({ "allocatable": amounts, "capacity": amounts, "nodeInfo": info });
        let labels = json!({
            "nvidia.com/gpu.count": GPUS.to_string(),
            "nvidia.com/gpu.memory": (80 * 1024).to_string(),
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        });
        let object = json!({ "metadata": { "name": node, "labels": labels }, "status": status });
        self.api.create("nodes", object).expect("its name is free");
        self.nodes_created_at[n] = Instant::now();
    }

    /// Names of the nodes that exist now.
    pub(super) fn node_names(&self) -> Vec<String> {
        (0..self.nodes)
            .filter(|n| self.node_returns_at[*n].is_none())
            .map(node_name)
            .collect()
    }

    /// The cloud takes a machine back, and gives another one later. Some machines go on for a while without their Nodes, and some
    /// register again.
    pub(super) fn disturb_nodes(&mut self) {
        if self.dice.below(250) > 0 {
            return;
        }
        let n = self.dice.below(self.nodes);
        let away = random_duration(
            &mut self.dice,
            Duration::from_millis(100),
            Duration::from_secs(30),
        );
        let silent = random_duration(
            &mut self.dice,
            Duration::from_secs(1),
            Duration::from_secs(150),
        );
        let lingers = random_duration(&mut self.dice, Duration::ZERO, MAX_LINGER);
        let (registers_again, lingers) = match self.dice.below(4) {
            0 => (true, None),
            1 => (false, Some(lingers)),
            _ => (false, None),
        };
        if self.node_returns_at[n].is_some() || !self.try_inject(FaultKind::LostNode) {
            return;
        }
        let node = node_name(n);
        self.api
            .delete_now(&format!("nodes/{node}"))
            .expect("it is there");
        self.node_returns_at[n] = Some(Instant::now() + away);
        if registers_again {
            return self.log(format!(
                "{node} is deleted, and registers again after {away:?}"
            ));
        }
        self.log(format!(
            "{node} is deleted, for {away:?}; its next agent starts {silent:?} after that"
        ));
        if let Some(lingers) = lingers {
            self.log(format!("its machine goes on for {lingers:?}"));
            self.orphaned_agents
                .extend(self.agents[n].orphan(&self.machines, lingers));
        }
        self.machines.replace_machine(&node);
        self.agents[n].restart_on_new_machine(away + silent);
    }

    pub(super) fn recreate_nodes(&mut self) {
        for n in 0..self.nodes {
            if self.node_returns_at[n].is_some_and(|at| at <= Instant::now()) {
                self.node_returns_at[n] = None;
                self.create_node(n);
                self.agents[n].handle_node_recreated();
            }
        }
    }

    /// In time, pods of a node that is gone are deleted, and so are those whose GPUs went with an earlier machine: no kubelet can
    /// start them.
    pub(super) fn delete_lost_pods(&mut self) {
        for pod in self.pods() {
            let is_lost = pod["spec"]["nodeName"].is_string() && !self.has_machine(&pod);
            if is_lost && pod["status"]["phase"] != "Failed" && self.dice.below(8) == 0 {
                self.delete_now(&pod);
            }
        }
    }

    /// All pods, without those whose GPUs are gone with their machine.
    pub(super) fn pods_on_machines(&self) -> Vec<Arc<Value>> {
        let pods = self.pods().into_iter();
        pods.filter(|pod| !self.names_gpus_of_an_earlier_machine(pod))
            .collect()
    }

    /// Whether the pod's machine is there, with the GPUs that the pod has.
    pub(super) fn has_machine(&self, pod: &Value) -> bool {
        self.node_of(pod)
            .is_some_and(|n| self.node_returns_at[n].is_none())
            && !self.names_gpus_of_an_earlier_machine(pod)
    }

    /// A pod that has just been bound. Its Binding may land late, but is not decided long after its machine went.
    pub(super) fn check_machine(&mut self, pod: &Value) {
        let Some(n) = self.node_of(pod) else { return };
        let is_known = self.node_returns_at[n].is_none()
            && self.nodes_created_at[n].elapsed() > NODE_OBSERVED_AFTER;
        if is_known && self.names_gpus_of_an_earlier_machine(pod) {
            let (pod, node) = (pod_name(pod), node_name(n));
            self.fail(format!(
                "{pod} is bound to GPUs that left {node} with an earlier machine"
            ));
        }
    }

    fn node_of(&self, pod: &Value) -> Option<usize> {
        let node = pod["spec"]["nodeName"].as_str()?;
        (0..self.nodes).find(|n| node_name(*n) == node)
    }

    fn names_gpus_of_an_earlier_machine(&self, pod: &Value) -> bool {
        let Some(node) = pod["spec"]["nodeName"].as_str() else {
            return false;
        };
        let devices = pod["metadata"]["annotations"]["stowage.dev/devices"]
            .as_str()
            .unwrap_or_default();
        let names_one =
            |device: &str| device.starts_with("GPU-") && !self.machines.has_gpu(node, device);
        devices.split(',').any(names_one)
    }
}
