//! Shadow mode: Stowage's answers are recorded and counted, and kube-scheduler's own choice is used.
//!
//! The verbs decide as always; where enforcing would act on a decision, this records it and lets everything through. No pod is
//! assumed, reserved, evicted or woken, and no soft reservation is made. Shadow mode is for device-plugin nodes: there a pod
//! that is bound without Stowage's answer still gets its GPUs. A pod that requests `stowage.dev/vram` would get none, and is
//! rejected.

use super::Extender;
use super::filter::{InvalidPod, filter_result};
use super::wire::{AnsweredVictim, AnsweredVictims, FilterResult, PreemptionResult, RequestNodes};
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use serde::{Serialize, Serializer};
use std::collections::{BTreeMap, VecDeque};
use stowage_kubernetes_objects as objects;
use stowage_scheduling::ids::{NodeName, PodKey, PodUid};
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::placing::fit::Misfit;
use stowage_scheduling::placing::rank::Shortlist;
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::{Digest, Mode};
use stowage_scheduling::units::plural;
use stowage_scheduling::verbs::preempt::OfferedNode;
use stowage_scheduling::verbs::preempt_device_plugin::NarrowedCandidates;
use stowage_scheduling::verbs::request::{DecisionView, VerbRequest};
use stowage_scheduling::verbs::shadow::{ExpectedBind, LetThrough, ShadowOutcome, decision_of};
use tracing::info;

/// The rejection of a pod that requests VRAM. The same text each time.
pub use stowage_scheduling::reasons::NO_VRAM_IN_SHADOW;

/// Maximum records. A pod leaves three or four: enough for the last few hundred pods, in less than a megabyte.
const MAX_RECORDS: usize = 1000;

/// Nodes named in a record's text.
const MAX_NAMED_NODES: usize = 8;

/// One answer that was recorded instead of given.
#[derive(Debug, Clone, Serialize)]
pub struct ShadowRecord {
    pub at: jiff::Timestamp,
    #[serde(serialize_with = "as_text")]
    pub pod: PodKey,
    pub uid: PodUid,
    pub verb: &'static str,
    pub outcome: ShadowOutcome,
    /// The policy of the decision.
    pub policy: Digest,
    /// What Stowage would have answered, and why.
    pub would: String,
    /// What was answered instead, or what kube-scheduler did.
    pub did: String,
}

/// The latest records, oldest first.
#[derive(Debug, Default)]
pub struct ShadowJournal {
    records: Mutex<VecDeque<ShadowRecord>>,
}

impl ShadowJournal {
    pub fn records(&self) -> Vec<ShadowRecord> {
        self.records.lock().iter().cloned().collect()
    }

    fn push(&self, record: ShadowRecord) {
        let mut records = self.records.lock();
        if records.len() == MAX_RECORDS {
            records.pop_front();
        }
        records.push_back(record);
    }
}

/// The pod and the verb of a decision.
struct ShadowSubject<'a> {
    uid: &'a PodUid,
    key: &'a PodKey,
    verb: &'static str,
    policy: Digest,
}

/// Passes all nodes whatever was decided; none, if the pod requests VRAM.
pub fn filter<'a>(
    extender: &Extender,
    nodes: &'a RequestNodes<'a>,
    view: &DecisionView,
    list: &Shortlist,
) -> FilterResult<'a> {
    extender.state.cluster().apply(decision_of(view, list));
    let subject = subject_of(&view.request, "filter", view.policy.digest);
    let (outcome, would) = (
        ShadowOutcome::for_filter(view, list),
        shortlist_text(&view.snapshot, list),
    );
    if outcome == ShadowOutcome::Refused {
        record(extender, subject, outcome, would, NO_VRAM_IN_SHADOW.into());
        return refuse_all(nodes);
    }
    record(extender, subject, outcome, would, passed_on(nodes));
    pass_all(nodes)
}

/// Passes all nodes for a pod with an invalid request; `None` if it is rejected in this mode too.
pub(crate) fn filter_invalid<'a>(
    extender: &Extender,
    nodes: &'a RequestNodes<'a>,
    pod: &Pod,
    invalid: &InvalidPod,
) -> Option<FilterResult<'a>> {
    let InvalidPod { uid, key, error } = invalid;
    let policy = shadow_policy(extender, pod)?;
    // Its bind finds it in the ledger.
    let demand = objects::worst_case(pod, &extender.state.policy());
    let waiting = ObservedWaiting::default();
    let disruption = Some(objects::disruption(pod, extender.state.clock.wall()));
    let request = VerbRequest {
        uid: uid.clone(),
        key: key.clone(),
        demand,
        waiting,
        disruption,
    };
    extender.state.cluster().apply(LetThrough(request));
    let subject = ShadowSubject {
        uid,
        key,
        verb: "filter",
        policy,
    };
    record(
        extender,
        subject,
        ShadowOutcome::WouldReject,
        error.to_string(),
        passed_on(nodes),
    );
    Some(pass_all(nodes))
}

/// Records how the nodes would have been ranked.
pub fn prioritize(extender: &Extender, view: &DecisionView, list: &Shortlist) {
    let subject = subject_of(&view.request, "prioritize", view.policy.digest);
    let (outcome, would) = (
        ShadowOutcome::for_prioritize(list),
        shortlist_text(&view.snapshot, list),
    );
    record(
        extender,
        subject,
        outcome,
        would,
        "all nodes scored 0".into(),
    );
}

/// Answers the candidates as they were offered; none, if the pod requests VRAM.
pub fn preempt(
    extender: &Extender,
    request: &VerbRequest,
    offered: &[OfferedNode],
    narrowed: &NarrowedCandidates,
) -> PreemptionResult {
    let subject = subject_of(request, "preempt", narrowed.policy.digest);
    let outcome = ShadowOutcome::for_preempt(request, narrowed, offered.len());
    if outcome == ShadowOutcome::Refused {
        record(
            extender,
            subject,
            outcome,
            "nothing".into(),
            NO_VRAM_IN_SHADOW.into(),
        );
        return PreemptionResult::default();
    }
    let would = match narrowed.chosen_index {
        None => format!("no candidate: {}", narrowed.code),
        Some(index) => offered[index].node.clone(),
    };
    record(
        extender,
        subject,
        outcome,
        would,
        format!("{} as offered", plural(offered.len(), "candidate")),
    );
    as_offered(offered)
}

/// Answers the candidates as offered for a pod with an invalid request; `None` if it gets no answer in this mode either.
pub(crate) fn preempt_invalid(
    extender: &Extender,
    offered: &[OfferedNode],
    pod: &Pod,
    invalid: &InvalidPod,
) -> Option<PreemptionResult> {
    let InvalidPod { uid, key, error } = invalid;
    let subject = ShadowSubject {
        uid,
        key,
        verb: "preempt",
        policy: shadow_policy(extender, pod)?,
    };
    let did = format!("{} as offered", plural(offered.len(), "candidate"));
    record(
        extender,
        subject,
        ShadowOutcome::WouldNotPreempt,
        error.to_string(),
        did,
    );
    Some(as_offered(offered))
}

/// Records that the pod is bound to kube-scheduler's node, and how that compares with Stowage's choice.
pub fn record_bound(
    extender: &Extender,
    uid: &PodUid,
    key: &PodKey,
    node: &NodeName,
    expected: &ExpectedBind,
) {
    let (outcome, first) = expected.compare(node);
    let would = match (outcome, first) {
        (ShadowOutcome::NotAsked, _) => "not asked".to_owned(),
        (_, None) => "no node".to_owned(),
        (_, Some(first)) => first.to_string(),
    };
    let subject = ShadowSubject {
        uid,
        key,
        verb: "bind",
        policy: expected.policy,
    };
    record(extender, subject, outcome, would, node.to_string());
}

fn subject_of<'a>(
    request: &'a VerbRequest,
    verb: &'static str,
    policy: Digest,
) -> ShadowSubject<'a> {
    ShadowSubject {
        uid: &request.uid,
        key: &request.key,
        verb,
        policy,
    }
}

/// The policy's digest, if it is in shadow mode and lets such a pod through.
fn shadow_policy(extender: &Extender, pod: &Pod) -> Option<Digest> {
    let policy = extender.state.cluster().ledger().policy().clone();
    let is_let_through = objects::asks_device_plugin(pod) && !objects::asks_for_vram(pod);
    (policy.mode == Mode::Shadow && is_let_through).then_some(policy.digest)
}

fn pass_all<'a>(nodes: &'a RequestNodes<'a>) -> FilterResult<'a> {
    filter_result(nodes, 0..nodes.len(), std::iter::empty())
}

fn refuse_all<'a>(nodes: &'a RequestNodes<'a>) -> FilterResult<'a> {
    filter_result(
        nodes,
        std::iter::empty(),
        (0..nodes.len()).map(|index| (index, NO_VRAM_IN_SHADOW)),
    )
}

fn as_offered(offered: &[OfferedNode]) -> PreemptionResult {
    let answered = offered.iter().map(|node| {
        let pods = node
            .victims
            .iter()
            .map(|uid| AnsweredVictim { uid: uid.clone() })
            .collect();
        (
            node.node.clone(),
            AnsweredVictims {
                pods,
                num_pdb_violations: node.pdb_violations,
            },
        )
    });
    PreemptionResult {
        node_name_to_meta_victims: answered.collect(),
    }
}

fn passed_on(nodes: &RequestNodes<'_>) -> String {
    format!("{} passed on", plural(nodes.len(), "node"))
}

/// `a, b; refused: 3 × devices-in-use`.
fn shortlist_text(snapshot: &Snapshot, list: &Shortlist) -> String {
    let names = list
        .best
        .iter()
        .take(MAX_NAMED_NODES)
        .map(|c| snapshot.nodes()[c.node_index].name.as_str());
    let mut text = names.collect::<Vec<_>>().join(", ");
    if list.best.is_empty() {
        text.push_str("no node");
    }
    let mut reasons: BTreeMap<&str, u32> = BTreeMap::new();
    list.rejected
        .iter()
        .map(|(_, misfit)| Misfit::code(misfit))
        .for_each(|code| {
            *reasons.entry(code).or_default() += 1;
        });
    let reasons: Vec<String> = reasons
        .iter()
        .map(|(code, count)| format!("{count} × {code}"))
        .collect();
    if !reasons.is_empty() {
        text.push_str("; refused: ");
        text.push_str(&reasons.join(", "));
    }
    text
}

fn record(
    extender: &Extender,
    subject: ShadowSubject<'_>,
    outcome: ShadowOutcome,
    would: String,
    did: String,
) {
    let ShadowSubject {
        uid,
        key,
        verb,
        policy,
    } = subject;
    extender
        .state
        .metrics
        .shadow
        .with_label_values(&[verb, outcome.into_str()])
        .inc();
    if outcome.is_difference() {
        info!(pod = %key, verb, outcome = outcome.into_str(), would, did, "shadow");
    }
    let at = extender.state.clock.wall();
    extender.journal.push(ShadowRecord {
        at,
        pod: key.clone(),
        uid: uid.clone(),
        verb,
        outcome,
        policy,
        would,
        did,
    });
}

fn as_text<S: Serializer>(key: &PodKey, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record_of(number: usize) -> ShadowRecord {
        ShadowRecord {
            at: jiff::Timestamp::UNIX_EPOCH,
            pod: PodKey::parse("default", &format!("pod-{number}")).unwrap(),
            uid: PodUid::parse("uid").unwrap(),
            verb: "bind",
            outcome: ShadowOutcome::WouldNotPreempt,
            policy: Digest(7),
            would: "a".into(),
            did: "b".into(),
        }
    }

    #[test]
    fn the_latest_thousand_records_are_kept_in_order() {
        let journal = ShadowJournal::default();
        (0..MAX_RECORDS + 3).for_each(|number| journal.push(record_of(number)));
        let names: Vec<String> = journal
            .records()
            .iter()
            .map(|record| record.pod.name.to_string())
            .collect();
        assert_eq!(
            (
                names.len(),
                names[0].as_str(),
                names[MAX_RECORDS - 1].as_str()
            ),
            (MAX_RECORDS, "pod-3", "pod-1002")
        );
    }

    #[test]
    fn a_record_is_written_as_operators_read_it() {
        let written = serde_json::to_value(record_of(1)).unwrap();
        let expected = serde_json::json!({
            "at": "1970-01-01T00:00:00Z", "pod": "default/pod-1", "uid": "uid", "verb": "bind",
            "outcome": "would-not-preempt", "policy": "0000000000000007", "would": "a", "did": "b",
        });
        assert_eq!(written, expected);
        assert_eq!(
            written["outcome"],
            ShadowOutcome::WouldNotPreempt.into_str()
        );
    }
}
