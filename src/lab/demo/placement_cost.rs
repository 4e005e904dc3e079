//! What each of two ways of placing the same batch costs kube-scheduler: the number of its requests, and of the nodes in them.

use super::scheduler::observations::{Observations, Verb};
use super::story::StoryPod;
use serde::Serialize;

/// How a batch was placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Manner {
    /// The scheduler asked filter, and prioritize where several nodes were left.
    Ordinary,
    /// The planner nominated each pod before kube-scheduler saw it.
    Planned,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlacementManner {
    pub manner: Manner,
    pub pods: usize,
    pub filter_calls: usize,
    /// Node names in all of them.
    pub nodes_asked: usize,
    pub prioritize_calls: usize,
}

impl PlacementManner {
    pub fn of(manner: Manner, batch: &[StoryPod], seen: &Observations) -> Self {
        let calls = batch
            .iter()
            .flat_map(|pod| seen.calls_for(&format!("default/{}", pod.name)));
        let mut way = Self {
            manner,
            pods: batch.len(),
            filter_calls: 0,
            nodes_asked: 0,
            prioritize_calls: 0,
        };
        for call in calls {
            match call.verb {
                Verb::Filter => {
                    way.filter_calls += 1;
                    way.nodes_asked += call.nodes;
                }
                Verb::Prioritize => way.prioritize_calls += 1,
                Verb::Preempt | Verb::Bind => {}
            }
        }
        way
    }

    pub fn line(&self) -> String {
        let manner = match self.manner {
            Manner::Ordinary => "the ordinary way",
            Manner::Planned => "planned",
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
