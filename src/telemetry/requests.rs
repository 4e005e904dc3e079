//! Families about kube-scheduler's requests: how long they take, what is answered, and how long a pod waits for its place.

use super::family::{Families, known, open};
use super::work_kind::WorkKind;
use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec};
use stowage_scheduling::placing::fit::Misfit;
use stowage_scheduling::verbs::shadow::ShadowOutcome;
use strum::VariantArray;

/// The scheduler's verbs, as labels.
pub const VERBS: [&str; 4] = ["filter", "prioritize", "preempt", "bind"];
/// The code of an answer that has no more to say than its outcome. An empty label would be none at all.
pub const NO_CODE: &str = "none";

/// From 50 µs, below which latency does not matter, to 3 s, beyond which kube-scheduler has given up.
const VERB_BUCKETS: [f64; 12] = [
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0, 3.0,
];
/// From a second, within which kube-scheduler tries again, to a day.
const PLACEMENT_BUCKETS: [f64; 14] = [
    0.0, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 150.0, 300.0, 900.0, 1800.0, 3600.0, 14_400.0, 86_400.0,
];

pub fn verb_seconds(families: &mut Families) -> HistogramVec {
    let help = "Time to answer the scheduler, by verb.";
    families.histograms(
        "stowage_verb_duration_seconds",
        help,
        [known("verb", VERBS)],
        &VERB_BUCKETS,
    )
}

pub fn answers(families: &mut Families) -> IntCounterVec {
    let answers = families.counters(
        "stowage_answers_total",
        "Answers to the scheduler, by verb, outcome and reason code.",
        [
            known("verb", VERBS),
            known(
                "outcome",
                [
                    "passed",
                    "refused",
                    "ranked",
                    "not-ranked",
                    "narrowed",
                    "none",
                    "reserved",
                    "bound",
                    "unbound",
                ],
            ),
            open(
                "code",
                "the reason codes of the source, some forty; none where the outcome says all",
            ),
        ],
    );
    let usual = [
        ("filter", "passed"),
        ("prioritize", "ranked"),
        ("preempt", "reserved"),
        ("bind", "bound"),
    ];
    usual
        .iter()
        .for_each(|(verb, outcome)| drop(answers.with_label_values(&[*verb, *outcome, NO_CODE])));
    answers
}

pub fn refusals(families: &mut Families) -> IntCounterVec {
    let help = "Nodes rejected by filter, by reason code.";
    families.counters(
        "stowage_nodes_rejected_total",
        help,
        [known("code", Misfit::CODES.iter().copied())],
    )
}

pub fn bad_requests(families: &mut Families) -> IntCounterVec {
    let verbs = VERBS.into_iter().chain(["reports"]);
    let bad = families.counters(
        "stowage_bad_requests_total",
        "Invalid requests, by verb (reports of those to the agents' address) and code.",
        [
            known("verb", verbs.clone()),
            open("code", "the codes of the source, some forty"),
        ],
    );
    verbs.for_each(|verb| drop(bad.with_label_values(&[verb, "malformed"])));
    bad
}

pub fn shadow(families: &mut Families) -> IntCounterVec {
    families.counters(
        "stowage_shadow_decisions_total",
        "Decisions recorded in shadow mode, by verb and how they compare with what kube-scheduler did.",
        [known("verb", VERBS), known("outcome", ShadowOutcome::VARIANTS.iter().map(ShadowOutcome::into_str))],
    )
}

pub fn panics(families: &mut Families) -> IntCounterVec {
    let help = "Panics that were caught: in a request of the scheduler's (any), in a report of an agent's (reports), and in work beside them.";
    let kinds = WorkKind::VARIANTS.iter().map(WorkKind::into_str);
    families.counters(
        "stowage_panics_total",
        help,
        [known("verb", ["any", "reports"].into_iter().chain(kinds))],
    )
}

pub fn ledger_wait(families: &mut Families) -> Histogram {
    let help = "Time that filter waited for the ledger's lock.";
    families.histogram("stowage_ledger_lock_wait_seconds", help, &VERB_BUCKETS)
}

pub fn ledger_hold(families: &mut Families) -> Histogram {
    let help = "Time that filter held the ledger's lock, once it had it.";
    families.histogram("stowage_ledger_lock_hold_seconds", help, &VERB_BUCKETS)
}

pub fn placement_seconds(families: &mut Families) -> HistogramVec {
    families.histograms(
        "stowage_pod_placement_duration_seconds",
        "Time from a pod's first refusal, or from when it was first seen behind the gate, to its Binding, by class; 0 for one that \
         was placed when kube-scheduler first asked.",
        [open("class", "the policy's classes")],
        &PLACEMENT_BUCKETS,
    )
}

pub fn bound_to_reusable_engines(families: &mut Families) -> IntCounter {
    families.counter(
        "stowage_bound_to_reusable_engines_total",
        "Pods bound to the GPUs of a sleeping engine of their model that they may wake.",
    )
}
