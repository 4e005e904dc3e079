//! The order of the inputs determines everything: inputs that are stored and applied again lead to the same state, and a state
//! that is stored and loaded goes on as the one it was. No promise is broken meanwhile.

use super::{Cluster, ClusterState, Input};
use crate::audit::ledger::audit;
use crate::explaining::fleet::Fleet;
use crate::explaining::fleet::history::FleetSums;
use crate::testkit::histories::{OutsideEvent, RecordedCluster};
use crate::testkit::lending_policy;
use proptest::prelude::*;
use std::sync::Arc;

fn event() -> impl Strategy<Value = OutsideEvent> {
    any::<u64>().prop_map(OutsideEvent::from_word)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn inputs_that_are_stored_and_applied_again_lead_to_the_same_state(
        events in prop::collection::vec(event(), 1..80),
    ) {
        let mut recorded = RecordedCluster::with_three_nodes();
        events.iter().for_each(|event| recorded.apply_event(event));
        let mut again = Cluster::new(Arc::new(lending_policy()));
        for input in &recorded.inputs {
            again.apply(serde_json::from_str::<Input>(input).unwrap());
        }
        prop_assert_eq!(audit(recorded.cluster.ledger()), []);
        prop_assert_eq!(FleetSums::from_ledger(recorded.cluster.ledger()), FleetSums::from_fleet(&Fleet::from_ledger(recorded.cluster.ledger(), 0)));
        prop_assert_eq!(recorded.state(), RecordedCluster::from_cluster(again).state());
    }

    #[test]
    fn a_loaded_cluster_goes_on_as_the_one_that_was_stored(
        before in prop::collection::vec(event(), 1..60),
        after in prop::collection::vec(event(), 1..40),
    ) {
        let mut stored = RecordedCluster::with_three_nodes();
        before.iter().for_each(|event| stored.apply_event(event));
        let text = stored.state().to_string();
        let state: ClusterState = serde_json::from_str(&text).unwrap();
        let mut loaded = RecordedCluster::from_cluster(Cluster::load(state).unwrap());
        loaded.continue_from(&stored);
        prop_assert_eq!(stored.state(), loaded.state());
        stored.decisions.clear();
        for event in &after {
            stored.apply_event(event);
            loaded.apply_event(event);
            prop_assert_eq!(&stored.decisions, &loaded.decisions, "after {:?}", event);
        }
        prop_assert_eq!(stored.state(), loaded.state());
    }
}

#[test]
fn histories_bind_and_evict_pods() {
    let mut recorded = RecordedCluster::with_three_nodes();
    (0..12_000).for_each(|word| recorded.apply_event(&OutsideEvent::from_word(word)));
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
