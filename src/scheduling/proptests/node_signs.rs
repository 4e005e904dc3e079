//! What Node objects show of their GPUs, under policies that change: a node of which it is unknown whose its GPUs are, or what
//! becomes of them, never takes a new pod, keeps what is bound, and is open again once the policy knows it to be harmless.

use super::{assert_same, stored_and_loaded};
use crate::ids::GpuUuid;
use crate::ledger::{AssumeResult, Ledger, ObservedPhase, ObservedWaiting, PodObservation};
use crate::placing::fit::fit;
use crate::policy::Policy;
use crate::testkit::{demand_of, h100, key, node, uid};
use crate::units::Bytes;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Device;
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_signs::{NodeLabel, NodeSigns};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Known and unknown ones, and whether they suggest a GPU.
const RESOURCES: [(&str, bool); 5] = [
    ("volcano.sh/vgpu-memory", true),
    ("tensor-fusion.ai/index", false),
    ("example.com/gpu", true),
    ("gpu.intel.com/i915", true),
    ("example.com/fpga", false),
];
const CHANGES: [&str; 2] = [
    "nvidia.com/mig.config.state",
    "nvidia.com/gpu-driver-upgrade-state",
];
const MEMORY: &str = "nvidia.com/gpu.memory";

#[derive(Debug, Clone)]
enum Step {
    Show {
        resources: BTreeSet<usize>,
        changes: BTreeSet<usize>,
        unreadable: bool,
    },
    Report,
    Set {
        harmless: BTreeSet<usize>,
        ignored: BTreeSet<usize>,
        ignores_memory: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let few = |of: usize| prop::collection::btree_set(0..of, 0..of);
    prop_oneof![
        4 => (prop::collection::btree_set(0usize..5, 0..2), prop::collection::btree_set(0usize..2, 0..2), prop::bool::weighted(0.2))
            .prop_map(|(resources, changes, unreadable)| Step::Show { resources, changes, unreadable }),
        1 => Just(Step::Report),
        2 => (few(5), few(3), any::<bool>())
            .prop_map(|(harmless, ignored, ignores_memory)| Step::Set { harmless, ignored, ignores_memory }),
    ]
}

fn label(key: &str) -> NodeLabel {
    NodeLabel {
        key: key.into(),
        value: "x".into(),
    }
}

/// The state of a node that is shown and in force, and what is expected to follow from it.
#[derive(Default)]
struct ExpectedSigns {
    resources: BTreeSet<usize>,
    changes: BTreeSet<usize>,
    unreadable: bool,
    reported: bool,
    harmless: Option<BTreeSet<usize>>,
    ignored: BTreeSet<usize>,
    ignores_memory: bool,
}

impl ExpectedSigns {
    fn is_open(&self) -> bool {
        // By default all but the integrated graphics and what has nothing to do with a GPU keep pods away.
        let is_harmless = |index: &usize| match &self.harmless {
            None => *index >= 3,
            Some(harmless) => harmless.contains(index) || *index == 4,
        };
        self.resources.iter().all(is_harmless)
            && self.changes.is_subset(&self.ignored)
            && (!self.unreadable || self.reported || self.ignores_memory)
    }

    fn signs(&self) -> NodeSigns {
        NodeSigns {
            resources: self
                .resources
                .iter()
                .map(|index| (RESOURCES[*index].0.into(), RESOURCES[*index].1))
                .collect(),
            changes: self
                .changes
                .iter()
                .map(|index| label(CHANGES[*index]))
                .collect(),
            unreadable: self.unreadable.then(|| label(MEMORY)),
            labelled: None,
            keeps_vram_limits: false,
        }
    }

    fn policy(&self) -> Policy {
        let mut policy = Policy::default();
        if let Some(harmless) = &self.harmless {
            policy.nodes.harmless_resources = harmless
                .iter()
                .map(|index| RESOURCES[*index].0.into())
                .collect();
        }
        let ignored = self
            .ignored
            .iter()
            .filter_map(|index| CHANGES.get(*index))
            .map(|key| (*key).to_owned());
        policy.nodes.ignored_labels = ignored
            .chain(self.ignores_memory.then(|| MEMORY.to_owned()))
            .collect();
        policy
    }
}

/// Two GPUs as labels show them.
fn labelled() -> Vec<Device> {
    (0..2)
        .map(|index| Device {
            uuid: GpuUuid::from_index(index),
            ..h100("n", index)
        })
        .collect()
}

fn observe(ledger: &mut Ledger, name: &str, gib: u64, state: ObservedPhase) {
    let demand = demand_of(gib << 30, 1, Sharing::Shared, 0);
    ledger.observe_pod(PodObservation {
        uid: uid(name),
        key: key(name),
        demand,
        state,
        observed: None,
    });
}

fn apply(ledger: &mut Ledger, shown: &mut ExpectedSigns, step: Step) {
    match step {
        Step::Show {
            resources,
            changes,
            unreadable,
        } => {
            (shown.resources, shown.changes, shown.unreadable) = (resources, changes, unreadable);
            ledger.set_node(&node("n"), NodeKind::Stowage, (!unreadable).then(labelled));
            ledger.set_signs(&node("n"), shown.signs());
        }
        Step::Report => {
            shown.reported = true;
            let devices: Arc<[Device]> = [h100("n", 0), h100("n", 1)].into();
            ledger.report_all_devices(&node("n"), devices).unwrap();
        }
        Step::Set {
            harmless,
            ignored,
            ignores_memory,
        } => {
            (shown.harmless, shown.ignored, shown.ignores_memory) =
                (Some(harmless), ignored, ignores_memory);
            drop(ledger.set_policy(shown.policy()));
        }
    }
}

proptest! {
    #[test]
    fn a_node_of_which_it_is_unknown_whose_its_gpus_are_takes_no_new_pod_and_keeps_its_own(
        steps in prop::collection::vec(step(), 1..12)
    ) {
        let (mut ledger, mut shown) = (Ledger::new(Arc::new(Policy::default())), ExpectedSigns::default());
        ledger.set_node(&node("n"), NodeKind::Stowage, Some(labelled()));
        let devices = Some(Arc::from([GpuUuid::from_index(1)]));
        let bound = ObservedPhase::Bound { node: node("n"), devices, starting: false, ran: None };
        observe(&mut ledger, "bound", 40, bound);
        for step in steps {
            apply(&mut ledger, &mut shown, step.clone());
            let (is_open, snapshot) = (shown.is_open(), ledger.snapshot());
            let view = snapshot.node("n").unwrap();
            prop_assert_eq!(fit(view, &demand_of(1 << 30, 1, Sharing::Shared, 0)).is_ok(), is_open, "{:?}", step);
            prop_assert!(view.gpus[1].charged >= Bytes::gib(40), "what is bound stays charged");
            drop(snapshot);
            observe(&mut ledger, "new", 1, ObservedPhase::Waiting(ObservedWaiting::default()));
            let assumed = ledger.assume(&uid("new"), &node("n"));
            prop_assert_eq!(matches!(assumed, Ok(AssumeResult::New(_))), is_open, "bind decides as filter does");
            ledger.release(&uid("new"));
        }
        assert_same(&mut stored_and_loaded(&ledger), &mut ledger);
    }
}
