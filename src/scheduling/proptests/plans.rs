//! Random queues on random clusters, planned and applied: no protected pod is evicted, no VRAM is allocated twice, no node is
//! chosen that kube-scheduler's filters refuse, a group is placed whole or not at all, and no pod waits although it would fit.
//! The oracle reads the pods alone.

use crate::audit::ledger::audit;
use crate::evicting::{
    BudgetRules, SearchEffort, cheapest, cheapest_among, cheapest_victims, examined,
};
use crate::ids::{NodeName, PodUid};
use crate::kube_filters::{
    ClusterFilters, FilterNode, FilterSnapshot, NodeFootprint, Requirements, ResourceList,
};
use crate::ledger::{
    Ledger, ObservedPhase, ObservedWaiting, PendingPod, PodObservation, PodPhase, SchedulingGate,
};
use crate::placing::fit::fit;
use crate::planning::{PlanBounds, PlanStep, PlannedPlacement, WaitReason, plan, plan_within};
use crate::policy::{EvictionRates, Policy, Preemptibility};
use crate::testkit::numbered::node_name;
use crate::testkit::{demand_of, gpu_at, key, uid, unit_gpu};
use crate::units::{Bytes, MilliCpu, Millis, Moment};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, PodDeletion,
    PodHealth, Replacement,
};
use crate::vocabulary::label_selector::{Requirement, Selector};
use crate::vocabulary::node::NodeKind;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NODES: u8 = 4;
const CPU: u64 = 8;

#[derive(Debug, Clone)]
struct QueuedPod {
    vram: u64,
    gpus: u32,
    sharing: Sharing,
    priority: i32,
    cpu: u64,
    /// The zone that it requires, if any.
    zone: Option<u8>,
    group: Option<u8>,
    gated: bool,
    is_covered: bool,
    replacement: Replacement,
    health: PodHealth,
}

#[derive(Debug, Clone)]
struct PlannedCluster {
    gpus: Vec<u32>,
    residents: Vec<(QueuedPod, u8, u32)>,
    queue: Vec<QueuedPod>,
    /// How many disruptions the one budget allows.
    allowed: u32,
    /// It lets pods go that are not Ready.
    unhealthy_may_go: bool,
    per_minute: u32,
}

fn pod() -> impl Strategy<Value = QueuedPod> {
    let sharing = prop_oneof![5 => Just(Sharing::Shared), 1 => Just(Sharing::Exclusive)];
    let zone = prop_oneof![3 => Just(None), 1 => (0u8..2).prop_map(Some)];
    let group = prop_oneof![4 => Just(None), 1 => (0u8..2).prop_map(Some)];
    let replacement = prop_oneof![
        4 => Just(Replacement::Anywhere),
        1 => Just(Replacement::SameNode),
        1 => Just(Replacement::Static),
    ];
    let health = prop_oneof![2 => Just(PodHealth::Ready), 1 => Just(PodHealth::Unready), 1 => Just(PodHealth::Pending)];
    let (gated, is_covered) = (any::<bool>(), any::<bool>());
    let sizes = (10u64..80, 1u32..3, sharing, -3i32..3, 0u64..4);
    (sizes, zone, group, gated, is_covered, replacement, health).prop_map(
        |(
            (vram, gpus, sharing, priority, cpu),
            zone,
            group,
            gated,
            is_covered,
            replacement,
            health,
        )| {
            QueuedPod {
                vram,
                gpus,
                sharing,
                priority,
                cpu,
                zone,
                group,
                gated,
                is_covered,
                replacement,
                health,
            }
        },
    )
}

fn world() -> impl Strategy<Value = PlannedCluster> {
    let gpus = prop::collection::vec(1u32..4, NODES as usize);
    let residents = prop::collection::vec((pod(), 0..NODES, 0u32..3), 0..14);
    (
        gpus,
        residents,
        prop::collection::vec(pod(), 1..10),
        0u32..3,
        any::<bool>(),
        0u32..8,
    )
        .prop_map(
            |(gpus, residents, queue, allowed, unhealthy_may_go, per_minute)| PlannedCluster {
                gpus,
                residents,
                queue,
                allowed,
                unhealthy_may_go,
                per_minute,
            },
        )
}

fn zone_of(node: u8) -> String {
    format!("zone-{}", node % 2)
}

fn demand(pod: &QueuedPod) -> Demand {
    let mut demand = demand_of(pod.vram, pod.gpus, pod.sharing, pod.priority);
    let mut traits = (*demand.traits).clone();
    if pod.is_covered {
        traits.labels.insert("app".into(), "covered".into());
    }
    demand.traits = Arc::new(traits);
    demand.host_resources.cpu = MilliCpu(pod.cpu * 1000);
    demand
}

fn amounts(pod: &QueuedPod) -> ResourceList {
    ResourceList {
        cpu: MilliCpu(pod.cpu * 1000),
        ..ResourceList::default()
    }
}

fn disruption_info(pod: &QueuedPod) -> DisruptionInfo {
    let key = |group: u8| GroupKey {
        namespace: "default".into(),
        kind: GroupKind::Stowage,
        name: format!("group-{group}").into(),
    };
    DisruptionInfo {
        group: pod.group.map(key),
        group_size: pod.group.map(|_| 2),
        replacement: pod.replacement,
        health: pod.health,
        ..DisruptionInfo::default()
    }
}

struct PlanFixture {
    ledger: Ledger,
    view: ClusterFilters,
    pods: BTreeMap<PodUid, QueuedPod>,
}

impl PlanFixture {
    fn new(world: &PlannedCluster) -> Self {
        let mut policy = Policy::default();
        policy.preemption.evictions_per_minute = EvictionRates {
            cluster: world.per_minute,
            node: 100,
            tenant: 100,
        };
        let mut ledger = Ledger::new(Arc::new(policy));
        ledger.set_now(Moment(10_000_000));
        let mut view = ClusterFilters::default();
        for n in 0..NODES {
            ledger.set_node(&node_name(n), NodeKind::Stowage, None);
            ledger
                .report_devices(
                    &node_name(n),
                    (0..world.gpus[n as usize])
                        .map(|g| unit_gpu(n, g))
                        .collect(),
                )
                .unwrap();
            view.set_node(FilterNode {
                name: node_name(n),
                labels: Arc::new([("zone".to_owned(), zone_of(n))].into()),
                taints: Arc::new([]),
                allocatable: ResourceList {
                    cpu: MilliCpu(CPU * 1000),
                    memory: Bytes(1),
                    ..ResourceList::default()
                },
                pods: 100,
            });
        }
        ledger.set_budget(crate::vocabulary::disruption_budget::DisruptionBudget {
            namespace: "default".into(),
            name: "covered".into(),
            selector: Selector::All(vec![Requirement::equals("app", "covered")]),
            allowed: world.allowed,
            unhealthy_may_go: world.unhealthy_may_go,
        });
        let mut bench = Self {
            ledger,
            view,
            pods: BTreeMap::new(),
        };
        for (i, (pod, on, gpu)) in world.residents.iter().enumerate() {
            bench.bind(
                &format!("resident-{i}"),
                pod,
                *on,
                *gpu % world.gpus[*on as usize],
            );
        }
        for (i, pod) in world.queue.iter().enumerate() {
            bench.arrive(&format!("waits-{i}"), pod);
        }
        bench.ledger.set_now(Moment(10_010_000));
        bench
    }

    /// Puts a resident on one GPU, if it fits and CPU is left.
    fn bind(&mut self, name: &str, pod: &QueuedPod, on: u8, gpu: u32) {
        let pod = QueuedPod {
            gpus: 1,
            ..pod.clone()
        };
        let demand = demand(&pod);
        let view = self.ledger.node(&node_name(on)).unwrap();
        let used: u64 = self.pods_on(on).map(|other| other.cpu).sum();
        if !view.gpus[gpu as usize].has_free_vram(&demand) || used + pod.cpu > CPU {
            return;
        }
        let devices = Some(Arc::from([gpu_at(on, gpu)]));
        let state = ObservedPhase::Bound {
            node: node_name(on),
            devices,
            starting: false,
            ran: Some(Millis::seconds(900)),
        };
        self.observe(name, &pod, state);
        let footprint = NodeFootprint {
            node: node_name(on),
            amounts: amounts(&pod),
            ports: Arc::new([]),
            repels: Arc::new([]),
            volumes: 0,
            claims_devices: false,
        };
        self.view.set_pod(uid(name), footprint);
    }

    fn arrive(&mut self, name: &str, pod: &QueuedPod) {
        let gate = if pod.gated {
            SchedulingGate::Planned
        } else {
            SchedulingGate::Open
        };
        self.observe(
            name,
            pod,
            ObservedPhase::Waiting(ObservedWaiting {
                gate,
                ..ObservedWaiting::default()
            }),
        );
        let zone = pod
            .zone
            .map(|zone| ("zone".to_owned(), format!("zone-{zone}")));
        let wants = Requirements {
            amounts: amounts(pod),
            node_selector: zone.into_iter().collect(),
            ..Requirements::default()
        };
        self.view.set_pending(uid(name), wants);
        if !pod.gated {
            self.ledger.record_refusal(&uid(name), None);
        }
    }

    fn observe(&mut self, name: &str, pod: &QueuedPod, state: ObservedPhase) {
        let shown = Some(ObservedDisruptionInfo {
            disruption_info: disruption_info(pod),
            ..ObservedDisruptionInfo::default()
        });
        let key = key(name);
        self.ledger.observe_pod(PodObservation {
            uid: uid(name),
            key,
            demand: demand(pod),
            state,
            observed: shown,
        });
        self.pods.insert(uid(name), pod.clone());
    }

    /// A resident saves its work, or is deleted.
    fn set_disruption_info(&mut self, name: &str, saved: Millis, leaves: bool) {
        let Some(entry) = self.ledger.pod_state(&uid(name)) else {
            return;
        };
        let (key, demand) = (entry.key.clone(), entry.demand.clone());
        let devices = entry.devices().cloned();
        let state = ObservedPhase::Bound {
            node: entry.node().unwrap().clone(),
            devices,
            starting: false,
            ran: None,
        };
        let leaving = leaves.then_some(PodDeletion {
            asked_ago: Millis::seconds(1),
            grace: Millis::seconds(20),
        });
        let shown = ObservedDisruptionInfo {
            disruption_info: disruption_info(&self.pods[&uid(name)]),
            stamp: CheckpointAge::Ago(saved),
            leaving,
            ..ObservedDisruptionInfo::default()
        };
        self.ledger.observe_pod(PodObservation {
            uid: uid(name),
            key,
            demand,
            state,
            observed: Some(shown),
        });
    }

    /// Pods that are bound to a node.
    fn pods_on(&self, n: u8) -> impl Iterator<Item = &QueuedPod> {
        let bound = move |uid: &PodUid| {
            let phase = self.ledger.pod_state(uid).map(|entry| &entry.phase);
            matches!(phase, Some(PodPhase::Bound(bound)) if bound.node == node_name(n))
        };
        self.pods
            .iter()
            .filter(move |(uid, _)| bound(uid))
            .map(|(_, pod)| pod)
    }

    fn kube_filters(&self) -> FilterSnapshot {
        self.view.snapshot()
    }

    fn steps(&mut self) -> Vec<PlanStep> {
        let pending = self.ledger.pending(64);
        plan(self.ledger.clone(), &self.kube_filters(), &pending)
    }

    /// Applies what a plan of this pod alone would do. Nothing, if the plan is only about free places and there is none.
    fn place_alone(
        &mut self,
        kube_filters: &FilterSnapshot,
        pod: &PendingPod,
        only_free: bool,
    ) -> Option<PlanStep> {
        let mut alone = plan_within(
            self.ledger.clone(),
            kube_filters,
            std::slice::from_ref(pod),
            PlanBounds::NONE,
        );
        let step = alone.steps.pop()?;
        let placements = if let PlanStep::Place(placements) = &step {
            &placements[..]
        } else {
            &[]
        };
        let is_free = !placements.is_empty()
            && placements
                .iter()
                .all(|placement| placement.reservation.victims.is_empty());
        if only_free && !is_free && !matches!(step, PlanStep::Requeue { .. }) {
            return None;
        }
        for placement in placements {
            placement.reserve_in(&mut self.ledger).unwrap();
            self.ledger.record_evictions(&placement.reservation.victims);
        }
        alone
            .reserved_scopes
            .into_iter()
            .for_each(|(scope, uid)| self.ledger.reserve_scope(scope, &uid));
        Some(step)
    }

    /// Checks what must hold of every placement, by the pods alone.
    fn check(&self, placements: &[PlannedPlacement], before: &BTreeMap<PodUid, i32>) {
        let mut victims_of_all = BTreeSet::new();
        for placement in placements {
            let pod = &self.pods[&placement.uid];
            let n: u8 = placement
                .reservation
                .node
                .as_str()
                .trim_start_matches("node-")
                .parse()
                .unwrap();
            assert!(
                pod.zone.is_none_or(|zone| zone == n % 2),
                "{placement:?} is in the wrong zone"
            );
            let mut devices = placement.reservation.devices.to_vec();
            devices.sort_unstable();
            devices.dedup();
            assert_eq!(devices.len(), pod.gpus as usize);
            for victim in placement.reservation.victims.iter() {
                assert!(
                    before[victim] < pod.priority,
                    "{victim} is as important as {}",
                    placement.uid
                );
                let class = self
                    .ledger
                    .policy()
                    .class(self.ledger.pod_state(victim).unwrap().demand.class);
                assert_eq!(class.eviction, Preemptibility::ForHigherPriority);
                assert!(
                    victims_of_all.insert(victim.clone()),
                    "{victim} leaves for two"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_plan_can_be_applied_and_breaks_no_rule(world in world()) {
        let mut bench = PlanFixture::new(&world);
        let priorities: BTreeMap<PodUid, i32> =
            bench.pods.iter().map(|(uid, pod)| (uid.clone(), pod.priority)).collect();
        let steps = bench.steps();
        prop_assert_eq!(&bench.steps(), &steps, "the same ledger gives the same plan");
        let mut evicted: Vec<PodUid> = Vec::new();
        let mut placed: BTreeSet<PodUid> = BTreeSet::new();
        for step in &steps {
            let PlanStep::Place(placements) = step else { continue };
            bench.check(placements, &priorities);
            for placement in placements {
                prop_assert!(bench.ledger.reserve(&placement.uid, placement.reservation.clone()).is_ok(), "{:?}", placement);
                prop_assert!(placed.insert(placement.uid.clone()));
                evicted.extend(placement.reservation.victims.iter().cloned());
            }
        }
        prop_assert_eq!(audit(&bench.ledger), Vec::new(), "no GPU is promised more than it has");
        let evicts = |step: &&PlanStep| matches!(step, PlanStep::Place(places) if places.iter().any(|place| !place.reservation.victims.is_empty()));
        let alone = world.per_minute > 0 && steps.iter().filter(evicts).count() == 1;
        prop_assert!(evicted.len() <= world.per_minute as usize || alone, "a larger set is evicted alone");
        let is_counted = |uid: &&PodUid| {
            let pod = &bench.pods[*uid];
            pod.is_covered && match pod.health {
                PodHealth::Ready => true,
                PodHealth::Unready => !world.unhealthy_may_go,
                PodHealth::Pending => false,
            }
        };
        let covered = evicted.iter().filter(is_counted).count();
        prop_assert!(covered <= world.allowed as usize, "the budget is kept");
        let is_static = |uid: &PodUid| bench.pods[uid].replacement == Replacement::Static;
        prop_assert!(!evicted.iter().any(is_static), "nothing is free without a static pod");
        // A group is evicted whole.
        for victim in &evicted {
            let group = bench.pods[victim].group;
            let members = bench.pods.iter().filter(|(uid, pod)| {
                group.is_some() && pod.group == group && uid.as_str().starts_with("resident")
            });
            for (member, _) in members {
                prop_assert!(evicted.contains(member), "{} stays of the group of {}", member, victim);
            }
        }
        // CPU adds up with every coming pod and without the leaving ones.
        for n in 0..NODES {
            let keep_reason = bench.pods.iter().filter(|(uid, _)| !evicted.contains(uid)).filter(|(uid, _)| {
                let entry = bench.ledger.pod_state(uid).unwrap();
                entry.node() == Some(&node_name(n)) || entry.reservation().is_some_and(|reservation| reservation.node == node_name(n))
            });
            let used: u64 = keep_reason.map(|(_, pod)| pod.cpu).sum();
            let asks: bool = bench.pods.iter().any(|(uid, pod)| {
                let entry = bench.ledger.pod_state(uid).unwrap();
                pod.cpu > 0 && entry.reservation().is_some_and(|reservation| reservation.node == node_name(n))
            });
            prop_assert!(!asks || used <= CPU, "node-{n} has {CPU} CPUs, and {used} are asked of it");
        }
        // A gated group is placed whole, or not at all.
        for group in 0..2u8 {
            let gated: Vec<&PodUid> = bench
                .pods
                .iter()
                .filter(|(uid, pod)| pod.gated && pod.group == Some(group) && uid.as_str().starts_with("waits"))
                .map(|(uid, _)| uid)
                .collect();
            let others = bench.pods.iter().filter(|(uid, pod)| {
                let entry = bench.ledger.pod_state(uid).unwrap();
                let has_room = entry.node().is_some() || entry.reservation().is_some();
                pod.group == Some(group) && !gated.contains(uid) && has_room
            });
            let there = others.count();
            let got = gated.iter().filter(|uid| placed.contains(**uid)).count();
            prop_assert!(got == 0 || got + there >= 2, "{got} of group {group} beside {there}");
        }
    }

    #[test]
    fn no_pod_waits_while_it_would_fit(world in world()) {
        let mut bench = PlanFixture::new(&world);
        let steps = bench.steps();
        for step in &steps {
            let PlanStep::Place(placements) = step else { continue };
            for placement in placements {
                bench.ledger.reserve(&placement.uid, placement.reservation.clone()).unwrap();
            }
        }
        let snapshot = bench.ledger.snapshot();
        for step in &steps {
            let PlanStep::Wait { uid, .. } = step else { continue };
            let pod = &bench.pods[uid];
            if pod.group.is_some() {
                continue;
            }
            for n in 0..NODES {
                let fits = fit(snapshot.node(node_name(n).as_str()).unwrap(), &demand(pod)).is_ok();
                let takes = pod.zone.is_none_or(|zone| zone == n % 2);
                let coming = bench.pods.iter().filter(|(uid, _)| {
                    let entry = bench.ledger.pod_state(uid).unwrap();
                    entry.node() == Some(&node_name(n)) || entry.reservation().is_some_and(|reservation| reservation.node == node_name(n))
                });
                // Leaving pods still have their CPU while they terminate.
                let used: u64 = coming.map(|(_, pod)| pod.cpu).sum();
                let has_cpu = pod.cpu == 0 || used + pod.cpu <= CPU;
                prop_assert!(!(fits && takes && has_cpu), "{} waits, and node-{} is free", uid, n);
            }
        }
    }

    #[test]
    fn the_pruned_search_finds_what_the_full_search_finds(
        world in world(),
        told in prop::collection::vec((0..12usize, 0..3000u64, any::<bool>()), 0..8),
    ) {
        let mut bench = PlanFixture::new(&world);
        for (n, seconds, leaves) in told {
            bench.set_disruption_info(&format!("resident-{n}"), Millis::seconds(seconds), leaves);
        }
        let nodes: Vec<NodeName> = (0..NODES).map(node_name).collect();
        let waiting = bench.pods.keys().filter(|uid| bench.ledger.pod_state(uid).unwrap().node().is_none());
        for uid in waiting {
            let (demand, preemptor) = (&bench.ledger.pod_state(uid).unwrap().demand, bench.ledger.preemptor(uid));
            let candidates = bench.ledger.candidates_for(&preemptor, &nodes);
            let cost_bounds = bench.ledger.cost_bounds(&preemptor, demand);
            for candidate in &candidates {
                if let Some(set) = cheapest_victims(candidate, demand, BudgetRules::Keep) {
                    let floor = cost_bounds.iter().find(|cost_bound| cost_bound.node == candidate.node).map(|found| found.floor);
                    prop_assert!(floor.is_some_and(|floor| floor <= set.eviction_cost), "{:?} {:?}", floor, set);
                }
            }
            let mut survey = bench.ledger.survey(&preemptor, demand);
            let look = |node: &NodeName| examined(survey.candidate(node)?, demand);
            let lazily = cheapest_among(cost_bounds, demand, BudgetRules::Keep, SearchEffort::UNLIMITED, look);
            prop_assert_eq!(lazily, cheapest(&candidates, demand, BudgetRules::Keep, SearchEffort::UNLIMITED));
        }
    }
}

proptest! {
    // One in some hundreds has equal pods and a budget that the first of them has spent.
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// First all pods with a free place, then those that need evictions; behind the first of these, pods of lower priority wait.
    #[test]
    fn planning_many_pods_equals_planning_them_one_by_one(mut world in world(), are_alike in any::<bool>()) {
        world.queue.iter_mut().for_each(|pod| pod.group = None);
        if are_alike {
            let first = world.queue[0].clone();
            world.queue.fill(first);
        }
        let mut bench = PlanFixture::new(&world);
        let (pending, kube_filters) = (bench.ledger.pending(64), bench.kube_filters());
        let together = plan(bench.ledger.clone(), &kube_filters, &pending);
        let mut alone = Vec::new();
        let mut queue: Vec<&PendingPod> = pending.iter().collect();
        while !queue.is_empty() {
            let (mut rest, mut below, mut evicts_from) = (Vec::new(), Vec::new(), i32::MIN);
            for pod in queue {
                if pod.demand.priority < evicts_from {
                    below.push(pod);
                } else if let Some(step) = bench.place_alone(&kube_filters, pod, true) {
                    alone.push(step);
                } else {
                    if bench.ledger.may_evict_for(&pod.uid) {
                        evicts_from = evicts_from.max(pod.demand.priority);
                    }
                    rest.push(pod);
                }
            }
            alone.extend(rest.into_iter().filter_map(|pod| bench.place_alone(&kube_filters, pod, false)));
            queue = below;
        }
        let waiting = |step: &PlanStep| match step {
            PlanStep::Wait { uid, why, .. } => Some((uid.clone(), matches!(why, WaitReason::EvictionLimit(_)))),
            _ => None,
        };
        let placed = |steps: &[PlanStep]| -> Vec<PlanStep> {
            steps.iter().filter(|step| waiting(step).is_none()).cloned().collect()
        };
        prop_assert_eq!(placed(&together), placed(&alone));
        // The reason of a waiting pod is the one found for the first equal pod.
        let waiting = |steps: &[PlanStep]| -> Vec<_> { steps.iter().filter_map(waiting).collect() };
        prop_assert_eq!(waiting(&together), waiting(&alone));
    }
}
