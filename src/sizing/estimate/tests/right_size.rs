//! What a running engine shows, and what its pod could ask for instead.

use super::super::right_size::{Advice, Observation, RightSize, Unobserved};
use super::*;

fn seen(usage: f64) -> Observation {
    Observation {
        reserved: Some(Bytes::gib(60)),
        used: Some(Bytes::gib(59)),
        kv_cache_usage: Some(usage),
        kv_cache_tokens: Some(320 << 10),
        ..Observation::default()
    }
}

fn right_size(seen: &Observation) -> Result<RightSize, Unobserved> {
    let (model, workload) = (read(LLAMA_8B).unwrap(), Workload::default());
    RightSize::of(&model, &workload, &estimate(&model, &workload), seen)
}

#[test]
fn a_pod_whose_cache_is_mostly_free_is_told_what_it_could_ask_for() {
    let size = right_size(&seen(0.4)).unwrap();
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
    let size = right_size(&seen(0.0)).unwrap();
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
        ..seen(0.97)
    };
    let size = right_size(&full).unwrap();
    assert_eq!(size.advice, Advice::Grow);
    assert!(size.reason.contains("7 requests wait"), "{}", size.reason);
    assert!(size.needed_with_margin_bytes > Bytes::gib(60));
    let preempting = Observation {
        preempting: true,
        ..seen(0.5)
    };
    assert_eq!(right_size(&preempting).unwrap().advice, Advice::Grow);
    let busy = right_size(&seen(0.8)).unwrap();
    assert_eq!((busy.advice, busy.pod), (Advice::Keep, None));
}

#[test]
fn what_the_engine_does_not_say_is_taken_from_the_estimate_or_asked_for() {
    let page = Observation {
        used: None,
        reserved: None,
        ..seen(0.4)
    };
    let size = right_size(&page).unwrap();
    assert_eq!(
        (size.kv_cache_bytes, size.advice),
        (Bytes::gib(40), Advice::Shrink)
    );
    let memory = Observation {
        kv_cache_tokens: None,
        used: None,
        ..seen(0.4)
    };
    assert!(right_size(&memory).unwrap().kv_cache_bytes < Bytes::gib(60));
    let neither = Observation {
        kv_cache_tokens: None,
        ..page
    };
    assert_eq!(right_size(&neither), Err(Unobserved::Size));
    let silent = Observation {
        kv_cache_usage: None,
        ..seen(0.4)
    };
    assert_eq!(right_size(&silent), Err(Unobserved::Usage));
}
