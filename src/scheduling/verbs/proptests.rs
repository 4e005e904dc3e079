//! The order of the inputs determines everything: inputs that are stored and applied again lead to the same state, and a state
//! that is stored and loaded goes on as the one it was. No promise is broken meanwhile.

use super::{Cluster, ClusterState, Input};
use crate::audit::ledger::audit;
use crate::explaining::fleet::Fleet;
use crate::explaining::fleet::history::FleetSums;
use crate::testkit::histories::{OutsideEvent, RecordedCluster};
use crate::testkit::lending;
use proptest::prelude::*;
use std::sync::Arc;

fn event() -> impl Strategy<Value = OutsideEvent> {
    any::<u64>().prop_map(OutsideEvent::drawn)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn inputs_that_are_stored_and_applied_again_lead_to_the_same_state(
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut recorded = RecordedCluster::of_three_nodes();
        events.iter().for_each(|event| recorded.happens(event));
        let mut again = Cluster::new(Arc::new(lending()));
        for input in &recorded.inputs {
            again.apply(serde_json::from_str::<Input>(input).unwrap());
        }
        prop_assert_eq!(audit(recorded.cluster.ledger()), []);
        prop_assert_eq!(FleetSums::of_ledger(recorded.cluster.ledger()), FleetSums::of(&Fleet::of(recorded.cluster.ledger(), 0)));
        prop_assert_eq!(recorded.state(), RecordedCluster::of(again).state());
    }

    #[test]
    fn a_loaded_cluster_goes_on_as_the_one_that_was_stored(
        before in prop::collection::vec(event(), 1..60),
        after in prop::collection::vec(event(), 1..40),
    ) {
        let mut stored = RecordedCluster::of_three_nodes();
        before.iter().for_each(|event| stored.happens(event));
        let text = stored.state().to_string();
        let state: ClusterState = serde_json::from_str(&text).unwrap();
        let mut loaded = RecordedCluster::of(Cluster::load(state).unwrap());
        loaded.go_on_as(&stored);
        prop_assert_eq!(stored.state(), loaded.state());
        stored.decisions.clear();
        for event in &after {
            stored.happens(event);
            loaded.happens(event);
            prop_assert_eq!(&stored.decisions, &loaded.decisions, "after {:?}", event);
        }
        prop_assert_eq!(stored.state(), loaded.state());
    }
}

#[test]
fn histories_bind_and_evict_pods() {
    let mut recorded = RecordedCluster::of_three_nodes();
    (0..12_000).for_each(|word| recorded.happens(&OutsideEvent::drawn(word)));
    let count = |begin: &str| {
        let texts = recorded.decisions.iter();
        texts.filter(|text| text.starts_with(begin)).count()
    };
    let counts = ["Ok(Write(", "kube-scheduler evicts", "the planner evicts"].map(count);
    let [bound, kube_scheduler, planner] = counts;
    assert!(
        bound > 100 && kube_scheduler > 5 && planner > 0,
        "{counts:?}"
    );
}
