//! What each of two ways of placing the same batch costs kube-scheduler: the number of its requests, and of the nodes in them.

use super::scheduler::observations::{SchedulerObservations, Verb};
use super::story::StoryPod;
use serde::Serialize;

/// How a batch was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum PlacementMode {
    /// The scheduler asked filter, and prioritize where several nodes were left.
    Ordinary,
    /// The planner nominated each pod before kube-scheduler saw it.
    Planned,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlacementCalls {
    pub manner: PlacementMode,
    pub pods: usize,
    pub filter_calls: usize,
    /// Node names in all of them.
    pub nodes_asked: usize,
    pub prioritize_calls: usize,
}

impl PlacementCalls {
    pub fn from_observations(
        manner: PlacementMode,
        batch: &[StoryPod],
        observations: &SchedulerObservations,
    ) -> Self {
        let calls = batch
            .iter()
            .flat_map(|pod| observations.calls_for(&format!("default/{}", pod.name)));
        let mut counts = Self {
            manner,
            pods: batch.len(),
            filter_calls: 0,
            nodes_asked: 0,
            prioritize_calls: 0,
        };
        for call in calls {
            match call.verb {
                Verb::Filter => {
                    counts.filter_calls += 1;
                    counts.nodes_asked += call.nodes;
                }
                Verb::Prioritize => counts.prioritize_calls += 1,
                Verb::Preempt | Verb::Bind => {}
            }
        }
        counts
    }

    pub fn line(&self) -> String {
        let manner = match self.manner {
            PlacementMode::Ordinary => "the ordinary way",
            PlacementMode::Planned => "planned",
        };
        let Self {
            pods,
            filter_calls,
            nodes_asked,
            prioritize_calls,
            ..
        } = self;
        format!(
            "{pods} pods {manner}: {filter_calls} filter calls about {nodes_asked} node names, {prioritize_calls} prioritize calls"
        )
    }
}
