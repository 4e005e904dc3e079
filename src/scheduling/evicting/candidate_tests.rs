//! Preemption candidates made from a ledger: which pods may be evicted for which, the parts of the eviction cost, and what a
//! reservation changes. Hand-made candidates are in `tests`.

use super::*;
use crate::evicting::{BudgetRules, SearchEffort, VictimSet, cheapest};
use crate::ids::{ModelId, OwnerUid};
use crate::ledger::ObservedWaiting;
use crate::ledger::PodEvictionCost;
use crate::ledger::{AllocationFailure, KeepReason, ObservedPhase};
use crate::policy::{Class, Policy, Preemptibility, Protection, built_in_classes};
use crate::testkit::{LedgerCluster, START, demand_of, gpu_at, node, uid};
use crate::units::{Bytes, MilliCpu, Millis};
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::disruption_budget::{BudgetVisibility, DisruptionBudget};
use crate::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, PodDeletion,
};
use crate::vocabulary::label_selector::Selector;
use crate::vocabulary::model_tier::{ModelTier, NodeModel};
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};
use crate::vocabulary::placement::Reservation;
use std::sync::Arc;

const HOUR: Millis = Millis::seconds(3600);

/// Nodes `a` and `b` with one GPU of 80 GiB each, of which 72 are allocatable.
struct CandidateFixture {
    ledger: LedgerCluster,
}

/// What a watch shows of a pod without annotations that has run for an hour.
fn observed() -> ObservedDisruptionInfo {
    ObservedDisruptionInfo::default()
}

fn in_group(name: &str) -> ObservedDisruptionInfo {
    let group = Some(GroupKey {
        namespace: "ns".into(),
        kind: GroupKind::Stowage,
        name: name.into(),
    });
    ObservedDisruptionInfo {
        disruption_info: DisruptionInfo {
            group,
            ..DisruptionInfo::default()
        },
        ..ObservedDisruptionInfo::default()
    }
}

impl CandidateFixture {
    fn new(policy: Policy) -> Self {
        Self {
            ledger: LedgerCluster::with_policy_and_nodes(policy, &[("a", 1), ("b", 1)]),
        }
    }

    fn see(
        &mut self,
        name: &str,
        demand: Demand,
        state: ObservedPhase,
        observed: ObservedDisruptionInfo,
    ) {
        self.ledger.observe(name, demand, state, Some(observed));
    }

    fn bound_with(
        &mut self,
        name: &str,
        on: &str,
        demand: Demand,
        observed: ObservedDisruptionInfo,
    ) {
        self.ledger
            .add_running(name, (on, 0), demand, Some(HOUR), observed);
    }

    fn bound(&mut self, name: &str, on: &str, observed: ObservedDisruptionInfo) {
        self.bound_with(name, on, demand(36, -5), observed);
    }

    /// The victims for a pod of 36 GiB.
    fn ask(&mut self, rules: BudgetRules) -> Option<VictimSet> {
        self.see(
            "asks",
            demand(36, 10),
            ObservedPhase::Waiting(ObservedWaiting::default()),
            observed(),
        );
        let candidates = self.ledger.ledger().candidates_for(
            &self.ledger.ledger().preemptor(&uid("asks")),
            [&node("a"), &node("b")],
        );
        cheapest(&candidates, &demand(36, 10), rules, SearchEffort::UNLIMITED)
    }

    /// The names of the pods that are evicted on the node, of those that are evicted elsewhere, and of those that leave anyway.
    fn group_victims(&mut self) -> Option<[String; 3]> {
        let set = self.ask(BudgetRules::Keep)?;
        let names = |uids: &[PodUid]| {
            uids.iter()
                .map(PodUid::as_str)
                .collect::<Vec<_>>()
                .join(" ")
        };
        Some([
            names(&set.victims),
            names(&set.elsewhere),
            names(&set.awaited),
        ])
    }

    fn reserve(&mut self, set: &VictimSet, victims: Vec<PodUid>) -> Result<(), AllocationFailure> {
        let devices = self
            .ledger
            .ledger()
            .node(&set.node)
            .unwrap()
            .devices
            .iter()
            .map(|d| d.uuid.clone())
            .collect();
        let reservation = Reservation {
            node: set.node.clone(),
            devices,
            victims: victims.into(),
            deadline: START + Millis(60_000),
        };
        self.ledger.ledger_mut().reserve(&uid("asks"), reservation)
    }

    fn eviction_cost(&mut self, name: &str) -> PodEvictionCost {
        self.ask(BudgetRules::Violate);
        let candidate = self
            .ledger
            .ledger()
            .candidates_for(&self.ledger.ledger().preemptor(&uid("asks")), [&node("a")])
            .pop()
            .unwrap();
        candidate
            .potential_victims
            .iter()
            .find(|one| one.uid == uid(name))
            .unwrap()
            .eviction_cost
    }

    fn keep_reason_of(&self, name: &str) -> Option<KeepReason> {
        let preemptor = self.ledger.ledger().preemptor(&uid("asks"));
        self.ledger
            .ledger()
            .keep_reason_of(&preemptor, &demand(36, 10), &uid(name))
    }
}

fn demand(gib: u64, priority: i32) -> Demand {
    demand_of(gib << 30, 1, Sharing::Shared, priority)
}

fn three(victims: &str, elsewhere: &str, awaited: &str) -> Option<[String; 3]> {
    Some([victims.into(), elsewhere.into(), awaited.into()])
}

#[test]
fn no_pod_is_evicted_where_vram_becomes_free_anyway() {
    let mut bench = CandidateFixture::new(Policy::default());
    bench.bound(
        "cheap",
        "a",
        ObservedDisruptionInfo {
            stamp: CheckpointAge::Ago(Millis(0)),
            ..observed()
        },
    );
    bench.bound("other", "a", observed());
    let leaving = PodDeletion {
        asked_ago: Millis::seconds(10),
        grace: Millis::seconds(30),
    };
    bench.bound(
        "leaves",
        "b",
        ObservedDisruptionInfo {
            leaving: Some(leaving),
            ..observed()
        },
    );
    bench.bound("stays", "b", observed());
    assert_eq!(bench.group_victims(), three("", "", "leaves"));
    assert_eq!(bench.keep_reason_of("leaves"), Some(KeepReason::Deleting));
    let set = bench.ask(BudgetRules::Keep).unwrap();
    assert_eq!(set.longest_grace, Millis::seconds(20));
    assert_eq!(bench.reserve(&set, set.all_victims()), Ok(()));
    // Its VRAM is reserved now.
    bench.ledger.ledger_mut().release_reservation(&uid("asks"));
    // Thirty seconds after its grace period, the search no longer counts on its end; and it is still no victim.
    bench
        .ledger
        .ledger_mut()
        .set_now(START + Millis::seconds(51));
    assert_eq!(bench.group_victims(), three("cheap", "", ""));
    assert_eq!(
        bench.reserve(&set, vec![uid("leaves")]),
        Err(AllocationFailure::VictimProtected)
    );
}

#[test]
fn on_each_node_a_group_costs_what_its_members_elsewhere_do() {
    let mut bench = CandidateFixture::new(Policy::default());
    for (name, on, gib) in [
        ("g-1", "a", 10),
        ("g-2", "b", 20),
        ("g-3", "a", 30),
        ("g-4", "b", 5),
    ] {
        bench.bound_with(name, on, demand(gib, -10), in_group("g"));
    }
    bench.ask(BudgetRules::Keep);
    let preemptor = bench.ledger.ledger().preemptor(&uid("asks"));
    let candidates = bench
        .ledger
        .ledger()
        .candidates_for(&preemptor, [&node("a"), &node("b")]);
    let costs = |candidate: &PreemptionCandidate| {
        candidate
            .potential_victims
            .iter()
            .fold(EvictionCost::default(), |cost, victim| cost.plus(victim))
    };
    for [here, other] in [
        [&candidates[0], &candidates[1]],
        [&candidates[1], &candidates[0]],
    ] {
        let [group] = &here.gangs[..] else {
            panic!("{:?}", here.gangs)
        };
        assert_eq!(group.eviction_cost, costs(other));
        assert_eq!(group.members[..], ["g-1", "g-2", "g-3", "g-4"].map(uid));
        let elsewhere: Vec<_> = group
            .elsewhere
            .iter()
            .map(|(node, _)| node.clone())
            .collect();
        assert_eq!(elsewhere, [other.node.clone(), other.node.clone()]);
    }
}

#[test]
fn a_pod_that_terminates_for_hours_is_evicted_and_not_awaited() {
    let year = PodDeletion {
        asked_ago: Millis(0),
        grace: Millis::seconds(365 * 24 * 3600),
    };
    let stuck = PodDeletion {
        asked_ago: Millis(0),
        grace: Millis(0),
    };
    for (leaving, kept, reserved) in [
        (year, None, Ok(())),
        (
            stuck,
            Some(KeepReason::Deleting),
            Err(AllocationFailure::VictimProtected),
        ),
    ] {
        let mut bench = CandidateFixture::new(Policy::default());
        let saved = ObservedDisruptionInfo {
            stamp: CheckpointAge::Ago(Millis(0)),
            ..observed()
        };
        bench.bound("cheap", "a", saved);
        bench.bound("other", "a", observed());
        bench.bound(
            "bait",
            "b",
            ObservedDisruptionInfo {
                leaving: Some(leaving),
                ..observed()
            },
        );
        bench.bound("stays", "b", observed());
        bench
            .ledger
            .ledger_mut()
            .set_now(START + Millis::seconds(31));
        assert_eq!(bench.group_victims(), three("cheap", "", ""));
        assert_eq!(bench.keep_reason_of("bait"), kept);
        let set = VictimSet {
            node: node("b"),
            ..bench.ask(BudgetRules::Keep).unwrap()
        };
        assert_eq!(bench.reserve(&set, vec![uid("bait")]), reserved);
    }
}

#[test]
fn a_protected_pod_is_no_victim_and_the_reason_is_known() {
    let mut bench = CandidateFixture::new(Policy::default());
    let disruption_info = |edit: fn(&mut DisruptionInfo)| {
        let mut observed = observed();
        edit(&mut observed.disruption_info);
        observed
    };
    bench.bound(
        "kept",
        "a",
        disruption_info(|disruption_info| disruption_info.do_not_disrupt = true),
    );
    bench.bound(
        "queued",
        "a",
        disruption_info(|disruption_info| disruption_info.queue_managed = true),
    );
    bench.bound_with("service", "b", demand(36, 0), observed());
    bench.bound_with("equal", "b", demand(36, 10), observed());
    assert_eq!(bench.group_victims(), None);
    assert_eq!(bench.keep_reason_of("kept"), Some(KeepReason::DoNotDisrupt));
    assert_eq!(
        bench.keep_reason_of("queued"),
        Some(KeepReason::QueueManaged)
    );
    assert_eq!(bench.keep_reason_of("service"), Some(KeepReason::Class));
    assert_eq!(bench.keep_reason_of("equal"), Some(KeepReason::Class));
    bench.bound("kept", "a", observed());
    assert_eq!(
        (bench.group_victims(), bench.keep_reason_of("kept")),
        (three("kept", "", ""), None)
    );
    let set = bench.ask(BudgetRules::Keep).unwrap();
    bench.bound(
        "kept",
        "a",
        disruption_info(|disruption_info| disruption_info.do_not_disrupt = true),
    );
    assert_eq!(
        bench.reserve(&set, set.all_victims()),
        Err(AllocationFailure::VictimProtected),
        "the hold looks again"
    );
}

#[test]
fn a_pod_that_may_not_preempt_gets_no_victims() {
    let mut bench = CandidateFixture::new(Policy::default());
    bench.bound("x", "a", observed());
    bench.bound("y", "a", observed());
    let meek = Demand {
        may_preempt: false,
        ..demand(36, 10)
    };
    bench.see(
        "meek",
        meek.clone(),
        ObservedPhase::Waiting(ObservedWaiting::default()),
        observed(),
    );
    let preemptor = bench.ledger.ledger().preemptor(&uid("meek"));
    assert!(
        bench
            .ledger
            .ledger()
            .candidates_for(&preemptor, [&node("a")])
            .pop()
            .unwrap()
            .potential_victims
            .is_empty()
    );
    let reservation = Reservation {
        node: node("a"),
        devices: Arc::from([gpu_at("a", 0)]),
        victims: Arc::from([uid("x")]),
        deadline: START,
    };
    assert_eq!(
        bench.ledger.ledger_mut().reserve(&uid("meek"), reservation),
        Err(AllocationFailure::VictimProtected)
    );
}

#[test]
fn a_group_is_evicted_whole_or_not_at_all() {
    let mut bench = CandidateFixture::new(Policy::default());
    bench.bound("g-1", "a", in_group("g"));
    bench.bound("other", "a", observed());
    bench.bound("g-2", "b", in_group("g"));
    bench.bound_with("service", "b", demand(36, 0), observed());
    // Alone it is cheaper than two.
    assert_eq!(bench.group_victims(), three("other", "", ""));
    bench.ledger.ledger_mut().release(&uid("other"));
    bench.bound_with("other", "a", demand(36, 0), observed());
    assert_eq!(bench.group_victims(), three("g-1", "g-2", ""));
    let set = bench.ask(BudgetRules::Keep).unwrap();
    assert_eq!(set.eviction_cost.victims, 2);
    assert_eq!(
        bench.reserve(&set, vec![uid("g-1")]),
        Err(AllocationFailure::VictimProtected),
        "half of it"
    );
    assert_eq!(bench.reserve(&set, vec![uid("g-1"), uid("g-2")]), Ok(()));
    // Both are victims of a reservation already, on either node.
    bench.see(
        "later",
        demand(36, 10),
        ObservedPhase::Waiting(ObservedWaiting::default()),
        observed(),
    );
    let preemptor = bench.ledger.ledger().preemptor(&uid("later"));
    for name in ["a", "b"] {
        assert!(
            bench
                .ledger
                .ledger()
                .candidates_for(&preemptor, [&node(name)])
                .pop()
                .unwrap()
                .potential_victims
                .is_empty()
        );
    }
    assert_eq!(
        bench
            .ledger
            .ledger()
            .keep_reason_of(&preemptor, &demand(36, 10), &uid("g-2")),
        Some(KeepReason::VictimOfAnother)
    );
}

#[test]
fn a_group_with_a_protected_member_stays() {
    let mut bench = CandidateFixture::new(Policy::default());
    bench.bound("g-1", "a", in_group("g"));
    bench.bound_with("service", "a", demand(36, 0), observed());
    bench.bound_with("g-2", "b", demand(36, 0), in_group("g"));
    bench.bound_with("service-b", "b", demand(36, 0), observed());
    assert_eq!(bench.group_victims(), None);
    assert!(matches!(
        bench.keep_reason_of("g-1"),
        Some(KeepReason::Group(_))
    ));
    // A member that is leaving already protects no other.
    let leaving = Some(PodDeletion {
        asked_ago: Millis(0),
        grace: Millis::seconds(30),
    });
    bench.bound_with(
        "g-2",
        "b",
        demand(36, 0),
        ObservedDisruptionInfo {
            leaving,
            ..in_group("g")
        },
    );
    assert_eq!(bench.keep_reason_of("g-1"), None);
}

#[test]
fn no_set_overdraws_a_budget_unless_allowed_and_unreadable_budgets_forbid_every_set() {
    let mut bench = CandidateFixture::new(Policy::default());
    bench.bound("x", "a", observed());
    bench.bound_with("service", "a", demand(36, 0), observed());
    let budget = |name: &str, allowed| DisruptionBudget {
        // The namespace of `demand_of`.
        namespace: "default".into(),
        name: name.into(),
        selector: Selector::EVERYTHING,
        allowed,
        unhealthy_may_go: false,
    };
    bench.ledger.ledger_mut().set_budget(budget("one", 0));
    bench.bound_with("service-b", "b", demand(72, 0), observed());
    assert_eq!(bench.group_victims(), None);
    assert_eq!(
        bench
            .ask(BudgetRules::Violate)
            .unwrap()
            .eviction_cost
            .violations,
        1
    );
    bench.ledger.ledger_mut().set_budget(budget("one", 1));
    assert_eq!(bench.group_victims(), three("x", "", ""));
    // The Eviction API refuses a pod that two budgets cover.
    bench.ledger.ledger_mut().set_budget(budget("two", 9));
    assert_eq!(bench.group_victims(), None);
    bench.ledger.ledger_mut().remove_budget("default", "two");
    bench
        .ledger
        .ledger_mut()
        .set_budget_visibility(BudgetVisibility::Forbidden);
    assert_eq!(bench.group_victims(), None);
}

#[test]
fn each_part_of_the_eviction_cost_has_its_figure() {
    let mut policy = Policy::default();
    policy.preemption.costs.per_request = Millis::seconds(3);
    let mut bench = CandidateFixture::new(policy);
    let model = ModelId::parse("llama").unwrap();
    let engine = Demand {
        model: Some(model.clone()),
        ..demand(36, -5)
    };
    let owner = OwnerUid::parse("owner").ok();
    let saved = CheckpointAge::Ago(Millis::seconds(600));
    let disruption_info = DisruptionInfo {
        owner: owner.clone(),
        deletion_cost: 7,
        ..DisruptionInfo::default()
    };
    bench.bound_with(
        "x",
        "a",
        engine,
        ObservedDisruptionInfo {
            disruption_info: disruption_info.clone(),
            stamp: saved,
            ..Default::default()
        },
    );
    bench.bound(
        "y",
        "a",
        ObservedDisruptionInfo {
            disruption_info,
            ..observed()
        },
    );
    // Half of its GPU: 36 of 72 GiB.
    let drain = 500 * 30;
    let expected = PodEvictionCost {
        restart: 60_000,
        work: 500 * 600,
        reload: 0,
        drain,
        in_flight: 0,
        again: 0,
        stranded: 0,
    };
    let eviction_cost = bench.eviction_cost("x");
    assert_eq!(
        PodEvictionCost {
            reload: 0,
            ..eviction_cost
        },
        expected
    );
    let from_nowhere = eviction_cost.reload;
    let gpu = GpuReading {
        uuid: gpu_at("b", 0),
        used: Some(Bytes::ZERO),
        attributed: Vec::new(),
        engine_load: EngineLoad::NONE,
    };
    let holding = NodeModel {
        model,
        tier: ModelTier::PageCache,
        bytes: Bytes(50_000_000_000),
    };
    let reading = |in_flight| NodeReading {
        sampled: START,
        gpus: vec![gpu.clone()],
        holdings: [holding.clone()].into_iter().collect(),
        in_flight,
        ..NodeReading::default()
    };
    // Where it is in the page cache: 10 s, and 20 s to start.
    bench
        .ledger
        .ledger_mut()
        .take_reading(&node("b"), reading(Vec::new()).into());
    assert_eq!(bench.eviction_cost("x").reload, 500 * 30);
    assert!(from_nowhere > 500 * 30);
    bench
        .ledger
        .ledger_mut()
        .take_reading(&node("a"), reading(vec![(uid("x"), 4)]).into());
    assert_eq!(bench.eviction_cost("x").in_flight, 4 * 3_000);
    bench.ledger.ledger_mut().record_owner_eviction(&uid("y"));
    bench.ledger.ledger_mut().record_owner_eviction(&uid("y"));
    assert_eq!(
        (
            bench.eviction_cost("x").again,
            bench.ledger.ledger().recent_evictions_of(&owner.unwrap())
        ),
        (2 * 60_000, 2)
    );
    bench.ledger.ledger_mut().set_now(START + HOUR);
    assert_eq!(
        bench.eviction_cost("x").again,
        0,
        "an hour later it is forgotten"
    );
}

#[test]
fn a_pod_without_checkpoints_loses_all_its_work_up_to_the_cap() {
    let mut classes = crate::policy::built_in_classes();
    let capped = |class: &mut Class| class.max_lost_work = Some(Millis::seconds(1200));
    classes
        .iter_mut()
        .filter(|class| class.eviction == Preemptibility::ForHigherPriority)
        .for_each(capped);
    let mut policy = Policy::default();
    policy.preemption.costs.max_lost_work = Millis::seconds(60);
    let mut bench = CandidateFixture::new(policy.with_classes(classes).unwrap());
    bench.bound("silent", "a", observed());
    bench.bound(
        "ahead",
        "a",
        ObservedDisruptionInfo {
            stamp: CheckpointAge::Ahead(HOUR),
            ..observed()
        },
    );
    assert_eq!(bench.eviction_cost("silent").work, 500 * 1200);
    assert_eq!(bench.eviction_cost("ahead").work, 0);
    bench.bound(
        "ahead",
        "a",
        ObservedDisruptionInfo {
            stamp: CheckpointAge::Ago(Millis::seconds(300)),
            ..observed()
        },
    );
    assert_eq!(bench.eviction_cost("ahead").work, 500 * 300);
    bench.bound(
        "ahead",
        "a",
        ObservedDisruptionInfo {
            stamp: CheckpointAge::Unreadable,
            ..observed()
        },
    );
    assert_eq!(bench.eviction_cost("ahead").work, 500 * 1200);
}

#[test]
fn of_pods_with_equal_cost_the_one_with_the_lower_deletion_cost_is_evicted() {
    let mut bench = CandidateFixture::new(Policy::default());
    for (name, deletion_cost) in [("dear", 100), ("cheap", -100)] {
        bench.bound(
            name,
            "a",
            ObservedDisruptionInfo {
                disruption_info: DisruptionInfo {
                    deletion_cost,
                    ..DisruptionInfo::default()
                },
                ..observed()
            },
        );
    }
    bench.bound_with("service", "b", demand(72, 0), observed());
    assert_eq!(bench.group_victims(), three("cheap", "", ""));
}

#[test]
fn without_evictable_removes_every_pod_of_lower_priority_that_may_be_evicted_some_day() {
    let mut bench = CandidateFixture::new(Policy::default());
    let free_host = |cores: u64| {
        Some(HostResources {
            cpu: MilliCpu(cores * 1000),
            memory: Bytes::ZERO,
        })
    };
    bench
        .ledger
        .ledger_mut()
        .set_free_host(&node("a"), free_host(3));
    let host_resources = free_host(4).unwrap();
    bench.bound_with(
        "low",
        "a",
        Demand {
            host_resources,
            ..demand(36, -5)
        },
        observed(),
    );
    bench.bound_with("high", "a", demand(18, 100), observed());
    let disruption_info = DisruptionInfo {
        do_not_disrupt: true,
        ..DisruptionInfo::default()
    };
    bench.bound(
        "protected",
        "b",
        ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        },
    );
    let free = |name: &str, priority| {
        let view = bench.ledger.ledger().node(&node(name))?;
        let without_evictable = bench
            .ledger
            .ledger()
            .without_evictable(&node(name), priority)?;
        let node_gpus = without_evictable.node_gpus(view);
        Some((node_gpus.gpus[0].free(), node_gpus.free_host))
    };
    assert_eq!(
        free("a", 50),
        Some((Bytes::gib(54), free_host(7))),
        "the higher one stays"
    );
    assert_eq!(
        free("a", -5),
        Some((Bytes::gib(18), free_host(3))),
        "equals stay"
    );
    assert_eq!(
        free("b", 50),
        Some((Bytes::gib(36), None)),
        "it is not to be disrupted"
    );
    assert_eq!(
        bench
            .ledger
            .ledger()
            .without_evictable(&node("nowhere"), 50),
        None
    );
}

/// The default policy with other rules for the opportunistic class.
fn opportunistic(change: impl Fn(&mut Class)) -> Policy {
    let mut classes = built_in_classes();
    classes
        .iter_mut()
        .filter(|class| &*class.name == "opportunistic")
        .for_each(change);
    Policy::default().with_classes(classes).unwrap()
}

#[test]
fn the_class_decides_whether_do_not_disrupt_counts() {
    let kept = ObservedDisruptionInfo {
        disruption_info: DisruptionInfo {
            do_not_disrupt: true,
            ..DisruptionInfo::default()
        },
        ..observed()
    };
    for (rule, group_victims, why) in [
        (Protection::Honor, None, Some(KeepReason::DoNotDisrupt)),
        (Protection::Ignore, three("kept", "", ""), None),
    ] {
        let mut bench = CandidateFixture::new(opportunistic(|class| class.do_not_disrupt = rule));
        bench.bound("kept", "a", kept.clone());
        bench.bound_with("service", "a", demand(36, 0), observed());
        bench.bound_with("other", "b", demand(72, 0), observed());
        let leaves = group_victims.is_some();
        assert_eq!(
            (bench.group_victims(), bench.keep_reason_of("kept")),
            (group_victims, why),
            "{rule:?}"
        );
        let without = bench
            .ledger
            .ledger()
            .without_evictable(&node("a"), 10)
            .unwrap()
            .gpus;
        let as_it_is = &bench.ledger.ledger().node(&node("a")).unwrap().gpus;
        assert_eq!(
            without[..] != as_it_is[..],
            leaves,
            "{rule:?}: what is ruled out is what stays"
        );
    }
}

#[test]
fn the_class_decides_whether_a_disruption_budget_counts() {
    let budget = DisruptionBudget {
        namespace: "ns".into(),
        name: "immortal".into(),
        selector: Selector::EVERYTHING,
        allowed: 0,
        unhealthy_may_go: false,
    };
    for (rule, group_victims) in [
        (Protection::Honor, None),
        (Protection::Ignore, three("covered", "", "")),
    ] {
        let mut bench =
            CandidateFixture::new(opportunistic(|class| class.disruption_budgets = rule));
        bench.ledger.ledger_mut().set_budget(budget.clone());
        let mut covered = demand(36, -5);
        Arc::make_mut(&mut covered.traits).namespace = "ns".into();
        bench.bound_with("covered", "a", covered, observed());
        bench.bound_with("service", "a", demand(36, 0), observed());
        bench.bound_with("other", "b", demand(72, 0), observed());
        assert_eq!(bench.group_victims(), group_victims, "{rule:?}");
        assert_eq!(
            bench.ledger.ledger().honors_budgets(&uid("covered")),
            group_victims.is_none(),
            "{rule:?}"
        );
        assert!(
            bench.ledger.ledger().honors_budgets(&uid("service")),
            "{rule:?}: of another class"
        );
    }
}

#[test]
fn an_eviction_counts_against_the_owners_other_pods_for_as_long_as_the_policy_says() {
    let mut policy = Policy::default();
    policy.preemption.costs.again_within = Millis::seconds(60);
    let mut bench = CandidateFixture::new(policy);
    let of_owner = || ObservedDisruptionInfo {
        disruption_info: DisruptionInfo {
            owner: OwnerUid::parse("replica-set").ok(),
            ..DisruptionInfo::default()
        },
        ..ObservedDisruptionInfo::default()
    };
    bench.bound("x", "a", of_owner());
    bench.bound("y", "b", of_owner());
    bench.ledger.ledger_mut().record_owner_eviction(&uid("y"));
    for (seconds, counts) in [(0, true), (59, true), (60, false)] {
        bench
            .ledger
            .ledger_mut()
            .set_now(START + Millis::seconds(seconds));
        assert_eq!(bench.eviction_cost("x").again > 0, counts, "{seconds} s");
    }
}
