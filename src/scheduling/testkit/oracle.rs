//! The oracle: which of a cluster's promises are broken, by plain facts alone. Whoever plays the core shows it what nodes have and
//! which pods are bound, and asks; no GPU is allocated beyond what it has, an exclusive GPU has one pod, a victim is one that may
//! be evicted, and disruption budgets are kept.
//!
//! GPUs are judged by the function with which the [continuous audit](crate::audit::conflicts) judges those of a real cluster.
//! Nothing here reads a ledger, or shares arithmetic with one.

use super::gpus::whole_gpu;
use crate::audit::conflicts::{
    AuditedPod, BindTimes, GpuShare, Grant, NodePods, OverAllocation, find_over_allocations,
};
use crate::ids::{GpuUuid, NodeName, PodKey, PodUid};
use crate::units::{Bytes, Moment};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::memory_fraction::MemoryFraction;
use std::collections::{BTreeMap, BTreeSet};

/// The GPUs of all nodes, and the pods that are bound to them.
#[derive(Debug, Clone, Default)]
pub struct Oracle {
    nodes: BTreeMap<NodeName, KnownNode>,
    /// The node of each pod.
    of: BTreeMap<PodUid, NodeName>,
}

#[derive(Debug, Clone, Default)]
struct KnownNode {
    gpus: Vec<Device>,
    pods: NodePods,
}

/// What a pod asks for and was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Granted {
    pub gpus: u32,
    /// On each of its GPUs.
    pub per_gpu: Bytes,
    pub sharing: Sharing,
    /// Sleeping engines lend it.
    pub borrows: bool,
}

/// What of a pod says whether it may be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VictimFacts {
    pub priority: i32,
    /// Its class may be evicted for pods of higher priority.
    pub is_preemptible: bool,
    /// It is not to be disrupted, and its class honors that.
    pub is_protected: bool,
}

/// An invariant that a decision breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BrokenInvariant {
    #[error("{0}")]
    Gpu(OverAllocation),
    #[error("{pod} is granted {granted} of {gpu} on {node}, which has less")]
    GrantedTooMuch {
        pod: PodUid,
        node: NodeName,
        gpu: GpuUuid,
        granted: Bytes,
    },
    #[error("{pod} is bound to {node}, which is not there")]
    NoSuchNode { pod: PodUid, node: NodeName },
    #[error("{pod} asks for {asked} GPUs and is bound to {got}")]
    OtherCount { pod: PodUid, asked: u32, got: usize },
    #[error("{pod} is bound a second time; it is on {node}")]
    BoundTwice { pod: PodUid, node: NodeName },
    #[error(
        "{victim} of priority {priority}, which {why}, is evicted for {preemptor} of priority {above}"
    )]
    WrongVictim {
        victim: PodUid,
        priority: i32,
        preemptor: PodUid,
        above: i32,
        why: &'static str,
    },
    #[error("{evicted} pods are evicted for {preemptor}, and their budget allows {allowed}")]
    OverBudget {
        preemptor: PodUid,
        evicted: usize,
        allowed: usize,
    },
}

impl Oracle {
    /// A node has these GPUs, and so much of each may be allocated.
    pub fn set_node(&mut self, node: &NodeName, gpus: impl IntoIterator<Item = (GpuUuid, Bytes)>) {
        let gpus = gpus.into_iter().zip(0..);
        let gpus = gpus.map(|((uuid, bytes), index)| whole_gpu(uuid, index, bytes));
        self.nodes.entry(node.clone()).or_default().gpus = gpus.collect();
    }

    /// The pod is bound, or its Binding may land at any time. Answers what its node breaks from now on.
    pub fn bind(
        &mut self,
        pod: &PodUid,
        node: &NodeName,
        gpus: &[GpuUuid],
        granted: Granted,
    ) -> Vec<BrokenInvariant> {
        let Granted {
            gpus: asked,
            per_gpu,
            sharing,
            borrows,
        } = granted;
        // One GPU that is given twice is one.
        let got = gpus.iter().collect::<BTreeSet<_>>().len();
        let mut broken = Vec::new();
        if u32::try_from(got) != Ok(asked) {
            let pod = pod.clone();
            broken.push(BrokenInvariant::OtherCount { pod, asked, got });
        }
        let grant = Grant {
            per_gpu,
            sharing,
            fraction: MemoryFraction::default(),
            has_started: true,
            is_leaving: false,
            is_static: false,
            borrows,
            bind_times: BindTimes::default(),
        };
        let bound = AuditedPod {
            key: PodKey {
                namespace: "pods".into(),
                name: pod.as_str().into(),
            },
            node: node.clone(),
            gpus: gpus.into(),
            share: GpuShare::Bound(grant),
        };
        broken.extend(self.observe(pod, bound));
        broken
    }

    /// Records a bound pod as its object shows it; returns the invariants that it breaks.
    pub fn observe(&mut self, pod: &PodUid, bound: AuditedPod) -> Vec<BrokenInvariant> {
        let node = bound.node.clone();
        let is_moved = |placement: &(&NodeName, &[GpuUuid])| *placement != (&node, &*bound.gpus);
        let before = self.placement_of(pod).filter(is_moved);
        let twice = before.map(|(node, _)| BrokenInvariant::BoundTwice {
            pod: pod.clone(),
            node: node.clone(),
        });
        self.end(pod);
        let on_node = self.nodes.entry(node.clone()).or_default();
        on_node.pods.insert(pod.clone(), bound);
        let broken = twice
            .into_iter()
            .chain(on_node.broken_on_node(&node))
            .collect();
        self.of.insert(pod.clone(), node);
        broken
    }

    /// The pod is gone, or no Binding of it can land any more.
    pub fn end(&mut self, pod: &PodUid) {
        let node = self.of.remove(pod);
        if let Some(on_node) = node.and_then(|node| self.nodes.get_mut(&node)) {
            on_node.pods.remove(pod);
        }
    }

    pub fn placement_of(&self, pod: &PodUid) -> Option<(&NodeName, &[GpuUuid])> {
        let node = self.of.get(pod)?;
        Some((node, &*self.nodes.get(node)?.pods.get(pod)?.gpus))
    }

    /// All that is broken, in order of node.
    pub fn broken_invariants(&self) -> Vec<BrokenInvariant> {
        let nodes = self.nodes.iter();
        nodes
            .flat_map(|(name, node)| node.broken_on_node(name))
            .collect()
    }
}

impl KnownNode {
    fn broken_on_node(&self, name: &NodeName) -> Vec<BrokenInvariant> {
        let node = || name.clone();
        if self.gpus.is_empty() {
            let pods = self.pods.keys().cloned();
            return pods
                .map(|pod| BrokenInvariant::NoSuchNode { pod, node: node() })
                .collect();
        }
        let found = find_over_allocations(&self.gpus, &self.pods, Moment::default());
        let over_allocations = found
            .into_iter()
            .map(|found| BrokenInvariant::Gpu(found.at_node(name)));
        // The audit does not know what an exclusive pod could be granted at most.
        let beyond = self.pods.iter().flat_map(|(pod, bound)| {
            let granted = bound.grant().map_or(Bytes::ZERO, |grant| grant.per_gpu);
            let is_beyond =
                move |gpu: &&Device| bound.gpus.contains(&gpu.uuid) && granted > gpu.total;
            let gpus = self.gpus.iter().filter(is_beyond);
            gpus.map(move |gpu| BrokenInvariant::GrantedTooMuch {
                pod: pod.clone(),
                node: node(),
                gpu: gpu.uuid.clone(),
                granted,
            })
        });
        over_allocations.chain(beyond).collect()
    }
}

impl VictimFacts {
    /// The pod is evicted for another, of that priority.
    pub fn check(
        self,
        victim: &PodUid,
        preemptor: &PodUid,
        above: i32,
    ) -> Result<(), BrokenInvariant> {
        let why = if !self.is_preemptible {
            "is of a class that is not preemptible"
        } else if self.priority >= above {
            "is not of lower priority"
        } else if self.is_protected {
            "is not to be disrupted"
        } else {
            return Ok(());
        };
        Err(BrokenInvariant::WrongVictim {
            victim: victim.clone(),
            priority: self.priority,
            preemptor: preemptor.clone(),
            above,
            why,
        })
    }
}

/// So many pods that a disruption budget covers are evicted for a pod, where it allows no more than that.
pub fn check_budget(
    preemptor: &PodUid,
    evicted: usize,
    allowed: usize,
) -> Result<(), BrokenInvariant> {
    let preemptor = preemptor.clone();
    (evicted <= allowed)
        .then_some(())
        .ok_or(BrokenInvariant::OverBudget {
            preemptor,
            evicted,
            allowed,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::{gpu, node, uid};

    fn shared(gib: u64) -> Granted {
        Granted {
            gpus: 1,
            per_gpu: Bytes::gib(gib),
            sharing: Sharing::Shared,
            borrows: false,
        }
    }

    fn oracle() -> Oracle {
        let mut oracle = Oracle::default();
        let gpus = ["GPU-a", "GPU-b"].map(|uuid| (gpu(uuid), Bytes::gib(72)));
        oracle.set_node(&node("n"), gpus);
        oracle
    }

    fn texts(broken: &[BrokenInvariant]) -> Vec<String> {
        broken.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_gpu_is_never_over_allocated_and_ended_pods_free_their_vram() {
        let mut oracle = oracle();
        let mut bind =
            |pod: &str, gib| oracle.bind(&uid(pod), &node("n"), &[gpu("GPU-a")], shared(gib));
        assert_eq!(bind("one", 40), []);
        assert_eq!(bind("two", 32), []);
        let [broken] = &bind("three", 1)[..] else {
            panic!("one GPU is beyond what it has");
        };
        assert!(broken.to_string().contains("GPU-a"), "{broken}");
        assert_eq!(oracle.broken_invariants().len(), 1);
        oracle.end(&uid("one"));
        assert_eq!(oracle.broken_invariants(), []);
    }

    #[test]
    fn what_sleeping_engines_lend_is_counted_beside_what_they_have() {
        let mut oracle = oracle();
        let borrowed = |gib| Granted {
            borrows: true,
            ..shared(gib)
        };
        let mut bind =
            |pod: &str, granted| oracle.bind(&uid(pod), &node("n"), &[gpu("GPU-a")], granted);
        assert_eq!(bind("lends", shared(70)), []);
        assert_eq!(bind("borrows", borrowed(60)), []);
        assert_eq!(bind("borrows-too", borrowed(20)).len(), 1);
    }

    #[test]
    fn an_exclusive_gpu_has_one_pod_which_is_granted_no_more_than_it_has() {
        let mut oracle = oracle();
        let alone = |gib| Granted {
            sharing: Sharing::Exclusive,
            ..shared(gib)
        };
        let mut bind =
            |pod: &str, uuid, granted| oracle.bind(&uid(pod), &node("n"), &[gpu(uuid)], granted);
        assert_eq!(bind("one", "GPU-a", alone(72)), []);
        assert_eq!(bind("two", "GPU-a", shared(1)).len(), 1);
        let broken = bind("three", "GPU-b", alone(73));
        assert!(
            texts(&broken)
                .iter()
                .any(|text| text.contains("granted 73")),
            "{broken:?}"
        );
    }

    #[test]
    fn a_pod_is_bound_once_to_the_number_of_existing_gpus_it_requests() {
        let (mut oracle, pod) = (oracle(), uid("one"));
        let mut bind =
            |on: &str, gpus: &[GpuUuid]| texts(&oracle.bind(&pod, &node(on), gpus, shared(1)));
        assert_eq!(
            bind("n", &[gpu("GPU-a"), gpu("GPU-b")]),
            ["one asks for 1 GPUs and is bound to 2"]
        );
        assert_eq!(
            bind("n", &[gpu("GPU-b")]),
            ["one is bound a second time; it is on n"]
        );
        assert_eq!(
            bind("n", &[gpu("GPU-b")]),
            [""; 0],
            "the same again is the same"
        );
        assert_eq!(
            bind("m", &[gpu("GPU-b")]),
            [
                "one is bound a second time; it is on n",
                "one is bound to m, which is not there"
            ]
        );
        oracle.end(&pod);
        let [broken] = &oracle.bind(&pod, &node("n"), &[gpu("GPU-c")], shared(1))[..] else {
            panic!("there is no such GPU");
        };
        assert!(broken.to_string().contains("has no GPU GPU-c"), "{broken}");
    }

    #[test]
    fn a_victim_is_preemptible_of_lower_priority_and_unprotected() {
        let facts = VictimFacts {
            priority: -1,
            is_preemptible: true,
            is_protected: false,
        };
        let check = |facts: VictimFacts, above| facts.check(&uid("v"), &uid("p"), above).is_ok();
        assert!(check(facts, 0));
        assert!(!check(facts, -1));
        assert!(!check(
            VictimFacts {
                is_preemptible: false,
                ..facts
            },
            0
        ));
        assert!(!check(
            VictimFacts {
                is_protected: true,
                ..facts
            },
            0
        ));
        assert!(check_budget(&uid("p"), 2, 2).is_ok() && check_budget(&uid("p"), 3, 2).is_err());
    }
}
