//! Families about the API server: leadership, contact, and what Stowage writes there.

use super::family::{Families, known, open};
use prometheus::{Gauge, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use stowage_scheduling::control_loop::{EvictionReason, PodEventReason};
use strum::VariantArray;

/// Resources that are watched.
const WATCHED_RESOURCES: [&str; 8] = [
    "namespaces",
    "nodes",
    "persistentvolumeclaims",
    "persistentvolumes",
    "poddisruptionbudgets",
    "pods",
    "resourceslices",
    "storageclasses",
];

/// What is written, and how that may end.
const WRITE_OUTCOMES: [(&str, &[&str]); 12] = [
    ("bind", &["written", "conflict", "refused", "unknown"]),
    (
        "evict",
        &[
            "written",
            "gone",
            "later",
            "called-off",
            "refused",
            "unknown",
        ],
    ),
    ("reservation", &["written", "gone", "failed", "landed-late"]),
    ("nomination", &["written", "gone", "failed"]),
    ("plan", &["written", "gone", "failed"]),
    ("eviction-reason", &["written", "gone", "failed"]),
    ("wake", &["written", "gone", "failed"]),
    ("requeue", &["written", "gone", "failed"]),
    ("gate", &["written", "gone", "failed"]),
    ("capacity", &["written", "failed"]),
    ("lease", &["written"]),
    ("certificates", &["written", "conflict", "failed"]),
];

pub fn ledgers_discarded(families: &mut Families) -> IntCounter {
    families.counter(
        "stowage_ledger_discarded_total",
        "Ledgers discarded after a panic under the lock, and rebuilt from a new list of the cluster.",
    )
}

pub fn events(families: &mut Families) -> IntCounterVec {
    families.counters(
        "stowage_events_total",
        "Kubernetes Events, by reason and outcome; a repetition is suppressed, one of too many at once is dropped, and a pod that may see all GPUs is exempt from StowageUngranted, for which the API server has to confirm what an agent calls the pod.",
        [
            known("reason", PodEventReason::VARIANTS.iter().map(PodEventReason::into_str)),
            known("outcome", ["published", "suppressed", "dropped", "failed", "exempt", "unconfirmed"]),
        ],
    )
}

pub fn writes(families: &mut Families) -> IntCounterVec {
    let writes = families.counters(
        "stowage_api_server_writes_total",
        "Writes to the API server, by kind and outcome.",
        [
            open("kind", "twelve kinds of writes"),
            open("outcome", "at most eight for each kind"),
        ],
    );
    for (kind, outcomes) in WRITE_OUTCOMES {
        outcomes
            .iter()
            .for_each(|outcome| drop(writes.with_label_values(&[kind, *outcome])));
    }
    writes
}

pub fn evictions(families: &mut Families) -> IntCounterVec {
    let help = "Pods that the API server evicted for Stowage, by reason. Victims that kube-scheduler evicts itself are not in it.";
    families.counters(
        "stowage_evictions_total",
        help,
        [known("reason", EvictionReason::CODES.iter().copied())],
    )
}

pub fn pod_warnings(families: &mut Families) -> IntCounterVec {
    families.counters(
        "stowage_pod_warnings_total",
        "Pods whose placement record is missing or was edited, or whose checkpoint time cannot be used, by warning.",
        [known(
            "warning",
            ["devices-edited", "demand-edited", "unplaced", "checkpoint-unreadable", "checkpoint-in-future"],
        )],
    )
}

pub fn leading(families: &mut Families) -> IntGauge {
    families.gauge("stowage_leader", "1 if this replica leads.")
}

pub fn synced(families: &mut Families) -> IntGauge {
    families.gauge(
        "stowage_synced",
        "1 once the watches have synced, 0 while the API server is unreachable, and while a replica that takes over lists the \
         cluster again.",
    )
}

pub fn refused_watches(families: &mut Families) -> IntGaugeVec {
    families.gauges(
        "stowage_watch_refused",
        "1 while the API server does not let this replica list or watch the resource.",
        [known("resource", WATCHED_RESOURCES)],
    )
}

pub fn bounds_reached(families: &mut Families) -> IntCounterVec {
    families.counters(
        "stowage_bounds_reached_total",
        "Objects that are larger than Stowage reads, by resource, each time that a list or a watch shows one.",
        [known("resource", WATCHED_RESOURCES)],
    )
}

pub fn last_contact_age(families: &mut Families) -> Gauge {
    families.float_gauge(
        "stowage_api_server_last_contact_age_seconds",
        "Time since the last response or watch event of the API server; 0 without an API server.",
    )
}
