//! One scheduling cycle for one pod: filter, score, and if nothing fits, preemption. No writes.
//!
//! The order of calls is the real scheduler's: the nominated node alone first, then as many nodes as the sampling wants, the
//! extender only about nodes that passed, scores only if more than one is left.

use super::config::SchedulerConfig;
use super::extender::ExtenderClient;
use super::filters::{NodeRejection, Rejector, Resolvable, run_filters};
use super::message::{self, NodeRejections};
use super::objects::{SchedulerNode, SchedulerPod};
use super::preemption::{self, DryRunCandidate};
use super::view::SchedulerCache;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::testkit::random::Random;

/// The result of a cycle.
#[derive(Debug)]
pub(crate) enum CycleResult {
    Fits {
        node: String,
    },
    /// Unschedulable: sleeps until an event that is relevant to the rejecting plugins.
    Unschedulable {
        message: String,
        rejectors: BTreeSet<Rejector>,
        nomination: CycleNomination,
    },
    /// SchedulerError: retried after back-off, with its nomination cleared.
    Error {
        message: String,
    },
}

/// The new value of `status.nominatedNodeName`.
#[derive(Debug)]
pub(crate) enum CycleNomination {
    Keep,
    Clear,
    /// These are evicted, and the pod is nominated to their node.
    Preempt(DryRunCandidate),
}

/// State that outlives a cycle: the random numbers, and where the next search begins.
#[derive(Debug)]
pub(crate) struct CycleMemory {
    pub random: Random,
    next_start: usize,
}

impl CycleMemory {
    pub fn seeded(seed: u64) -> Self {
        Self {
            random: Random::seeded(seed, 0),
            next_start: 0,
        }
    }
}

pub(crate) struct Cycle<'a> {
    pub pod: &'a SchedulerPod,
    pub cache: &'a SchedulerCache,
    pub config: &'a SchedulerConfig,
    pub extender: &'a ExtenderClient,
    pub memory: &'a mut CycleMemory,
}

/// Nodes that passed every filter, and why the others did not.
#[derive(Default)]
struct FilteredNodes {
    feasible: Vec<Arc<SchedulerNode>>,
    rejections: NodeRejections,
    rejectors: BTreeSet<Rejector>,
}

impl Cycle<'_> {
    pub async fn run(mut self) -> CycleResult {
        if self.cache.nodes().len() == 0 {
            let message = "no nodes available to schedule pods".to_owned();
            return CycleResult::Unschedulable {
                message,
                rejectors: BTreeSet::from([Rejector::Extender]),
                nomination: CycleNomination::Clear,
            };
        }
        let found = match self.find_feasible_nodes().await {
            Ok(found) => found,
            Err(message) => return CycleResult::Error { message },
        };
        match found.feasible.as_slice() {
            [] => self.run_post_filter(found).await,
            [only] => CycleResult::Fits {
                node: only.name.clone(),
            },
            several => CycleResult::Fits {
                node: self.select_host(several).await,
            },
        }
    }

    async fn find_feasible_nodes(&mut self) -> Result<FilteredNodes, String> {
        let nominated = self
            .pod
            .nominated_node
            .as_deref()
            .and_then(|name| self.cache.node(name))
            .cloned();
        if let Some(node) = nominated
            // An error about the nominated node alone does not end the cycle: all nodes are checked next.
            && let Ok(found) = self.ask_extender(self.pass_own_filters(vec![node], 1)).await
            && !found.feasible.is_empty()
        {
            return Ok(found);
        }
        let mut nodes: Vec<Arc<SchedulerNode>> = self.cache.nodes().cloned().collect();
        let total = nodes.len();
        let start = self.memory.next_start % total;
        nodes.rotate_left(start);
        let found = self.pass_own_filters(nodes, self.config.nodes_to_find(total));
        self.memory.next_start = (start + found.feasible.len() + found.rejections.len()) % total;
        self.ask_extender(found).await
    }

    /// Checks nodes in their order until `max_feasible` are feasible.
    fn pass_own_filters(
        &self,
        nodes: Vec<Arc<SchedulerNode>>,
        max_feasible: usize,
    ) -> FilteredNodes {
        let mut found = FilteredNodes::default();
        for node in nodes {
            if found.feasible.len() >= max_feasible {
                break;
            }
            let usage = self.cache.usage_for(self.pod, &node.name);
            match run_filters(self.pod, &node, &usage, self.ignored_resource()) {
                Ok(()) => found.feasible.push(node),
                Err(refusal) => {
                    found.rejectors.insert(refusal.by);
                    found.rejections.insert(node.name.clone(), refusal);
                }
            }
        }
        found
    }

    /// The extender is asked only about nodes that passed, and only about pods it manages.
    async fn ask_extender(&self, mut found: FilteredNodes) -> Result<FilteredNodes, String> {
        if found.feasible.is_empty() || !self.extender.is_interested(self.pod) {
            return Ok(found);
        }
        let answer = match self.extender.filter(self.pod, &found.feasible).await {
            Ok(answer) => answer,
            Err(_) if self.extender.config.ignorable => return Ok(found),
            Err(error) => return Err(error),
        };
        for (node, text) in answer.failed {
            found.rejections.insert(
                node,
                NodeRejection::new(Rejector::Extender, Resolvable::ByEviction, text),
            );
        }
        for (node, text) in answer.unresolvable {
            found.rejections.insert(
                node,
                NodeRejection::new(Rejector::Extender, Resolvable::Never, text),
            );
        }
        if answer.nodes.len() != found.feasible.len() {
            found.rejectors.insert(Rejector::Extender);
        }
        found.feasible = answer.nodes;
        Ok(found)
    }

    /// The highest score; a random one of equal ones.
    async fn select_host(&mut self, nodes: &[Arc<SchedulerNode>]) -> String {
        let scores = self.extender_scores(nodes).await;
        let jitter = self.config.own_score_jitter;
        let own_score = |random: &mut Random| {
            i64::try_from(random.below(jitter.saturating_add(1))).unwrap_or_default()
        };
        let mut best: Vec<&str> = Vec::new();
        let mut highest = i64::MIN;
        for node in nodes {
            let extender = scores.get(&node.name).copied().unwrap_or_default();
            let score = own_score(&mut self.memory.random).saturating_add(extender);
            if score > highest {
                highest = score;
                best.clear();
            }
            if score == highest {
                best.push(&node.name);
            }
        }
        best[self.memory.random.below(best.len())].to_owned()
    }

    /// Weighted; an error means no scores, not a failed cycle.
    async fn extender_scores(&self, nodes: &[Arc<SchedulerNode>]) -> BTreeMap<String, i64> {
        /// The framework's top score over the extender's: 100 / 10.
        const SCALE: i64 = 10;
        if !self.extender.is_interested(self.pod) {
            return BTreeMap::new();
        }
        let scores = self
            .extender
            .prioritize(self.pod, nodes)
            .await
            .unwrap_or_default();
        let factor = self.extender.config.weight.saturating_mul(SCALE);
        scores
            .into_iter()
            .map(|(host, score)| (host, score.saturating_mul(factor)))
            .collect()
    }

    async fn run_post_filter(&mut self, found: FilteredNodes) -> CycleResult {
        let (post_filter, nomination) = match self.preempt(&found.rejections).await {
            Ok(candidate) => (String::new(), CycleNomination::Preempt(candidate)),
            Err((text, nomination)) => (format!(" {text}"), nomination),
        };
        let fit_error = message::fit_error(self.cache.nodes().len(), &found.rejections);
        CycleResult::Unschedulable {
            message: fit_error + &post_filter,
            rejectors: found.rejectors,
            nomination,
        }
    }

    /// The victims to evict, or PostFilter's message and the new nomination.
    async fn preempt(
        &mut self,
        refusals: &NodeRejections,
    ) -> Result<DryRunCandidate, (String, CycleNomination)> {
        let keep = |text: &str| (message::post_filter(text), CycleNomination::Keep);
        if let Some(why) = preemption::ineligibility(self.pod, self.cache, refusals) {
            return Err(keep(why));
        }
        let nodes = self.cache.nodes().len();
        let offset = self.memory.random.below(nodes);
        let mut found = preemption::dry_run(
            self.pod,
            self.cache,
            refusals,
            offset,
            self.ignored_resource(),
        );
        // The real dry run is parallel: its errors come in any order, and so does the condition's text.
        self.memory.random.shuffle(&mut found.errors);
        if found.candidates.is_empty() && !found.errors.is_empty() {
            return Err((
                format!("preemption: {}", message::aggregate(&found.errors)),
                CycleNomination::Keep,
            ));
        }
        if found.candidates.is_empty() {
            let text = message::no_candidates(nodes, &found.rejections);
            return Err((message::post_filter(&text), CycleNomination::Clear));
        }
        let left = self.ask_extender_about_victims(found.candidates).await;
        let left = left.map_err(|error| (format!("preemption: {error}"), CycleNomination::Keep))?;
        // Nothing left is no failure of the search, so the nomination stays as it is.
        preemption::select_candidate(left).ok_or_else(|| keep("no candidate node for preemption"))
    }

    async fn ask_extender_about_victims(
        &self,
        candidates: Vec<DryRunCandidate>,
    ) -> Result<Vec<DryRunCandidate>, String> {
        if !self.extender.is_interested(self.pod) {
            return Ok(candidates);
        }
        let by_node = candidates.iter().map(|candidate| {
            let victims: Vec<&SchedulerPod> = candidate.victims.iter().map(Arc::as_ref).collect();
            (candidate.node.clone(), (victims, candidate.pdb_violations))
        });
        let answer = self.extender.preempt(self.pod, &by_node.collect()).await;
        let adopted = answer.and_then(|answer| {
            preemption::candidates_from_answer(answer, self.cache, &self.extender.config.url_prefix)
        });
        match adopted {
            Err(_) if self.extender.config.ignorable => Ok(candidates),
            adopted => adopted,
        }
    }

    fn ignored_resource(&self) -> Option<&str> {
        let config = &self.extender.config;
        config
            .ignored_by_scheduler
            .then_some(config.managed_resource.as_str())
    }
}
