//! Same-GPU affinity: a pod goes to the very GPUs on which an engine of its model sleeps that it may wake, if there is room, and
//! is ready after the wake. A node without such an engine is packed as if this file were not there.

use super::learned::{NodeGpus, PackingModel};
use super::pack::{GpuChoice, choose_by, takes};
use super::packing::NodeEvaluation;
use super::start_model::{StartModel, ready};
use crate::units::Millis;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::engine_model::{ReusableEngine, ReusableEngineSet, SleepLevel};
use crate::vocabulary::gpu::GpuSet;
use crate::vocabulary::model_tier::{LoadingSpeeds, time_to_wake};
use crate::vocabulary::node::Node;

/// The GPUs for a demand among the `allowed` ones, or `None` if too few have enough free VRAM. A place that is softly reserved for
/// another pod comes last; then the engine that sleeps least deep; then what [`choose_by`] compares by.
pub fn choose(
    evaluation: &NodeEvaluation<'_>,
    reusable: &ReusableEngineSet,
    allowed: GpuSet,
) -> Option<GpuChoice> {
    let demand = evaluation.demand();
    let has_room = |engine: &&ReusableEngine| {
        let takes = |place| takes(evaluation.gpus().gpu(place), demand);
        engine.gpus.without(allowed).is_empty() && engine.gpus.iter().all(takes)
    };
    let candidates = reusable.suiting(demand).filter(has_room);
    let warm = candidates
        .map(|engine| (engine.level, GpuChoice::of(evaluation, engine.gpus)))
        .min_by_key(|(level, choice)| {
            (
                choice.contended,
                *level,
                choice.engine_load,
                choice.packing_cost,
                choice.gpus,
            )
        });
    match warm {
        Some((_, warm)) if !warm.contended => Some(warm),
        Some((_, warm)) => choose_by(evaluation, allowed)
            .filter(|other| !other.contended)
            .or(Some(warm)),
        None => choose_by(evaluation, allowed),
    }
}

/// The same with a packing model, on a node that the model has not summarized yet.
pub(crate) fn choose_at(
    packing_model: &PackingModel,
    node_gpus: NodeGpus<'_>,
    demand: &Demand,
    reusable: &ReusableEngineSet,
    allowed: GpuSet,
) -> Option<GpuSet> {
    let node_summary = packing_model.node_summary(node_gpus);
    choose(
        &NodeEvaluation::of(packing_model, &node_summary, demand),
        reusable,
        allowed,
    )
    .map(|choice| choice.gpus)
}

/// A wake in place of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wake {
    /// Until the woken engine answers.
    pub woken: Millis,
    /// Until a new one would.
    pub loaded: Millis,
}

/// What a pod with this demand gains on these GPUs of a node; `None` if no engine sleeps there that it may wake, or a start takes
/// no longer. Either way the pod's own images come first.
pub(crate) fn wake_on(
    node: &Node,
    gpus: GpuSet,
    demand: &Demand,
    starts: &StartModel,
    speeds: &LoadingSpeeds,
) -> Option<Wake> {
    let engine = node.reusable.on(gpus, demand)?;
    let start = ready(node, demand, starts, speeds)?;
    let awake = match engine.level {
        SleepLevel::WeightsOffloaded => time_to_wake(
            engine.level,
            node.holding(&engine.model),
            demand.weights(),
            speeds,
        ),
        // As long as engines have taken to read them.
        SleepLevel::WeightsDiscarded => start.time.fetch + start.time.load + speeds.wake_init,
    };
    let (woken, loaded) = (start.time.pull + awake, start.total());
    (woken < loaded).then_some(Wake { woken, loaded })
}
