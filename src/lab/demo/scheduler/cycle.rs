//! One scheduling cycle for one pod: filter, score, and if nothing fits, preemption. No writes.
//!
//! The order of calls is the real scheduler's: the nominated node alone first, then as many nodes as the sampling wants, the
//! extender only about nodes that passed, scores only if more than one is left.

use super::config::SchedulerConfig;
use super::extender::ExtenderClient;
use super::filters::{Refusal, Rejector, Resolvable, run_filters};
use super::message::{self, Refusals};
use super::objects::{SchedulerNode, SchedulerPod};
use super::preemption::{self, DryRunCandidate};
use super::view::SchedulerCache;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::testkit::random::Random;

/// The result of a cycle.
#[derive(Debug)]
pub(crate) enum CycleResult {
    Place {
        node: String,
    },
    /// Unschedulable: sleeps until an event that is relevant to the rejecting plugins.
    Unfit {
        message: String,
        rejectors: BTreeSet<Rejector>,
        nomination: CycleNomination,
    },
    /// SchedulerError: retried after back-off, with its nomination cleared.
    Failed {
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
    pub view: &'a SchedulerCache,
    pub config: &'a SchedulerConfig,
    pub extender: &'a ExtenderClient,
    pub memory: &'a mut CycleMemory,
}

/// Nodes that passed every filter, and why the others did not.
#[derive(Default)]
struct FilteredNodes {
    feasible: Vec<Arc<SchedulerNode>>,
    refusals: Refusals,
    rejectors: BTreeSet<Rejector>,
}

impl Cycle<'_> {
    pub async fn run(mut self) -> CycleResult {
        if self.view.nodes().len() == 0 {
            let message = "no nodes available to schedule pods".to_owned();
            return CycleResult::Unfit {
                message,
                rejectors: BTreeSet::from([Rejector::Extender]),
                nomination: CycleNomination::Clear,
            };
        }
        let found = match self.find().await {
            Ok(found) => found,
            Err(message) => return CycleResult::Failed { message },
        };
        match found.feasible.as_slice() {
            [] => self.unfit(found).await,
            [only] => CycleResult::Place {
                node: only.name.clone(),
            },
            several => CycleResult::Place {
                node: self.best(several).await,
            },
        }
    }

    async fn find(&mut self) -> Result<FilteredNodes, String> {
        let nominated = self
            .pod
            .nominated
            .as_deref()
            .and_then(|name| self.view.node(name))
            .cloned();
        if let Some(node) = nominated
            // An error about the nominated node alone does not end the cycle: all nodes are checked next.
            && let Ok(found) = self.ask_extender(self.pass_own_filters(vec![node], 1)).await
            && !found.feasible.is_empty()
        {
            return Ok(found);
        }
        let mut nodes: Vec<Arc<SchedulerNode>> = self.view.nodes().cloned().collect();
        let total = nodes.len();
        let start = self.memory.next_start % total;
        nodes.rotate_left(start);
        let found = self.pass_own_filters(nodes, self.config.nodes_to_find(total));
        self.memory.next_start = (start + found.feasible.len() + found.refusals.len()) % total;
        self.ask_extender(found).await
    }

    /// Checks nodes in their order until `wanted` are feasible.
    fn pass_own_filters(&self, nodes: Vec<Arc<SchedulerNode>>, wanted: usize) -> FilteredNodes {
        let mut found = FilteredNodes::default();
        for node in nodes {
            if found.feasible.len() >= wanted {
                break;
            }
            let usage = self.view.usage_for(self.pod, &node.name);
            match run_filters(self.pod, &node, &usage, self.ignored()) {
                Ok(()) => found.feasible.push(node),
                Err(refusal) => {
                    found.rejectors.insert(refusal.by);
                    found.refusals.insert(node.name.clone(), refusal);
                }
            }
        }
        found
    }

    /// The extender is asked only about nodes that passed, and only about pods it manages.
    async fn ask_extender(&self, mut found: FilteredNodes) -> Result<FilteredNodes, String> {
        if found.feasible.is_empty() || !self.extender.is_interested_in(self.pod) {
            return Ok(found);
        }
        let answer = match self.extender.filter(self.pod, &found.feasible).await {
            Ok(answer) => answer,
            Err(_) if self.extender.config.ignorable => return Ok(found),
            Err(error) => return Err(error),
        };
        for (node, text) in answer.failed {
            found.refusals.insert(
                node,
                Refusal::new(Rejector::Extender, Resolvable::ByEviction, text),
            );
        }
        for (node, text) in answer.unresolvable {
            found.refusals.insert(
                node,
                Refusal::new(Rejector::Extender, Resolvable::Never, text),
            );
        }
        if answer.nodes.len() != found.feasible.len() {
            found.rejectors.insert(Rejector::Extender);
        }
        found.feasible = answer.nodes;
        Ok(found)
    }

    /// The highest score; a random one of equal ones.
    async fn best(&mut self, nodes: &[Arc<SchedulerNode>]) -> String {
        let scores = self.extender_scores(nodes).await;
        let jitter = self.config.own_score_jitter;
        let own = |random: &mut Random| {
            i64::try_from(random.below(jitter.saturating_add(1))).unwrap_or_default()
        };
        let mut best: Vec<&str> = Vec::new();
        let mut highest = i64::MIN;
        for node in nodes {
            let extender = scores.get(&node.name).copied().unwrap_or_default();
            let score = own(&mut self.memory.random).saturating_add(extender);
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
        if !self.extender.is_interested_in(self.pod) {
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

    async fn unfit(&mut self, found: FilteredNodes) -> CycleResult {
        let (post_filter, nomination) = match self.preempt(&found.refusals).await {
            Ok(candidate) => (String::new(), CycleNomination::Preempt(candidate)),
            Err((text, nomination)) => (format!(" {text}"), nomination),
        };
        let fit_error = message::fit_error(self.view.nodes().len(), &found.refusals);
        CycleResult::Unfit {
            message: fit_error + &post_filter,
            rejectors: found.rejectors,
            nomination,
        }
    }

    /// The victims to evict, or PostFilter's message and the new nomination.
    async fn preempt(
        &mut self,
        refusals: &Refusals,
    ) -> Result<DryRunCandidate, (String, CycleNomination)> {
        let keep = |text: &str| (message::post_filter(text), CycleNomination::Keep);
        if let Some(why) = preemption::ineligibility(self.pod, self.view, refusals) {
            return Err(keep(why));
        }
        let nodes = self.view.nodes().len();
        let offset = self.memory.random.below(nodes);
        let mut found = preemption::dry_run(self.pod, self.view, refusals, offset, self.ignored());
        // The real dry run is parallel: its errors come in any order, and so does the condition's text.
        self.memory.random.shuffle(&mut found.errors);
        if found.candidates.is_empty() && !found.errors.is_empty() {
            return Err((
                format!("preemption: {}", message::aggregate(&found.errors)),
                CycleNomination::Keep,
            ));
        }
        if found.candidates.is_empty() {
            let text = message::no_candidates(nodes, &found.refusals);
            return Err((message::post_filter(&text), CycleNomination::Clear));
        }
        let left = self.ask_about_victims(found.candidates).await;
        let left = left.map_err(|error| (format!("preemption: {error}"), CycleNomination::Keep))?;
        // Nothing left is no failure of the search, so the nomination stays as it is.
        preemption::choose(left).ok_or_else(|| keep("no candidate node for preemption"))
    }

    async fn ask_about_victims(
        &self,
        candidates: Vec<DryRunCandidate>,
    ) -> Result<Vec<DryRunCandidate>, String> {
        if !self.extender.is_interested_in(self.pod) {
            return Ok(candidates);
        }
        let by_node = candidates.iter().map(|candidate| {
            let victims: Vec<&SchedulerPod> = candidate.victims.iter().map(Arc::as_ref).collect();
            (candidate.node.clone(), (victims, candidate.pdb_violations))
        });
        let answer = self.extender.preempt(self.pod, &by_node.collect()).await;
        let adopted = answer.and_then(|answer| {
            preemption::adopt(answer, self.view, &self.extender.config.url_prefix)
        });
        match adopted {
            Err(_) if self.extender.config.ignorable => Ok(candidates),
            adopted => adopted,
        }
    }

    fn ignored(&self) -> Option<&str> {
        let config = &self.extender.config;
        config
            .ignored_by_scheduler
            .then_some(config.managed_resource.as_str())
    }
}
