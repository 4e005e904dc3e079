//! The scheduler's HTTP client of its extender: requests as Go writes them, answers as Go parses them.
//!
//! Errors are texts, because the scheduler only writes them into a pod's condition. `cycle`, `preemption` and the binding
//! decide what follows from an answer.

use super::config::ExtenderConfig;
use super::go_json::{entries, field, first_value, integer, slice, string, structure};
use super::objects::{SchedulerNode, SchedulerPod};
use super::observations::{SchedulerObservations, Verb};
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Nodes that passed filter, and why the others did not.
#[derive(Debug)]
pub struct ExtenderFilterResult {
    /// May contain a node twice, or one that was not in the request: the scheduler takes it as it comes.
    pub nodes: Vec<Arc<SchedulerNode>>,
    pub failed: BTreeMap<String, String>,
    pub unresolvable: BTreeMap<String, String>,
}

/// A node with the UIDs of its victims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExtenderVictims {
    pub uids: Vec<String>,
    pub pdb_violations: i64,
}

pub(crate) struct ExtenderClient {
    pub config: ExtenderConfig,
    client: Client<HttpConnector, Full<Bytes>>,
    observations: Arc<SchedulerObservations>,
}

/// Go's transport keeps this many idle connections to one host.
const IDLE_CONNECTIONS: usize = 2;

impl ExtenderClient {
    pub fn new(config: ExtenderConfig, observations: Arc<SchedulerObservations>) -> Self {
        let client = Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .http1_title_case_headers(true)
            .build_http();
        Self {
            config,
            client,
            observations,
        }
    }

    pub(crate) fn is_interested(&self, pod: &SchedulerPod) -> bool {
        pod.mentions_resource(&self.config.managed_resource)
    }

    pub async fn filter(
        &self,
        pod: &SchedulerPod,
        nodes: &[Arc<SchedulerNode>],
    ) -> Result<ExtenderFilterResult, String> {
        let answer = self
            .send(
                Verb::Filter,
                pod.full_name(),
                nodes.len(),
                &self.arguments(pod, nodes),
            )
            .await?;
        let answer = structure(&answer, "v1.ExtenderFilterResult")?;
        let list = structure(field(answer, "Nodes"), "v1.NodeList")?;
        let items = slice(field(list, "items"), "NodeList.items")?;
        let names = slice(field(answer, "NodeNames"), "ExtenderFilterResult.NodeNames")?;
        let failed = texts(
            field(answer, "FailedNodes"),
            "ExtenderFilterResult.FailedNodes",
        )?;
        let unresolvable = texts(
            field(answer, "FailedAndUnresolvableNodes"),
            "ExtenderFilterResult.FailedAndUnresolvableNodes",
        )?;
        let error = string(field(answer, "Error"), "ExtenderFilterResult.Error")?;
        if !error.is_empty() {
            return Err(error);
        }
        let nodes = match (self.config.node_cache_capable, names) {
            (true, Some(names)) => self.resolve_names(names, nodes)?,
            _ => items
                .unwrap_or_default()
                .iter()
                .map(|item| Arc::new(SchedulerNode::parse(Arc::new(item.clone()))))
                .collect(),
        };
        Ok(ExtenderFilterResult {
            nodes,
            failed,
            unresolvable,
        })
    }

    /// Host and score; the caller ignores hosts that were not in the request.
    pub async fn prioritize(
        &self,
        pod: &SchedulerPod,
        nodes: &[Arc<SchedulerNode>],
    ) -> Result<Vec<(String, i64)>, String> {
        let answer = self
            .send(
                Verb::Prioritize,
                pod.full_name(),
                nodes.len(),
                &self.arguments(pod, nodes),
            )
            .await?;
        let scores = slice(&answer, "v1.HostPriorityList")?.unwrap_or_default();
        let one = |score: &Value| {
            let score = structure(score, "v1.HostPriority")?;
            let host = string(field(score, "Host"), "HostPriority.Host")?;
            Ok((host, integer(field(score, "Score"), "HostPriority.Score")?))
        };
        scores.iter().map(one).collect()
    }

    /// The candidates in the extender's answer, always by UID.
    pub async fn preempt(
        &self,
        pod: &SchedulerPod,
        candidates: &BTreeMap<String, (Vec<&SchedulerPod>, i64)>,
    ) -> Result<BTreeMap<String, ExtenderVictims>, String> {
        let sends_whole_objects = !self.config.node_cache_capable;
        let victims = |victims: &[&SchedulerPod]| -> Vec<Value> {
            let one = |victim: &&SchedulerPod| {
                if sends_whole_objects {
                    victim.to_wire_json()
                } else {
                    json!({"UID": victim.uid})
                }
            };
            victims.iter().map(one).collect()
        };
        let map: Value = candidates
            .iter()
            .map(|(node, (pods, violations))| {
                (
                    node.clone(),
                    json!({"Pods": victims(pods), "NumPDBViolations": violations}),
                )
            })
            .collect();
        let (full, meta) = if sends_whole_objects {
            (map, Value::Null)
        } else {
            (Value::Null, map)
        };
        let arguments = json!({"Pod": pod.to_wire_json(), "NodeNameToVictims": full, "NodeNameToMetaVictims": meta});
        let answer = self
            .send(Verb::Preempt, pod.full_name(), candidates.len(), &arguments)
            .await?;
        let answer = structure(&answer, "v1.ExtenderPreemptionResult")?;
        let map = entries(
            field(answer, "NodeNameToMetaVictims"),
            "ExtenderPreemptionResult.NodeNameToMetaVictims",
        )?;
        map.into_iter()
            .map(|(node, victims)| Ok((node.clone(), meta_victims(victims)?)))
            .collect()
    }

    pub async fn bind(&self, pod: &SchedulerPod, node: &str) -> Result<(), String> {
        let arguments = json!({"PodName": pod.name, "PodNamespace": pod.namespace, "PodUID": pod.uid, "Node": node});
        let answer = self
            .send(Verb::Bind, pod.full_name(), 1, &arguments)
            .await?;
        let answer = structure(&answer, "v1.ExtenderBindingResult")?;
        let error = string(field(answer, "Error"), "ExtenderBindingResult.Error")?;
        if error.is_empty() { Ok(()) } else { Err(error) }
    }

    fn arguments(&self, pod: &SchedulerPod, nodes: &[Arc<SchedulerNode>]) -> Value {
        let (list, names) = if self.config.node_cache_capable {
            (
                Value::Null,
                nodes.iter().map(|node| json!(node.name)).collect(),
            )
        } else {
            let items: Vec<Value> = nodes.iter().map(|node| node.to_wire_json()).collect();
            (json!({"metadata": {}, "items": items}), Value::Null)
        };
        json!({"Pod": pod.to_wire_json(), "Nodes": list, "NodeNames": names})
    }

    fn resolve_names(
        &self,
        names: &[Value],
        requested: &[Arc<SchedulerNode>],
    ) -> Result<Vec<Arc<SchedulerNode>>, String> {
        let by_name: BTreeMap<&str, &Arc<SchedulerNode>> = requested
            .iter()
            .map(|node| (node.name.as_str(), node))
            .collect();
        let one = |name: &Value| {
            let name = string(name, "ExtenderFilterResult.NodeNames")?;
            let node = by_name.get(name.as_str()).copied().cloned();
            node.ok_or_else(|| {
                let prefix = &self.config.url_prefix;
                format!(
                    "extender \"{prefix}\" claims a filtered node \"{name}\" which is not found in the input node list"
                )
            })
        };
        names.iter().map(one).collect()
    }

    async fn send(
        &self,
        verb: Verb,
        pod: String,
        nodes: usize,
        arguments: &Value,
    ) -> Result<Value, String> {
        self.observations.record_call(verb, pod, nodes);
        let url = format!("{}/{}", self.config.url_prefix, verb.as_str());
        let timeout_message =
            "context deadline exceeded (Client.Timeout exceeded while awaiting headers)";
        let exchange =
            tokio::time::timeout(self.config.timeout, self.exchange(&url, arguments)).await;
        let (status, body) = exchange
            .unwrap_or_else(|_| Err(timeout_message.to_owned()))
            .map_err(|why| format!("Post \"{url}\": {why}"))?;
        if status != http::StatusCode::OK {
            return Err(format!(
                "failed {} with extender at URL {url}, code {}",
                verb.as_str(),
                status.as_u16()
            ));
        }
        first_value(&body)
    }

    async fn exchange(
        &self,
        url: &str,
        arguments: &Value,
    ) -> Result<(http::StatusCode, Bytes), String> {
        // No Accept-Encoding: Go asks for gzip, but nothing in this tree could unpack it.
        let request = http::Request::post(url)
            .header(http::header::USER_AGENT, "Go-http-client/1.1")
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(arguments.to_string())))
            .map_err(|error| error.to_string())?;
        let response = self.client.request(request).await.map_err(|error| {
            if error.is_connect() {
                "dial tcp: connect: connection refused".to_owned()
            } else {
                "EOF".to_owned()
            }
        })?;
        let status = response.status();
        let body = response
            .into_body()
            .collect()
            .await
            .map_err(|_| "unexpected EOF".to_owned())?;
        Ok((status, body.to_bytes()))
    }
}

fn texts(value: &Value, name: &str) -> Result<BTreeMap<String, String>, String> {
    entries(value, name)?
        .into_iter()
        .map(|(key, text)| Ok((key.clone(), string(text, name)?)))
        .collect()
}

fn meta_victims(value: &Value) -> Result<ExtenderVictims, String> {
    let victims = structure(value, "v1.MetaVictims")?;
    let pods = slice(field(victims, "Pods"), "MetaVictims.Pods")?.unwrap_or_default();
    let uid = |pod: &Value| string(field(structure(pod, "v1.MetaPod")?, "UID"), "MetaPod.UID");
    Ok(ExtenderVictims {
        uids: pods.iter().map(uid).collect::<Result<_, String>>()?,
        pdb_violations: integer(
            field(victims, "NumPDBViolations"),
            "MetaVictims.NumPDBViolations",
        )?,
    })
}
