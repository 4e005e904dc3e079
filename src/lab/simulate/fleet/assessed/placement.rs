//! Pods placed by a scheduler on empty nodes of one kind.

use super::catalog::NodeKind;
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::messages::PodBinding;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::schedulers::FleetScheduler;
use crate::simulate::fleet::stage::{ScenarioEvent, Stage};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, GpuUuid, NodeName};
use stowage_scheduling::units::{Bytes, Millis};
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

/// Between two pods, and before the first: reports are there, and what the last one left is known.
const INTERVAL: Millis = Millis::seconds(10);

/// A pod of a workload, and where it is; `None` if it has no place.
pub struct PlacedPod {
    pub workload: usize,
    pub replica: u32,
    pub spec: PodSpec,
    pub binding: Option<PodBinding>,
}

impl PlacedPod {
    pub fn devices(&self) -> &[GpuUuid] {
        self.binding.as_ref().map_or(&[], |bound| &bound.devices)
    }
}

/// So many GPUs in full nodes, and one node with the rest.
pub fn machines(kind: &NodeKind, gpus: u32) -> Machines {
    let spec = |node: u32| MachineSpec {
        name: NodeName::parse(&format!("{}-{node}", kind.name)).expect("it is a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse(kind.product).expect("it is a plain word"),
        gpus: (gpus - node * kind.gpus).min(kind.gpus),
        vram: kind.vram,
        page_cache: Bytes::ZERO,
    };
    Machines::new(
        (0..gpus.div_ceil(kind.gpus)).map(spec),
        LoadingSpeeds::default(),
    )
}

/// The pods come one after the other, in this order, as they are moved.
pub fn place(
    scheduler: Box<dyn FleetScheduler>,
    kind: &NodeKind,
    gpus: u32,
    mut pods: Vec<PlacedPod>,
) -> Vec<PlacedPod> {
    let mut stage: Stage<'_, ()> = Stage::new(machines(kind, gpus), scheduler, 0);
    let pass = |stage: &mut Stage<'_, ()>| {
        let until = stage.now() + INTERVAL;
        stage.schedule_timer(until, ());
        while stage
            .next(until)
            .is_some_and(|event| !matches!(event, ScenarioEvent::Timer(())))
        {}
    };
    pass(&mut stage);
    let mut uids = Vec::new();
    for pod in &pods {
        uids.push(stage.submit(pod.spec.clone()));
        pass(&mut stage);
    }
    assert_eq!(stage.violations, [], "no scheduler breaks what GPUs have");
    for (pod, uid) in pods.iter_mut().zip(&uids) {
        pod.binding = stage.pod(uid).and_then(|it| it.binding.clone());
    }
    pods
}
