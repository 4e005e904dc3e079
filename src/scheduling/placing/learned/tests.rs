//! The packing model as a whole: against best fit where best fit is good, and on the demand of a real cluster.

use super::values;
use super::{DemandHistory, DemandShape, NodeGpus, PackingModel};
use crate::ids::{GpuModel, GpuUuid};
use crate::placing::pack;
use crate::placing::pack::{NodeEvaluation, PackingCost};
use crate::testkit::demand_of;
use crate::units::{Bytes, MilliCpu, Percent};
use crate::vocabulary::demand::{Demand, HostResources, Sharing};
use crate::vocabulary::gpu::{Device, Gpu, GpuSet, Health};
use crate::vocabulary::headroom::Headroom;
use proptest::prelude::*;

/// A GPU that can be cut into thousandths.
const WHOLE: u64 = 1000;

fn device(index: u32, model: &str, capacity: u64) -> Device {
    Device {
        uuid: GpuUuid::from_index(index),
        index,
        model: GpuModel::parse(model).unwrap(),
        parent: None,
        total: Bytes(capacity),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        exclusive_process: false,
        island: None,
    }
}

/// A node of empty GPUs.
#[derive(Debug, Clone)]
pub(super) struct EmptyNode {
    pub gpus: Vec<Gpu>,
    pub devices: Vec<Device>,
    pub free_host: Option<HostResources>,
}

impl EmptyNode {
    pub fn new(gpus: &[(&str, u64)], cpu: Option<u64>) -> Self {
        let devices: Vec<Device> = (0..)
            .zip(gpus)
            .map(|(index, (model, capacity))| device(index, model, *capacity))
            .collect();
        let headroom = Headroom::uniform(Percent::default());
        let gpus = devices
            .iter()
            .map(|device| Gpu::from_device(device, &headroom))
            .collect();
        let free_host = cpu.map(|cpu| HostResources {
            cpu: MilliCpu(cpu),
            memory: Bytes::gib(100),
        });
        Self {
            gpus,
            devices,
            free_host,
        }
    }

    fn alike(gpus: usize) -> Self {
        Self::new(&vec![("H100", WHOLE); gpus], None)
    }

    pub fn node_gpus(&self) -> NodeGpus<'_> {
        NodeGpus {
            gpus: &self.gpus,
            devices: &self.devices,
            free_host: self.free_host,
        }
    }

    pub fn with_charges(mut self, charged: &[u64]) -> Self {
        self.gpus
            .iter_mut()
            .zip(charged)
            .filter(|(_, bytes)| **bytes > 0)
            .for_each(|(gpu, bytes)| gpu.charge(Bytes(*bytes), Sharing::Shared));
        self
    }

    fn chosen(
        &self,
        packing_model: &PackingModel,
        demand: &Demand,
    ) -> Option<(PackingCost, GpuSet)> {
        let node_summary = packing_model.node_summary(self.node_gpus());
        let evaluation = NodeEvaluation::by_model(packing_model, &node_summary, demand);
        let choice = pack::choose_by_cost(&evaluation, GpuSet::ALL)?;
        Some((choice.packing_cost, choice.gpus))
    }
}

pub(super) fn shared(milli: u64) -> Demand {
    demand_of(milli, 1, Sharing::Shared, 0)
}

pub(super) fn with_cpu(demand: Demand, cpu: u64) -> Demand {
    Demand {
        host_resources: HostResources {
            cpu: MilliCpu(cpu),
            memory: Bytes::ZERO,
        },
        ..demand
    }
}

pub(super) fn whole(gpus: u32) -> Demand {
    demand_of(WHOLE, gpus, Sharing::Exclusive, 0)
}

pub(super) fn demand_history(demands: impl IntoIterator<Item = Demand>) -> DemandHistory {
    let mut demand_history = DemandHistory::default();
    demands.into_iter().for_each(|demand| {
        demand_history.record_arrival(DemandShape::from_demand(&demand).unwrap())
    });
    demand_history
}

pub(super) fn learned(demand_history: &DemandHistory, machines: &[EmptyNode]) -> PackingModel {
    PackingModel::learn(demand_history, machines.iter().map(EmptyNode::node_gpus))
}

/// How much of these nodes is allocated when all these pods have arrived, in thousandths of a GPU; learned on the way.
fn filled(mut machines: Vec<EmptyNode>, pods: &[Demand], is_learning: bool) -> u64 {
    let (mut packing_model, mut demand_history) =
        (PackingModel::default(), DemandHistory::default());
    let mut allocated = 0;
    for pod in pods {
        demand_history.record_arrival(DemandShape::from_demand(pod).unwrap());
        if is_learning && demand_history.is_due(packing_model.learned_at()) {
            packing_model = learned(&demand_history, &machines);
        }
        let gpu_candidates = machines.iter().enumerate();
        let best = gpu_candidates
            .filter_map(|(node_index, machine)| {
                Some((machine.chosen(&packing_model, pod)?, node_index))
            })
            .min();
        if let Some(((_, chosen), node_index)) = best {
            chosen
                .iter()
                .for_each(|gpu| machines[node_index].gpus[gpu].charge(pod.per_gpu, pod.sharing));
            allocated += chosen.iter().map(|_| pod.per_gpu.0).sum::<u64>();
        }
    }
    allocated
}

/// Never more than a tenth of a point below best fit.
fn assert_no_worse_than_best_fit(pods: &[Demand]) {
    let machines = vec![EmptyNode::alike(8); 12];
    let all = (machines.len() * 8) as u64 * WHOLE;
    let [ours, best_fit] =
        [true, false].map(|is_learning| filled(machines.clone(), pods, is_learning));
    assert!(
        (ours + all / 1000) >= best_fit,
        "{ours} of {all} allocated, and {best_fit} by best fit"
    );
}

#[test]
fn a_node_with_the_largest_possible_cpu_has_a_finite_packing_cost() {
    let pods = (0..20).map(|n| with_cpu(shared(100 + n * 40), 1000 * n));
    let large = EmptyNode::new(&[("H100", WHOLE); 8], Some(128_000)).with_charges(&[300]);
    let packing_model = learned(&demand_history(pods), std::slice::from_ref(&large));
    let mut boastful = large.clone();
    boastful.free_host = Some(HostResources {
        cpu: MilliCpu(u64::MAX),
        memory: Bytes(u64::MAX),
    });
    let demand = with_cpu(shared(200), 1000);
    let [modest, boastful] =
        [large, boastful].map(|machine| machine.chosen(&packing_model, &demand).unwrap());
    assert_eq!(modest.1, boastful.1);
    assert!(modest.0 < boastful.0, "{modest:?} {boastful:?}");
}

#[test]
fn with_too_few_arrivals_the_packing_cost_is_the_free_vram_left() {
    let machines = [EmptyNode::alike(2).with_charges(&[300, 500])];
    let packing_model = learned(&demand_history((0..9).map(|_| shared(200))), &machines);
    assert!(!packing_model.is_learned());
    assert_eq!(
        machines[0].chosen(&packing_model, &shared(200)),
        Some((PackingCost(300), GpuSet::single(1)))
    );
}

#[test]
fn without_gpus_nothing_is_learned() {
    assert!(!learned(&demand_history((0..50).map(|_| shared(200))), &[]).is_learned());
}

#[test]
fn a_usable_remainder_is_preferred_to_a_smaller_useless_one() {
    // Best fit would leave 100 on the first; on the second, 400 remain, which fit two more pods.
    let machine = EmptyNode::alike(2).with_charges(&[700, 400]);
    let packing_model = learned(
        &demand_history((0..100).map(|_| shared(200))),
        std::slice::from_ref(&machine),
    );
    assert_eq!(
        machine
            .chosen(&PackingModel::default(), &shared(200))
            .unwrap()
            .1,
        GpuSet::single(0)
    );
    assert_eq!(
        machine.chosen(&packing_model, &shared(200)).unwrap().1,
        GpuSet::single(1)
    );
}

#[test]
fn an_empty_gpu_is_not_used_on_a_node_without_cpu_for_its_other_gpus() {
    let pods = || (0..100).map(|_| with_cpu(shared(500), 1000));
    let machines = [
        EmptyNode::new(&[("H100", WHOLE); 4], Some(9000)),
        EmptyNode::new(&[("H100", WHOLE); 4], Some(3000)),
    ];
    let packing_model = learned(&demand_history(pods()), &machines);
    let [roomy, short] = [0, 1].map(|index| {
        machines[index]
            .chosen(&packing_model, &with_cpu(shared(500), 2000))
            .unwrap()
            .0
    });
    assert!(roomy < short, "{roomy:?} {short:?}");
}

#[test]
fn a_gpu_model_that_other_pods_require_is_left_to_them() {
    let of = |model: &str| EmptyNode::new(&[(model, WHOLE); 4], None);
    let machines = [of("H100"), of("L4")];
    let insist = Demand {
        models: [GpuModel::parse("H100").unwrap()].into(),
        ..shared(500)
    };
    let packing_model = learned(
        &demand_history((0..100).map(|n| {
            if n % 2 == 0 {
                insist.clone()
            } else {
                shared(500)
            }
        })),
        &machines,
    );
    let [wanted, other] = [0, 1].map(|index| {
        machines[index]
            .chosen(&packing_model, &shared(500))
            .unwrap()
            .0
    });
    assert!(other < wanted, "{other:?} {wanted:?}");
}

#[test]
fn a_block_of_gpus_is_not_broken_for_a_single_gpu_pod() {
    let machines = [
        EmptyNode::alike(4),
        EmptyNode::alike(4).with_charges(&[1000, 1000, 0, 0]),
    ];
    let mixed = demand_history((0..100).map(|n| if n % 2 == 0 { whole(4) } else { whole(1) }));
    let packing_model = learned(&mixed, &machines);
    let [unbroken, broken] =
        [0, 1].map(|index| machines[index].chosen(&packing_model, &whole(1)).unwrap().0);
    assert!(broken < unbroken, "{broken:?} {unbroken:?}");
}

#[test]
fn gpus_of_another_capacity_are_valued_separately() {
    let mixed = demand_history((0..100).map(|_| shared(400)));
    let at = |capacity: u64, hundredths: usize| {
        values::value_curve(&mixed, Bytes(capacity)).at(hundredths)
    };
    assert_eq!((at(1000, 39), at(1000, 40), at(1000, 80)), (0.0, 0.5, 1.0));
    assert_eq!((at(400, 99), at(400, 100), at(300, 99)), (0.0, 1.0, 0.0));
}

#[test]
fn pods_without_gpus_prefer_nodes_whose_gpus_are_in_use() {
    let pods = (0..100).map(|_| with_cpu(shared(500), 4000));
    let machines = [
        EmptyNode::new(&[("H100", WHOLE); 2], Some(16_000)),
        EmptyNode::new(&[("H100", WHOLE); 2], Some(16_000)).with_charges(&[1000, 1000]),
    ];
    let packing_model = learned(&demand_history(pods), &machines);
    let taken = HostResources {
        cpu: MilliCpu(6000),
        memory: Bytes::ZERO,
    };
    let [free, full] = [0, 1].map(|index| {
        packing_model
            .host_packing_cost(
                &packing_model.node_summary(machines[index].node_gpus()),
                taken,
            )
            .unwrap()
    });
    assert!(full < free, "{full:?} {free:?}");
}

#[test]
fn with_one_size_only_it_packs_as_best_fit_does() {
    for milli in [70, 110, 250, 300, 340, 510, 700, 1000] {
        let pods: Vec<Demand> = (0..96 * 1300 / milli).map(|_| shared(milli)).collect();
        assert_no_worse_than_best_fit(&pods);
    }
}

#[test]
fn with_sizes_just_over_a_half_it_packs_as_best_fit_does() {
    let pods: Vec<Demand> = (0..250u64).map(|n| shared(501 + n * 37 % 60)).collect();
    assert_no_worse_than_best_fit(&pods);
    let beside_small: Vec<Demand> = (0..300u64)
        .map(|n| shared(if n % 3 == 0 { 480 } else { 510 + n % 10 }))
        .collect();
    assert_no_worse_than_best_fit(&beside_small);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_same_demand_gives_the_same_order_and_finite_costs(
        sizes in prop::collection::vec((1u64..=1000, 1u32..4, 0u64..20_000), 10..60),
        charged in prop::collection::vec(0u64..=1000, 8),
        cpu in prop::option::of(0u64..100_000),
        ended in 0u32..40,
    ) {
        let demand = |(milli, gpus, cpu): (u64, u32, u64)| match milli {
            900.. => with_cpu(whole(gpus), cpu),
            _ => with_cpu(shared(milli), cpu),
        };
        let mut mixed = demand_history(sizes.iter().copied().map(demand));
        (0..ended).for_each(|_| mixed.record_departure());
        let machine = EmptyNode::new(&[("H100", WHOLE); 8], cpu).with_charges(&charged);
        let [one, other] = [0, 1].map(|_| learned(&mixed, std::slice::from_ref(&machine)));
        for pod in sizes.iter().copied().map(demand) {
            let found = machine.chosen(&one, &pod);
            prop_assert_eq!(found, machine.chosen(&other, &pod));
            if let Some((packing_cost, _)) = found {
                prop_assert!(packing_cost.0.abs() < 100_000_000_000, "{:?}", packing_cost);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Brute force over single GPUs finds the same.
    #[test]
    fn the_gpu_of_least_cost_is_chosen_and_the_first_among_equals(
        sizes in prop::collection::vec(1u64..=1000, 10..40),
        charged in prop::collection::vec(prop_oneof![Just(0u64), Just(400), 1u64..=900], 8),
        (capacity, milli, is_learning) in (prop_oneof![Just(1000u64), Just(400)], 1u64..=1000, any::<bool>()),
    ) {
        let gpus = [("H100", WHOLE), ("L4", capacity)].repeat(4);
        let machine = EmptyNode::new(&gpus, Some(50_000)).with_charges(&charged);
        let mixed = demand_history(sizes.into_iter().map(shared).chain([whole(2)]));
        let packing_model = if is_learning { learned(&mixed, std::slice::from_ref(&machine)) } else { PackingModel::default() };
        let (demand, node_summary) = (shared(milli), packing_model.node_summary(machine.node_gpus()));
        let evaluation = NodeEvaluation::by_model(&packing_model, &node_summary, &demand);
        let gpu_candidates = (0..8).filter(|place| machine.gpus[*place].has_free_vram(&demand));
        let best = gpu_candidates.map(|place| (evaluation.packing_cost(GpuSet::single(place)), place)).min();
        let chosen = pack::choose_by_cost(&evaluation, GpuSet::ALL).map(|choice| (choice.packing_cost, choice.gpus));
        prop_assert_eq!(chosen, best.map(|(packing_cost, place)| (packing_cost, GpuSet::single(place))));
        prop_assert_eq!(chosen, machine.chosen(&packing_model, &demand));
        let places: Vec<usize> = node_summary.gpu_groups().iter().flat_map(|gpu_group| gpu_group.indices.iter()).collect();
        prop_assert_eq!(places.len(), 8);
        prop_assert!((0..8).all(|place| *evaluation.gpus().gpu(place) == machine.gpus[place]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Brute force over sets of GPUs finds the same: the fewest GPUs with a soft reservation of another pod, in one island, and
    /// each at the least single cost.
    #[test]
    fn a_set_of_gpus_of_least_cost_is_chosen(
        sizes in prop::collection::vec(1u64..=1000, 10..40),
        gpus in prop::collection::vec(
            (prop_oneof![3 => Just(0u64), 1 => Just(400), 1 => 1u64..=900], prop_oneof![4 => Just(0u64), 1 => 1u64..=900],
                prop::option::of(0u8..2)), 7),
        (capacity, milli, wanted) in (prop_oneof![Just(1000u64), Just(400)], 1u64..=1000, 2u32..=4),
    ) {
        let models = [("H100", WHOLE), ("L4", capacity)].repeat(4);
        let charged: Vec<u64> = gpus.iter().map(|(charged, ..)| *charged).collect();
        let mut machine = EmptyNode::new(&models[..7], Some(50_000)).with_charges(&charged);
        for (gpu, (_, softly_reserved, island)) in machine.gpus.iter_mut().zip(&gpus) {
            (gpu.softly_reserved, gpu.island) = (Bytes(*softly_reserved), *island);
        }
        let mixed = demand_history(sizes.into_iter().map(shared).chain([whole(2), whole(4)]));
        let packing_model = learned(&mixed, std::slice::from_ref(&machine));
        let demand = if milli > 900 { whole(wanted) } else { demand_of(milli, wanted, Sharing::Shared, 0) };
        let node_summary = packing_model.node_summary(machine.node_gpus());
        let evaluation = NodeEvaluation::by_model(&packing_model, &node_summary, &demand);
        let is_promised = |place: usize| {
            let gpu = &machine.gpus[place];
            match demand.sharing {
                Sharing::Exclusive => gpu.softly_reserved.0 > 0,
                Sharing::Shared => gpu.charged.0 + gpu.softly_reserved.0 + demand.per_gpu.0 > gpu.capacity.0,
            }
        };
        let cost = |set: &GpuSet| {
            let islands: Vec<_> = set.iter().map(|place| machine.gpus[place].island).collect();
            let is_apart = islands.iter().any(|island| island.is_none() || *island != islands[0]);
            let alone = |place| (is_promised(place), evaluation.packing_cost(GpuSet::single(place)), place);
            let mut each: Vec<_> = set.iter().map(alone).collect();
            each.sort_unstable();
            (each.iter().filter(|(is_promised, ..)| *is_promised).count(), is_apart, each)
        };
        let sets = (0u32..1 << 7).filter(|bits| bits.count_ones() == wanted);
        let best = sets
            .map(|bits| (0..7).filter(|place| bits >> place & 1 == 1).collect::<GpuSet>())
            .filter(|set| set.iter().all(|place| machine.gpus[place].has_free_vram(&demand)))
            .min_by_key(cost);
        let chosen = pack::choose_by_cost(&evaluation, GpuSet::ALL).map(|choice| choice.gpus);
        prop_assert_eq!(chosen, best);
    }
}

#[test]
fn on_a_real_clusters_demand_free_vram_has_the_published_values() {
    use super::cutting_stock::ValueCurve;
    let Some(pods) = crate::needs::trace("openb/openb_pod_list_default.csv") else {
        return;
    };
    let mut lines = pods.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let names = lines.next().unwrap();
    let at = |name: &str| names.iter().position(|column| *column == name).unwrap();
    let (gpus, milli) = (at("num_gpu"), at("gpu_milli"));
    let mut mixed = DemandHistory::with_window(u16::MAX);
    for line in lines.filter(|line| line[gpus] != "0") {
        let (gpus, milli) = (line[gpus].parse().unwrap(), line[milli].parse().unwrap());
        let sharing = if milli == WHOLE {
            Sharing::Exclusive
        } else {
            Sharing::Shared
        };
        mixed
            .record_arrival(DemandShape::from_demand(&demand_of(milli, gpus, sharing, 0)).unwrap());
    }
    let curve: ValueCurve = values::value_curve(&mixed, Bytes(WHOLE));
    for (part, packing_model) in [
        (19, 0.0),
        (32, 1.0 / 3.0),
        (47, 0.5),
        (65, 2.0 / 3.0),
        (81, 1.0),
    ] {
        assert!(
            (curve.at(part) - packing_model).abs() < 0.01,
            "{part}: {}",
            curve.at(part)
        );
    }
}
