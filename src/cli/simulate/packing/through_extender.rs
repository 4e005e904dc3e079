//! Stowage behind its HTTP verbs: every pod goes through the router, request and answer in JSON, in this process. Filter gets
//! the nodes that kube-scheduler's filters accept, prioritize those that are left, and one of the nodes with the highest of the
//! scores 0 to 10 is chosen at random, as kube-scheduler does.

use anyhow::{Context, Result, ensure};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, header};
use futures::future::{BoxFuture, ready};
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_kubernetes_objects::port::{BindOrder, BindOutcome, ControlPlane, IsDue};
use stowage_lab::simulate::packing::arrivals::{Arrivals, RandomStream};
use stowage_lab::simulate::packing::cluster::{SimulatedCluster, SimulatedPlacement};
use stowage_lab::simulate::packing::placer::{PlacedPod, Placer, PodArrival};
use stowage_lab::simulate::packing::shipped::cpu_only::{CpuOnly, CpuRule};
use stowage_lab::simulate::packing::shipped::learning::{CoreUpkeep, DemandKnowledge};
use stowage_lab::simulate::packing::shipped::{accepted_ranks, ledger};
use stowage_lab::simulate::packing::trace::{PodKind, WorkloadTrace};
use stowage_scheduling::control_loop::{
    ControlPlaneError, EvictionOutcome, EvictionReason, FreshPod, PodEvent, StatusChange,
};
use stowage_scheduling::ids::{GpuModel, NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::ObservedPhase;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::verbs::observe::{PodObserved, PodReleased};
use stowage_server::extender::Extender;
use stowage_server::extender::request::RequestLimits;
use stowage_server::extender::server::scheduler_router;
use stowage_server::service::ServerState;
use tokio::runtime::Runtime;
use tower::ServiceExt;

pub struct ThroughExtender<'s> {
    played_trace: &'s WorkloadTrace,
    state: Arc<ServerState>,
    router: Router,
    /// Binds are tasks of their own.
    runtime: Runtime,
    /// The names of the nodes, by rank.
    names: Vec<NodeName>,
    policy: Policy,
    upkeep: CoreUpkeep,
    cpu_only: CpuOnly<'s>,
    dice: Random,
}

impl<'s> ThroughExtender<'s> {
    pub fn new(
        setting: &'s WorkloadTrace,
        arrivals: &Arrivals,
        cpu_rule: CpuRule,
        knowledge: DemandKnowledge,
    ) -> Result<Self> {
        let policy = Policy::default();
        let state = ServerState::new(policy.clone());
        let names = ledger::names(setting, &arrivals.ranks);
        ledger::add_nodes(&mut state.cluster(), setting, &arrivals.ranks, &names);
        state.lead_from_the_start();
        let extender = Extender::new(
            state.clone(),
            Arc::new(AlwaysWritten),
            RequestLimits::default(),
        );
        Ok(Self {
            router: scheduler_router(extender),
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?,
            state,
            names,
            policy,
            upkeep: CoreUpkeep::new(knowledge),
            cpu_only: CpuOnly::new(setting, cpu_rule),
            dice: RandomStream::Policy.seeded(arrivals.seed),
            played_trace: setting,
        })
    }

    fn schedule(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        kind: &PodKind,
    ) -> Result<Option<SimulatedPlacement>> {
        let pod = pod_manifest(uid, self.played_trace, kind, &self.policy);
        let names: Vec<&str> = accepted_ranks(cluster, kind)
            .map(|rank| self.names[rank].as_str())
            .collect();
        let passed = self.call_verb(
            "filter",
            &json!({ "Pod": pod, "Nodes": null, "NodeNames": names }),
        )?;
        let node_names: Vec<String> = serde_json::from_value(passed["NodeNames"].clone())?;
        let node = match node_names.as_slice() {
            [] => return Ok(None),
            // kube-scheduler does not call prioritize for one node.
            [only] => only.clone(),
            several => {
                let request = json!({ "Pod": pod, "Nodes": null, "NodeNames": several });
                self.pick_highest(&self.call_verb("prioritize", &request)?)?
            }
        };
        let binding = json!({ "PodName": uid.as_str(), "PodNamespace": "sim", "PodUID": uid.as_str(), "Node": node });
        let bound = self.call_verb("bind", &binding)?;
        ensure!(
            bound["Error"] == "",
            "pod {uid} is not bound to {node}: {}",
            bound["Error"]
        );
        self.confirm_bound(uid).map(Some)
    }

    /// One of the nodes with the highest score.
    fn pick_highest(&mut self, scores: &Value) -> Result<String> {
        let scores = scores.as_array().context("prioritize answers an array")?;
        let highest = scores.iter().filter_map(|one| one["Score"].as_u64()).max();
        let best: Vec<&str> = scores
            .iter()
            .filter(|one| one["Score"].as_u64() == highest)
            .filter_map(|one| one["Host"].as_str())
            .collect();
        let taken = best
            .get(self.dice.below(best.len()))
            .context("prioritize answers hosts with scores")?;
        Ok((*taken).to_owned())
    }

    /// The pod runs, as the watch would show, and its engine answers at once.
    fn confirm_bound(&self, uid: &PodUid) -> Result<SimulatedPlacement> {
        let mut cluster = self.state.cluster();
        let entry = cluster
            .ledger()
            .pod_state(uid)
            .context("a pod that was bound is in the ledger")?;
        let (node, devices) = entry
            .node()
            .zip(entry.devices())
            .context("it is bound to GPUs")?;
        let (node, devices, demand) = (node.clone(), devices.clone(), entry.demand.clone());
        let placement = ledger::placement(cluster.ledger(), &self.names, &node, &devices);
        let state = ObservedPhase::Bound {
            node,
            devices: Some(devices),
            starting: false,
            ran: None,
        };
        cluster.apply(PodObserved(ledger::observation(uid, demand, state)));
        Ok(placement)
    }

    fn call_verb(&self, verb: &str, request: &Value) -> Result<Value> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/scheduler/{verb}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(serde_json::to_vec(request)?))?;
        self.runtime.block_on(async {
            let answer = self.router.clone().oneshot(request).await?;
            let status = answer.status();
            let body = to_bytes(answer.into_body(), usize::MAX).await?;
            ensure!(
                status.is_success(),
                "{verb} answers {status}: {}",
                String::from_utf8_lossy(&body)
            );
            Ok(serde_json::from_slice(&body)?)
        })
    }
}

impl Placer for ThroughExtender<'_> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<PlacedPod> {
        let setting = self.played_trace;
        let kind = &setting.kinds[arrival.kind];
        self.upkeep
            .tick(&mut self.state.cluster(), cluster, &self.names);
        if kind.gpus == 0 {
            return self
                .cpu_only
                .place(&mut self.state.cluster(), cluster, arrival);
        }
        let uid = ledger::uid(arrival.number);
        let placement = self.schedule(cluster, &uid, kind);
        let placement =
            placement.expect("the verbs answer a well-formed request from one who leads");
        if placement.is_none() {
            self.state.cluster().apply(PodReleased(uid.clone()));
        }
        placement.map(PlacedPod::without_victims)
    }

    fn end(&mut self, number: usize) {
        self.state.cluster().apply(PodReleased(ledger::uid(number)));
    }
}

/// The pod's manifest.
fn pod_manifest(uid: &PodUid, setting: &WorkloadTrace, kind: &PodKind, policy: &Policy) -> Value {
    let resources = json!({
        "cpu": format!("{}m", kind.cpu),
        "memory": kind.memory.to_string(),
        "stowage.dev/vram": ledger::vram(kind, policy).0.to_string(),
    });
    let annotations = json!({
        "stowage.dev/gpus": kind.gpus.to_string(),
        "stowage.dev/exclusive": ledger::is_exclusive(kind).to_string(),
    });
    let models: Vec<&str> = ledger::models(setting, kind)
        .map(GpuModel::as_str)
        .collect();
    let expression = json!({ "key": "nvidia.com/gpu.product", "operator": "In", "values": models });
    let terms = json!([{ "matchExpressions": [expression] }]);
    let required =
        json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } });
    let affinity = json!({ "nodeAffinity": required });
    json!({
        "metadata": { "name": uid.as_str(), "namespace": "sim", "uid": uid.as_str(), "annotations": annotations },
        "spec": {
            "schedulerName": "stowage",
            "priority": 1000,
            "affinity": if models.is_empty() { Value::Null } else { affinity },
            "containers": [{ "name": "main", "resources": { "limits": resources, "requests": resources } }],
        },
    })
}

/// A control plane that accepts every Binding, and no other request.
struct AlwaysWritten;

impl ControlPlane for AlwaysWritten {
    fn bind<'a>(&'a self, _: &'a BindOrder) -> BoxFuture<'a, BindOutcome> {
        Box::pin(ready(BindOutcome::Written))
    }

    fn read_pod<'a>(
        &'a self,
        _: &'a PodKey,
    ) -> BoxFuture<'a, Result<Option<FreshPod>, ControlPlaneError>> {
        Box::pin(ready(Ok(None)))
    }

    fn write_status<'a>(
        &'a self,
        _: &'a PodKey,
        _: &'a PodUid,
        _: &'a StatusChange,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(ready(Ok(())))
    }

    fn evict<'a>(
        &'a self,
        _: &'a PodKey,
        _: &'a PodUid,
        _: &'a EvictionReason,
        _: &'a IsDue<'a>,
    ) -> BoxFuture<'a, EvictionOutcome> {
        let message = "no pod is evicted here".into();
        Box::pin(ready(EvictionOutcome::Refused { message }))
    }

    fn remove_scheduling_gate<'a>(
        &'a self,
        _: &'a PodKey,
        _: &'a PodUid,
    ) -> BoxFuture<'a, Result<(), ControlPlaneError>> {
        Box::pin(ready(Ok(())))
    }

    fn record_event(&self, _: PodEvent) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_lab::simulate::openb::built_in;
    use stowage_lab::simulate::packing::{
        Replay, SimulatedEviction, SimulatedPolicy, TypicalPods, replay,
    };

    #[test]
    fn through_the_verbs_pods_go_where_the_core_puts_them() {
        let setting = WorkloadTrace::from_trace(&built_in::trace());
        let (typical, arrivals) = (
            TypicalPods::from_trace(&setting),
            Arrivals::draw(&setting, 42),
        );
        let mut in_process = SimulatedPolicy::Stowage.placer(
            &setting,
            &typical,
            &arrivals,
            SimulatedEviction::Never,
            CpuRule::default(),
        );
        let expected: Replay = replay(&setting, &arrivals, &typical, &mut *in_process);
        let mut through = ThroughExtender::new(
            &setting,
            &arrivals,
            CpuRule::default(),
            DemandKnowledge::Learned,
        )
        .unwrap();
        assert_eq!(
            replay(&setting, &arrivals, &typical, &mut through),
            expected
        );
    }

    #[test]
    fn each_node_with_the_highest_score_is_chosen_sometimes() {
        let setting = WorkloadTrace::from_trace(&built_in::trace());
        let mut through = ThroughExtender::new(
            &setting,
            &Arrivals::draw(&setting, 42),
            CpuRule::default(),
            DemandKnowledge::Learned,
        )
        .unwrap();
        let scores = json!([
            { "Host": "a", "Score": 9 }, { "Host": "b", "Score": 3 }, { "Host": "c", "Score": 9 }
        ]);
        let mut taken: Vec<String> = (0..40)
            .map(|_| through.pick_highest(&scores).unwrap())
            .collect();
        taken.sort_unstable();
        taken.dedup();
        assert_eq!(taken, ["a", "c"]);
        assert!(through.pick_highest(&json!([])).is_err());
    }
}
