//! The choice of victims against brute force: every subset of every node's pods, with a fit and a cost of the oracle's own, on
//! thousands of small seeded clusters.

use crate::evicting::{
    BudgetRules, EvictionCost, MembersElsewhere, PreemptionCandidate, SearchEffort, Shortfall,
    VictimGroup, VictimSet, cheapest,
};
use crate::ids::{NodeName, PodUid};
use crate::ledger::{
    PodEvictionCost, PotentialVictim, QuotaStatus, TenantQuota, recompute_class_exclusions,
};
use crate::testkit::demand_of;
use crate::testkit::random::Random;
use crate::units::{Bytes, MilliCpu, Millis, Percent};
use crate::vocabulary::classification::{ClassId, ClassSet};
use crate::vocabulary::cluster_share::{TenantLimit, TenantUsage};
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::gpu::ClassExclusion;
use crate::vocabulary::gpu::{Gpu, GpuSet, Health};
use crate::vocabulary::gpu_wish::GpuTraits;
use crate::vocabulary::latency::NeighborRoom;
use crate::vocabulary::node_reading::EngineLoad;
use crate::vocabulary::spare::SpareSet;
use std::collections::{BTreeMap, BTreeSet};

/// A pod as the oracle knows it.
#[derive(Debug, Clone)]
struct OraclePod {
    name: String,
    /// `None`: on a node that is not searched.
    node: Option<usize>,
    gpus: BTreeSet<usize>,
    bytes: u64,
    beyond: u64,
    alone: bool,
    cpu: u64,
    priority: i32,
    cost: u64,
    deletion_cost: i32,
    stranded: bool,
    /// `None` if it lives on a guarantee.
    spared: Option<u32>,
    budgets: BTreeSet<usize>,
    group: Option<usize>,
    own_tenant: bool,
    class_exclusions: bool,
    way: VictimKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VictimKind {
    MayLeave,
    LeavesAnyway,
    Stays,
}

#[derive(Debug, Clone)]
struct GpuState {
    capacity: u64,
    unaccounted_for: u64,
    busy: bool,
    starting: bool,
    lost: bool,
}

#[derive(Debug)]
struct VictimCluster {
    nodes: Vec<Vec<GpuState>>,
    pods: Vec<OraclePod>,
    /// By budget: how many disruptions it allows.
    budgets: Vec<u64>,
    budgets_known: bool,
    demand: Demand,
    /// What the preemptor's tenant has left of its limit; negative if it uses too much.
    left: Option<i64>,
    /// By node: VRAM and CPU that the scheduler must see freed, and budgets that are overdrawn whichever pods are evicted.
    missing: Vec<(u64, u64, u32)>,
}

/// A seed determines a case, and names it in a failure.
struct VictimDice(Random);

impl VictimDice {
    fn below(&mut self, n: u64) -> u64 {
        self.0.below(n as usize) as u64
    }

    fn with_chance_one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What the tenant used before this request.
const USED: u64 = 500;

impl VictimCluster {
    fn new(seed: u64) -> Self {
        let mut dice = VictimDice(Random::seeded(seed, 0));
        let sharing = if dice.with_chance_one_in(5) {
            Sharing::Exclusive
        } else {
            Sharing::Shared
        };
        let gpus = 1 + u32::from(dice.with_chance_one_in(3));
        let demand = demand_of(10 + dice.below(60), gpus, sharing, 5);
        let nodes: Vec<Vec<GpuState>> = (0..1 + dice.below(3))
            .map(|_| (0..1 + dice.below(3)).map(|_| card(&mut dice)).collect())
            .collect();
        let budgets: Vec<u64> = (0..dice.below(3)).map(|_| dice.below(3)).collect();
        let missing = nodes.iter().map(|_| missing(&mut dice)).collect();
        let left = dice
            .with_chance_one_in(4)
            .then(|| dice.below(120) as i64 - 20);
        let budgets_known = !dice.with_chance_one_in(20);
        let mut world = Self {
            nodes,
            pods: Vec::new(),
            budgets,
            budgets_known,
            demand,
            left,
            missing,
        };
        for n in 0..dice.below(11) {
            world.add_pod(&mut dice, n);
        }
        world
    }

    fn add_pod(&mut self, dice: &mut VictimDice, n: u64) {
        let node = dice.below(self.nodes.len() as u64) as usize;
        let cards = self.nodes[node].len() as u64;
        let way = match dice.below(8) {
            0 => VictimKind::Stays,
            1 => VictimKind::LeavesAnyway,
            _ => VictimKind::MayLeave,
        };
        let is_far = way == VictimKind::MayLeave && dice.with_chance_one_in(10);
        let budgets = (0..self.budgets.len())
            .filter(|_| dice.with_chance_one_in(3))
            .collect();
        let alone = dice.with_chance_one_in(8);
        // Few sizes and costs, so that there are equals.
        let pod = OraclePod {
            name: format!("pod-{n}"),
            node: (!is_far).then_some(node),
            gpus: (0..1 + u64::from(dice.with_chance_one_in(4)))
                .map(|_| dice.below(cards) as usize)
                .collect(),
            bytes: 5 + 5 * dice.below(8),
            beyond: if dice.with_chance_one_in(4) && !alone {
                dice.below(10)
            } else {
                0
            },
            alone,
            cpu: dice.below(3),
            priority: -(dice.below(3) as i32) - 1,
            cost: dice.below(6),
            deletion_cost: dice.below(2) as i32,
            stranded: dice.with_chance_one_in(3),
            spared: (!dice.with_chance_one_in(4)).then(|| dice.below(2) as u32),
            budgets,
            group: (way == VictimKind::MayLeave && (is_far || dice.with_chance_one_in(3)))
                .then(|| dice.below(2) as usize),
            own_tenant: dice.with_chance_one_in(2),
            class_exclusions: dice.with_chance_one_in(8),
            way,
        };
        if is_far || pod.gpus.iter().all(|g| self.fits_on(node, *g, &pod)) {
            self.pods.push(pod);
        }
    }

    fn on(&self, node: usize, gpu: usize) -> impl Iterator<Item = &OraclePod> {
        self.pods
            .iter()
            .filter(move |pod| pod.node == Some(node) && pod.gpus.contains(&gpu))
    }

    fn fits_on(&self, node: usize, gpu: usize, pod: &OraclePod) -> bool {
        let card = &self.nodes[node][gpu];
        let used: u64 = self
            .on(node, gpu)
            .map(|other| other.bytes + other.beyond)
            .sum();
        let is_first = self.on(node, gpu).next().is_none();
        let is_shared = self.on(node, gpu).all(|other| !other.alone);
        is_shared && (!pod.alone || is_first) && used + pod.bytes + pod.beyond <= card.capacity
    }

    // ---- what the search is given ----

    fn candidates(&self) -> Vec<PreemptionCandidate> {
        (0..self.nodes.len())
            .map(|node| self.candidate(node))
            .collect()
    }

    fn candidate(&self, node: usize) -> PreemptionCandidate {
        let here = |way: VictimKind| {
            self.pods
                .iter()
                .filter(move |pod| pod.node == Some(node) && pod.way == way)
        };
        let groups: BTreeSet<usize> = here(VictimKind::MayLeave)
            .filter_map(|pod| pod.group)
            .collect();
        let group_index = |group: Option<usize>| {
            group
                .and_then(|group| groups.iter().position(|known| *known == group))
                .map(|index| index as u16)
        };
        let (vram, cpu, violations) = self.missing[node];
        let class_exclusions = self
            .pods
            .iter()
            .filter(|pod| pod.node == Some(node) && pod.class_exclusions)
            .map(class_exclusion);
        let mut candidate = PreemptionCandidate {
            potential_victims: here(VictimKind::MayLeave)
                .map(|pod| PotentialVictim {
                    gang: group_index(pod.group),
                    ..self.resident(pod)
                })
                .collect(),
            awaited: here(VictimKind::LeavesAnyway)
                .map(|pod| self.resident(pod))
                .collect(),
            gangs: groups.iter().map(|group| self.gang(*group, node)).collect(),
            class_exclusions: class_exclusions.collect(),
            budgets: self.budgets.iter().map(|allowed| *allowed as u32).collect(),
            are_budgets_known: self.budgets_known,
            tenant_quota: self.tenant(),
            shortfall: Shortfall {
                vram: Bytes(vram),
                host_resources: HostResources {
                    cpu: MilliCpu(cpu),
                    memory: Bytes::ZERO,
                },
            },
            violations,
            ..PreemptionCandidate::new(
                NodeName::parse(&format!("node-{node}")).unwrap(),
                self.gpus(node),
            )
        };
        recompute_class_exclusions(&candidate.class_exclusions, &mut candidate.gpus, |_| false);
        candidate
    }

    fn gpus(&self, node: usize) -> Vec<Gpu> {
        let gpu = |(gpu_index, card): (usize, &GpuState)| {
            let mut gpu = Gpu {
                capacity: Bytes(card.capacity),
                charged: Bytes::ZERO,
                softly_reserved: Bytes::ZERO,
                engine_softly_reserved: false,
                excluded_by_soft_reservations: ClassSet::NONE,
                unaccounted_vram: Bytes(card.unaccounted_for),
                lendable: Bytes::ZERO,
                lends_below: 0,
                lends_within_limits: false,
                engine_load: if card.busy {
                    EngineLoad::new(Percent::new(99), Some(99))
                } else {
                    EngineLoad::NONE
                },
                // A closed GPU takes no pod, a full one only once a pod has left.
                neighbors: NeighborRoom {
                    busy: 0,
                    room: match (card.starting, card.busy) {
                        (true, true) => NeighborRoom::CLOSED,
                        (true, false) => 0,
                        _ => NeighborRoom::EMPTY.room,
                    },
                    micros_per_gib: None,
                },
                excluded_classes: ClassSet::NONE,
                residents: 0,
                exclusive: false,
                starting: card.starting,
                slice: false,
                exclusive_process: false,
                island: None,
                health: if card.lost {
                    Health::Lost
                } else {
                    Health::Healthy
                },
                spare: SpareSet::NONE,
                traits: GpuTraits::default(),
            };
            for pod in self.on(node, gpu_index) {
                gpu.charge(Bytes(pod.bytes), sharing(pod));
                gpu.unaccounted_vram += Bytes(pod.beyond);
            }
            gpu
        };
        self.nodes[node].iter().enumerate().map(gpu).collect()
    }

    fn tenant(&self) -> TenantQuota {
        let Some(left) = self.left else {
            return TenantQuota::default();
        };
        let ceiling = TenantLimit {
            vram: Some(Bytes(USED.saturating_add_signed(left))),
            milli_gpus: None,
        };
        TenantQuota {
            ceiling,
            used: TenantUsage {
                vram: Bytes(USED),
                milli_gpus: 0,
            },
        }
    }

    fn resident(&self, pod: &OraclePod) -> PotentialVictim {
        PotentialVictim {
            uid: uid(pod),
            gpus: pod.gpus.iter().copied().collect::<GpuSet>(),
            per_gpu: Bytes(pod.bytes),
            used_beyond_grant: Bytes(pod.beyond),
            busy: Percent::FULL,
            sharing: sharing(pod),
            priority: pod.priority,
            class: ClassId::default(),
            tenant: None,
            // No two are equal except by name if one excludes classes and the other does not.
            host_resources: HostResources {
                cpu: MilliCpu(pod.cpu),
                memory: Bytes(u64::from(pod.class_exclusions)),
            },
            grace: Millis::seconds(1),
            eviction_cost: PodEvictionCost {
                work: pod.cost,
                stranded: u64::from(pod.stranded),
                ..PodEvictionCost::default()
            },
            deletion_cost: pod.deletion_cost,
            quota_status: pod.spared.map_or(QuotaStatus::Guaranteed, |spared| {
                QuotaStatus::Borrowed { spared }
            }),
            returned_quota: TenantUsage {
                vram: Bytes(gives_back(pod)),
                milli_gpus: 0,
            },
            budgets: pod.budgets.iter().map(|budget| *budget as u16).collect(),
            gang: None,
            has_ended: false,
        }
    }

    fn gang(&self, group: usize, node: usize) -> VictimGroup {
        let of_group = |pod: &&OraclePod| pod.group == Some(group);
        let elsewhere = || {
            self.pods
                .iter()
                .filter(of_group)
                .filter(|pod| pod.node != Some(node))
        };
        let mut members: Vec<_> = self.pods.iter().filter(of_group).map(uid).collect();
        members.sort();
        VictimGroup {
            members: members.into(),
            eviction_cost: elsewhere().fold(EvictionCost::default(), |price, pod| {
                price.plus(&self.resident(pod))
            }),
            grace: Millis::seconds(1),
            given_back: TenantUsage {
                vram: Bytes(elsewhere().map(gives_back).sum()),
                milli_gpus: 0,
            },
            budgets: elsewhere()
                .flat_map(|pod| &pod.budgets)
                .map(|budget| *budget as u16)
                .collect(),
            elsewhere: MembersElsewhere::default(),
        }
    }

    // ---- what the oracle makes of it ----

    /// All pods that are evicted if this pod of a node is.
    fn evicted_together_with(&self, pod: &OraclePod) -> Vec<&OraclePod> {
        match pod.group {
            Some(_) => self
                .pods
                .iter()
                .filter(|other| other.group == pod.group)
                .collect(),
            None => self
                .pods
                .iter()
                .filter(|other| other.name == pod.name)
                .collect(),
        }
    }

    fn best(&self, rules: BudgetRules) -> Option<(EvictionCost, usize)> {
        (0..self.nodes.len())
            .filter_map(|node| {
                let movable: Vec<&OraclePod> = self
                    .pods
                    .iter()
                    .filter(|p| p.node == Some(node) && p.way != VictimKind::Stays)
                    .collect();
                let sets = (0u32..1 << movable.len()).map(|bits| {
                    (0..movable.len())
                        .filter(|i| bits >> i & 1 == 1)
                        .map(|i| movable[i])
                        .collect::<Vec<_>>()
                });
                sets.filter_map(|chosen| self.price_of(node, &chosen, rules))
                    .min()
                    .map(|price| (price, node))
            })
            .min()
    }

    /// The cost of these pods and all that are evicted with them; `None` if a pod is no potential victim.
    fn price_of(
        &self,
        node: usize,
        chosen: &[&OraclePod],
        rules: BudgetRules,
    ) -> Option<EvictionCost> {
        let mut all: BTreeMap<&str, &OraclePod> = BTreeMap::new();
        for pod in chosen
            .iter()
            .flat_map(|pod| self.evicted_together_with(pod))
        {
            all.insert(&pod.name, pod);
        }
        // A set that leaves out a member of its own group is counted as the set with it.
        if !self.is_enough(node, &all) {
            return None;
        }
        let victims = || all.values().filter(|pod| pod.way == VictimKind::MayLeave);
        let covered = |budget: usize| {
            victims()
                .filter(|pod| pod.budgets.contains(&budget))
                .count() as u64
        };
        let over: u64 = (0..self.budgets.len())
            .map(|b| covered(b).saturating_sub(self.budgets[b]))
            .sum();
        let violations = over as u32 + self.missing[node].2;
        let is_forbidden = violations > 0 || (!self.budgets_known && victims().count() > 0);
        if rules == BudgetRules::Keep && is_forbidden {
            return None;
        }
        let most =
            |figure: fn(&OraclePod) -> u32| victims().map(|pod| figure(pod)).max().unwrap_or(0);
        Some(EvictionCost {
            violations,
            from_guarantee: victims().any(|pod| pod.spared.is_none()),
            priority: most(|pod| pod.priority.abs_diff(i32::MIN)),
            spared: most(|pod| pod.spared.unwrap_or(0)),
            cost: victims()
                .map(|pod| pod.cost + u64::from(pod.stranded))
                .sum(),
            stranded: victims().filter(|pod| pod.stranded).count() as u32,
            deletion_cost: most(|pod| pod.deletion_cost.abs_diff(i32::MIN)),
            victims: victims().count() as u32,
            evicted: Bytes(victims().map(|pod| pod.bytes * pod.gpus.len() as u64).sum()),
            awaited: all
                .values()
                .filter(|pod| pod.way == VictimKind::LeavesAnyway)
                .count() as u32,
        })
    }

    fn is_enough(&self, node: usize, gone: &BTreeMap<&str, &OraclePod>) -> bool {
        let here = || gone.values().filter(|pod| pod.node == Some(node));
        let vram: u64 = here().map(|pod| pod.bytes * pod.gpus.len() as u64).sum();
        let cpu: u64 = here().map(|pod| pod.cpu).sum();
        if vram < self.missing[node].0 || cpu < self.missing[node].1 {
            return false;
        }
        let gpu_candidates: Vec<u64> = (0..self.nodes[node].len())
            .filter_map(|g| self.vram_if_gpu_fits(node, g, gone))
            .collect();
        let wanted = self.demand.gpus as usize;
        // The use of the tenant's limit differs from GPU to GPU only for a pod that takes a GPU whole.
        let mut cheapest = gpu_candidates.clone();
        cheapest.sort_unstable();
        let is_allowed = |used: u64| {
            let given_back: u64 = gone.values().map(|pod| gives_back(pod)).sum();
            self.left
                .is_none_or(|left| used as i64 - given_back.min(USED) as i64 <= left)
        };
        gpu_candidates.len() >= wanted && is_allowed(cheapest[..wanted].iter().sum())
    }

    /// What the pod would use of a GPU, if it fits there without these pods.
    fn vram_if_gpu_fits(
        &self,
        node: usize,
        gpu: usize,
        gone: &BTreeMap<&str, &OraclePod>,
    ) -> Option<u64> {
        let card = &self.nodes[node][gpu];
        let rest: Vec<&OraclePod> = self
            .on(node, gpu)
            .filter(|pod| !gone.contains_key(&*pod.name))
            .collect();
        let had_tenants = self.on(node, gpu).next().is_some();
        let is_emptied = had_tenants && rest.is_empty();
        let used: u64 = rest.iter().map(|pod| pod.bytes + pod.beyond).sum();
        let wants_all = self.demand.sharing == Sharing::Exclusive;
        let is_free = used + card.unaccounted_for + self.demand.per_gpu.0 <= card.capacity
            && rest.iter().all(|pod| !pod.alone && !pod.class_exclusions)
            && (!wants_all || rest.is_empty());
        let minds = self.demand.terms.kv_cache_limit.is_some();
        let is_calm =
            is_emptied || !(card.busy && minds || card.starting && self.demand.terms.engine);
        (is_free && is_calm && !card.lost).then_some(if wants_all {
            card.capacity
        } else {
            self.demand.per_gpu.0
        })
    }
}

fn card(dice: &mut VictimDice) -> GpuState {
    GpuState {
        capacity: if dice.with_chance_one_in(4) { 60 } else { 72 },
        unaccounted_for: if dice.with_chance_one_in(5) {
            dice.below(40)
        } else {
            0
        },
        busy: dice.with_chance_one_in(10),
        starting: dice.with_chance_one_in(10),
        lost: dice.with_chance_one_in(12),
    }
}

fn missing(dice: &mut VictimDice) -> (u64, u64, u32) {
    let vram = if dice.with_chance_one_in(4) {
        dice.below(60)
    } else {
        0
    };
    let cpu = if dice.with_chance_one_in(4) {
        dice.below(4)
    } else {
        0
    };
    (vram, cpu, u32::from(dice.with_chance_one_in(12)))
}

fn sharing(pod: &OraclePod) -> Sharing {
    if pod.alone {
        Sharing::Exclusive
    } else {
        Sharing::Shared
    }
}

fn gives_back(pod: &OraclePod) -> u64 {
    if pod.own_tenant {
        pod.bytes * pod.gpus.len() as u64
    } else {
        0
    }
}

fn uid(pod: &OraclePod) -> PodUid {
    PodUid::parse(&pod.name).unwrap()
}

fn class_exclusion(pod: &OraclePod) -> ClassExclusion {
    ClassExclusion {
        uid: uid(pod),
        gpus: pod.gpus.iter().copied().collect(),
        classes: ClassSet::ALL,
    }
}

/// The set is what the oracle says it must be, and every victim in it is necessary.
fn check(world: &VictimCluster, rules: BudgetRules, seed: u64) -> Option<VictimSet> {
    let found = cheapest(
        &world.candidates(),
        &world.demand,
        rules,
        SearchEffort::UNLIMITED,
    );
    let node_of = |set: &VictimSet| {
        set.node
            .as_str()
            .trim_start_matches("node-")
            .parse::<usize>()
            .unwrap()
    };
    let answer = found.as_ref().map(|set| (set.eviction_cost, node_of(set)));
    assert_eq!(answer, world.best(rules), "seed {seed}: {world:#?}");
    let set = found?;
    let named = |uids: &[PodUid]| -> Vec<&OraclePod> {
        uids.iter()
            .map(|one| world.pods.iter().find(|pod| uid(pod) == *one).unwrap())
            .collect()
    };
    let node = node_of(&set);
    let all: BTreeMap<&str, &OraclePod> = named(&set.all_victims())
        .into_iter()
        .map(|pod| (&*pod.name, pod))
        .collect();
    assert!(set.exact && world.is_enough(node, &all), "seed {seed}");
    assert!(
        named(&set.victims)
            .iter()
            .all(|pod| pod.way == VictimKind::MayLeave && pod.node == Some(node))
    );
    assert!(
        named(&set.elsewhere)
            .iter()
            .all(|pod| pod.way == VictimKind::MayLeave && pod.node != Some(node))
    );
    assert!(
        named(&set.awaited)
            .iter()
            .all(|pod| pod.way == VictimKind::LeavesAnyway && pod.node == Some(node))
    );
    for pod in all.values() {
        let together = world.evicted_together_with(pod);
        assert!(
            together
                .iter()
                .all(|member| all.contains_key(&*member.name)),
            "seed {seed}: a group is whole"
        );
        let mut rest = all.clone();
        rest.retain(|name, _| together.iter().all(|member| member.name != *name));
        assert!(
            !world.is_enough(node, &rest),
            "seed {seed}: {} need not have left",
            pod.name
        );
    }
    Some(set)
}

#[test]
fn no_cheaper_set_of_victims_exists_on_any_node() {
    let (mut found, mut emptied, mut grouped, mut awaited, mut violated) = (0, 0, 0, 0, 0);
    for seed in 0..4000 {
        let world = VictimCluster::new(seed);
        for rules in [BudgetRules::Keep, BudgetRules::Violate] {
            let Some(set) = check(&world, rules, seed) else {
                continue;
            };
            found += 1;
            emptied += usize::from(set.victims.is_empty());
            grouped += usize::from(!set.elsewhere.is_empty());
            awaited += usize::from(!set.awaited.is_empty());
            violated += usize::from(set.eviction_cost.violations > 0);
        }
    }
    // The cases are useful only if everything happens in them.
    for (times, least) in [
        (found - emptied, 1000),
        (grouped, 50),
        (awaited, 100),
        (violated, 50),
    ] {
        assert!(times >= least, "{times} of at least {least}");
    }
}

#[test]
fn the_input_order_of_pods_and_nodes_changes_nothing() {
    for seed in 0..500 {
        let world = VictimCluster::new(seed);
        let mut candidates = world.candidates();
        let first = cheapest(
            &candidates,
            &world.demand,
            BudgetRules::Violate,
            SearchEffort::UNLIMITED,
        );
        let mut random = Random::seeded(seed, 1);
        random.shuffle(&mut candidates);
        for candidate in &mut candidates {
            random.shuffle(&mut candidate.potential_victims);
            random.shuffle(&mut candidate.awaited);
            random.shuffle(&mut candidate.class_exclusions);
        }
        let again = cheapest(
            &candidates,
            &world.demand,
            BudgetRules::Violate,
            SearchEffort::UNLIMITED,
        );
        assert_eq!(first, again, "seed {seed}");
    }
}

#[test]
fn a_search_that_is_cut_short_is_marked_as_inexact() {
    let mut cut_short = 0;
    for seed in 0..500 {
        let world = VictimCluster::new(seed);
        let effort = SearchEffort {
            per_node: 3,
            per_search: 5,
        };
        let Some(set) = cheapest(
            &world.candidates(),
            &world.demand,
            BudgetRules::Violate,
            effort,
        ) else {
            continue;
        };
        cut_short += usize::from(!set.exact);
        let best = world.best(BudgetRules::Violate).expect("a set was found").0;
        assert!(
            set.eviction_cost == best || (!set.exact && set.eviction_cost > best),
            "seed {seed}"
        );
    }
    assert!(cut_short > 10, "{cut_short}");
}
