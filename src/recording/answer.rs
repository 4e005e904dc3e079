//! What a verb answered, small enough to be kept of every request: nodes by their places in the snapshot that the decision was
//! made on, and of the nodes that do not fit the counts and a digest.
//!
//! The order of the names in a request changes nothing of its answer, and kube-scheduler sends them in any; so it is not kept.

use rustc_hash::FxHasher;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use stowage_scheduling::evicting::VictimSet;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::ledger::AllocationFailure;
use stowage_scheduling::placing::fit::Misfit;
use stowage_scheduling::placing::rank::Shortlist;
use stowage_scheduling::placing::snapshot::NO_INDEX;
use stowage_scheduling::verbs::bind::BindAnswer;
use stowage_scheduling::verbs::preempt::PreemptDecision;
use stowage_scheduling::verbs::preempt_device_plugin::NarrowedCandidates;
use stowage_scheduling::vocabulary::gpu::GpuSet;
use stowage_scheduling::vocabulary::placement::Placement;

/// Input that a verb answered, and the cluster generation at that time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnsweredInput {
    /// The input's number.
    #[serde(rename = "of")]
    pub number: u64,
    /// Generation of the snapshot that the decision was made on.
    #[serde(rename = "gen")]
    pub generation: u64,
}

/// A verb's decision, as the core made it.
#[derive(Debug)]
pub enum Decision {
    Filter(Shortlist),
    Prioritize(Shortlist),
    /// `None` if the pod has a reservation already.
    Preempt(Option<PreemptDecision>),
    Narrow(NarrowedCandidates),
    Bind(Result<BindAnswer, AllocationFailure>),
}

impl Decision {
    /// Approximate memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        let node_bytes = match self {
            Self::Filter(list) | Self::Prioritize(list) => {
                size_of_val(list.rejected.as_slice()) + size_of_val(list.node_indices.as_slice())
            }
            Self::Preempt(_) | Self::Narrow(_) | Self::Bind(_) => 0,
        };
        size_of::<Self>() + node_bytes
    }
}

/// A verb's answer, as it is recorded.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Answer {
    #[serde(flatten)]
    pub input: AnsweredInput,
    pub answer: KeptAnswer,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeptAnswer {
    Filter(KeptRanking),
    Prioritize(KeptRanking),
    Preempt(KeptPreemption),
    /// Index of the chosen candidate among those offered, or why there is none.
    Narrow(Result<usize, String>),
    Bind(KeptBind),
}

/// Nodes that fit and nodes that do not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptRanking {
    /// Indices of the nodes that were asked about, as runs: first index and length.
    #[serde(rename = "asked")]
    pub queried: Vec<(u32, u32)>,
    /// Number of names of no node.
    pub unknown: u32,
    /// The best nodes, best first, with the GPUs of each.
    pub best: Vec<(u32, GpuSet)>,
    /// Number of nodes that do not fit, by reason.
    pub refused: BTreeMap<String, u32>,
    /// Digest of the nodes that do not fit, with their reasons and figures.
    pub digest: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeptPreemption {
    AlreadyReserved,
    Evict {
        victims: VictimSet,
        others: Vec<String>,
    },
    NoCandidate,
    FitsNow,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeptBind {
    Write {
        placement: Placement,
        is_reserved: bool,
        is_new: bool,
        #[serde(rename = "wakes")]
        wakes_engine: bool,
    },
    AlreadyBound,
    /// Reason, and the node that it names.
    Refused {
        why: String,
        node: Option<NodeName>,
    },
}

/// Serializes as the derive would, but as a struct: names of its fields are no texts ([`redaction`](super::redaction)).
impl Serialize for Answer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self {
            input: AnsweredInput { number, generation },
            answer,
        } = self;
        let mut fields = serializer.serialize_struct("Answer", 3)?;
        fields.serialize_field("of", number)?;
        fields.serialize_field("gen", generation)?;
        fields.serialize_field("answer", answer)?;
        fields.end()
    }
}

impl KeptBind {
    fn from_assume_failure(failure: &AllocationFailure) -> Self {
        use AllocationFailure::{AlreadyReserved, BoundElsewhere, Unsettled};
        let (BoundElsewhere { node } | Unsettled { node } | AlreadyReserved { node }) = failure
        else {
            return Self::Refused {
                why: failure.to_string(),
                node: None,
            };
        };
        Self::Refused {
            why: failure.code().into(),
            node: Some(node.clone()),
        }
    }
}

impl KeptAnswer {
    pub fn from_decision(decision: Decision) -> Self {
        match decision {
            Decision::Filter(list) => Self::Filter(KeptRanking::from_shortlist(list)),
            Decision::Prioritize(list) => Self::Prioritize(KeptRanking::from_shortlist(list)),
            Decision::Preempt(decision) => Self::Preempt(match decision {
                None => KeptPreemption::AlreadyReserved,
                Some(PreemptDecision::Evict {
                    victims,
                    victims_without_vram: others,
                }) => KeptPreemption::Evict { victims, others },
                Some(PreemptDecision::NoCandidate) => KeptPreemption::NoCandidate,
                Some(PreemptDecision::FitsNow) => KeptPreemption::FitsNow,
            }),
            Decision::Narrow(narrowed) => {
                Self::Narrow(narrowed.chosen_index.ok_or(narrowed.code.to_owned()))
            }
            Decision::Bind(answer) => Self::Bind(match answer {
                Ok(BindAnswer::Write(decision)) => KeptBind::Write {
                    placement: decision.placement,
                    is_reserved: decision.is_reserved,
                    is_new: decision.is_new,
                    wakes_engine: decision.wakes_engine,
                },
                Ok(BindAnswer::AlreadyBound) => KeptBind::AlreadyBound,
                Err(failure) => KeptBind::from_assume_failure(&failure),
            }),
        }
    }

    /// Name of the verb on the wire.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Filter(_) => "filter",
            Self::Prioritize(_) => "prioritize",
            Self::Preempt(_) | Self::Narrow(_) => "preempt",
            Self::Bind(_) => "bind",
        }
    }
}

impl KeptRanking {
    fn from_shortlist(list: Shortlist) -> Self {
        let Shortlist {
            best,
            rejected: refused,
            mut node_indices,
        } = list;
        let mut refused: Vec<(u32, Misfit)> = refused
            .into_iter()
            .map(|(query_index, misfit)| (node_indices[query_index], misfit))
            .collect();
        // kube-scheduler goes round the nodes from another one each time: these are a few runs, which a stable sort merges.
        refused.sort_by_key(|(node_index, _)| *node_index);
        node_indices.sort();
        let mut digest = FxHasher::default();
        refused.hash(&mut digest);
        let known_count = node_indices.partition_point(|node_index| *node_index != NO_INDEX);
        Self {
            queried: runs(&node_indices[..known_count]),
            unknown: (node_indices.len() - known_count) as u32,
            best: best
                .iter()
                .map(|candidate| (candidate.node_index as u32, candidate.gpus))
                .collect(),
            refused: count_codes(refused.iter().map(|(_, misfit)| misfit.code())),
            digest: digest.finish(),
        }
    }

    /// The indices of the nodes that were asked about, and [`NO_INDEX`] for each name of no node.
    pub fn indices(&self) -> impl Iterator<Item = u32> {
        let existing = self
            .queried
            .iter()
            .flat_map(|(first, length)| *first..first.saturating_add(*length));
        existing.chain(std::iter::repeat_n(NO_INDEX, self.unknown as usize))
    }
}

/// Number of occurrences of each code. Most come many times in a row.
fn count_codes(codes: impl Iterator<Item = &'static str>) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    let mut run = ("", 0);
    for code in codes.chain([""]) {
        if code == run.0 {
            run.1 += 1;
        } else {
            if run.1 > 0 {
                *counts.entry(run.0.to_owned()).or_default() += run.1;
            }
            run = (code, 1);
        }
    }
    counts
}

/// Sorted indices as runs of consecutive ones.
fn runs(indices: &[u32]) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for index in indices {
        match runs.last_mut() {
            Some((first, length)) if *first + *length == *index => *length += 1,
            _ => runs.push((*index, 1)),
        }
    }
    runs
}
