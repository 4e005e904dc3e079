//! The answer to a Binding and what the watch shows of the pod come in any order: its state is the same in the end.

use super::*;
use crate::audit::ledger::audit;
use crate::policy::StartGate;
use crate::testkit::{self, LedgerCluster, demand_of, gpu, whole_gpu};
use crate::units::{Bytes, Millis};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_info::{ObservedDisruptionInfo, PodDeletion};
use proptest::prelude::*;

/// What can be learned of a pod whose Binding was sent.
#[derive(Debug, Clone, Copy)]
enum BindEvent {
    /// The Binding was written.
    Confirm,
    /// It is on its node, and its engine starts.
    Bound,
    /// It has run for so many seconds, and it is ready.
    Ready(u64),
    /// It is being deleted, with so many seconds of grace.
    Leaving(u64),
}

fn event() -> impl Strategy<Value = BindEvent> {
    prop_oneof![
        Just(BindEvent::Confirm),
        Just(BindEvent::Bound),
        (1u64..100).prop_map(BindEvent::Ready),
        (1u64..100).prop_map(BindEvent::Leaving),
    ]
}

fn uid() -> PodUid {
    testkit::uid("pod")
}

fn node() -> NodeName {
    testkit::node("n")
}

/// A pod whose Binding is on its way, of a class that keeps other engines from starting beside it for 60 s at least.
fn assumed() -> LedgerCluster {
    let mut classes = Policy::default().classes().to_vec();
    for class in &mut classes {
        class.start_gate = StartGate {
            min: Millis::seconds(60),
            max: Millis::seconds(600),
        };
    }
    let policy = Policy::default().with_classes(classes).unwrap();
    let gpu = whole_gpu(gpu("GPU-a"), 0, Bytes(100));
    let mut ledger = LedgerCluster::empty(policy).with_node("n", vec![gpu]);
    observe(
        &mut ledger,
        ObservedPhase::Waiting(ObservedWaiting::default()),
        None,
    );
    ledger.ledger_mut().assume(&uid(), &node()).unwrap();
    ledger
}

fn observe(
    ledger: &mut LedgerCluster,
    state: ObservedPhase,
    observed: Option<ObservedDisruptionInfo>,
) {
    ledger.observe("pod", demand_of(40, 1, Sharing::Shared, 0), state, observed);
}

fn take(ledger: &mut LedgerCluster, event: BindEvent) {
    let devices = || Some([gpu("GPU-a")].into());
    let bound = |starting, ran| ObservedPhase::Bound {
        node: node(),
        devices: devices(),
        starting,
        ran,
    };
    match event {
        BindEvent::Confirm => ledger.ledger_mut().confirm(&uid(), &node(), devices()),
        BindEvent::Bound => observe(ledger, bound(true, None), None),
        BindEvent::Ready(ran) => observe(ledger, bound(false, Some(Millis::seconds(ran))), None),
        BindEvent::Leaving(grace) => {
            let leaving = PodDeletion {
                asked_ago: Millis(0),
                grace: Millis::seconds(grace),
            };
            let observed = ObservedDisruptionInfo {
                leaving: Some(leaving),
                ..ObservedDisruptionInfo::default()
            };
            observe(ledger, bound(true, None), Some(observed));
        }
    }
    assert_eq!(audit(ledger.ledger()), []);
}

proptest! {
    #[test]
    fn read_confirm_and_watch_events_give_the_same_entry_in_any_order(
        (one, other) in prop::collection::vec(event(), 1..6)
            .prop_flat_map(|events| (Just(events.clone()).prop_shuffle(), Just(events).prop_shuffle())),
    ) {
        let [one, other] = [one, other].map(|events| {
            let mut ledger = assumed();
            events.into_iter().for_each(|event| take(&mut ledger, event));
            let snapshot = ledger.snapshot();
            (ledger.ledger().pod_state(&uid()).cloned(), snapshot.node("n").map(|node| node.gpus.to_vec()))
        });
        prop_assert_eq!(one, other);
    }
}
