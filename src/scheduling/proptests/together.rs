//! Loans, reusable engines, DRA nodes, spare GPUs, reservations and policies that change, all at once and in any order.
//!
//! The oracle counts what pods have by the placements alone, and knows of nodes and sleep only what it told the cluster itself.
//! After each step: no GPU is promised more than it has, to bound pods or to reservations; a pod borrows only what sleeping
//! engines that were not asked for do not use; nothing new is placed on published or spare GPUs; and the state that is loaded, or
//! made again from the inputs, is the one that it was.

mod world;

use super::assert_same;
use crate::audit::ledger::audit;
use crate::ids::{GpuUuid, ModelId, NodeName};
use crate::ledger::{DeviceSlice, PodState, PublishedDevices};
use crate::planning::loans_to_end;
use crate::policy::{Class, Match, Policy, Preemptibility, SleepingRule, SpareRule};
use crate::testkit::numbered::{node_name, uid};
use crate::testkit::{demand_of, reclassified, unit_gpu};
use crate::units::{Bytes, Millis};
use crate::verbs::observe::PodDeleted;
use crate::verbs::observe::{SliceDeleted, SliceObserved};
use crate::verbs::tick::PolicySet;
use crate::verbs::{Cluster, ClusterState, Input};
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::demand::{Demand, Sharing};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use world::{World, number, used};

/// Of 100 B, a tenth is headroom.
const CAPACITY: u64 = 90;
const GPUS: u32 = 2;
const NODES: u8 = 2;
const PODS: u8 = 14;
const SPARE: u32 = 1;

#[derive(Debug, Clone)]
enum Step {
    Filter(u8),
    /// A pod that comes, or waits, is bound to a node; the answer to its Binding may be lost.
    Bind(u8, u8, bool),
    Plan(u8),
    /// An engine goes to sleep, or wakes without asking; and agents report three times.
    Report(u8, bool),
    Ask(u8, bool),
    Leave(u8),
    Delete(u8),
    EndLoans,
    Publish(u8, bool),
    Policy(bool, bool),
    Pass(u64),
    Store,
}

fn step() -> impl Strategy<Value = Step> {
    let (pod, node) = (0..PODS, 0..NODES);
    prop_oneof![
        3 => pod.clone().prop_map(Step::Filter),
        12 => (pod.clone(), node.clone(), prop::bool::weighted(0.9))
            .prop_map(|(pod, node, answered)| Step::Bind(pod, node, answered)),
        6 => pod.clone().prop_map(Step::Plan),
        10 => (pod.clone(), prop::bool::weighted(0.8)).prop_map(|(pod, asleep)| Step::Report(pod, asleep)),
        2 => (pod.clone(), any::<bool>()).prop_map(|(pod, asks)| Step::Ask(pod, asks)),
        2 => pod.clone().prop_map(Step::Leave),
        3 => pod.prop_map(Step::Delete),
        2 => Just(Step::EndLoans),
        1 => (node, prop::bool::weighted(0.3)).prop_map(|(node, is_there)| Step::Publish(node, is_there)),
        1 => (prop::bool::weighted(0.7), any::<bool>()).prop_map(|(lends, spare)| Step::Policy(lends, spare)),
        2 => (1u64..8000).prop_map(Step::Pass),
        1 => Just(Step::Store),
    ]
}

fn policy(lends: bool, spare: bool) -> Policy {
    let class = |name: &str, sleeping, eviction| Class {
        matches: Match {
            priority_classes: vec![name.into()],
            ..Match::default()
        },
        engine: false,
        reusable: true,
        sleeping,
        eviction,
        ..Class::new(name)
    };
    let sleeping = if lends {
        SleepingRule::Lend
    } else {
        SleepingRule::Keep
    };
    let classes = vec![
        class("serving", sleeping, Preemptibility::Never),
        class("flex", sleeping, Preemptibility::ForHigherPriority),
        class(
            "jobs",
            SleepingRule::Keep,
            Preemptibility::ForHigherPriority,
        ),
        Class {
            engine: false,
            ..Class::new("others")
        },
    ];
    let mut policy = Policy::default().with_classes(classes).unwrap();
    (
        policy.planning.lending.after,
        policy.planning.lending.margin,
    ) = (Millis::seconds(1), Bytes(2));
    let rule = SpareRule {
        gpus: SPARE,
        model: None,
        pool: None,
        when: Vec::new(),
    };
    policy.planning.spare = spare.then_some(rule).into_iter().collect();
    policy
}

/// 0 to 3 serve, 4 to 6 serve and may be preempted, 7 to 10 are jobs, and 11 to 13 are others.
fn demand(pod: u8, policy: &Policy) -> Demand {
    let vram = [60, 50, 30, 40, 60, 40, 50, 50, 30, 20, 80, 30, 80, 40][usize::from(pod)];
    let (class, priority) = match pod {
        0..4 => ("serving", 10),
        4..7 => ("flex", 0),
        7..11 => ("jobs", -10),
        _ => ("others", 5),
    };
    let sharing = if pod == 13 {
        Sharing::Exclusive
    } else {
        Sharing::Shared
    };
    let gpus = if pod == 3 || pod == 9 { 2 } else { 1 };
    let traits = PodTraits {
        priority,
        priority_class: class.into(),
        sharing,
        ..PodTraits::default()
    };
    let model = pod.is_multiple_of(2).then(|| ModelId::parse("m").unwrap());
    reclassified(
        Demand {
            model,
            ..demand_of(vram, gpus, sharing, priority)
        },
        traits,
        policy,
    )
}

type Gpu = (NodeName, GpuUuid);

impl World {
    fn apply_step(&mut self, step: &Step) {
        match *step {
            Step::Filter(pod) => self.filter(pod),
            Step::Bind(pod, node, is_answered) => self.bind(pod, node, is_answered),
            Step::Plan(pod) => self.plan(pod),
            Step::Report(pod, asleep) => {
                match asleep {
                    true => self.asleep.insert(pod),
                    false => self.asleep.remove(&pod),
                };
                self.report();
            }
            Step::Ask(pod, asks) => {
                if asks {
                    self.wake_requests
                        .insert(pod, self.inputs.len().to_string().into());
                } else if self.wake_requests.remove(&pod).is_none() {
                    // It has not asked: nothing changes, and it lends on.
                    return;
                }
                self.seen_asleep.remove(&pod);
                self.watch_bound(pod);
            }
            Step::Leave(pod) => {
                self.leaving.insert(pod);
                self.watch_bound(pod);
            }
            Step::Delete(pod) => self.delete(pod),
            Step::EndLoans => {
                for eviction in
                    loans_to_end(self.cluster.ledger(), &BTreeSet::new(), &BTreeSet::new())
                {
                    self.delete(number(&eviction.uid));
                }
            }
            Step::Publish(node, is_there) => self.publish(node, is_there),
            Step::Policy(lends, spare) => {
                self.spare = spare;
                if !lends {
                    self.seen_asleep.clear();
                }
                self.apply(PolicySet {
                    policy: policy(lends, spare),
                    prepared: None,
                });
            }
            Step::Pass(millis) => self.advance(millis),
            Step::Store => self.store(),
        }
    }

    fn watch_bound(&mut self, pod: u8) {
        if self.pod(pod).is_some_and(|state| state.node().is_some()) {
            self.watch(pod);
        }
    }

    fn delete(&mut self, pod: u8) {
        self.apply(PodDeleted(uid(pod)));
        self.asleep.remove(&pod);
        self.seen_asleep.remove(&pod);
        self.wake_requests.remove(&pod);
        self.leaving.remove(&pod);
        self.gated.remove(&pod);
    }

    fn publish(&mut self, node: u8, is_there: bool) {
        let name: Arc<str> = format!("slice-{node}").into();
        if !is_there {
            self.published.remove(&node);
            return drop(self.apply(SliceDeleted(name)));
        }
        self.published.insert(node);
        let devices = vec![PublishedDevices::OnNode(node_name(node))];
        let (driver, pool) = ("gpu.nvidia.com".into(), name.clone());
        let slice = DeviceSlice {
            driver,
            pool,
            scope: "".into(),
            generation: 1,
            slices_of_pool: 1,
            devices,
        };
        self.apply(SliceObserved { name, slice });
    }

    /// The loaded cluster is the stored one, down to what decisions see.
    fn store(&mut self) {
        let stored = serde_json::to_string(&self.cluster.export()).unwrap();
        let state: ClusterState = serde_json::from_str(&stored).unwrap();
        let mut loaded = Cluster::load(state).unwrap();
        assert_same(self.cluster.ledger_mut(), loaded.ledger_mut());
        self.cluster = loaded;
    }

    /// Bound pods, with what each takes of that GPU.
    fn charged_on(&self, (node, gpu): &Gpu) -> Vec<(u8, PodState, u64)> {
        let here = |state: &PodState| {
            state.node() == Some(node)
                && state.devices().is_some_and(|devices| devices.contains(gpu))
        };
        let bound = self.bound().into_iter().filter(|(_, state)| here(state));
        bound
            .map(|(pod, state)| (pod, state.clone(), used(&state, false)))
            .collect()
    }

    /// The reservations that keep that GPU, with what each wants of it.
    fn reserved_on(&self, (node, gpu): &Gpu) -> Vec<(u8, PodState, u64)> {
        let known = (0..PODS).filter_map(|pod| Some((pod, self.pod(pod)?)));
        let keeps = |state: &PodState| {
            let now = self.cluster.ledger().now();
            let reservation = state
                .reservation()
                .filter(|reservation| reservation.deadline > now);
            reservation.is_some_and(|kept| kept.node == *node && kept.devices.contains(gpu))
        };
        known
            .filter(|(_, state)| keeps(state))
            .map(|(pod, state)| (pod, state.clone(), used(&state, false)))
            .collect()
    }

    fn gpus() -> impl Iterator<Item = Gpu> {
        (0..NODES).flat_map(|node| {
            (0..GPUS).map(move |index| (node_name(node), unit_gpu(node, index).uuid))
        })
    }

    /// GPUs that nothing has or uses, on nodes that are Stowage's.
    fn free(&self) -> BTreeSet<Gpu> {
        let is_free = |gpu: &Gpu| {
            let node = self.cluster.ledger().node(&gpu.0).unwrap();
            let gpu_index = node
                .devices
                .iter()
                .position(|device| device.uuid == gpu.1)
                .unwrap();
            let margin = self
                .cluster
                .ledger()
                .policy()
                .telemetry
                .margin
                .share_of(Bytes(100));
            !(0..NODES).any(|node| self.published.contains(&node) && node_name(node) == gpu.0)
                && self.charged_on(gpu).is_empty()
                && self.reserved_on(gpu).is_empty()
                && node.gpus[gpu_index].unaccounted_vram <= margin
        };
        Self::gpus().filter(is_free).collect()
    }

    /// Preemptible pods were placed where that was free before.
    fn check_spare(&self, placed: &[u8], before: &BTreeSet<Gpu>) {
        let is_preemptible = |pod: &u8| (4..11).contains(pod);
        let free = self.free();
        if self.spare && placed.iter().all(is_preemptible) && free.len() < before.len() {
            assert!(
                free.len() >= SPARE as usize,
                "{placed:?} took of the last of {before:?}"
            );
        }
    }

    /// A pod was placed on GPUs of a node.
    fn check_new(&self, pod: u8, node: &NodeName, gpus: &[GpuUuid]) {
        let is_published = (0..NODES).any(|n| self.published.contains(&n) && node_name(n) == *node);
        assert!(
            !is_published,
            "{pod} is placed on {node}, whose GPUs a DRA driver publishes"
        );
        for gpu in gpus {
            // Without what sleeping engines are not seen to use.
            let most = |pod: u8, state: &PodState| {
                used(
                    state,
                    pod < 7 && self.seen_asleep.contains(&pod) && !state.borrows(),
                )
            };
            let here = self.charged_on(&(node.clone(), gpu.clone()));
            // A reservation uses nothing yet, and an engine that woke without asking may have filled its GPU beyond its capacity.
            if !here.iter().any(|(other, ..)| *other == pod) {
                continue;
            }
            let sum: u64 = here.iter().map(|(pod, state, _)| most(*pod, state)).sum();
            assert!(sum <= CAPACITY, "with {pod} {sum} B are in use on {gpu}");
        }
    }

    fn check(&self, after: &Step) {
        assert_eq!(audit(self.cluster.ledger()), [], "after {after:?}");
        for gpu in Self::gpus() {
            let here = self.charged_on(&gpu);
            let own: u64 = here
                .iter()
                .filter(|(_, state, _)| !state.borrows())
                .map(|(.., vram)| vram)
                .sum();
            assert!(
                own <= CAPACITY,
                "after {after:?} {own} B of {gpu:?} are granted"
            );
            // A pod that cannot borrow finds what is kept for it once its victims are gone.
            for (pod, state, vram) in self
                .reserved_on(&gpu)
                .iter()
                .filter(|(pod, ..)| *pod < 4 || *pod > 10)
            {
                let victims = &state.reservation().unwrap().victims;
                let stay = here
                    .iter()
                    .filter(|(other, ..)| !victims.contains(&uid(*other)));
                let sum: u64 = stay.map(|(.., vram)| vram).sum();
                assert!(
                    sum + vram <= CAPACITY,
                    "after {after:?} {pod} waits for {vram} B on {gpu:?} beside {sum} B"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_vram_is_allocated_twice_under_any_combination_of_events(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in &steps {
            world.apply_step(step);
            world.check(step);
        }
        world.store();
        let mut again = Cluster::new(Arc::new(policy(true, true)));
        for input in &world.inputs {
            again.apply(serde_json::from_str::<Input>(input).unwrap());
        }
        assert_same(world.cluster.ledger_mut(), again.ledger_mut());
    }
}

/// The random histories above do what they are for.
#[test]
fn what_is_reserved_for_a_pod_that_cannot_borrow_is_not_lent() {
    for is_reserved in [false, true] {
        let mut world = World::new();
        world.apply_step(&Step::Bind(0, 0, true));
        world.apply_step(&Step::Bind(1, 0, true));
        world.apply_step(&Step::Report(0, true));
        if is_reserved {
            world.apply_step(&Step::Plan(11));
            let reservation = world.pod(11).unwrap().reservation().cloned().unwrap();
            assert_eq!(
                reservation.devices,
                world.pod(0).unwrap().devices().cloned().unwrap(),
                "30 B are free"
            );
        }
        world.apply_step(&Step::Bind(7, 0, true));
        world.check(&Step::Store);
        assert_eq!(world.borrowed, usize::from(!is_reserved));
        world.apply_step(&Step::Bind(11, 0, true));
        assert!(world.pod(11).unwrap().node().is_some());
    }
}
