//! Traces, as a collector gets them.

use super::*;
use crate::Metrics;
use hyper_util::client::legacy::connect::HttpConnector;
use std::net::TcpListener;

fn pod() -> (PodUid, PodKey) {
    (
        PodUid::parse("0f8fad5b-d9cb-469f-a165-70867728950e").unwrap(),
        PodKey::parse("team", "llm").unwrap(),
    )
}

/// A collector that takes connections and never answers.
fn silent() -> (TcpListener, Collector) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap())
        .parse()
        .unwrap();
    (
        listener,
        Collector {
            endpoint,
            instance: "stowage-0".into(),
        },
    )
}

#[test]
fn nothing_is_recorded_while_traces_are_off() {
    let (traces, (uid, key)) = (Traces::default(), pod());
    assert_eq!(traces.arrival_time(), None);
    let call = traces.call("filter", None, &uid, &key);
    let _within = call.enter();
    assert!(!call.is_recorded() && !traces.step("decide").is_recorded());
    assert!(!traces.write("write Binding", &uid, &key).is_recorded());
    assert!(!Context::current().has_active_span());
}

#[test]
fn a_step_needs_a_call_and_a_write_without_one_is_a_root_of_its_pods_trace() {
    let (_listener, collector) = silent();
    let (traces, _exporting) =
        start(collector, HttpConnector::new(), &Metrics::new().traces).unwrap();
    let (uid, key) = pod();
    let trace = |traced: &PodSpan| {
        traced
            .context
            .as_ref()
            .unwrap()
            .span()
            .span_context()
            .trace_id()
    };
    assert!(!traces.step("decide").is_recorded());
    let write = traces.write("evict pod", &uid, &key);
    assert_eq!(trace(&write), trace_id::trace_id(&uid));
    drop(write);
    let other = PodUid::parse("uid-other").unwrap();
    let call = traces.call("preempt", traces.arrival_time(), &uid, &key);
    let _within = call.enter();
    assert_eq!(
        trace(&traces.write("evict pod", &other, &key)),
        trace_id::trace_id(&uid),
        "below the call"
    );
}

#[test]
fn a_silent_collector_delays_nothing_and_dropped_spans_are_counted() {
    let (_listener, collector) = silent();
    let metrics = Metrics::new().traces;
    let (traces, exporting) = start(collector, HttpConnector::new(), &metrics).unwrap();
    let (uid, key) = pod();
    // Twice what the queue and a batch on its way can hold.
    const SPANS: u64 = 10_000;
    (0..SPANS).for_each(|_| drop(traces.call("filter", None, &uid, &key)));
    let dropped = |reason: &str| metrics.dropped.with_label_values(&[reason]).get();
    assert!(dropped("queue-full") > 0);
    // The end waits for it for a bounded time, and whatever was not sent is counted.
    drop(exporting);
    assert_eq!(dropped("queue-full") + dropped("export-failed"), SPANS);
    assert_eq!(metrics.exported.get(), 0);
}
