//! Taking one reason away: what it does to a node and a demand, so that the core can be asked again, and how a person does it.

use crate::ids::NodeName;
use crate::units::Bytes;
use crate::vocabulary::classification::ClassSet;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::gpu::Gpu;
use crate::vocabulary::latency::NeighborRoom;
use crate::vocabulary::node::Node;
use crate::vocabulary::node_reading::EngineLoad;

/// The change that takes a reason away.
#[derive(Debug)]
pub(crate) struct Lift {
    /// The effort, by the role that has to act: see the efforts of all remedies.
    pub effort: u8,
    pub names: PodsToName,
    /// The node and the demand without it; `None` where it is no obstacle.
    pub apply: fn(&Node, &Demand) -> Option<(Node, Demand)>,
    /// What to do, and which GPUs fit then.
    pub action: fn(&FitWithoutReason<'_>) -> String,
}

impl Lift {
    pub(super) const fn new(
        effort: u8,
        names: PodsToName,
        apply: fn(&Node, &Demand) -> Option<(Node, Demand)>,
        action: fn(&FitWithoutReason<'_>) -> String,
    ) -> Self {
        Self {
            effort,
            names,
            apply,
            action,
        }
    }
}

/// The pods on the GPUs that the action names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodsToName {
    Nobody,
    Residents,
    /// Pods whose classes do not share a GPU with the class of the pod.
    Excluding,
}

/// Where the pod fits without the reason.
#[derive(Debug)]
pub(crate) struct FitWithoutReason<'a> {
    pub node: &'a NodeName,
    /// `node GPUs 0 and 1`.
    pub gpus: &'a str,
    /// `node GPUs 0 and 1 fit`.
    pub fits: &'a str,
    pub are_several: bool,
    /// The pod's class.
    pub class: &'a str,
    pub pool: Option<&'a str>,
    pub by: &'a [String],
    /// The health, in words, of GPUs that are not healthy.
    pub state: &'static str,
}

pub(crate) fn without_gpu_reason(
    node: &Node,
    demand: &Demand,
    edit: fn(&mut Gpu),
) -> Option<(Node, Demand)> {
    let mut gpus = node.gpus.to_vec();
    gpus.iter_mut().for_each(edit);
    (*gpus != *node.gpus).then(|| {
        (
            Node {
                gpus: gpus.into(),
                ..node.clone()
            },
            demand.clone(),
        )
    })
}

/// A copy of node and demand, edited, if the reason `is_obstacle` there.
pub(crate) fn without_reason_if(
    is_obstacle: bool,
    node: &Node,
    demand: &Demand,
    edit: fn(&mut Node, &mut Demand),
) -> Option<(Node, Demand)> {
    let mut changed = is_obstacle.then(|| (node.clone(), demand.clone()))?;
    edit(&mut changed.0, &mut changed.1);
    Some(changed)
}

/// Removes all pods and reservations from a GPU.
pub(super) fn remove_pods(gpu: &mut Gpu) {
    *gpu = Gpu {
        charged: Bytes::ZERO,
        softly_reserved: Bytes::ZERO,
        engine_softly_reserved: false,
        excluded_by_soft_reservations: ClassSet::NONE,
        engine_load: EngineLoad::NONE,
        neighbors: NeighborRoom::EMPTY,
        excluded_classes: ClassSet::NONE,
        residents: 0,
        exclusive: false,
        starting: false,
        ..*gpu
    };
}
