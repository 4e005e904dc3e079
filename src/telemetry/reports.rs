//! Families about agents' reports, as the extender receives them.

use super::family::{Families, Label, known, open};
use prometheus::{IntCounter, IntCounterVec};
use stowage_kubernetes_objects::port::AuthError;
use stowage_report::ReportPart;
use strum::VariantArray;

/// Outcomes of a token's review.
pub(super) fn review_outcomes() -> Label {
    let refusals = AuthError::CODES.iter().copied();
    known(
        "outcome",
        ["accepted"]
            .into_iter()
            .chain(refusals)
            .chain(["abandoned"]),
    )
}

pub fn reports(families: &mut Families) -> IntCounterVec {
    let reports = families.counters(
        "stowage_agent_reports_total",
        "Agent reports, by outcome: accepted, old, or the reason of a rejection.",
        [open("outcome", "the codes of the source, some twenty")],
    );
    for outcome in [
        "accepted",
        "old",
        "malformed",
        "unknown-node",
        "wrong-node",
        "replaced-node",
    ] {
        reports.with_label_values(&[outcome]);
    }
    reports
}

pub fn bytes(families: &mut Families) -> IntCounter {
    families.counter(
        "stowage_agent_report_bytes_total",
        "Bytes of agent reports received.",
    )
}

pub fn gpus_delayed(families: &mut Families) -> IntCounter {
    families.counter(
        "stowage_agent_gpus_delayed_total",
        "GPUs in agent reports that were deferred because their node's GPU list changes too often.",
    )
}

pub fn missing(families: &mut Families) -> IntCounterVec {
    let help = "Parts that agent reports lacked because they could not be sampled, by part.";
    families.counters(
        "stowage_agent_missing_parts_total",
        help,
        [known(
            "part",
            ReportPart::VARIANTS.iter().map(ReportPart::into_str),
        )],
    )
}

pub fn findings(families: &mut Families) -> IntCounterVec {
    let help = "Pods found to run on other GPUs (drift) or to use more VRAM (over-grant) than recorded, by kind.";
    families.counters(
        "stowage_agent_findings_total",
        help,
        [known("kind", ["drift", "over-grant"])],
    )
}

pub fn token_reviews(families: &mut Families) -> IntCounterVec {
    let help = "TokenReviews of agents' tokens, by outcome.";
    families.counters(
        "stowage_agent_token_reviews_total",
        help,
        [review_outcomes()],
    )
}
