//! What a running engine shows, and what its pod could ask for instead.

use super::super::right_size::{Advice, Observation, RightSize, RightSizeError};
use super::*;

fn observation_with_usage(usage: f64) -> Observation {
    Observation {
        reserved: Some(Bytes::gib(60)),
        used: Some(Bytes::gib(59)),
        kv_cache_usage: Some(usage),
        kv_cache_tokens: Some(320 << 10),
        ..Observation::default()
    }
}

fn right_size(seen: &Observation) -> Result<RightSize, RightSizeError> {
    let (model, workload) = (read(LLAMA_8B).unwrap(), Workload::default());
    RightSize::new(&model, &workload, &estimate(&model, &workload), seen)
}

#[test]
fn a_pod_with_a_mostly_free_cache_is_advised_to_shrink() {
    let size = right_size(&observation_with_usage(0.4)).unwrap();
    assert_eq!(size.advice, Advice::Shrink);
    assert_eq!(
        size.kv_cache_bytes,
        Bytes::gib(40),
        "320 Ki tokens of 128 KiB"
    );
    assert_eq!(
        size.needed_bytes,
        Bytes::gib(19 + 16),
        "all but the cache was measured: 59 − 40"
    );
    assert_eq!(size.needed_with_margin_bytes, Bytes::gib(19 + 20));
    let pod = size.pod.unwrap();
    assert_eq!((pod.vram.as_str(), pod.kv_cache.as_str()), ("39Gi", "20Gi"));
}

#[test]
fn an_empty_cache_keeps_room_for_one_sequence() {
    let size = right_size(&observation_with_usage(0.0)).unwrap();
    assert_eq!(
        (size.advice, size.needed_with_margin_bytes),
        (Advice::Shrink, Bytes::gib(20))
    );
    assert!(
        size.reason.contains("one sequence of 8,192 tokens"),
        "{}",
        size.reason
    );
}

#[test]
fn a_full_cache_with_a_queue_asks_for_more_and_a_busy_one_stays() {
    let full = Observation {
        waiting: Some(7),
        ..observation_with_usage(0.97)
    };
    let size = right_size(&full).unwrap();
    assert_eq!(size.advice, Advice::Grow);
    assert!(size.reason.contains("7 requests wait"), "{}", size.reason);
    assert!(size.needed_with_margin_bytes > Bytes::gib(60));
    let preempting = Observation {
        preempting: true,
        ..observation_with_usage(0.5)
    };
    assert_eq!(right_size(&preempting).unwrap().advice, Advice::Grow);
    let busy = right_size(&observation_with_usage(0.8)).unwrap();
    assert_eq!((busy.advice, busy.pod), (Advice::Keep, None));
}

#[test]
fn values_that_the_engine_does_not_report_come_from_the_estimate() {
    let page = Observation {
        used: None,
        reserved: None,
        ..observation_with_usage(0.4)
    };
    let size = right_size(&page).unwrap();
    assert_eq!(
        (size.kv_cache_bytes, size.advice),
        (Bytes::gib(40), Advice::Shrink)
    );
    let memory = Observation {
        kv_cache_tokens: None,
        used: None,
        ..observation_with_usage(0.4)
    };
    assert!(right_size(&memory).unwrap().kv_cache_bytes < Bytes::gib(60));
    let neither = Observation {
        kv_cache_tokens: None,
        ..page
    };
    assert_eq!(right_size(&neither), Err(RightSizeError::Size));
    let silent = Observation {
        kv_cache_usage: None,
        ..observation_with_usage(0.4)
    };
    assert_eq!(right_size(&silent), Err(RightSizeError::Usage));
}
