//! What is fuzzed: `cargo fuzz run --features fuzzing TARGET`. `cargo test` replays the corpus without the fuzzer.
//!
//! [`mod@ledger`] is a cluster with two replicas of Stowage, [`decisions()`] one that events from outside reach in any order,
//! [`hostile`] makes pods with as much content as possible,
//! [`small_cluster`] is where policies, reports and recordings come to.

mod hostile;
mod ledger;
mod recording;
mod reload;
mod small_cluster;

pub use ledger::ledger;
pub use recording::recording;
pub use reload::{reload, report};

use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::histories::{OutsideEvent, RecordedCluster};
use stowage_scheduling::units::{Bytes, MilliCpu, Millis};

/// A small cluster to which happens what each two bytes choose: no promise is broken, as an oracle beside it counts.
pub fn decisions(data: &[u8]) {
    let mut recorded = RecordedCluster::with_three_nodes();
    for word in data.chunks_exact(2) {
        let word = u16::from_le_bytes([word[0], word[1]]);
        recorded.apply_event(&OutsideEvent::from_word(word.into()));
    }
}

/// Requests of the scheduler and reports of agents: whatever comes is read or refused, never a panic.
pub fn wire(data: &[u8]) {
    use stowage_report::NodeReport;
    use stowage_server::extender::reports::validate;
    use stowage_server::extender::wire::{BindingArgs, ExtenderArgs, PreemptionArgs};
    if let Ok(args) = serde_json::from_slice::<ExtenderArgs<'_>>(data) {
        let policy = Policy::default();
        let _ = stowage_kubernetes_objects::identity(&args.pod);
        let _ = stowage_kubernetes_objects::demand(&args.pod, &policy);
        let _ =
            stowage_kubernetes_objects::observation(&args.pod, &policy, None, Default::default());
        if let Some(Ok(nodes)) = args.request_nodes() {
            assert_eq!(nodes.names().count(), nodes.len());
        }
    }
    if let Ok(args) = serde_json::from_slice::<PreemptionArgs<'_>>(data) {
        let _ = args.offered();
    }
    let _ = serde_json::from_slice::<BindingArgs>(data);
    if let Ok(Ok(report)) = serde_json::from_slice::<NodeReport>(data).map(validate::check) {
        assert!(
            validate::devices(&report, Millis::seconds(30))
                .unwrap_or_default()
                .len()
                <= 64
        );
        assert_eq!(
            validate::check(report.clone()),
            Ok(report),
            "checked twice is checked once"
        );
    }
}

/// A policy file: it is parsed, or every error is reported at a position within it; a parsed policy classifies every pod, the
/// most hostile ones too, and the same text always means the same.
pub fn policy(data: &[u8]) {
    use stowage_policy_file::{SourceText, load};
    let files = [SourceText::new("policy.yaml", data)];
    match (load(&files), load(&files)) {
        (Ok(loaded), Ok(again)) => {
            assert_eq!(loaded.policy, again.policy);
            for class in loaded.policy.classes() {
                let cost = class
                    .matches
                    .expression
                    .as_ref()
                    .map(|expression| expression.cost())
                    .unwrap_or_default();
                assert!(cost.steps <= 10_000 && cost.bytes <= 4 << 20, "{cost:?}");
            }
            for pod in hostile::pods(data) {
                let classified = loaded.policy.classify(&pod);
                assert!(classified.class.index() < loaded.policy.classes().len());
                assert_eq!(classified, again.policy.classify(&pod));
                // The namespace's labels may be as hostile as the pod's.
                let known = [(
                    pod.namespace.clone(),
                    std::sync::Arc::new(pod.labels.clone()),
                )]
                .into();
                let selecting = again.policy.clone().with_namespace_labels(&known);
                assert!(selecting.classify(&pod).class.index() <= classified.class.index());
            }
        }
        (Err(found), Err(_)) => {
            assert!(!found.is_empty());
            // As it is shown: a byte that is not UTF-8 is a character of three.
            let shown = String::from_utf8_lossy(data).len().max(1);
            assert!(
                found.iter().all(|one| one.span.range().end <= shown),
                "{found:?}"
            );
        }
        (first, second) => panic!("{} and then {}", first.is_ok(), second.is_ok()),
    }
}

/// Quantities: what is read back from what was written is the same.
pub fn quantity(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let _ = MilliCpu::parse_quantity(text);
    if let Ok(bytes) = Bytes::parse_quantity(text) {
        assert_eq!(Bytes::parse_quantity(&bytes.0.to_string()), Ok(bytes));
    }
}

/// An engine's metrics page, after one byte that chooses the declared engine: whatever the page says, the figures are possible.
pub fn engine_page(data: &[u8]) {
    use stowage_report::engine_metrics::{Engine, parse_page};
    let Some((&soft_reservation, page)) = data.split_first() else {
        return;
    };
    let Ok(figures) = parse_page(
        page,
        Engine::ALL.get(usize::from(soft_reservation)).copied(),
    ) else {
        return;
    };
    assert!(
        figures
            .kv_cache_usage
            .is_none_or(|usage| (0.0..=1.0).contains(&usage)),
        "{figures:?}"
    );
    assert!(
        figures
            .sleep_level
            .is_none_or(|level| level == 1 || level == 2),
        "{figures:?}"
    );
    // A count of one rank is at most 10^12, and 256 ranks are read.
    for count in [figures.kv_cache_tokens, figures.waiting, figures.running]
        .into_iter()
        .flatten()
    {
        assert!(count <= 256_000_000_000_000, "{figures:?}");
    }
    assert!(
        figures
            .problems
            .iter()
            .all(|problem| problem.to_string().len() < 400),
        "{figures:?}"
    );
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn replay(target: &str, run: impl Fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("corpus")
            .join(target);
        let files: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().path())
            .collect();
        assert!(!files.is_empty(), "the corpus of {target} is there");
        files
            .iter()
            .for_each(|file| run(&std::fs::read(file).unwrap()));
    }

    #[test]
    fn the_wire_corpus_passes() {
        replay("wire", super::wire);
    }

    /// What a real kube-scheduler sends, with Stowage's resource in place of the recorded one.
    #[test]
    fn the_recorded_requests_pass() {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/kube-scheduler-v1.36.2");
        let mut requests = 0;
        for file in std::fs::read_dir(folder).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let fixture: serde_json::Value = serde_json::from_str(&text).unwrap();
            let Some(request) = fixture.get("request") else {
                continue;
            };
            super::wire(
                request
                    .to_string()
                    .replace("example.com/vram", "stowage.dev/vram")
                    .as_bytes(),
            );
            requests += 1;
        }
        assert!(requests > 10, "{requests} requests are recorded");
    }

    #[test]
    fn the_engine_page_corpus_passes() {
        replay("engine_page", super::engine_page);
    }

    #[test]
    fn the_decisions_corpus_passes() {
        replay("decisions", super::decisions);
    }

    #[test]
    fn the_ledger_corpus_passes() {
        replay("ledger", super::ledger);
    }

    #[test]
    fn the_policy_corpus_passes() {
        replay("policy", super::policy);
    }

    #[test]
    fn the_quantity_corpus_passes() {
        replay("quantity", super::quantity);
    }

    #[test]
    fn the_recording_corpus_passes() {
        replay("recording", super::recording);
    }

    #[test]
    fn the_reload_corpus_passes() {
        replay("reload", super::reload);
    }

    #[test]
    fn the_report_corpus_passes() {
        replay("report", super::report);
    }
}
