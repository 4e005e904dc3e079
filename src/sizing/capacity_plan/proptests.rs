//! Plans against an exhaustive search that knows none of the code: the lower bound is at most the optimum, and what is found is
//! at least that, and keeps every rule.

use super::bound::l2;
use super::plan;
use super::question::{NodeTemplate, PodToPlace, TemplateHost};
use super::report::CapacityPlan;
use super::testkit::{
    nodes, nodes_with_gpu, plugin_pod, pod, policy, question, with_class, with_cpu,
};
use proptest::prelude::*;
use std::collections::BTreeMap;
use stowage_scheduling::units::MilliCpu;
use stowage_scheduling::vocabulary::demand::Sharing;

/// GiB of a GPU.
const SIZE: u64 = 12;
/// Which classes share a GPU, both ways: `red` with itself and `blue`, `green` with itself, `lone` with none.
const CLASSES: [&str; 4] = ["red", "blue", "green", "lone"];

fn may_share(one: usize, other: usize) -> bool {
    matches!((one, other), (0, 0 | 1) | (1, 0 | 1) | (2, 2))
}

#[derive(Debug, Clone)]
struct Asked {
    gib: u64,
    gpus: u32,
    is_exclusive: bool,
    class: usize,
    cores: u64,
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    gpus: u32,
    cores: Option<u64>,
}

fn any_pod(most_gpus: u32) -> impl Strategy<Value = Asked> {
    (
        1..=SIZE,
        1..=most_gpus,
        proptest::bool::weighted(0.2),
        0..CLASSES.len(),
        0..4u64,
    )
        .prop_map(|(gib, gpus, is_exclusive, class, cores)| Asked {
            gib,
            gpus,
            is_exclusive,
            class,
            cores,
        })
}

fn case() -> impl Strategy<Value = (Shape, Vec<Asked>)> {
    (1..=3u32, proptest::option::of(4..8u64)).prop_flat_map(|(gpus, cores)| {
        (
            Just(Shape { gpus, cores }),
            proptest::collection::vec(any_pod(gpus), 1..6),
        )
    })
}

/// What is on each GPU and each node of a fleet while pods are tried on it.
struct Oracle<'c> {
    shape: Shape,
    pods: &'c [Asked],
    /// Pods on each GPU.
    on: Vec<Vec<usize>>,
    cores: BTreeMap<usize, u64>,
}

impl Oracle<'_> {
    /// The fewest GPUs, as full nodes and one with the rest.
    fn optimum(shape: Shape, pods: &[Asked]) -> usize {
        let holds = |gpus: &usize| {
            let mut oracle = Oracle {
                shape,
                pods,
                on: vec![Vec::new(); *gpus],
                cores: BTreeMap::new(),
            };
            oracle.holds_from(0)
        };
        (1..=pods.len() * shape.gpus as usize)
            .find(holds)
            .expect("a node for each pod is enough")
    }

    fn holds_from(&mut self, next: usize) -> bool {
        let Some(pod) = self.pods.get(next) else {
            return true;
        };
        let (each, count) = (self.shape.gpus as usize, self.on.len());
        for node in 0..count.div_ceil(each) {
            let cores = self.cores.get(&node).copied().unwrap_or(0) + pod.cores;
            if self.shape.cores.is_some_and(|most| cores > most) {
                continue;
            }
            let gpus: Vec<usize> = (node * each..((node + 1) * each).min(count)).collect();
            for chosen in subsets(&gpus, pod.gpus as usize) {
                if chosen.iter().all(|gpu| self.may_join(next, *gpu)) {
                    chosen.iter().for_each(|gpu| self.on[*gpu].push(next));
                    let before = self.cores.insert(node, cores);
                    if self.holds_from(next + 1) {
                        return true;
                    }
                    self.cores.insert(node, before.unwrap_or(0));
                    for gpu in chosen {
                        self.on[gpu].pop();
                    }
                }
            }
        }
        false
    }

    fn may_join(&self, pod: usize, gpu: usize) -> bool {
        fits_together(self.pods, &[&self.on[gpu][..], &[pod]].concat())
    }
}

/// The rules of one GPU, in their own words.
fn fits_together(pods: &[Asked], on: &[usize]) -> bool {
    let sum: u64 = on.iter().map(|pod| pods[*pod].gib).sum();
    let pairs = || {
        on.iter()
            .enumerate()
            .flat_map(|(at, one)| on[at + 1..].iter().map(move |other| (*one, *other)))
    };
    sum <= SIZE
        && pairs().all(|(one, other)| !pods[one].is_exclusive && !pods[other].is_exclusive)
        && pairs().all(|(one, other)| may_share(pods[one].class, pods[other].class))
}

fn subsets(of: &[usize], size: usize) -> Vec<Vec<usize>> {
    match (size, of) {
        (0, _) => vec![Vec::new()],
        (_, []) => Vec::new(),
        (_, [first, rest @ ..]) => {
            let with = subsets(rest, size - 1)
                .into_iter()
                .map(|set| [&[*first], &set[..]].concat());
            with.chain(subsets(rest, size)).collect()
        }
    }
}

fn plan_of(shape: Shape, pods: &[Asked]) -> CapacityPlan {
    let policy = policy(&[
        ("red", Some(&["red", "blue"])),
        ("blue", Some(&["red", "blue"])),
        ("green", Some(&["green"])),
        ("lone", Some(&[])),
    ]);
    let to_place = |(place, asked): (usize, &Asked)| -> PodToPlace {
        let sharing = if asked.is_exclusive {
            Sharing::Exclusive
        } else {
            Sharing::Shared
        };
        let pod = pod(&format!("pod-{place}"), asked.gib, asked.gpus, sharing);
        with_cpu(with_class(pod, CLASSES[asked.class], &policy), asked.cores)
    };
    let cpu = shape.cores.map(|cores| MilliCpu(cores * 1000));
    let kind = NodeTemplate {
        host: TemplateHost::Described { cpu, memory: None },
        ..nodes(shape.gpus, SIZE)
    };
    let pods: Vec<PodToPlace> = pods.iter().enumerate().map(to_place).collect();
    plan(&question(policy, pods, [kind]))
}

/// Pods on each GPU of a plan, by their places.
fn pods_by_gpu(plan: &CapacityPlan) -> Vec<Vec<usize>> {
    let place = |name: &str| name.strip_prefix("pod-").unwrap().parse().unwrap();
    let gpus = plan.layout.iter().flat_map(|node| &node.gpus);
    gpus.map(|gpu| gpu.pods.iter().map(|pod| place(&pod.pod.name)).collect())
        .collect()
}

/// Every way to put these slices on GPUs, by A100's own placements.
mod slices {
    /// Profile, first memory slices, memory slices.
    pub const PROFILES: [(&str, &[u8], u8); 6] = [
        ("1g.10gb", &[0, 1, 2, 3, 4, 5, 6], 1),
        ("1g.20gb", &[0, 2, 4, 6], 2),
        ("2g.20gb", &[0, 2, 4], 2),
        ("3g.40gb", &[0, 4], 4),
        ("4g.40gb", &[0], 4),
        ("7g.80gb", &[0], 8),
    ];

    pub fn fewest(wanted: &[usize]) -> usize {
        (1..=wanted.len())
            .find(|gpus| holds(wanted, &mut vec![0u8; *gpus]))
            .unwrap()
    }

    /// GPUs of which each is cut into slices of 39, 19 and 9 whole GiB, for pods of so many GiB, alone on their slice or not.
    pub(crate) fn fewest_cut(pods: &[(u64, bool)]) -> usize {
        let holds = |gpus: &usize| {
            fill(
                pods,
                &mut [39, 19, 9].repeat(*gpus),
                &mut vec![false; 3 * gpus],
            )
        };
        (1..=pods.len()).find(holds).unwrap()
    }

    fn fill(pods: &[(u64, bool)], left: &mut [u64], is_used: &mut [bool]) -> bool {
        let Some(((gib, is_exclusive), rest)) = pods.split_first() else {
            return true;
        };
        for slice in 0..left.len() {
            if *gib > left[slice] || (*is_exclusive && is_used[slice]) {
                continue;
            }
            let before = (left[slice], is_used[slice]);
            left[slice] = if *is_exclusive { 0 } else { left[slice] - gib };
            is_used[slice] = true;
            if fill(rest, left, is_used) {
                return true;
            }
            (left[slice], is_used[slice]) = before;
        }
        false
    }

    fn holds(wanted: &[usize], taken: &mut Vec<u8>) -> bool {
        let Some((next, rest)) = wanted.split_first() else {
            return true;
        };
        let (_, starts, size) = PROFILES[*next];
        for gpu in 0..taken.len() {
            for start in starts {
                let place = (((1u16 << size) - 1) << start) as u8;
                if taken[gpu] & place == 0 {
                    taken[gpu] |= place;
                    if holds(rest, taken) {
                        return true;
                    }
                    taken[gpu] &= !place;
                }
            }
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_bound_is_at_most_the_optimum_and_what_is_found_at_least_that((shape, pods) in case()) {
        // A pod that fits on no empty node is another test's.
        prop_assume!(pods.iter().all(|pod| shape.cores.is_none_or(|most| pod.cores <= most)));
        let plan = plan_of(shape, &pods);
        let optimum = Oracle::optimum(shape, &pods);
        prop_assert_eq!(plan.held, pods.len());
        prop_assert!(plan.lower_bound.gpus as usize <= optimum, "{:?} is above {}", plan.lower_bound, optimum);
        prop_assert!(optimum <= plan.gpus as usize, "{} is found, and {} is the optimum", plan.gpus, optimum);
        prop_assert_eq!(plan.is_optimal, plan.gpus == plan.lower_bound.gpus);
    }

    #[test]
    fn what_is_found_keeps_every_rule((shape, pods) in case()) {
        prop_assume!(pods.iter().all(|pod| shape.cores.is_none_or(|most| pod.cores <= most)));
        let plan = plan_of(shape, &pods);
        let on = pods_by_gpu(&plan);
        prop_assert_eq!(on.len(), plan.gpus as usize);
        for gpu in &on {
            prop_assert!(fits_together(&pods, gpu), "{:?}", gpu);
        }
        for (place, pod) in pods.iter().enumerate() {
            let gpus: Vec<usize> = (0..on.len()).filter(|gpu| on[*gpu].contains(&place)).collect();
            prop_assert_eq!(gpus.len(), pod.gpus as usize);
            let node = |gpu: &usize| gpu / shape.gpus as usize;
            prop_assert!(gpus.iter().all(|gpu| node(gpu) == node(&gpus[0])), "{:?}", gpus);
        }
    }

    #[test]
    fn slices_are_bounded_and_found_alike(wanted in proptest::collection::vec(0..slices::PROFILES.len(), 1..7)) {
        let pods: Vec<PodToPlace> = wanted
            .iter()
            .enumerate()
            .map(|(place, profile)| {
                plugin_pod(&format!("pod-{place}"), &format!("nvidia.com/mig-{}", slices::PROFILES[*profile].0), 1)
            })
            .collect();
        let plan = plan(&question(policy(&[]), pods, [nodes_with_gpu(1, "A100-80GB", None)]));
        let optimum = slices::fewest(&wanted);
        prop_assert_eq!(plan.held, wanted.len());
        prop_assert!(plan.lower_bound.gpus as usize <= optimum && optimum <= plan.gpus as usize,
            "{:?} {} {}", plan.lower_bound, optimum, plan.gpus);
    }

    #[test]
    fn whole_gpus_of_a_plugin_are_bounded_and_found_alike((shape, pods) in case()) {
        prop_assume!(pods.iter().all(|pod| shape.cores.is_none_or(|most| pod.cores <= most)));
        let pods: Vec<Asked> = pods.into_iter().map(|pod| Asked { is_exclusive: true, ..pod }).collect();
        let to_place = pods.iter().enumerate().map(|(place, asked)| {
            with_cpu(plugin_pod(&format!("pod-{place}"), "nvidia.com/gpu", asked.gpus), asked.cores)
        });
        let host = TemplateHost::Described { cpu: shape.cores.map(|cores| MilliCpu(cores * 1000)), memory: None };
        let kind = NodeTemplate { host, ..nodes(shape.gpus, SIZE) };
        let plan = plan(&question(policy(&[]), to_place.collect::<Vec<_>>(), [kind]));
        let optimum = Oracle::optimum(shape, &pods);
        prop_assert_eq!(plan.held, pods.len());
        prop_assert!(plan.lower_bound.gpus as usize <= optimum && optimum <= plan.gpus as usize,
            "{:?} {} {}", plan.lower_bound, optimum, plan.gpus);
    }

    #[test]
    fn slices_of_several_sizes_are_bounded_and_filled_alike(
        sizes in proptest::collection::vec((1..=39u64, proptest::bool::weighted(0.2)), 1..6)
    ) {
        let pods = sizes.iter().enumerate().map(|(place, (gib, is_exclusive))| {
            let sharing = if *is_exclusive { Sharing::Exclusive } else { Sharing::Shared };
            pod(&format!("pod-{place}"), *gib, 1, sharing)
        });
        let kind = nodes_with_gpu(1, "A100-80GB", Some("4g.40gb,2g.20gb,1g.10gb"));
        let plan = plan(&question(policy(&[]), pods.collect::<Vec<_>>(), [kind]));
        let optimum = slices::fewest_cut(&sizes);
        prop_assert_eq!(plan.held, sizes.len());
        prop_assert!(plan.lower_bound.gpus as usize <= optimum && optimum <= plan.gpus as usize,
            "{:?} {} {}", plan.lower_bound, optimum, plan.gpus);
    }

    #[test]
    fn l2_is_at_least_the_sum_and_at_most_the_optimum(items in proptest::collection::vec(1..=SIZE, 0..7)) {
        let pods: Vec<Asked> = items
            .iter()
            .map(|gib| Asked { gib: *gib, gpus: 1, is_exclusive: false, class: 0, cores: 0 })
            .collect();
        let bound = l2(&items, SIZE) as usize;
        prop_assert!(bound >= items.iter().sum::<u64>().div_ceil(SIZE) as usize);
        if !items.is_empty() {
            let optimum = Oracle::optimum(Shape { gpus: 1, cores: None }, &pods);
            prop_assert!(bound <= optimum, "{} is above {}", bound, optimum);
        }
    }
}

#[test]
fn l2_sees_that_pods_over_half_a_gpu_share_none_with_each_other() {
    assert_eq!(l2(&[7, 7, 7, 3], 12), 3);
    // By their sum 3 would do; what the large ones leave is too small for the rest.
    assert_eq!(l2(&[8, 8, 8, 5, 5], 12), 4);
    assert_eq!((l2(&[], 12), l2(&[5], 0)), (0, 1));
}

#[test]
fn items_of_over_a_third_of_a_bin_are_at_most_two_to_a_bin() {
    assert_eq!(
        (l2(&[5; 10], 12), l2(&[4; 9], 12), l2(&[3, 3, 3, 3, 5], 12)),
        (5, 3, 2)
    );
}
