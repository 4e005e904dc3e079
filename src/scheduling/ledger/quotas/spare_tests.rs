//! No order of pods, binds, plans and policies lets preemptible pods take the last free GPUs. The oracle counts free GPUs from
//! what pods hold, and knows nothing of how the ledger counts them.

use super::*;
use crate::audit::ledger::audit;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::kube_filters::node::Taint;
use crate::kube_filters::{FilterNode, ResourceList};
use crate::ledger::{AllocationFailure, AssumeResult};
use crate::placing::fit::Misfit;
use crate::planning::PlanStep;
use crate::policy::{Policy, Pool};
use crate::testkit::numbered::{node_name, uid};
use crate::testkit::{LedgerCluster, demand_of, plan_steps, unit_gpu};
use crate::verbs::observe::{DevicesReported, NodeDeleted, NodeObserved};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::{Device, Health};
use crate::vocabulary::node::NodeKind;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const NODES: u8 = 3;
const GPUS: u32 = 3;

#[derive(Debug, Clone)]
enum Op {
    /// A pod asks to be bound; of a preemptible class, if its priority is negative.
    Bind {
        pod: u8,
        vram: u64,
        gpus: u32,
        exclusive: bool,
        priority: i32,
        node: u8,
    },
    /// A pod waits for the planner.
    Gate {
        pod: u8,
        vram: u64,
        gpus: u32,
        priority: i32,
    },
    Plan,
    Confirm(u8),
    Forget(u8),
    Release(u8),
    Rules(u8),
    Health(u8, u32, bool),
    NodeGone(u8),
    NodeBack(u8),
    Cordon(u8, bool),
}

fn op() -> impl Strategy<Value = Op> {
    let (pod, node, vram, gpus, priority) = (0u8..12, 0..NODES, 10u64..91, 1u32..3, -2i32..2);
    prop_oneof![
        8 => (pod.clone(), vram.clone(), gpus.clone(), any::<bool>(), priority.clone(), node.clone()).prop_map(
            |(pod, vram, gpus, exclusive, priority, node)| Op::Bind { pod, vram, gpus, exclusive, priority, node }
        ),
        3 => (pod.clone(), vram, gpus, priority).prop_map(|(pod, vram, gpus, priority)| Op::Gate { pod, vram, gpus, priority }),
        3 => Just(Op::Plan),
        2 => pod.clone().prop_map(Op::Confirm),
        1 => pod.clone().prop_map(Op::Forget),
        3 => pod.prop_map(Op::Release),
        1 => (0u8..6).prop_map(Op::Rules),
        1 => (node.clone(), 0..GPUS, any::<bool>()).prop_map(|(node, gpu, is_lost)| Op::Health(node, gpu, is_lost)),
        1 => node.clone().prop_map(Op::NodeGone),
        2 => node.clone().prop_map(Op::NodeBack),
        1 => (node, any::<bool>()).prop_map(|(node, is_cordoned)| Op::Cordon(node, is_cordoned)),
    ]
}

/// Node 0 is in pool `left`; GPU 2 of each node is an A100.
fn policy(n: u8) -> Policy {
    let left = Pool {
        selector: [("side".to_owned(), "left".to_owned())].into(),
        ..Pool::new("left")
    };
    let mut policy = Policy::default().with_pools(vec![left]).unwrap();
    let rule = |gpus, model: Option<&str>, pool: Option<&str>| SpareRule {
        gpus,
        model: model.map(str::to_owned),
        pool: pool.map(str::to_owned),
        when: Vec::new(),
    };
    policy.planning.spare = match n {
        0 => Vec::new(),
        1 => vec![rule(2, None, None)],
        2 => vec![rule(1, Some("a100"), None)],
        3 => vec![rule(1, None, Some("left")), rule(4, None, None)],
        4 => vec![
            rule(1, Some("H100"), Some("left")),
            rule(2, Some("A100"), None),
        ],
        _ => vec![rule(100, None, None)],
    };
    policy
}

fn device(node: u8, index: u32) -> Device {
    let model = if index == 2 {
        "NVIDIA-A100-SXM4"
    } else {
        "NVIDIA-H100-80GB"
    };
    Device {
        model: crate::ids::GpuModel::parse(model).unwrap(),
        ..unit_gpu(node, index)
    }
}

struct Bench {
    cluster: LedgerCluster,
    /// Nodes that exist, each with its GPUs that are lost.
    nodes: BTreeMap<u8, BTreeSet<u32>>,
    cordoned: BTreeSet<u8>,
}

impl Bench {
    fn new() -> Self {
        let mut bench = Self {
            cluster: LedgerCluster::empty(policy(1)),
            nodes: BTreeMap::new(),
            cordoned: BTreeSet::new(),
        };
        (0..NODES).for_each(|node| bench.show(node, BTreeSet::new()));
        bench
    }

    fn show(&mut self, node: u8, lost: BTreeSet<u32>) {
        let side = if node == 0 { "left" } else { "right" };
        let labels = Arc::new([("side".to_owned(), side.to_owned())].into());
        let taints = self.cordoned.contains(&node).then(Taint::unschedulable);
        let machine = Some(FilterNode {
            name: node_name(node),
            labels: Arc::default(),
            taints: taints.into_iter().collect(),
            allocatable: ResourceList::default(),
            pods: 110,
        });
        let observed = NodeObserved::new(node_name(node), NodeKind::Stowage);
        self.cluster.apply(NodeObserved {
            labels,
            machine,
            ..observed
        });
        let health = |index| {
            if lost.contains(&index) {
                Health::Lost
            } else {
                Health::Healthy
            }
        };
        let devices = (0..GPUS)
            .map(|index| Device {
                health: health(index),
                ..device(node, index)
            })
            .collect();
        self.cluster
            .apply(DevicesReported {
                node: node_name(node),
                devices,
                are_all: true,
            })
            .unwrap();
        self.nodes.insert(node, lost);
    }

    /// All GPUs that a pod or a reservation holds.
    fn held(&self) -> BTreeSet<(NodeName, GpuUuid)> {
        let pods = self.cluster.ledger().pod_states();
        let held = pods.values().flat_map(|pod| {
            let placed = pod.node().zip(pod.devices());
            let reserved = pod
                .reservation()
                .map(|reservation| (&reservation.node, &reservation.devices));
            placed
                .into_iter()
                .chain(reserved)
                .flat_map(|(node, gpus)| gpus.iter().map(|gpu| (node.clone(), gpu.clone())))
        });
        held.collect()
    }

    /// Of each rule, the GPUs that are free.
    fn free(&self) -> Vec<BTreeSet<(NodeName, GpuUuid)>> {
        let (held, policy) = (self.held(), self.cluster.ledger().policy());
        let counts = |rule: &SpareRule, node: u8, gpu: &Device| {
            let model = gpu.model.as_str().to_lowercase();
            rule.pool.as_deref().is_none_or(|_| node == 0)
                && rule
                    .model
                    .as_deref()
                    .is_none_or(|part| model.contains(&part.to_lowercase()))
        };
        let of = |rule: &SpareRule| {
            let all = self.nodes.iter().flat_map(|(node, lost)| {
                let is_open = !self.cordoned.contains(node);
                let healthy = (0..GPUS)
                    .filter(move |_| is_open)
                    .filter(|index| !lost.contains(index));
                healthy.map(|index| (*node, device(*node, index)))
            });
            let counted = all.filter(|(node, gpu)| counts(rule, *node, gpu));
            let named = counted.map(|(node, gpu)| (node_name(node), gpu.uuid));
            named.filter(|gpu| !held.contains(gpu)).collect()
        };
        policy.planning.spare.iter().map(of).collect()
    }

    /// What a pod of a preemptible class has taken leaves the last free GPUs.
    fn check(&self, before: &[BTreeSet<(NodeName, GpuUuid)>], uid: &PodUid, what: &str) {
        let pod = self.cluster.ledger().pod_state(uid).unwrap();
        if pod.demand.priority >= 0 {
            return;
        }
        let after = self.free();
        for ((rule, before), after) in self
            .cluster
            .ledger()
            .policy()
            .planning
            .spare
            .iter()
            .zip(before)
            .zip(after)
        {
            let kept = rule.gpus as usize;
            assert!(
                after.len() >= before.len().min(kept),
                "{what} took one of the last {kept} of {rule}: {before:?}"
            );
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Bind {
                pod,
                vram,
                gpus,
                exclusive,
                priority,
                node,
            } => {
                let sharing = if exclusive {
                    Sharing::Exclusive
                } else {
                    Sharing::Shared
                };
                self.cluster
                    .add_waiting(uid(pod).as_str(), demand_of(vram, gpus, sharing, priority));
                self.bind(pod, node);
            }
            Op::Gate {
                pod,
                vram,
                gpus,
                priority,
            } => {
                self.cluster.add_gated(
                    uid(pod).as_str(),
                    demand_of(vram, gpus, Sharing::Shared, priority),
                );
            }
            Op::Plan => self.plan(),
            Op::Confirm(pod) => {
                let assumed = self
                    .cluster
                    .ledger()
                    .pod_state(&uid(pod))
                    .filter(|state| state.is_assumed());
                let placed = assumed
                    .and_then(|state| Some((state.node()?.clone(), state.devices()?.clone())));
                if let Some((node, devices)) = placed {
                    self.cluster
                        .ledger_mut()
                        .confirm(&uid(pod), &node, Some(devices));
                }
            }
            Op::Forget(pod) => self.cluster.ledger_mut().forget(&uid(pod)),
            Op::Release(pod) => drop(self.cluster.ledger_mut().release(&uid(pod))),
            Op::Rules(n) => drop(self.cluster.ledger_mut().set_policy(policy(n))),
            Op::Health(node, gpu, is_lost) => {
                let Some(mut lost) = self.nodes.get(&node).cloned() else {
                    return;
                };
                if is_lost {
                    lost.insert(gpu)
                } else {
                    lost.remove(&gpu)
                };
                self.show(node, lost);
            }
            Op::NodeGone(node) => {
                self.cluster.apply(NodeDeleted(node_name(node)));
                self.nodes.remove(&node);
            }
            Op::Cordon(node, is_cordoned) => {
                let Some(lost) = self.nodes.get(&node).cloned() else {
                    return;
                };
                if is_cordoned {
                    self.cordoned.insert(node)
                } else {
                    self.cordoned.remove(&node)
                };
                self.show(node, lost);
            }
            Op::NodeBack(node) if !self.nodes.contains_key(&node) => {
                self.show(node, BTreeSet::new())
            }
            Op::NodeBack(_) => {}
        }
    }

    fn bind(&mut self, pod: u8, node: u8) {
        let (before, reserved) = (
            self.free(),
            self.cluster
                .ledger()
                .pod_state(&uid(pod))
                .is_some_and(|pod| pod.reservation().is_some()),
        );
        match self
            .cluster
            .ledger_mut()
            .assume(&uid(pod), &node_name(node))
        {
            // What is reserved was taken when it was reserved.
            Ok(AssumeResult::New(_)) if !reserved => self.check(&before, &uid(pod), "a bind"),
            Err(AllocationFailure::NoLongerFits(Misfit::KeptSpare { .. })) => {
                let demand = &self.cluster.ledger().pod_state(&uid(pod)).unwrap().demand;
                assert!(
                    demand.priority < 0,
                    "a pod that is not preemptible is refused a spare GPU"
                );
                let rules = self
                    .cluster
                    .ledger()
                    .policy()
                    .planning
                    .spare
                    .iter()
                    .zip(&before);
                let mut kept =
                    rules.map(|(rule, free)| free.len() < (rule.gpus + demand.gpus) as usize);
                assert!(kept.any(|is_kept| is_kept), "more are free than are kept");
            }
            _ => {}
        }
    }

    fn plan(&mut self) {
        for step in plan_steps(self.cluster.ledger_mut(), 64) {
            let PlanStep::Place(placements) = step else {
                continue;
            };
            for placement in placements {
                let before = self.free();
                self.cluster
                    .ledger_mut()
                    .reserve(&placement.uid, placement.reservation)
                    .expect("what was planned on a copy holds");
                self.check(&before, &placement.uid, "a reservation");
            }
        }
    }

    fn counts_agree(&self) {
        let counted: Vec<usize> = self
            .cluster
            .ledger()
            .spare_status()
            .map(|(_, free)| free.unwrap() as usize)
            .collect();
        let free: Vec<usize> = self.free().iter().map(BTreeSet::len).collect();
        assert_eq!(counted, free);
        assert_eq!(audit(self.cluster.ledger()), []);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn preemptible_pods_never_take_the_last_free_gpus(ops in prop::collection::vec(op(), 1..60)) {
        let mut bench = Bench::new();
        for op in &ops {
            bench.apply(op);
            bench.counts_agree();
            // A state that is stored counts the same.
            let ledger: &Ledger = bench.cluster.ledger();
            let loaded = Ledger::load(ledger.policy().clone(), ledger.export()).unwrap();
            let counts = |ledger: &Ledger| ledger.spare_status().map(|(_, free)| free).collect::<Vec<_>>();
            prop_assert_eq!(counts(&loaded), counts(ledger));
        }
    }
}

#[test]
fn the_last_free_gpu_is_for_pods_that_are_not_preemptible() {
    let mut bench = Bench::new();
    bench.apply(&Op::NodeGone(1));
    bench.apply(&Op::NodeGone(2));
    let job = |pod| Op::Bind {
        pod,
        vram: 90,
        gpus: 1,
        exclusive: false,
        priority: -1,
        node: 0,
    };
    bench.apply(&job(1));
    bench.apply(&job(2));
    let state = |bench: &Bench, pod: u8| {
        bench
            .cluster
            .ledger()
            .pod_state(&uid(pod))
            .unwrap()
            .node()
            .is_some()
    };
    assert_eq!([1, 2].map(|pod| state(&bench, pod)), [true, false]);
    let refused = bench
        .cluster
        .ledger_mut()
        .assume(&uid(2), &node_name(0))
        .unwrap_err();
    assert_eq!(
        refused,
        AllocationFailure::NoLongerFits(Misfit::KeptSpare { kept: 2, asked: 1 })
    );
    bench.apply(&Op::Bind {
        pod: 3,
        vram: 90,
        gpus: 2,
        exclusive: false,
        priority: 1,
        node: 0,
    });
    assert!(state(&bench, 3), "two replicas' GPUs were free");
}
