//! A cluster in a ledger, made by a fixed rule from a seed: nodes of eight GPUs, services that may not be evicted, and jobs that
//! may, some in groups, with models, checkpoints and budgets.

use crate::gpu::h100;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_scheduling::ids::{GpuUuid, ModelId, NodeName, OwnerUid, PodKey, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use stowage_scheduling::policy::{EvictionRates, Policy};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::observe::{
    BudgetObserved, DevicesReported, NodeObserved, PodObserved, ReadingReported,
};
use stowage_scheduling::verbs::tick::{ClockAdvanced, Tick};
use stowage_scheduling::vocabulary::demand::{ContainerRequest, Demand, PodRequest};
use stowage_scheduling::vocabulary::disruption_budget::DisruptionBudget;
use stowage_scheduling::vocabulary::disruption_info::{
    CheckpointAge, DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo,
};
use stowage_scheduling::vocabulary::label_selector::{Requirement, Selector};
use stowage_scheduling::vocabulary::model_tier::{ModelTier, NodeModel};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};

/// Nodes of the largest cluster.
pub const LARGE_CLUSTER_NODES: usize = 65_000;
const GPUS: u64 = 8;
const GIB: u64 = 1 << 30;
/// Allocatable VRAM of a GPU of 80 GiB, without the headroom, in bytes.
const ALLOCATABLE_PER_GPU: u64 = 72 * GIB;
const NOW: Moment = Moment(1_000_000_000_000);

pub struct FullCluster {
    pub ledger: Cluster,
    pub nodes: Vec<NodeName>,
    pub residents: usize,
    policy: Policy,
    dice: Random,
}

pub enum GroupMembership {
    Alone,
    InAGroupOf(u32),
}

impl FullCluster {
    /// Filled until `load` hundredths of the VRAM are allocated, with jobs of `least` to `most` GiB.
    pub fn new(nodes: usize, load: u64, sizes: (u64, u64), seed: u64) -> Self {
        let mut policy = Policy::default();
        // Eviction limits have a bench of their own.
        policy.preemption.evictions_per_minute = EvictionRates {
            cluster: u32::MAX,
            node: u32::MAX,
            tenant: u32::MAX,
        };
        Self::with_policy(policy, nodes, load, sizes, seed)
    }

    /// Cluster with this policy, filled as by [`FullCluster::new`].
    pub fn with_policy(
        policy: Policy,
        nodes: usize,
        load: u64,
        (least, most): (u64, u64),
        seed: u64,
    ) -> Self {
        let mut ledger = Cluster::new(Arc::new(policy.clone()));
        ledger.apply(ClockAdvanced(NOW));
        let names: Vec<NodeName> = (0..nodes)
            .map(|n| NodeName::parse(&format!("node-{n:04}")).expect("a name"))
            .collect();
        for (n, name) in names.iter().enumerate() {
            ledger.apply(NodeObserved::new(name.clone(), NodeKind::Stowage));
            ledger
                .apply(DevicesReported {
                    node: name.clone(),
                    devices: (0..GPUS)
                        .map(|g| h100(uuid(n, g), g as usize, Some(0)))
                        .collect(),
                    are_all: true,
                })
                .expect("eight GPUs");
        }
        let mut cluster = Self {
            ledger,
            nodes: names,
            residents: 0,
            policy,
            dice: Random::seeded(seed, 0),
        };
        (0..nodes).for_each(|node| {
            (0..GPUS).for_each(|gpu| cluster.fill(node, gpu, load, (least, most)))
        });
        cluster.report_all();
        cluster.set_budgets();
        cluster
    }

    pub fn advance(&mut self, time: Millis) {
        let later = self.ledger.ledger().now() + time;
        self.ledger.apply(Tick {
            now: later,
            is_leading: true,
        });
    }

    fn fill(&mut self, node: usize, gpu: u64, load: u64, (least, most): (u64, u64)) {
        let mut left = ALLOCATABLE_PER_GPU * load / 100;
        loop {
            let wanted = (least + self.dice.below((most - least + 1) as usize) as u64) * GIB;
            if wanted > left {
                return;
            }
            left -= wanted;
            // One in four is a service.
            let priority = if self.dice.below(4) == 0 {
                0
            } else {
                -10 * (1 + self.dice.below(2) as i32)
            };
            self.add(node, gpu, wanted, priority);
        }
    }

    fn add(&mut self, node: usize, gpu: u64, vram: u64, priority: i32) {
        let n = self.residents;
        self.residents += 1;
        let model = format!("model-{}", self.dice.below(40));
        let demand = self.demand(n, vram, 1, priority, Some(&model));
        let minutes = |dice: &mut Random, most| Millis::seconds(60 * dice.below(most) as u64);
        let in_a_group = self.dice.below(10) == 0;
        let group = in_a_group.then(|| GroupKey {
            namespace: "llm".into(),
            kind: GroupKind::JobSet,
            name: format!("set-{}", n / 40).into(),
        });
        let disruption_info = DisruptionInfo {
            group,
            owner: OwnerUid::parse(&format!("owner-{}", n / 8)).ok(),
            ..DisruptionInfo::default()
        };
        let stamp = match self.dice.below(3) {
            0 => CheckpointAge::None,
            _ => CheckpointAge::Ago(minutes(&mut self.dice, 240)),
        };
        let ran = Some(minutes(&mut self.dice, 2880));
        let devices = Some(Arc::from([uuid(node, gpu)]));
        let state = ObservedPhase::Bound {
            node: self.nodes[node].clone(),
            devices,
            starting: false,
            ran,
        };
        let shown = Some(ObservedDisruptionInfo {
            disruption_info,
            stamp,
            ..ObservedDisruptionInfo::default()
        });
        self.ledger.apply(PodObserved(PodObservation {
            uid: uid(n),
            key: key(n),
            demand,
            state,
            observed: shown,
        }));
    }

    /// Adds a pending pod.
    pub fn add_pending_pod(
        &mut self,
        name: usize,
        vram: Bytes,
        gpus: u32,
        priority: i32,
    ) -> PodUid {
        let demand = self.demand(name, vram.0, gpus, priority, None);
        let state = ObservedPhase::Waiting(ObservedWaiting::default());
        self.ledger.apply(PodObserved(PodObservation {
            uid: uid(name),
            key: key(name),
            demand,
            state,
            observed: None,
        }));
        uid(name)
    }

    /// Adds a pod with the planner's gate.
    pub fn add_gated_pod(
        &mut self,
        name: usize,
        vram: Bytes,
        priority: i32,
        waits: GroupMembership,
    ) {
        let demand = self.demand(name, vram.0, 1, priority, None);
        let state = ObservedPhase::Waiting(ObservedWaiting {
            gate: SchedulingGate::Planned,
            ..ObservedWaiting::default()
        });
        let group_size = match waits {
            GroupMembership::Alone => None,
            GroupMembership::InAGroupOf(size) => Some(size),
        };
        let group = group_size.map(|_| GroupKey {
            namespace: "llm".into(),
            kind: GroupKind::Stowage,
            name: "group".into(),
        });
        let disruption_info = DisruptionInfo {
            group,
            group_size,
            ..DisruptionInfo::default()
        };
        let shown = Some(ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        });
        self.ledger.apply(PodObserved(PodObservation {
            uid: uid(name),
            key: key(name),
            demand,
            state,
            observed: shown,
        }));
    }

    fn demand(&self, n: usize, vram: u64, gpus: u32, priority: i32, model: Option<&str>) -> Demand {
        let (vram, gpus) = (vram.to_string(), gpus.to_string());
        let labels = BTreeMap::from([("app".to_owned(), format!("app-{}", n / 20))]);
        let containers = [ContainerRequest {
            vram: Some(&vram),
            ..ContainerRequest::plain("main")
        }];
        let request = PodRequest {
            labels: &labels,
            priority,
            gpus: Some(&gpus),
            model,
            resources: &BTreeSet::from(["stowage.dev/vram"]),
            ..PodRequest::plain("llm", &containers)
        };
        Demand::from_pod(&request, &self.policy).expect("a pod that can be understood")
    }

    /// Reports idle engines, and some models, of each node.
    fn report_all(&mut self) {
        for (n, name) in self.nodes.clone().iter().enumerate() {
            let gpu = |g| GpuReading {
                uuid: uuid(n, g),
                used: Some(Bytes::ZERO),
                attributed: Vec::new(),
                engine_load: EngineLoad::NONE,
            };
            let models: BTreeSet<usize> = (0..6).map(|_| self.dice.below(40)).collect();
            let holding = |model: usize| NodeModel {
                model: ModelId::parse(&format!("model-{model}")).expect("a name"),
                tier: ModelTier::Disk,
                bytes: Bytes::gib(8 + model as u64),
            };
            let reading = NodeReading {
                sampled: NOW,
                gpus: (0..GPUS).map(gpu).collect(),
                holdings: models.into_iter().map(holding).collect(),
                ..NodeReading::default()
            };
            self.ledger.apply(ReadingReported {
                node: name.clone(),
                reading: reading.into(),
            });
        }
    }

    fn set_budgets(&mut self) {
        for app in (0..self.residents / 20).step_by(10) {
            let selector = Selector::All(vec![Requirement::equals("app", &format!("app-{app}"))]);
            let name = format!("budget-{app}");
            self.ledger.apply(BudgetObserved(DisruptionBudget {
                namespace: "llm".into(),
                name,
                selector,
                allowed: 1,
                unhealthy_may_go: false,
            }));
        }
    }
}

fn uuid(node: usize, gpu: u64) -> GpuUuid {
    GpuUuid::parse(&format!("GPU-{node:08x}-0000-0000-0000-{gpu:012x}")).expect("a UUID")
}

fn uid(n: usize) -> PodUid {
    PodUid::parse(&format!("{n:08x}-0000-4000-8000-000000000000")).expect("a UID")
}

fn key(n: usize) -> PodKey {
    PodKey::parse("llm", &format!("pod-{n}")).expect("a name")
}
