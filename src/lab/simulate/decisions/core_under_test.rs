//! The core that is tested, and the translation between its types and the plain values of the oracle.
//!
//! A planted bug lies here, between the core and the driver that asks it.

use super::oracle::{SeenBind, SeenNodes};
use super::planted::PlantedBug;
use super::record::{Mask, Place, PodSpec, each};
use super::rules::{APPS, CLASSES, NAMESPACES};
use super::victims::Evictions;
use std::sync::Arc;
use stowage_scheduling::engines::Engine;
use stowage_scheduling::ids::{GpuUuid, NodeName, PodKey, PodUid};
use stowage_scheduling::placing::rank::Shortlist;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::placing::snapshot::Snapshot;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::reasons::AssumeConflict;
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::verbs::bind::{BindAnswer, BindDecision};
use stowage_scheduling::verbs::{Change, Cluster};
use stowage_scheduling::vocabulary::classification::{Classification, PodTraits};
use stowage_scheduling::vocabulary::demand::{Demand, HostResources, Sharing};
use stowage_scheduling::vocabulary::device_plugin::Ask;
use stowage_scheduling::vocabulary::gpu::GpuSet;
use stowage_scheduling::vocabulary::placement::Reservation;
use stowage_scheduling::vocabulary::spare::SpareSet;

pub(crate) struct CoreUnderTest {
    pub cluster: Cluster,
    pub scores: ScoreCache,
    pub planted: Option<PlantedBug>,
}

impl CoreUnderTest {
    pub fn apply<C: Change>(&mut self, change: C) -> C::Output {
        self.cluster.apply(change)
    }

    pub fn has(&self, bug: PlantedBug) -> bool {
        self.planted == Some(bug)
    }

    /// The answer of filter, as it is heard.
    pub fn heard(
        &self,
        snapshot: &Snapshot,
        list: &Shortlist,
        names: &[&str],
        gpus: u32,
    ) -> SeenNodes {
        let mut seen = seen_nodes(snapshot, list);
        let first = (1u16 << gpus.min(8)) as Mask;
        let first_gpus = first.wrapping_sub(1);
        match self.planted {
            Some(PlantedBug::PassesRefusedNodes) => {
                if let Some((at, _)) = seen.refused.pop()
                    && let Some(node) = snapshot.place_of(names[at])
                {
                    seen.passed.push(Place {
                        node: node as u8,
                        gpus: first_gpus,
                    });
                }
            }
            Some(PlantedBug::RefusesFittingNodes) => {
                if let Some(place) = seen.passed.pop() {
                    let at = names
                        .iter()
                        .position(|name| snapshot.place_of(name) == Some(place.node.into()));
                    seen.refused.extend(at.map(|at| (at, "planted")));
                }
            }
            Some(PlantedBug::DropsNodes) => drop(seen.passed.pop()),
            Some(PlantedBug::OffersOtherGpus) => {
                seen.passed
                    .iter_mut()
                    .for_each(|place| place.gpus = first_gpus);
            }
            _ => {}
        }
        seen
    }

    /// The answer of bind, as it is heard; the decision is changed with it, so that the world goes on by what was answered.
    pub(crate) fn heard_bind(
        &self,
        answer: Result<BindAnswer, AssumeConflict>,
        spec: &PodSpec,
    ) -> (SeenBind, Option<BindDecision>) {
        let mut decision = match answer {
            Err(conflict) => return (SeenBind::Conflict(conflict.code()), None),
            Ok(BindAnswer::AlreadyBound) => return (SeenBind::AlreadyBound, None),
            Ok(BindAnswer::Write(decision)) => decision,
        };
        let node = node_number(&decision.placement.node);
        let moved = |shift: Mask| {
            let gpus = ((1u16 << spec.gpus) - 1) as Mask;
            each(gpus << shift)
                .map(|gpu| gpu_name(node, gpu as u32))
                .collect()
        };
        match self.planted {
            Some(PlantedBug::BindsToFirstGpus) => decision.placement.devices = moved(0),
            Some(PlantedBug::BindsBesideReservations) if decision.is_reserved => {
                decision.placement.devices = moved(1);
            }
            Some(PlantedBug::GrantsTooMuch) => decision.placement.granted += Bytes(1 << 20),
            Some(PlantedBug::RefusesBinds) if decision.is_new => {
                return (SeenBind::Conflict("planted"), Some(decision));
            }
            _ => {}
        }
        let place = Place {
            node,
            gpus: gpus_of(&decision.placement.devices),
        };
        let (granted, fraction) = (
            decision.placement.granted.0,
            decision.placement.memory_fraction.ten_thousandths(),
        );
        (
            SeenBind::Write {
                place,
                granted,
                fraction,
                is_new: decision.is_new,
            },
            Some(decision),
        )
    }
}

/// The same in plain values.
pub(crate) fn seen_nodes(snapshot: &Snapshot, list: &Shortlist) -> SeenNodes {
    let place = |node: usize, gpus: GpuSet| {
        let node = &snapshot.nodes()[node];
        let gpus = gpus
            .iter()
            .filter_map(|place| node.devices.get(place))
            .map(|device| gpu_number(&device.uuid));
        Place {
            node: node_number(&node.name),
            gpus: gpus.fold(0, |mask, gpu| mask | 1 << gpu),
        }
    };
    SeenNodes {
        passed: list
            .best
            .iter()
            .map(|best| place(best.node, best.gpus))
            .collect(),
        refused: list
            .refused
            .iter()
            .map(|(at, misfit)| (*at, misfit.code()))
            .collect(),
    }
}

pub fn node_name(node: u8) -> NodeName {
    NodeName::parse(&format!("n{node:02}")).expect("it is a name")
}

/// Names of nodes end in their number.
pub(crate) fn node_number(name: &NodeName) -> u8 {
    number(name.as_str().as_bytes()) as u8
}

pub(crate) fn gpu_name(node: u8, gpu: u32) -> GpuUuid {
    GpuUuid::parse(&format!("GPU-{node:02}-{gpu}")).expect("it is a name")
}

pub(crate) fn gpu_number(uuid: &GpuUuid) -> u32 {
    number(uuid.as_str().as_bytes())
}

pub fn gpus_of(uuids: &[GpuUuid]) -> Mask {
    uuids
        .iter()
        .fold(0, |mask, uuid| mask | 1 << gpu_number(uuid))
}

/// In the order of their numbers.
pub fn pod_uid(pod: u32) -> PodUid {
    PodUid::parse(&format!("uid-{pod:05}")).expect("it is a name")
}

pub(crate) fn pod_number(uid: &PodUid) -> u32 {
    number(uid.as_str().as_bytes())
}

/// The digits at the end.
fn number(name: &[u8]) -> u32 {
    let digits = name
        .iter()
        .rev()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    name[name.len() - digits..]
        .iter()
        .fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
}

pub fn pod_key(pod: u32, spec: &PodSpec) -> PodKey {
    let namespace = NAMESPACES[usize::from(spec.namespace)];
    PodKey::parse(namespace, &format!("pod-{pod}")).expect("it is a name")
}

/// A reservation in plain values.
pub fn place_of(reservation: &Reservation) -> Place {
    Place {
        node: node_number(&reservation.node),
        gpus: gpus_of(&reservation.devices),
    }
}

/// What a pod requests, as the policy classifies it.
pub fn demand(spec: &PodSpec, policy: &Policy) -> Demand {
    let sharing = if spec.is_exclusive {
        Sharing::Exclusive
    } else {
        Sharing::Shared
    };
    let traits = PodTraits {
        namespace: NAMESPACES[usize::from(spec.namespace)].into(),
        labels: [("app".to_owned(), APPS[usize::from(spec.app)].to_owned())].into(),
        priority_class: CLASSES[usize::from(spec.class)].into(),
        priority: spec.priority,
        sharing,
        gpus: spec.gpus,
        vram: Bytes(spec.vram()),
        ..PodTraits::default()
    };
    let Classification {
        class,
        terms,
        tenant,
        version,
    } = policy.classify(&traits);
    Demand {
        ask: Ask::Vram,
        per_gpu: Bytes(spec.per_gpu),
        gpus: spec.gpus,
        sharing,
        traits: Arc::new(traits),
        class,
        terms,
        tenant,
        classified_by: version,
        priority: spec.priority,
        may_preempt: spec.may_preempt,
        host_resources: HostResources::default(),
        grace: Millis(spec.grace),
        model: None,
        kv_cache: None,
        weights: None,
        kept: SpareSet::NONE,
        models: Arc::default(),
        wish: None,
        containers: Arc::default(),
        images: Arc::default(),
        engine: Engine::default(),
    }
}

/// Pods that must leave, in plain values; `is_leaving` says which do anyway.
pub fn evictions(victims: &[PodUid], is_leaving: impl Fn(u32) -> bool) -> Evictions {
    let (awaited, evicted) = victims
        .iter()
        .map(pod_number)
        .partition(|pod| is_leaving(*pod));
    Evictions { evicted, awaited }
}
