//! Random queues under random eviction limits: no plan exceeds a limit, no pod waits that a set within the limits would place,
//! and every reason is true. The oracle counts evictions by itself and tries every set of pods on every node.

use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::ledger::evictions::LimitedBecause;
use crate::ledger::{Ledger, ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use crate::planning::{
    Plan, PlanBounds, PlanStep, PlannedPlacement, WaitReason, plan, plan_within,
};
use crate::policy::{EvictionRates, Policy, Tenant};
use crate::testkit::{accepting_filters, demand_of, gpu_at, key, uid, unit_gpu, with_namespace};
use crate::units::{Millis, Moment};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::placement::Reservation;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

const NAMESPACES: [&str; 3] = ["red", "blue", "nobody's"];

#[derive(Debug, Clone)]
struct RatedPod {
    vram: u64,
    gpus: u32,
    priority: i32,
    namespace: usize,
}

#[derive(Debug, Clone)]
struct RateLimitedCluster {
    /// GPUs of each node.
    nodes: Vec<u32>,
    residents: Vec<(RatedPod, usize, u32)>,
    queue: Vec<RatedPod>,
    rates: EvictionRates,
    has_tenants: bool,
    /// Residents that count as evicted a while ago.
    earlier: Vec<usize>,
}

fn pod(
    vram: std::ops::Range<u64>,
    priority: std::ops::Range<i32>,
) -> impl Strategy<Value = RatedPod> {
    (vram, 1u32..3, priority, 0usize..3).prop_map(|(vram, gpus, priority, namespace)| RatedPod {
        vram,
        gpus,
        priority,
        namespace,
    })
}

fn world() -> impl Strategy<Value = RateLimitedCluster> {
    let nodes = prop::collection::vec(1u32..3, 1..4);
    let residents = prop::collection::vec((pod(10..60, -3..0), 0usize..3, 0u32..2), 0..10);
    let queue = prop::collection::vec(pod(20..91, -1..3), 1..6);
    let rates = (0u32..6, 0u32..5, 0u32..4).prop_map(|(cluster, node, tenant)| EvictionRates {
        cluster,
        node,
        tenant,
    });
    let earlier = prop::collection::vec(0usize..10, 0..3);
    (nodes, residents, queue, rates, any::<bool>(), earlier).prop_map(
        |(nodes, residents, queue, rates, has_tenants, earlier)| RateLimitedCluster {
            nodes,
            residents,
            queue,
            rates,
            has_tenants,
            earlier,
        },
    )
}

fn node(n: usize) -> NodeName {
    NodeName::parse(&format!("node-{n}")).unwrap()
}

/// A scope in which evictions are counted: all, a node's, a tenant's.
type CountedScope = (&'static str, String);

struct AllowanceFixture {
    ledger: Ledger,
    world: RateLimitedCluster,
    /// The node and the tenant of each resident.
    homes: BTreeMap<PodUid, (usize, usize)>,
    earlier: Vec<PodUid>,
}

impl AllowanceFixture {
    fn new(world: RateLimitedCluster) -> Self {
        let mut policy = Policy::default();
        policy.preemption.evictions_per_minute = world.rates;
        if world.has_tenants {
            let tenants = NAMESPACES[..2]
                .iter()
                .map(|name| Tenant::new(name, &[name]));
            policy = policy.with_tenants(tenants.collect()).unwrap();
        }
        let mut ledger = Ledger::new(Arc::new(policy));
        ledger.set_now(Moment(10_000_000));
        for (n, gpus) in world.nodes.iter().enumerate() {
            ledger.set_node(&node(n), NodeKind::Stowage, None);
            ledger
                .report_devices(&node(n), (0..*gpus).map(|g| unit_gpu(n as u8, g)).collect())
                .unwrap();
        }
        let mut bench = Self {
            ledger,
            world,
            homes: BTreeMap::new(),
            earlier: Vec::new(),
        };
        for (i, (pod, on, g)) in bench.world.residents.clone().iter().enumerate() {
            let on = *on % bench.world.nodes.len();
            bench.bind(
                &format!("resident-{i}"),
                pod,
                on,
                *g % bench.world.nodes[on],
            );
        }
        for (i, pod) in bench.world.queue.clone().iter().enumerate() {
            let waiting = ObservedWaiting {
                gate: SchedulingGate::Planned,
                ..ObservedWaiting::default()
            };
            bench.observe(&format!("waits-{i}"), pod, ObservedPhase::Waiting(waiting));
        }
        let earlier = bench
            .world
            .earlier
            .iter()
            .map(|i| uid(&format!("resident-{i}")));
        bench.earlier = earlier
            .filter(|uid| bench.homes.contains_key(uid))
            .collect();
        bench.ledger.record_evictions(&bench.earlier);
        bench.ledger.set_now(Moment(10_010_000));
        bench
    }

    /// Puts a resident on one GPU, if it fits.
    fn bind(&mut self, name: &str, pod: &RatedPod, on: usize, g: u32) {
        let pod = RatedPod {
            gpus: 1,
            ..pod.clone()
        };
        if !self.ledger.node(&node(on)).unwrap().gpus[g as usize].has_free_vram(&self.demand(&pod))
        {
            return;
        }
        let devices = Some(Arc::from([gpu_at(on, g)]));
        let ran = Some(Millis::seconds(900));
        self.observe(
            name,
            &pod,
            ObservedPhase::Bound {
                node: node(on),
                devices,
                starting: false,
                ran,
            },
        );
        self.homes.insert(uid(name), (on, pod.namespace));
    }

    fn demand(&self, pod: &RatedPod) -> Demand {
        let demand = demand_of(pod.vram, pod.gpus, Sharing::Shared, pod.priority);
        with_namespace(demand, NAMESPACES[pod.namespace], self.ledger.policy())
    }

    fn observe(&mut self, name: &str, pod: &RatedPod, state: ObservedPhase) {
        let key = key(name);
        let demand = self.demand(pod);
        self.ledger.observe_pod(PodObservation {
            uid: uid(name),
            key,
            demand,
            state,
            observed: None,
        });
    }

    fn plan(&mut self) -> Vec<PlanStep> {
        let pending = self.ledger.pending(64);
        plan(
            self.ledger.clone(),
            &accepting_filters(&self.ledger),
            &pending,
        )
    }

    fn scopes_of(&self, victim: &PodUid) -> Vec<CountedScope> {
        let (on, namespace) = self.homes[victim];
        let mut scopes = vec![("cluster", String::new()), ("node", on.to_string())];
        if self.world.has_tenants {
            // Pods without a tenant count as one tenant's.
            scopes.push(("tenant", NAMESPACES[namespace].to_owned()));
        }
        scopes
    }

    fn count<'a>(
        &self,
        victims: impl IntoIterator<Item = &'a PodUid>,
    ) -> BTreeMap<CountedScope, u32> {
        let mut counts = BTreeMap::new();
        for scope in victims
            .into_iter()
            .flat_map(|victim| self.scopes_of(victim))
        {
            *counts.entry(scope).or_default() += 1;
        }
        counts
    }

    fn limit(&self, scope: &CountedScope) -> u32 {
        let EvictionRates {
            cluster,
            node,
            tenant,
        } = self.world.rates;
        match scope.0 {
            "cluster" => cluster,
            "node" => node,
            _ => tenant,
        }
    }

    /// Whether so many more may be evicted in each scope: within what is left of its limit, or as the only ones.
    fn is_within(
        &self,
        set: &BTreeMap<CountedScope, u32>,
        used: &BTreeMap<CountedScope, u32>,
    ) -> bool {
        set.iter().all(|(scope, wanted)| {
            let (limit, used) = (self.limit(scope), used.get(scope).copied().unwrap_or(0));
            used + wanted <= limit || (used == 0 && limit > 0)
        })
    }

    /// Every set of residents of one node, on any of its GPUs, whose eviction the ledger would accept for the pod.
    fn sets(&self, waiting: &PodUid) -> Vec<Vec<PodUid>> {
        let gpus = self.ledger.pod_state(waiting).unwrap().demand.gpus;
        let preemptor = self.ledger.preemptor(waiting);
        let mut sets = Vec::new();
        for (n, count) in self.world.nodes.iter().enumerate() {
            let here: Vec<&PodUid> = self
                .homes
                .iter()
                .filter(|(_, (on, _))| *on == n)
                .map(|(uid, _)| uid)
                .collect();
            for chosen in (0u32..1 << count).filter(|chosen| chosen.count_ones() == gpus) {
                let devices: Arc<[GpuUuid]> = (0..*count)
                    .filter(|g| chosen & (1 << g) != 0)
                    .map(|g| gpu_at(n, g))
                    .collect();
                for leaving in 0u32..1 << here.len() {
                    let leaves = here
                        .iter()
                        .enumerate()
                        .filter(|(i, _)| leaving & (1 << i) != 0);
                    let victims: Vec<PodUid> = leaves.map(|(_, uid)| (*uid).clone()).collect();
                    let reservation = Reservation {
                        node: node(n),
                        devices: devices.clone(),
                        victims: victims.clone().into(),
                        deadline: self.ledger.now() + Millis::seconds(60),
                    };
                    if self
                        .ledger
                        .check_reservation(&preemptor, waiting, &reservation)
                        .is_ok()
                    {
                        sets.push(victims);
                    }
                }
            }
        }
        sets
    }

    fn apply(&mut self, steps: &[PlanStep]) -> Vec<PlannedPlacement> {
        let mut placements = Vec::new();
        for placement in steps.iter().flat_map(|step| {
            if let PlanStep::Place(placements) = step {
                &placements[..]
            } else {
                &[]
            }
        }) {
            placement
                .reserve_in(&mut self.ledger)
                .expect("what was planned can be held");
            self.ledger.record_evictions(&placement.reservation.victims);
            placements.push(placement.clone());
        }
        placements
    }
}

fn waits(steps: &[PlanStep]) -> impl Iterator<Item = (&PodUid, &WaitReason)> {
    steps.iter().filter_map(|step| match step {
        PlanStep::Wait { uid, why, .. } => Some((uid, why)),
        _ => None,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_plan_exceeds_an_eviction_limit(world in world()) {
        let mut bench = AllowanceFixture::new(world);
        let steps = bench.plan();
        let placements = bench.apply(&steps);
        let mut used = bench.count(&bench.earlier);
        for placement in &placements {
            let set = bench.count(placement.reservation.victims.iter());
            prop_assert!(bench.is_within(&set, &used), "{:?} after {:?}", set, used);
            set.into_iter().for_each(|(scope, n)| *used.entry(scope).or_default() += n);
        }
    }

    #[test]
    fn a_pod_waits_only_if_no_evictions_within_the_limits_would_place_it(world in world()) {
        let mut bench = AllowanceFixture::new(world);
        let steps = bench.plan();
        let at_first: BTreeMap<PodUid, Vec<Vec<PodUid>>> =
            waits(&steps).map(|(uid, _)| (uid.clone(), bench.sets(uid))).collect();
        let placements = bench.apply(&steps);
        let evicted = placements.iter().flat_map(|placement| placement.reservation.victims.iter());
        let used = bench.count(bench.earlier.iter().chain(evicted));
        let because = |why: &WaitReason| match why {
            WaitReason::EvictionLimit(limit) => Some(limit.because),
            _ => None,
        };
        let waits_for_a_minute =
            waits(&steps).any(|(_, why)| because(why) == Some(LimitedBecause::SetIsLarger));
        for (uid, why) in waits(&steps) {
            let sets = bench.sets(uid);
            match because(why) {
                None => prop_assert!(sets.is_empty(), "{} waits ({}), and {:?} would do", uid, why, sets),
                Some(because) => {
                    prop_assert!(!at_first[uid].is_empty(), "{} waits ({}), and nobody could leave", uid, why);
                    let reserved = because == LimitedBecause::Reserved;
                    prop_assert!(!reserved || waits_for_a_minute, "{} waits for nobody", uid);
                    let helped = sets.iter().find(|set| bench.is_within(&bench.count(*set), &used));
                    // A scope reserved for a pod that needs a whole minute is not for the others.
                    prop_assert!(
                        helped.is_none() || waits_for_a_minute,
                        "{} waits ({}), and {:?} may leave beside {:?}", uid, why, helped, used
                    );
                }
            }
        }
    }

    #[test]
    fn an_interrupted_plan_is_a_prefix_of_the_whole_plan(world in world(), steps in 1u64..400) {
        let mut bench = AllowanceFixture::new(world);
        let (pending, kube_filters) = (bench.ledger.pending(64), accepting_filters(&bench.ledger));
        let run = |bounds: PlanBounds<'_>| plan_within(bench.ledger.clone(), &kube_filters, &pending, bounds);
        let whole = run(PlanBounds::NONE);
        prop_assert!(whole.unreached.is_empty());
        let asked = Cell::new(0);
        let is_stopped = || {
            asked.set(asked.get() + 1);
            asked.get() > steps
        };
        let stopped = run(PlanBounds { is_stopped: &is_stopped, ..PlanBounds::NONE });
        let free = |plan: &Plan| plan.steps.iter().take_while(|step| is_free(step)).count();
        let same = stopped.steps.iter().zip(&whole.steps).take_while(|(a, b)| a == b).count();
        prop_assert!(same == stopped.steps.len(), "{:?} {:?}", stopped, whole);
        prop_assert_eq!(stopped.steps.len() + stopped.unreached.len(), pending.len());
        prop_assert!(asked.get() <= steps + 2, "it went on for {} looks", asked.get() - steps);
        let cut = run(PlanBounds { free_steps: steps, eviction_steps: steps, ..PlanBounds::NONE });
        prop_assert_eq!(cut.steps.len() + cut.unreached.len(), pending.len());
        prop_assert!(!cut.steps.is_empty() && free(&cut) <= free(&whole));
        prop_assert_eq!(run(PlanBounds { free_steps: steps, eviction_steps: steps, ..PlanBounds::NONE }), cut);
    }
}

fn is_free(step: &PlanStep) -> bool {
    matches!(step, PlanStep::Place(placements) if placements.iter().all(|placement| placement.reservation.victims.is_empty()))
}
