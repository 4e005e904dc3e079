//! On any cluster, an explanation agrees with the filter, and every remedy helps once it is applied.

use super::explanation::{GpuPart, PodVerdict};
use super::obstacle::Obstacle;
use super::remedy::{PreemptionNeeds, RemedyChange, RemedyPlacement};
use super::testkit::{ExplainedCluster, TestPod, name, pod};
use super::{Explanation, PodAccess, ShownNodes, explain, explain_for};
use crate::ids::PodUid;
use crate::placing::fit::{Misfit, fit, is_usable};
use crate::policy::Policy;
use crate::units::{Bytes, Millis};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;

/// A cluster that can be rebuilt, to try a remedy in it.
#[derive(Debug, Clone)]
struct ExplainedPlan {
    /// GPUs of each node, with the KV cache on each in per cent.
    nodes: Vec<Vec<u8>>,
    /// GiB, GPUs, alone, priority, node.
    pods: Vec<(u64, u32, bool, i32, usize)>,
    /// Since the last pod came, in seconds.
    passed: u64,
}

fn plan() -> impl Strategy<Value = ExplainedPlan> {
    let kv = prop_oneof![3 => Just(0u8), 1 => 60u8..=100];
    let nodes = prop::collection::vec(prop::collection::vec(kv, 0..4), 1..4);
    let pod = (
        1u64..70,
        1u32..3,
        proptest::bool::weighted(0.2),
        -3i32..3,
        0usize..4,
    );
    (
        nodes,
        prop::collection::vec(pod, 0..8),
        prop_oneof![Just(0u64), Just(3600)],
    )
        .prop_map(|(nodes, pods, passed)| ExplainedPlan {
            nodes,
            pods,
            passed,
        })
}

fn wanted() -> impl Strategy<Value = TestPod> {
    (
        1u64..120,
        1u32..3,
        proptest::bool::weighted(0.2),
        -3i32..3,
        proptest::bool::weighted(0.2),
    )
        .prop_map(|(gib, gpus, exclusive, priority, never_preempts)| TestPod {
            gpus: Some(gpus),
            exclusive,
            priority,
            never_preempts,
            ..pod("wanted", &format!("{gib}Gi"))
        })
}

fn node_name(index: usize) -> String {
    format!("node-{index}")
}

impl ExplainedPlan {
    fn build(&self) -> ExplainedCluster {
        let mut world = ExplainedCluster::new(Policy::default());
        for (index, gpus) in self.nodes.iter().enumerate() {
            world = world.with_node(&node_name(index), gpus.len());
        }
        for (n, (gib, gpus, exclusive, priority, node)) in self.pods.iter().enumerate() {
            let pod = TestPod {
                gpus: Some(*gpus),
                exclusive: *exclusive,
                priority: *priority,
                namespace: ["team", "elsewhere"][n % 2],
                ..pod(&format!("pod-{n}"), &format!("{gib}Gi"))
            };
            let (uid, node) = (
                world.add_waiting(&pod),
                name(&node_name(node % self.nodes.len())),
            );
            // The pod is there if it fits.
            match world.cluster.ledger_mut().assume(&uid, &node) {
                Ok(_) => {
                    let devices = world
                        .cluster
                        .ledger()
                        .pod_state(&uid)
                        .unwrap()
                        .devices()
                        .cloned();
                    world.cluster.ledger_mut().confirm(&uid, &node, devices);
                }
                Err(_) => drop(world.cluster.ledger_mut().release(&uid)),
            }
        }
        world.advance(Millis::seconds(self.passed));
        self.report(&mut world, None);
        world
    }

    /// All agents report; the engines on `calm` have no load.
    fn report(&self, world: &mut ExplainedCluster, calm: Option<&str>) {
        for (index, gpus) in self.nodes.iter().enumerate() {
            let busy: Vec<_> = gpus
                .iter()
                .enumerate()
                .map(|(gpu, kv)| (gpu, *kv, 0))
                .collect();
            let node = node_name(index);
            let busy = if calm == Some(node.as_str()) {
                &[][..]
            } else {
                &busy
            };
            world.report(&node, busy, &[]);
        }
    }
}

fn release(world: &mut ExplainedCluster, keys: &[String]) {
    for key in keys {
        let uid = PodUid::parse(key.rsplit('/').next().unwrap()).unwrap();
        world
            .cluster
            .ledger_mut()
            .release(&uid)
            .expect("who is named is there");
    }
}

/// Whether the pod fits on the candidate's node, by the core itself.
fn fits(world: &mut ExplainedCluster, pod: &TestPod, gpu_candidate: &RemedyPlacement) -> bool {
    let demand = pod.demand(&Policy::default());
    let snapshot = world.cluster.snapshot();
    fit(snapshot.node(gpu_candidate.node.as_str()).unwrap(), &demand).is_ok()
}

fn fits_anywhere(world: &mut ExplainedCluster, pod: &TestPod) -> bool {
    let demand = pod.demand(&Policy::default());
    world
        .cluster
        .snapshot()
        .nodes()
        .iter()
        .any(|node| fit(node, &demand).is_ok())
}

/// Applies the remedy in a rebuilt cluster; `None` if this test cannot apply it.
fn helps(plan: &ExplainedPlan, wanted: &TestPod, change: &RemedyChange) -> Option<bool> {
    let mut world = plan.build();
    let mut other = wanted.clone();
    let gpu_candidate = change.entry().1?;
    match change {
        RemedyChange::RequestLess { vram_bytes, .. } => other.vram = vram_bytes.0.to_string(),
        RemedyChange::ChangeGpuCount { gpus, .. } => other.gpus = Some(*gpus),
        RemedyChange::Share { .. } => other.exclusive = false,
        RemedyChange::Preempt { victims, needs, .. } => {
            if let PreemptionNeeds::Priority(least) = needs {
                other.priority = *least;
            }
            release(
                &mut world,
                &victims
                    .iter()
                    .map(|victim| victim.pod.clone())
                    .collect::<Vec<_>>(),
            );
            plan.report(&mut world, None);
            // A GPU without pods has no busy engine, as the search for victims assumes.
            if victims.is_empty() {
                return Some(false);
            }
            let calm = gpu_candidate.node.as_str();
            plan.report(&mut world, Some(calm));
        }
        RemedyChange::WaitForStartGate {
            opens_in_millis, ..
        } => {
            world.advance((*opens_in_millis)?);
            plan.report(&mut world, None);
        }
        RemedyChange::WaitForEngines { .. } => {
            plan.report(&mut world, Some(gpu_candidate.node.as_str()))
        }
        RemedyChange::FreeVram { short_bytes, .. } if wanted.gpus == Some(1) => {
            let requested = Bytes::parse_quantity(&wanted.vram).unwrap();
            // If nothing is free on a GPU, all of it is missing, and no pod requests nothing.
            let rest = requested.minus(*short_bytes);
            if rest.0 == 0 {
                return None;
            }
            other.vram = rest.0.to_string();
        }
        RemedyChange::Lift { reason, by, .. } if reason == "no-empty-gpu" => {
            release(&mut world, by);
            plan.report(&mut world, Some(gpu_candidate.node.as_str()));
        }
        _ => return None,
    }
    Some(fits(&mut world, &other, gpu_candidate))
}

fn explained(plan: &ExplainedPlan, wanted: &TestPod) -> (ExplainedCluster, Explanation) {
    let mut world = plan.build();
    let uid = world.add_waiting(wanted);
    let explanation = explain(&mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
    (world, explanation)
}

proptest! {
    #[test]
    fn explanations_agree_with_filter_and_name_an_obstacle_for_every_gpu_that_does_not_fit(
        plan in plan(), wanted in wanted()
    ) {
        let (mut world, explanation) = explained(&plan, &wanted);
        let demand = wanted.demand(&Policy::default());
        let snapshot = world.cluster.snapshot();
        prop_assert_eq!(explanation.nodes.len(), snapshot.nodes().len());
        for part in &explanation.nodes {
            let node = snapshot.node(part.name.as_str()).unwrap();
            let verdict = fit(node, &demand);
            let code = part.misfit.as_ref().map(|misfit| misfit.code.as_str());
            prop_assert_eq!(code, verdict.as_ref().err().map(Misfit::code));
            for (place, gpu) in part.gpus.iter().enumerate() {
                let can_take = is_usable(&node.gpus[place], &demand) && node.gpus[place].can_take(&demand);
                prop_assert_eq!(gpu.obstacles.is_empty(), can_take, "{:?}", gpu);
                prop_assert_eq!(gpu.chosen, verdict.is_ok_and(|gpus| gpus.contains(place)));
                let left = gpu.total_bytes.minus(gpu.driver_reserved_bytes).minus(gpu.headroom_bytes);
                prop_assert_eq!(gpu.free_bytes, left.minus(gpu.allocated_bytes).minus(gpu.unaccounted_bytes));
                let named = |obstacle: &Obstacle| match obstacle {
                    Obstacle::Exclusive { by } | Obstacle::NotEmpty { by } | Obstacle::EngineStarting { by, .. } => !by.is_empty(),
                    _ => true,
                };
                prop_assert!(gpu.obstacles.iter().all(named), "{:?}", gpu.obstacles);
            }
        }
        let fits = snapshot.nodes().iter().any(|node| fit(node, &demand).is_ok());
        prop_assert_eq!(explanation.verdict, if fits { PodVerdict::Fits } else { PodVerdict::DoesNotFit });
        prop_assert!(!explanation.remedies.is_empty());
    }

    #[test]
    fn every_remedy_makes_the_pod_fit_once_it_is_applied(plan in plan(), wanted in wanted()) {
        let (_, explanation) = explained(&plan, &wanted);
        for remedy in &explanation.remedies {
            prop_assert_ne!(helps(&plan, &wanted, &remedy.change), Some(false), "{}", remedy.text);
        }
    }

    #[test]
    fn the_proposed_request_is_the_largest_that_fits(plan in plan(), wanted in wanted()) {
        let (mut world, explanation) = explained(&plan, &wanted);
        let asked = Bytes::parse_quantity(&wanted.vram).unwrap();
        let proposed = explanation.remedies.iter().find_map(|remedy| match remedy.change {
            RemedyChange::RequestLess { vram_bytes, .. } => Some(vram_bytes),
            _ => None,
        });
        if explanation.verdict == PodVerdict::DoesNotFit {
            let least = proposed.unwrap_or_default();
            let larger = (1..120).map(|gib| least + Bytes::gib(gib)).filter(|larger| *larger < asked);
            for larger in larger {
                let other = TestPod { vram: larger.0.to_string(), ..wanted.clone() };
                prop_assert!(!fits_anywhere(&mut world, &other), "{larger} fits, {proposed:?} was proposed");
            }
        }
    }

    #[test]
    fn an_explanation_names_no_pod_that_its_reader_may_not_see(plan in plan(), wanted in wanted()) {
        let mut world = plan.build();
        let uid = world.add_waiting(&wanted);
        let all = explain(&mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
        let sums = |explanation: &Explanation| -> Vec<(u32, Bytes)> {
            let gpus = explanation.nodes.iter().flat_map(|node| &node.gpus);
            let sum = |gpu: &GpuPart| {
                let others = gpu.others.unwrap_or_default();
                let shown: Bytes = gpu.occupants.iter().map(|occupant| occupant.bytes).sum();
                (gpu.occupants.len() as u32 + others.pods, shown + others.bytes)
            };
            gpus.map(sum).collect()
        };
        let evicted = |explanation: &Explanation| -> Vec<u32> {
            let changes = explanation.remedies.iter().map(|one| &one.change);
            let evicted = changes.filter_map(|change| match change {
                RemedyChange::Preempt { victims, others, .. } => {
                    Some(victims.len() as u32 + others.map_or(0, |others| others.pods))
                }
                _ => None,
            });
            evicted.collect()
        };
        for (reader, hidden) in [(PodAccess::Namespace, &["elsewhere"][..]), (PodAccess::Own, &["elsewhere", "team/pod"])] {
            let told = explain_for(reader, &mut world.cluster.copy(), &uid, &ShownNodes::All).unwrap();
            let text = serde_json::to_string(&told).unwrap();
            prop_assert!(!hidden.iter().any(|name| text.contains(name)), "{reader:?}: {text}");
            prop_assert_eq!((sums(&told), evicted(&told)), (sums(&all), evicted(&all)));
            let is_told_twice = text.split('"').any(|part| part.matches(" of others").count() > 1);
            prop_assert!(!is_told_twice, "{text}");
            let changes = |told: &Explanation| told.remedies.iter().map(|one| one.change.code()).collect::<Vec<_>>();
            prop_assert_eq!((told.verdict, changes(&told)), (all.verdict, changes(&all)));
        }
    }

    #[test]
    fn an_explanation_survives_a_json_round_trip(plan in plan(), wanted in wanted()) {
        let (_, explanation) = explained(&plan, &wanted);
        let text = serde_json::to_string(&explanation).unwrap();
        prop_assert_eq!(serde_json::from_str::<Explanation>(&text).unwrap(), explanation);
    }
}

/// A remedy that is never applied is never checked.
#[test]
fn the_generated_cases_apply_each_kind_of_remedy() {
    let mut runner = TestRunner::deterministic();
    let mut helped = BTreeMap::<String, u32>::new();
    for _ in 0..2000 {
        let (plan, wanted) = (plan(), wanted()).new_tree(&mut runner).unwrap().current();
        for remedy in explained(&plan, &wanted).1.remedies {
            if helps(&plan, &wanted, &remedy.change) == Some(true) {
                let change = match &remedy.change {
                    RemedyChange::Lift { reason, .. } => reason.clone(),
                    other => format!("{other:?}")
                        .split([' ', '{'])
                        .next()
                        .unwrap()
                        .to_owned(),
                };
                *helped.entry(change).or_default() += 1;
            }
        }
    }
    for change in [
        "RequestLess",
        "ChangeGpuCount",
        "Share",
        "Preempt",
        "WaitForStartGate",
        "WaitForEngines",
        "FreeVram",
        "no-empty-gpu",
    ] {
        assert!(
            helped.get(change).is_some_and(|times| *times >= 3),
            "{change}: {helped:?}"
        );
    }
}
