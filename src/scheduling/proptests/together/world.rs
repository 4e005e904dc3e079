//! The cluster that a history happens to, with all that was told it.

use super::{CAPACITY, GPUS, NODES, PODS, demand, policy};
use crate::ids::{LeaderEpoch, ModelId, PodUid};
use crate::kube_filters::{FilterNode, Requirements, ResourceList};
use crate::ledger::{ObservedPhase, ObservedWaiting, PodObservation, PodState, SchedulingGate};
use crate::placing::score_cache::ScoreCache;
use crate::planning::{PlanBounds, PlanStep, plan_within};
use crate::testkit::numbered::{key, node_name, uid};
use crate::testkit::unit_gpu;
use crate::units::{Bytes, Millis};
use crate::verbs::bind::{BindAnswer, BindAsked};
use crate::verbs::binding::BindingWritten;
use crate::verbs::filter::{FilterAsked, decision_of, filter};
use crate::verbs::observe::{
    DevicesReported, FilterPod, FilterPodObserved, NodeObserved, PodObserved, ReadingReported,
};
use crate::verbs::request::VerbRequest;
use crate::verbs::tick::{LeadershipBegan, Tick};
use crate::verbs::wait::{PutBack, ReservePlaces, TakePending};
use crate::verbs::{Change, Cluster, Input};
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::disruption_info::{ObservedDisruptionInfo, ObservedLoan, PodDeletion};
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading, SleepState};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) struct World {
    pub cluster: Cluster,
    pub inputs: Vec<String>,
    pub spare: bool,
    pub published: BTreeSet<u8>,
    pub asleep: BTreeSet<u8>,
    /// As the reports told the cluster, of pods that lend since then.
    pub seen_asleep: BTreeSet<u8>,
    pub wake_requests: BTreeMap<u8, Arc<str>>,
    pub leaving: BTreeSet<u8>,
    /// Pods that came behind the planner's gate.
    pub gated: BTreeSet<u8>,
    pub borrowed: usize,
}

impl World {
    pub fn new() -> Self {
        let cluster = Cluster::new(Arc::new(policy(true, true)));
        let (inputs, published, asleep) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let (seen_asleep, wake_requests, leaving) =
            (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
        let mut world = Self {
            cluster,
            inputs,
            spare: true,
            published,
            asleep,
            seen_asleep,
            wake_requests,
            leaving,
            gated: BTreeSet::new(),
            borrowed: 0,
        };
        world.apply(LeadershipBegan(LeaderEpoch::new("lease", 1, "nonce")));
        for node in 0..NODES {
            let (labels, taints, allocatable) =
                (Arc::default(), Arc::default(), ResourceList::default());
            let machine = FilterNode {
                name: node_name(node),
                labels,
                taints,
                allocatable,
                pods: 110,
            };
            let observed = NodeObserved::new(node_name(node), NodeKind::Stowage);
            world.apply(NodeObserved {
                machine: Some(machine),
                ..observed
            });
            let devices = (0..GPUS).map(|index| unit_gpu(node, index)).collect();
            world
                .apply(DevicesReported {
                    node: node_name(node),
                    devices,
                    are_all: true,
                })
                .unwrap();
        }
        world
    }

    pub fn apply<C: Change + Clone + Into<Input>>(&mut self, change: C) -> C::Output {
        self.inputs
            .push(serde_json::to_string(&change.clone().into()).unwrap());
        self.cluster.apply(change)
    }

    pub fn pod(&self, pod: u8) -> Option<PodState> {
        self.cluster.ledger().pod_state(&uid(pod)).cloned()
    }

    pub fn bound(&self) -> Vec<(u8, PodState)> {
        let known = (0..PODS).filter_map(|pod| Some((pod, self.pod(pod)?)));
        known.filter(|(_, state)| state.node().is_some()).collect()
    }

    /// The watch shows the pod as it is.
    pub fn watch(&mut self, pod: u8) {
        let known = self.pod(pod);
        let state = match known
            .as_ref()
            .and_then(|known| Some((known, known.node()?)))
        {
            Some((known, node)) => {
                let (node, devices) = (node.clone(), known.devices().cloned());
                ObservedPhase::Bound {
                    node,
                    devices,
                    starting: false,
                    ran: None,
                }
            }
            None => {
                let reservation = known
                    .as_ref()
                    .and_then(|known| known.reservation().cloned());
                let gate = if self.gated.contains(&pod) {
                    SchedulingGate::Planned
                } else {
                    SchedulingGate::Open
                };
                ObservedPhase::Waiting(ObservedWaiting {
                    reservation,
                    gate,
                    nominated: None,
                })
            }
        };
        let leaving = PodDeletion {
            asked_ago: Millis(0),
            grace: Millis::seconds(30),
        };
        let borrows = known.is_some_and(|known| known.borrows());
        let (wake_requested, wakeable) = (self.wake_requests.get(&pod).cloned(), None);
        let observed = ObservedDisruptionInfo {
            leaving: self.leaving.contains(&pod).then_some(leaving),
            loan: ObservedLoan {
                borrows,
                has_vram_limits: false,
                wake_requested,
                wakeable,
            },
            ..ObservedDisruptionInfo::default()
        };
        let demand = demand(pod, self.cluster.ledger().policy());
        let (uid, key, observed) = (uid(pod), key(pod), Some(observed));
        self.apply(PodObserved(PodObservation {
            uid,
            key,
            demand,
            state,
            observed,
        }));
    }

    pub fn arrive(&mut self, pod: u8) {
        if self.pod(pod).is_none() {
            self.watch(pod);
            let wants = FilterPod::Waiting(Requirements::default());
            self.apply(FilterPodObserved {
                uid: uid(pod),
                pod: wants,
            });
        }
    }

    pub fn filter(&mut self, pod: u8) {
        self.arrive(pod);
        let known = self.pod(pod).unwrap();
        let (demand, waiting) = (known.demand, ObservedWaiting::default());
        let view = self.apply(FilterAsked(VerbRequest {
            uid: uid(pod),
            key: key(pod),
            demand,
            waiting,
            disruption: None,
        }));
        let mut scores =
            ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy);
        let names: Vec<String> = view
            .snapshot
            .nodes()
            .iter()
            .map(|node| node.name.to_string())
            .collect();
        let list = filter(&view, names.iter().map(String::as_str), &mut scores);
        if let Some(decided) = decision_of(&view, &list) {
            self.apply(decided);
        }
    }

    pub fn bind(&mut self, pod: u8, node: u8, is_answered: bool) {
        self.arrive(pod);
        let is_reserved = self.pod(pod).unwrap().reservation().is_some();
        let free = self.free();
        let query = BindAsked {
            uid: uid(pod),
            key: key(pod),
            node: node_name(node),
        };
        let Ok(BindAnswer::Write(decision)) = self.apply(query) else {
            return;
        };
        if decision.is_new {
            self.check_new(pod, &node_name(node), &decision.placement.devices);
            if !is_reserved {
                self.check_spare(&[pod], &free);
            }
            self.borrowed += usize::from(!decision.placement.borrowed_from.is_empty());
        }
        if is_answered {
            let devices = decision.placement.recorded_gpus();
            self.apply(BindingWritten {
                uid: uid(pod),
                node: node_name(node),
                devices,
            });
        }
    }

    pub fn plan(&mut self, pod: u8) {
        if self.pod(pod).is_none() {
            self.gated.insert(pod);
        }
        match self.gated.contains(&pod) {
            true => self.arrive(pod),
            false => self.filter(pod),
        }
        let pending = self.apply(TakePending { limit: 4 });
        let (scratch, generation) = (
            self.cluster.ledger().scratch(),
            self.cluster.ledger().generation(),
        );
        let filters = self.cluster.kube_filters().snapshot();
        let bounds = PlanBounds {
            free_steps: 1000,
            eviction_steps: 1000,
            max_placements: 4,
            is_stopped: &|| false,
        };
        let plan = plan_within(scratch, &filters, &pending, bounds);
        self.apply(PutBack(plan.unreached));
        for step in plan.steps {
            let PlanStep::Place(placements) = step else {
                continue;
            };
            let free = self.free();
            let of = |uid: &_| number(uid);
            let pods: Vec<u8> = placements
                .iter()
                .map(|placement| of(&placement.uid))
                .collect();
            if self
                .apply(ReservePlaces {
                    placements,
                    generation,
                })
                .is_ok()
            {
                self.check_spare(&pods, &free);
                for pod in pods {
                    let reservation = self.pod(pod).unwrap().reservation().cloned().unwrap();
                    self.check_new(pod, &reservation.node, &reservation.devices);
                }
            }
        }
    }

    /// Each agent reports three times what its pods use.
    pub fn report(&mut self) {
        for _ in 0..3 {
            self.advance(700);
            (0..NODES).for_each(|node| self.report_node(node));
        }
    }

    pub fn report_node(&mut self, node: u8) {
        let sampled = self.cluster.ledger().now();
        let here: Vec<_> = self
            .bound()
            .into_iter()
            .filter(|(_, state)| state.node() == Some(&node_name(node)))
            .collect();
        let is_asleep = |pod: &u8| self.asleep.contains(pod);
        let gpu = |index: u32| {
            let uuid = unit_gpu(node, index).uuid;
            let there = here
                .iter()
                .filter(|(_, state)| state.devices().unwrap().contains(&uuid));
            let mut attributed: Vec<_> = there
                .map(|(pod, state)| (uid(*pod), Bytes(used(state, is_asleep(pod)))))
                .collect();
            attributed.sort_unstable();
            let used = Some(attributed.iter().map(|(_, bytes)| *bytes).sum());
            GpuReading {
                uuid,
                used,
                attributed,
                engine_load: EngineLoad::NONE,
            }
        };
        let engines = || here.iter().filter(|(pod, _)| *pod < 7);
        let state = |pod: &u8| {
            if is_asleep(pod) {
                SleepState::Asleep
            } else {
                SleepState::Awake
            }
        };
        let mut sleep: Vec<_> = engines().map(|(pod, _)| (uid(*pod), state(pod))).collect();
        sleep.sort_unstable();
        let reading = |(pod, state): &(u8, PodState)| EngineReading {
            pod: uid(*pod),
            model: ModelId::parse("m").unwrap(),
            gpus: state.devices().unwrap().clone(),
            state: EngineModelState::Asleep(SleepLevel::WeightsOffloaded),
            reusable_in: None,
            observed_at: sampled,
        };
        let mut engines: Vec<_> = engines()
            .filter(|(pod, _)| is_asleep(pod))
            .map(reading)
            .collect();
        engines.sort_by(|a, b| a.pod.cmp(&b.pod));
        let gpus = (0..GPUS).map(gpu).collect();
        let reading = NodeReading {
            sampled,
            gpus,
            sleep,
            engines,
            ..NodeReading::default()
        };
        for (pod, _) in &here {
            match self.asleep.contains(pod) {
                true => self.seen_asleep.insert(*pod),
                false => self.seen_asleep.remove(pod),
            };
        }
        self.apply(ReadingReported {
            node: node_name(node),
            reading: reading.into(),
        });
    }

    pub fn advance(&mut self, millis: u64) {
        let now = self.cluster.ledger().now() + Millis(millis);
        self.apply(Tick {
            now,
            is_leading: true,
        });
    }
}

/// What the pod's processes have of each of its GPUs.
pub(super) fn used(state: &PodState, is_asleep: bool) -> u64 {
    let granted = if state.demand.sharing == Sharing::Exclusive {
        CAPACITY
    } else {
        state.demand.per_gpu.0
    };
    if is_asleep { granted / 10 } else { granted }
}

pub(super) fn number(uid: &PodUid) -> u8 {
    uid.as_str().trim_start_matches("uid-").parse().unwrap()
}
