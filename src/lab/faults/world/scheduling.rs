//! The two kube-schedulers' requests: filter, prioritize, preempt and bind, over the extender's own router.
//!
//! Some requests skip what comes before: a kube-scheduler that just lost its Lease binds what it decided earlier.

use super::binding_writes::CountGuard;
use super::budgets::needs_budget;
use super::*;
use axum::body::{Body, to_bytes};
use http::{Request, header};
use tower::ServiceExt;

/// For how long a kube-scheduler waits for the answer to a call that is lost.
const LOST_CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// What becomes of a call on its way between a kube-scheduler and a replica.
enum CallOutcome {
    Answered,
    Lost,
    /// kube-scheduler gives it up after so long, and closes the connection.
    GivenUp(Duration),
    /// Something on its way sends it once more, after so long.
    Repeated(Duration),
}

/// What one request of a kube-scheduler needs to know.
#[derive(Clone)]
struct SchedulingRequest {
    api: Arc<ApiServer>,
    scheduler_router: axum::Router,
    client: String,
    started_at: Instant,
    pod: Arc<Value>,
    nodes: Vec<String>,
    task_reports: Arc<Mutex<TaskReports>>,
    writes: Arc<ReplicaWrites>,
    /// Whether its calls may be lost.
    may_lose_calls: bool,
    times: WriteTimes,
}

impl FaultyCluster {
    /// The schedulers take up pods. The one that does not lead may, too: its last request may be late.
    pub(super) fn schedule(&mut self, pods: usize) {
        let ready: Vec<Arc<Value>> = self
            .waiting_pods()
            .into_iter()
            .filter(|pod| !is_gated(pod))
            .collect();
        for _ in 0..pods {
            if ready.is_empty() {
                return;
            }
            let again = self
                .recreated
                .pop_front_if(|again| again.at < Instant::now());
            let again = again.and_then(|again| {
                Some((
                    ready.iter().find(|pod| pod_name(pod) == again.pod)?.clone(),
                    again.node,
                ))
            });
            let (pod, volume_node) =
                again.unwrap_or_else(|| (ready[self.dice.below(ready.len())].clone(), None));
            let nominated = volume_node.or(pod["status"]["nominatedNodeName"]
                .as_str()
                .map(str::to_owned));
            let node = nominated.filter(|_| self.dice.below(5) > 0);
            let nodes = self.node_names();
            let any = self.dice.below(nodes.len().max(1));
            let Some(node) = node.or_else(|| nodes.get(any).cloned()) else {
                return;
            };
            let binds_at_once = self.dice.below(2) == 0;
            let acting = self.acting_replica().unwrap_or(0);
            let host = if self.dice.below(5) == 0 {
                1 - acting
            } else {
                acting
            };
            let Some(request) = self.request(host, pod) else {
                continue;
            };
            if binds_at_once {
                tokio::spawn(async move { request.bind(&node).await });
            } else {
                tokio::spawn(request.cycle());
            }
        }
    }

    /// Every pod that waits, in order, as a kube-scheduler without a backlog does.
    pub(super) fn schedule_all(&mut self) {
        let Some(acting) = self.acting_replica() else {
            return;
        };
        let ready: Vec<Arc<Value>> = self
            .waiting_pods()
            .into_iter()
            .filter(|pod| !is_gated(pod))
            .collect();
        let requests: Vec<SchedulingRequest> = ready
            .into_iter()
            .filter_map(|pod| self.request(acting, pod))
            .collect();
        tokio::spawn(async move {
            for request in requests {
                request.cycle().await;
            }
        });
    }

    fn request(&self, host: usize, pod: Arc<Value>) -> Option<SchedulingRequest> {
        let replica = self.replicas[host].as_ref()?;
        Some(SchedulingRequest {
            api: self.api.clone(),
            scheduler_router: replica.scheduler_router.clone(),
            client: replica.client.clone(),
            started_at: self.started_at,
            pod,
            nodes: self.node_names(),
            task_reports: self.task_reports.clone(),
            writes: self.writes.clone(),
            may_lose_calls: !self.is_quiet && !self.history.without.contains(&FaultKind::LostCall),
            times: self.times,
        })
    }
}

pub fn is_gated(pod: &Value) -> bool {
    pod["spec"]["schedulingGates"]
        .as_array()
        .is_some_and(|gates| !gates.is_empty())
}

impl SchedulingRequest {
    /// One scheduling cycle.
    async fn cycle(self) {
        let args = json!({ "Pod": *self.pod, "NodeNames": self.nodes });
        let Some(filtered) = self.call_with_faults("filter", &args).await else {
            return;
        };
        let fits: Vec<String> =
            serde_json::from_value(filtered["NodeNames"].clone()).unwrap_or_default();
        if fits.is_empty() {
            return self.preempt().await;
        }
        let args = json!({ "Pod": *self.pod, "NodeNames": fits });
        let Some(scores) = self.call_with_faults("prioritize", &args).await else {
            return;
        };
        let best = scores
            .as_array()
            .into_iter()
            .flatten()
            .max_by_key(|one| one["Score"].as_u64());
        if let Some(node) = best.and_then(|best| best["Host"].as_str()) {
            self.bind(node).await;
        }
    }

    /// kube-scheduler offers every pod of lower priority on each node as a victim, and deletes those that are answered.
    async fn preempt(&self) {
        let priority = priority(&self.pod);
        let pods = self.api.list("pods");
        let mut offered = json!({});
        for node in &self.nodes {
            // kube-scheduler does not watch pods that have ended.
            let lower = pods.iter().filter(|pod| {
                let is_here =
                    pod["spec"]["nodeName"] == node.as_str() && pod["status"]["phase"] != "Failed";
                is_here && self::priority(pod) < priority
            });
            let victims: Vec<Value> = lower
                .map(|pod| json!({ "UID": pod["metadata"]["uid"] }))
                .collect();
            if !victims.is_empty() {
                offered[node] = json!({ "Pods": victims, "NumPDBViolations": 0 });
            }
        }
        if offered.as_object().is_none_or(serde_json::Map::is_empty) {
            return;
        }
        let args = json!({ "Pod": *self.pod, "NodeNameToMetaVictims": offered });
        let Some(answer) = self.call_with_faults("preempt", &args).await else {
            return;
        };
        let chosen = answer["NodeNameToMetaVictims"]
            .as_object()
            .into_iter()
            .flatten()
            .next();
        let Some((node, victims)) = chosen else {
            return;
        };
        let uids: Vec<&str> = victims["Pods"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|pod| pod["UID"].as_str())
            .collect();
        self.log(format!(
            "{} may preempt {} pods on {node}",
            pod_name(&self.pod),
            uids.len()
        ));
        let found = self.api.list("pods").into_iter().filter(|pod| {
            pod["metadata"]["uid"]
                .as_str()
                .is_some_and(|uid| uids.contains(&uid))
        });
        let mut guarded = 0;
        for victim in found {
            let uid = victim["metadata"]["uid"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            guarded += usize::from(needs_budget(&victim));
            self.task_reports
                .lock()
                .preempted_victims
                .push((uid, priority, pod_name(&self.pod)));
            let path = format!("pods/default/{}", pod_name(&victim));
            let target = json!({
                "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler",
                "message": "stowage: preempting to accommodate a higher priority pod",
            });
            // The victim may be gone meanwhile.
            let _ = self
                .api
                .patch_status(&path, &json!({ "status": { "conditions": [target] } }));
            let _ = self.api.delete(&path);
        }
        self.task_reports
            .lock()
            .guarded_victims
            .push((guarded, pod_name(&self.pod)));
        let nominated = json!({ "status": { "nominatedNodeName": node } });
        if self.is_still_there() {
            let _ = self
                .api
                .patch_status(&format!("pods/default/{}", pod_name(&self.pod)), &nominated);
        }
    }

    /// One request for a Binding.
    async fn bind(&self, node: &str) {
        let uid = self.pod["metadata"]["uid"].as_str().unwrap_or_default();
        let args = json!({ "PodName": pod_name(&self.pod), "PodNamespace": "default", "PodUID": uid, "Node": node });
        let answer = self.call_with_faults("bind", &args).await;
        if answer.is_some_and(|answer| answer["Error"].as_str().is_none_or(str::is_empty)) {
            let claim = ReportedBinding {
                pod: pod_name(&self.pod),
                uid: uid.to_owned(),
                node: node.to_owned(),
            };
            self.task_reports.lock().reported_bindings.push(claim);
        }
    }

    fn is_still_there(&self) -> bool {
        let now = self
            .api
            .get(&format!("pods/default/{}", pod_name(&self.pod)));
        now.is_some_and(|now| now["metadata"]["uid"] == self.pod["metadata"]["uid"])
    }

    /// Calls a verb; `None` if there is no answer, or none that says anything.
    async fn call_with_faults(&self, verb: &'static str, args: &Value) -> Option<Value> {
        // Drawn in any case: without this fault a history has the other draws.
        let outcome = CallOutcome::draw();
        match outcome {
            _ if !self.may_lose_calls => self.call(verb, args).await,
            CallOutcome::Answered => self.call(verb, args).await,
            CallOutcome::Lost => {
                self.log_lost_call(format!("{verb} of {} is lost", pod_name(&self.pod)));
                tokio::time::sleep(LOST_CALL_TIMEOUT).await;
                None
            }
            CallOutcome::GivenUp(after) => {
                let (again, asked_again) = (self.clone(), args.clone());
                // What it asked for may go on.
                tokio::spawn(async move {
                    let _is_asked = again.track_binding_request(&asked_again);
                    tokio::time::sleep(after + 2 * again.times.client).await;
                });
                let answer = tokio::time::timeout(after, self.call(verb, args)).await;
                answer.unwrap_or_else(|_| {
                    self.log_lost_call(format!(
                        "{verb} of {} is given up after {after:?}",
                        pod_name(&self.pod)
                    ));
                    None
                })
            }
            CallOutcome::Repeated(after) => {
                self.log_lost_call(format!(
                    "{verb} of {} arrives once more after {after:?}",
                    pod_name(&self.pod)
                ));
                let (again, asked_again) = (self.clone(), args.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    again.call(verb, &asked_again).await
                });
                self.call(verb, args).await
            }
        }
    }

    /// A Binding that is asked for counts as such for as long as this.
    fn track_binding_request(&self, args: &Value) -> Option<CountGuard<'_>> {
        let (uid, node) = (args["PodUID"].as_str()?, args["Node"].as_str()?);
        Some(self.writes.bindings.begin_request(&self.client, uid, node))
    }

    async fn call(&self, verb: &'static str, args: &Value) -> Option<Value> {
        let _is_asked = self.track_binding_request(args);
        let request = Request::post(format!("/scheduler/{verb}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(args.to_string()))
            .expect("a request of fixed parts");
        let answer = self.scheduler_router.clone().oneshot(request).await.ok()?;
        let status = answer.status();
        let body = to_bytes(answer.into_body(), usize::MAX).await.ok()?;
        *self.task_reports.lock().answers.entry(verb).or_default() += 1;
        let text = String::from_utf8_lossy(&body);
        self.log(format!(
            "{verb} of {} by {}: {} {text}",
            pod_name(&self.pod),
            self.client,
            status.as_u16()
        ));
        if status.is_server_error() && status != http::StatusCode::SERVICE_UNAVAILABLE {
            let failed = format!("{verb} of {} fails: {status} {text}", pod_name(&self.pod));
            self.task_reports.lock().violations.push(failed);
        }
        status
            .is_success()
            .then(|| serde_json::from_slice(&body).ok())?
    }

    fn log_lost_call(&self, what: String) {
        self.task_reports.lock().lost_calls += 1;
        self.log(what);
    }

    fn log(&self, what: String) {
        self.task_reports
            .lock()
            .lines
            .push(format!("{} {what}", timestamp(self.started_at)));
    }
}

impl CallOutcome {
    fn draw() -> Self {
        match fastrand::u8(..) {
            0..4 => Self::Lost,
            4..14 => Self::GivenUp(Duration::from_millis(fastrand::u64(1..60))),
            14..24 => Self::Repeated(Duration::from_millis(fastrand::u64(..4000))),
            _ => Self::Answered,
        }
    }
}

pub fn priority(pod: &Value) -> i64 {
    pod["spec"]["priority"].as_i64().unwrap_or(0)
}
