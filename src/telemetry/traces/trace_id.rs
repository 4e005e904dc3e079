//! The trace of a pod has the pod's UID as its ID.

use opentelemetry::TraceId;
use opentelemetry::trace::SpanId;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};
use sha2::{Digest, Sha256};
use std::cell::Cell;
use stowage_scheduling::ids::PodUid;

thread_local! {
    /// The ID of the trace that a root begins on this thread. The SDK takes it from its generator alone.
    static NEXT_TRACE_ID: Cell<TraceId> = const { Cell::new(TraceId::INVALID) };
}

/// Random IDs, but for roots that begin in [`with_pod_trace`].
#[derive(Debug, Default)]
pub(crate) struct PodTraceIds(RandomIdGenerator);

impl IdGenerator for PodTraceIds {
    fn new_trace_id(&self) -> TraceId {
        match NEXT_TRACE_ID.replace(TraceId::INVALID) {
            TraceId::INVALID => self.0.new_trace_id(),
            pod_trace_id => pod_trace_id,
        }
    }

    fn new_span_id(&self) -> SpanId {
        self.0.new_span_id()
    }
}

/// The first root that `begin` begins belongs to this pod's trace.
pub(crate) fn with_pod_trace<T>(uid: &PodUid, begin: impl FnOnce() -> T) -> T {
    NEXT_TRACE_ID.set(trace_id(uid));
    let begun = begin();
    NEXT_TRACE_ID.set(TraceId::INVALID);
    begun
}

/// The UID without its hyphens; of a UID that is no UUID, as static pods may have, the first half of its SHA-256.
pub fn trace_id(uid: &PodUid) -> TraceId {
    let digits: String = uid.as_str().chars().filter(|c| *c != '-').collect();
    let is_uuid = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let from_uuid = TraceId::from_hex(&digits)
        .ok()
        .filter(|id| is_uuid && *id != TraceId::INVALID);
    from_uuid.unwrap_or_else(|| {
        let digest = Sha256::digest(uid.as_str());
        let mut half = [0; 16];
        half.copy_from_slice(&digest[..16]);
        TraceId::from_bytes(half)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_the_trace_id_and_any_other_uid_has_one_of_its_own() {
        let id = |uid: &str| trace_id(&PodUid::parse(uid).unwrap());
        assert_eq!(
            id("0f8fad5b-d9cb-469f-a165-70867728950e").to_string(),
            "0f8fad5bd9cb469fa16570867728950e"
        );
        let others = [
            "uid-a",
            "uid-b",
            "00000000-0000-0000-0000-000000000000",
            "+f8fad5bd9cb469fa16570867728950e",
        ];
        for uid in others {
            assert_ne!(id(uid), TraceId::INVALID, "{uid}");
            assert_eq!(id(uid), id(uid));
        }
        assert_ne!(id("uid-a"), id("uid-b"));
    }

    #[test]
    fn only_a_root_that_begins_for_a_pod_takes_its_id() {
        let (ids, uid) = (PodTraceIds::default(), PodUid::parse("uid-a").unwrap());
        assert_eq!(with_pod_trace(&uid, || ids.new_trace_id()), trace_id(&uid));
        assert_ne!(ids.new_trace_id(), trace_id(&uid));
        with_pod_trace(&uid, || ());
        assert_ne!(
            ids.new_trace_id(),
            trace_id(&uid),
            "one that was not taken is not left over"
        );
    }
}
