//! A ledger that is stored and loaded is the one that it was: it exports the same state, shows the same snapshot, and gives the
//! same answers from then on.

use super::histories::ledger_history::LedgerHistory;
use super::histories::step::{LedgerStep, key, node_name, step, uid};
use super::{assert_same, stored_and_loaded};
use crate::ids::{LeaderEpoch, PodUid};
use crate::ledger::evictions::ScopeKey;
use crate::ledger::{
    Ledger, LoadError, ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate,
};
use crate::policy::Policy;
use crate::units::Millis;
use crate::vocabulary::disruption_budget::{BudgetVisibility, DisruptionBudget};
use crate::vocabulary::disruption_info::{CheckpointAge, DisruptionInfo, ObservedDisruptionInfo};
use crate::vocabulary::label_selector::Selector;
use proptest::prelude::*;
use std::sync::Arc;

/// What the planner, the verbs and watches do to a ledger beside [`LedgerStep`].
#[derive(Debug, Clone)]
enum PlannerStep {
    Refuse(u8, Option<u8>),
    Gate(u8, SchedulingGate),
    Checkpoint(u8, u64),
    Pending(usize),
    Wake(u8),
    NoPlacement(u8),
    FailedEviction(u8),
    Evict(u8),
    ReserveScope(u8, u8),
    Budget(u8, u32),
    Budgets(BudgetVisibility),
    Lead(bool),
    Attempt(u8),
}

#[derive(Debug, Clone)]
enum Step {
    Ledger(LedgerStep),
    Planner(PlannerStep),
}

fn planner_step() -> impl Strategy<Value = PlannerStep> {
    let (pod, node) = (0u8..14, 0u8..3);
    let gate = prop_oneof![
        Just(SchedulingGate::Open),
        Just(SchedulingGate::Planned),
        Just(SchedulingGate::Others)
    ];
    let visibility = prop_oneof![
        Just(BudgetVisibility::Complete),
        Just(BudgetVisibility::Forbidden)
    ];
    prop_oneof![
        4 => (pod.clone(), prop::option::of(node.clone())).prop_map(|(pod, node)| PlannerStep::Refuse(pod, node)),
        3 => (pod.clone(), gate).prop_map(|(pod, gate)| PlannerStep::Gate(pod, gate)),
        1 => (pod.clone(), 0u64..100_000).prop_map(|(pod, age)| PlannerStep::Checkpoint(pod, age)),
        4 => (1usize..6).prop_map(PlannerStep::Pending),
        2 => pod.clone().prop_map(PlannerStep::Wake),
        2 => pod.clone().prop_map(PlannerStep::NoPlacement),
        1 => pod.clone().prop_map(PlannerStep::FailedEviction),
        3 => pod.clone().prop_map(PlannerStep::Evict),
        1 => (pod.clone(), node.clone()).prop_map(|(pod, node)| PlannerStep::ReserveScope(pod, node)),
        1 => (node, 0u32..3).prop_map(|(budget, allowed)| PlannerStep::Budget(budget, allowed)),
        1 => visibility.prop_map(PlannerStep::Budgets),
        1 => any::<bool>().prop_map(PlannerStep::Lead),
        2 => pod.prop_map(PlannerStep::Attempt),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![2 => step().prop_map(Step::Ledger), 1 => planner_step().prop_map(Step::Planner)]
}

/// Does one step, and answers what the ledger said.
fn apply(history: &mut LedgerHistory, step: &Step) -> String {
    match step {
        Step::Ledger(step) => {
            history.apply(step);
            String::new()
        }
        Step::Planner(step) => plan(&mut history.ledger, step),
    }
}

fn plan(ledger: &mut Ledger, step: &PlannerStep) -> String {
    match *step {
        PlannerStep::Refuse(pod, node) => {
            let snapshot = ledger.snapshot();
            let queried = node.map(|node| {
                snapshot.node_set(
                    (0..snapshot.nodes().len())
                        .filter(|node_index| *node_index != usize::from(node)),
                )
            });
            ledger.record_refusal(&uid(pod), queried);
        }
        PlannerStep::Gate(pod, gate) => show(
            ledger,
            pod,
            ObservedWaiting {
                gate,
                ..ObservedWaiting::default()
            },
            None,
        ),
        PlannerStep::Checkpoint(pod, age) => {
            let disruption_info = DisruptionInfo {
                owner: Some(owner()),
                ..DisruptionInfo::default()
            };
            let stamp = CheckpointAge::Ago(Millis(age));
            let observed = ObservedDisruptionInfo {
                disruption_info,
                stamp,
                shows_eviction: age % 2 == 0,
                shows_reservation: age % 3 == 0,
                ..Default::default()
            };
            show(ledger, pod, ObservedWaiting::default(), Some(observed));
        }
        PlannerStep::Pending(limit) => {
            let pending: Vec<PodUid> = ledger
                .pending(limit)
                .into_iter()
                .map(|pod| pod.uid)
                .collect();
            ledger.put_back(pending.iter().take(1));
            return format!("{pending:?} of {}", ledger.pending_count());
        }
        PlannerStep::Wake(pod) => ledger.record_requeue(&uid(pod)),
        PlannerStep::NoPlacement(pod) => ledger.record_no_placement(&uid(pod), ledger.generation()),
        PlannerStep::FailedEviction(pod) => ledger.record_failed_eviction(&uid(pod)),
        PlannerStep::Evict(pod) => {
            let victims = [uid(pod)];
            let limit = ledger.eviction_limit(&victims);
            ledger.record_evictions(&victims);
            ledger.record_owner_eviction(&uid(pod));
            return format!(
                "{limit:?} {} {}",
                ledger.recent_evictions_of(&owner()),
                ledger.may_evict_for(&uid(pod))
            );
        }
        PlannerStep::ReserveScope(pod, node) => {
            ledger.reserve_scope(ScopeKey::Node(node_name(node)), &uid(pod));
            return format!("{:?}", ledger.scopes_reserved_for_others(&uid(0), 0));
        }
        PlannerStep::Budget(number, allowed) => {
            let (namespace, name) = ("default".into(), format!("budget-{number}"));
            ledger.set_budget(DisruptionBudget {
                namespace,
                name,
                selector: Selector::EVERYTHING,
                allowed,
                unhealthy_may_go: false,
            });
        }
        PlannerStep::Budgets(visibility) => ledger.set_budget_visibility(visibility),
        PlannerStep::Lead(true) => ledger.begin_leading(LeaderEpoch::new("lease", 1, "nonce")),
        PlannerStep::Lead(false) => ledger.stop_leading(),
        PlannerStep::Attempt(pod) => return format!("{:?}", ledger.begin_attempt(&uid(pod))),
    }
    format!("{:?}", ledger.reservation_statuses())
}

fn owner() -> crate::ids::OwnerUid {
    crate::ids::OwnerUid::parse("owner").unwrap()
}

/// The API server shows a pod as it is known, but for this.
fn show(
    ledger: &mut Ledger,
    pod: u8,
    waiting: ObservedWaiting,
    observed: Option<ObservedDisruptionInfo>,
) {
    let Some(known) = ledger.pod_state(&uid(pod)) else {
        return;
    };
    let (demand, reservation) = (known.demand.clone(), known.reservation().cloned());
    let state = ObservedPhase::Waiting(ObservedWaiting {
        reservation,
        ..waiting
    });
    ledger.observe_pod(PodObservation {
        uid: uid(pod),
        key: key(pod),
        demand,
        state,
        observed,
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_loaded_ledger_is_the_one_that_was_stored(
        before in prop::collection::vec(any_step(), 1..80),
        after in prop::collection::vec(any_step(), 1..30),
    ) {
        let mut history = LedgerHistory::new();
        before.iter().for_each(|step| drop(apply(&mut history, step)));
        let mut loaded = history.clone();
        loaded.ledger = stored_and_loaded(&history.ledger);
        assert_same(&mut history.ledger, &mut loaded.ledger);
        for step in &after {
            prop_assert_eq!(apply(&mut history, step), apply(&mut loaded, step), "after {:?}", step);
            assert_same(&mut history.ledger, &mut loaded.ledger);
        }
    }
}

#[test]
fn a_state_is_loaded_only_if_everything_that_it_names_is_there() {
    let mut history = LedgerHistory::new();
    history.apply(&LedgerStep::Arrive(1, 10, 1, super::Sharing::Shared, 0));
    history.apply(&LedgerStep::Offer(1, 0));
    let ledger = &mut history.ledger;
    let all = ledger.snapshot().node_set(0..3);
    ledger.record_refusal(&uid(1), Some(all));
    let stored = serde_json::to_value(ledger.export()).unwrap();
    let load = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut stored = stored.clone();
        edit(&mut stored);
        Ledger::load(
            ledger.policy().clone(),
            serde_json::from_value(stored).unwrap(),
        )
        .map(drop)
    };
    let pod = uid(1);
    assert_eq!(load(&|_| {}), Ok(()));
    let class = load(&|stored| stored["pods"]["uid-1"]["demand"]["class"] = 63.into());
    assert_eq!(class, Err(LoadError::UnknownClass { pod: pod.clone() }));
    let gpus = load(&|stored| {
        stored["pods"]["uid-1"]["phase"]["waiting"]["soft_reservation"]["gpus"] =
            format!("{:x}", 1u64 << 40).into()
    });
    assert_eq!(
        gpus,
        Err(LoadError::UnknownGpu {
            pod: pod.clone(),
            node: node_name(0)
        })
    );
    let set = load(&|stored| {
        stored["pods"]["uid-1"]["phase"]["waiting"]["refused"]["asked"]["words"] =
            serde_json::json!([]);
    });
    assert_eq!(set, Err(LoadError::UnknownNodeSet { pod: pod.clone() }));
    let node = load(&|stored| stored["nodes"]["nodes"] = serde_json::json!([]));
    assert!(
        matches!(
            node,
            Err(LoadError::UnknownNode { .. } | LoadError::UnknownNodeSet { .. })
        ),
        "{node:?}"
    );
    let mut other = Policy::default();
    other.version = 7;
    let policy = Ledger::load(Arc::new(other), ledger.export()).map(drop);
    assert_eq!(
        policy,
        Err(LoadError::OtherPolicy {
            stored: 0,
            given: 7
        })
    );
}
