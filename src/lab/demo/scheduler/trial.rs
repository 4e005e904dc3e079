//! One pod, one extender, one outcome: used to replay the recorded answer shapes.

use super::StandInScheduler;
use super::config::SchedulerConfig;
use super::observations::{SchedulerObservations, Verb};
use crate::demo::api_server::ApiServer;
use crate::demo::api_server::error::ApiError;
use serde_json::Value;

/// The pod's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrialResult {
    /// The node it is bound to, by the API server.
    pub bound_node: Option<String>,
    /// The message of the last failure, if there was one.
    pub reason: Option<&'static str>,
    pub message: Option<String>,
    pub calls: Vec<Verb>,
}

#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    #[error("the pod was not created: {0}")]
    Pod(#[from] ApiError),
    #[error("no client of the API server: {0}")]
    Client(#[from] kube::Error),
}

/// Creates the pod, and schedules until it has settled (nothing to do and all events seen) or an error was retried.
pub async fn run_one(
    api: &ApiServer,
    config: SchedulerConfig,
    pod: Value,
) -> Result<TrialResult, TrialError> {
    let created = api.create("pods", pod)?;
    let name = |field: &str| {
        created["metadata"][field]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    let full_name = format!("{}/{}", name("namespace"), name("name"));
    let scheduler = StandInScheduler::start(api.client("stand-in-scheduler")?, config);
    let observations = scheduler.observations().clone();
    observations
        .until(|observed| is_settled(api, observed, &full_name).then_some(()))
        .await;
    let outcome = observations.outcome(&full_name);
    Ok(TrialResult {
        bound_node: outcome.node,
        reason: outcome.reason,
        message: outcome.message,
        calls: observations
            .calls_for(&full_name)
            .iter()
            .map(|call| call.verb)
            .collect(),
    })
}

fn is_settled(api: &ApiServer, observations: &SchedulerObservations, pod: &str) -> bool {
    let outcome = observations.outcome(pod);
    let failed = outcome.reason == Some("SchedulerError") && outcome.node.is_none();
    if failed {
        let filters = observations
            .calls_for(pod)
            .iter()
            .filter(|call| call.verb == Verb::Filter)
            .count();
        return filters > 1;
    }
    let stored = api.get(&format!("pods/{pod}")).and_then(|pod| {
        pod["metadata"]["resourceVersion"]
            .as_str()
            .and_then(|version| version.parse::<u64>().ok())
    });
    let progress = observations.progress();
    progress.is_idle && Some(progress.pods_version) == stored
}
