//! Verbs that were asked and whose answers come later in the recording: other inputs stand in between.

use crate::answer::{Answer, AnsweredInput, Decision, KeptAnswer, KeptRanking};
use std::collections::BTreeMap;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::placing::snapshot::NO_INDEX;
use stowage_scheduling::reasons::AllocationFailure;
use stowage_scheduling::verbs::bind::BindAnswer;
use stowage_scheduling::verbs::filter::filter;
use stowage_scheduling::verbs::preempt::{PreemptView, preempt};
use stowage_scheduling::verbs::preempt_device_plugin::NarrowedCandidates;
use stowage_scheduling::verbs::prioritize::prioritize;
use stowage_scheduling::verbs::request::DecisionView;

/// Maximum number of pending decisions, more than requests are ever in progress at once. The oldest is dropped beyond it: its
/// client may have gone.
const MAX_PENDING: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct PendingDecisions {
    /// Pending decisions by the number of their input.
    pending: BTreeMap<u64, PendingDecision>,
    scores: ScoreCache,
}

#[derive(Debug)]
struct PendingDecision {
    pod: PodKey,
    generation: u64,
    input: DecisionInput,
}

/// What a decision is made on, or the decision if the core made it at once.
#[derive(Debug)]
enum DecisionInput {
    Filter(Box<DecisionView>),
    Prioritize(Box<DecisionView>),
    Preempt(Box<PreemptView>),
    Decided(Box<Decision>),
}

impl PendingDecisions {
    pub fn filter(&mut self, number: u64, view: DecisionView) {
        let (pod, generation) = (view.request.key.clone(), view.snapshot.generation());
        self.add(
            number,
            PendingDecision {
                pod,
                generation,
                input: DecisionInput::Filter(Box::new(view)),
            },
        );
    }

    pub fn prioritize(&mut self, number: u64, view: DecisionView) {
        let (pod, generation) = (view.request.key.clone(), view.snapshot.generation());
        self.add(
            number,
            PendingDecision {
                pod,
                generation,
                input: DecisionInput::Prioritize(Box::new(view)),
            },
        );
    }

    pub fn preempt(
        &mut self,
        number: u64,
        pod: PodKey,
        generation: u64,
        view: Option<PreemptView>,
    ) {
        let question = match view {
            Some(view) => DecisionInput::Preempt(Box::new(view)),
            None => DecisionInput::Decided(Box::new(Decision::Preempt(None))),
        };
        self.add(
            number,
            PendingDecision {
                pod,
                generation,
                input: question,
            },
        );
    }

    pub fn narrow(
        &mut self,
        number: u64,
        pod: PodKey,
        generation: u64,
        narrowed: NarrowedCandidates,
    ) {
        let question = DecisionInput::Decided(Box::new(Decision::Narrow(narrowed)));
        self.add(
            number,
            PendingDecision {
                pod,
                generation,
                input: question,
            },
        );
    }

    pub fn bind(
        &mut self,
        number: u64,
        pod: PodKey,
        generation: u64,
        answer: Result<BindAnswer, AllocationFailure>,
    ) {
        let question = DecisionInput::Decided(Box::new(Decision::Bind(answer)));
        self.add(
            number,
            PendingDecision {
                pod,
                generation,
                input: question,
            },
        );
    }

    fn add(&mut self, number: u64, decision: PendingDecision) {
        self.pending.insert(number, decision);
        if self.pending.len() > MAX_PENDING {
            self.pending.pop_first();
        }
    }

    /// Pod that a pending decision is about.
    pub fn pod(&self, number: u64) -> Option<&PodKey> {
        Some(&self.pending.get(&number)?.pod)
    }

    /// Answer to the same input as it is decided now; `None` if that input is not pending.
    pub fn decide(&mut self, recorded: &Answer) -> Option<Answer> {
        let number = recorded.input.number;
        let PendingDecision {
            generation,
            input: question,
            ..
        } = self.pending.remove(&number)?;
        let decision = match (question, &recorded.answer) {
            (DecisionInput::Filter(view), KeptAnswer::Filter(kept)) => {
                let mut scores =
                    self.scores
                        .take(&view.snapshot, &view.request.demand, &view.policy);
                let list = filter(&view, node_names(&view, kept).into_iter(), &mut scores);
                self.scores.put(scores);
                Decision::Filter(list)
            }
            (DecisionInput::Prioritize(view), KeptAnswer::Prioritize(kept)) => {
                Decision::Prioritize(prioritize(&view, node_names(&view, kept).into_iter()))
            }
            (DecisionInput::Preempt(view), _) => Decision::Preempt(Some(preempt(*view))),
            (DecisionInput::Decided(decision), _) => *decision,
            // Another verb's answer: it shows as one.
            (DecisionInput::Filter(view), _) => Decision::Filter(filter(
                &view,
                std::iter::empty(),
                &mut ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy),
            )),
            (DecisionInput::Prioritize(view), _) => {
                Decision::Prioritize(prioritize(&view, std::iter::empty()))
            }
        };
        Some(Answer {
            input: AnsweredInput { number, generation },
            answer: KeptAnswer::from_decision(decision),
        })
    }
}

/// Names of the nodes that were asked about. An index that the snapshot does not have, because the state differs, has no name.
fn node_names<'a>(view: &'a DecisionView, kept: &KeptRanking) -> Vec<&'a str> {
    let nodes = view.snapshot.nodes();
    // A corrupt count would take all memory.
    let indices = kept.indices().take(MAX_NAMES);
    indices
        .map(|index| match index {
            NO_INDEX => "",
            node_index => nodes
                .get(node_index as usize)
                .map_or("", |node| node.name.as_str()),
        })
        .collect()
}

/// Maximum number of names of a request: far more than the nodes of any cluster.
const MAX_NAMES: usize = 1 << 20;
