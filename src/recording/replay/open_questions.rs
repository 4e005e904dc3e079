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

/// More requests are never in progress at once. A question that stays unanswered, because its client went, is forgotten when so
/// many came after it.
const KEPT: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct OpenQuestions {
    /// By the input's number.
    open: BTreeMap<u64, Unanswered>,
    scores: ScoreCache,
}

#[derive(Debug)]
struct Unanswered {
    pod: PodKey,
    generation: u64,
    question: OpenQuestion,
}

/// A question, with what it is decided on, or its answer if the core gave it at once.
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

    /// The pod that a question is about.
    pub fn pod(&self, number: u64) -> Option<&PodKey> {
        Some(&self.open.get(&number)?.pod)
    }

    /// The same question's answer now; `None` if it is not known here.
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

/// The names that were asked about. A place that the snapshot does not have, because the state is another, is of no node.
fn names<'a>(view: &'a DecisionView, kept: &KeptRanking) -> Vec<&'a str> {
    let nodes = view.snapshot.nodes();
    // A lying count would take all memory: no request names more.
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

/// Far more than the nodes of any cluster.
const MOST_NAMES: usize = 1 << 20;
