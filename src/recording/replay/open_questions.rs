//! Verbs that were asked and whose answers come later in the recording: other inputs stand in between.

use crate::answer::{Answer, Asked, Decision, KeptAnswer, KeptRanking};
use std::collections::BTreeMap;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::placing::rank::UNKNOWN_PLACE;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::reasons::AssumeConflict;
use stowage_scheduling::verbs::bind::BindAnswer;
use stowage_scheduling::verbs::filter::filter;
use stowage_scheduling::verbs::preempt::{PreemptView, preempt};
use stowage_scheduling::verbs::preempt_device_plugin::NarrowedCandidates;
use stowage_scheduling::verbs::prioritize::prioritize;
use stowage_scheduling::verbs::request::DecisionView;

/// Maximum number of pending decisions, more than requests are ever in progress at once. The oldest is dropped beyond it: its
/// client may have gone.
const KEPT: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct OpenQuestions {
    /// Pending decisions by the number of their input.
    open: BTreeMap<u64, Unanswered>,
    scores: ScoreCache,
}

#[derive(Debug)]
struct Unanswered {
    pod: PodKey,
    generation: u64,
    question: OpenQuestion,
}

/// What a decision is made on, or the decision if the core made it at once.
#[derive(Debug)]
enum OpenQuestion {
    Filter(Box<DecisionView>),
    Prioritize(Box<DecisionView>),
    Preempt(Box<PreemptView>),
    Decided(Box<Decision>),
}

impl OpenQuestions {
    pub fn filter(&mut self, number: u64, view: DecisionView) {
        let (pod, generation) = (view.request.key.clone(), view.snapshot.generation());
        self.open(
            number,
            Unanswered {
                pod,
                generation,
                question: OpenQuestion::Filter(Box::new(view)),
            },
        );
    }

    pub fn prioritize(&mut self, number: u64, view: DecisionView) {
        let (pod, generation) = (view.request.key.clone(), view.snapshot.generation());
        self.open(
            number,
            Unanswered {
                pod,
                generation,
                question: OpenQuestion::Prioritize(Box::new(view)),
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
            Some(view) => OpenQuestion::Preempt(Box::new(view)),
            None => OpenQuestion::Decided(Box::new(Decision::Preempt(None))),
        };
        self.open(
            number,
            Unanswered {
                pod,
                generation,
                question,
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
        let question = OpenQuestion::Decided(Box::new(Decision::Narrow(narrowed)));
        self.open(
            number,
            Unanswered {
                pod,
                generation,
                question,
            },
        );
    }

    pub fn bind(
        &mut self,
        number: u64,
        pod: PodKey,
        generation: u64,
        answer: Result<BindAnswer, AssumeConflict>,
    ) {
        let question = OpenQuestion::Decided(Box::new(Decision::Bind(answer)));
        self.open(
            number,
            Unanswered {
                pod,
                generation,
                question,
            },
        );
    }

    fn open(&mut self, number: u64, unanswered: Unanswered) {
        self.open.insert(number, unanswered);
        if self.open.len() > KEPT {
            self.open.pop_first();
        }
    }

    /// Pod that a pending decision is about.
    pub fn pod(&self, number: u64) -> Option<&PodKey> {
        Some(&self.open.get(&number)?.pod)
    }

    /// Answer to the same input as it is decided now; `None` if that input is not pending.
    pub fn answer(&mut self, recorded: &Answer) -> Option<Answer> {
        let number = recorded.asked.number;
        let Unanswered {
            generation,
            question,
            ..
        } = self.open.remove(&number)?;
        let decision = match (question, &recorded.answer) {
            (OpenQuestion::Filter(view), KeptAnswer::Filter(kept)) => {
                let mut scores =
                    self.scores
                        .take(&view.snapshot, &view.request.demand, &view.policy);
                let list = filter(&view, names(&view, kept).into_iter(), &mut scores);
                self.scores.put(scores);
                Decision::Filter(list)
            }
            (OpenQuestion::Prioritize(view), KeptAnswer::Prioritize(kept)) => {
                Decision::Prioritize(prioritize(&view, names(&view, kept).into_iter()))
            }
            (OpenQuestion::Preempt(view), _) => Decision::Preempt(Some(preempt(*view))),
            (OpenQuestion::Decided(decision), _) => *decision,
            // Another verb's answer: it shows as one.
            (OpenQuestion::Filter(view), _) => Decision::Filter(filter(
                &view,
                std::iter::empty(),
                &mut ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy),
            )),
            (OpenQuestion::Prioritize(view), _) => {
                Decision::Prioritize(prioritize(&view, std::iter::empty()))
            }
        };
        Some(Answer {
            asked: Asked { number, generation },
            answer: KeptAnswer::of(decision),
        })
    }
}

/// Names of the nodes that were asked about. An index that the snapshot does not have, because the state differs, has no name.
fn names<'a>(view: &'a DecisionView, kept: &KeptRanking) -> Vec<&'a str> {
    let nodes = view.snapshot.nodes();
    // A corrupt count would take all memory.
    let places = kept.places().take(MOST_NAMES);
    places
        .map(|place| match place {
            UNKNOWN_PLACE => "",
            place => nodes
                .get(place as usize)
                .map_or("", |node| node.name.as_str()),
        })
        .collect()
}

/// Maximum number of names of a request: far more than the nodes of any cluster.
const MOST_NAMES: usize = 1 << 20;
