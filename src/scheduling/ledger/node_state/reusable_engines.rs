//! Which sleeping engines of a node a new pod may wake: those that the agent saw asleep a moment ago, that their pod's label or
//! their pod's class opens to others, and that no pod that came meanwhile has taken over.

use super::{NodeState, ResidentPod};
use crate::ids::PodUid;
use crate::ledger::pod_states::PodStates;
use crate::policy::Policy;
use crate::vocabulary::engine_model::{EngineModelState, EngineReading, ReusableEngine};
use crate::vocabulary::gpu::GpuSet;
use std::sync::Arc;

impl NodeState {
    /// The engines that are left for new pods, in order of their pods' UIDs, as if `except` had nothing here. On a node without an
    /// engine that sleeps and is open to others, no pod is read.
    pub(in crate::ledger) fn reusable_engines(
        &self,
        pods: &PodStates,
        policy: &Policy,
        except: Option<&PodUid>,
    ) -> Vec<ReusableEngine> {
        let Some(reading) = self.believed_reading() else {
            return Vec::new();
        };
        let is_recent = |engine: &&EngineReading| {
            reading.sampled.since(engine.observed_at) < policy.telemetry.fresh
        };
        let mut left: Vec<ReusableEngine> = reading
            .engines
            .iter()
            .filter(is_recent)
            .filter_map(|engine| self.reusable_engine(engine, pods, policy))
            .collect();
        if left.is_empty() {
            return left;
        }
        for uid in self.pods().iter().filter(|uid| Some(*uid) != except) {
            if let Some(taken_index) = left
                .iter()
                .position(|engine| self.has_taken(uid, engine, &reading.engines, pods))
            {
                left.remove(taken_index);
            }
        }
        left
    }

    fn reusable_engine(
        &self,
        engine: &EngineReading,
        pods: &PodStates,
        policy: &Policy,
    ) -> Option<ReusableEngine> {
        let EngineModelState::Asleep(level) = engine.state else {
            return None;
        };
        // A lender must ask before it wakes. The pod that woke it would not, and its borrowers would lose their VRAM.
        if self
            .resident_of(&engine.pod)
            .is_some_and(|resident: &ResidentPod| resident.lends_asleep)
        {
            return None;
        }
        let namespace = engine
            .reusable_in
            .clone()
            .or_else(|| self.namespace_opened_by_class(&engine.pod, pods, policy))?;
        Some(ReusableEngine {
            model: engine.model.clone(),
            namespace,
            gpus: self.resolve(&engine.gpus)?,
            level,
        })
    }

    /// The namespace of a pod on this node whose class opens its engines to others.
    fn namespace_opened_by_class(
        &self,
        uid: &PodUid,
        pods: &PodStates,
        policy: &Policy,
    ) -> Option<Arc<str>> {
        let pod_state = pods.get(uid).filter(|_| self.pods().contains(uid))?;
        let is_open = policy.class(pod_state.demand.class).reusable && !pod_state.is_leaving();
        is_open.then(|| pod_state.key.namespace.clone())
    }

    /// Whether a pod that is here or on its way has come for this engine: it is of the same model on the same GPUs, and runs no
    /// engine of its own that the agent sees.
    fn has_taken(
        &self,
        uid: &PodUid,
        engine: &ReusableEngine,
        own_engines: &[EngineReading],
        pods: &PodStates,
    ) -> bool {
        let pod_state = &pods[uid];
        if !engine.is_usable_by(&pod_state.demand)
            || own_engines
                .binary_search_by(|own_engine| own_engine.pod.cmp(uid))
                .is_ok()
        {
            return false;
        }
        let charged = self
            .charge_of(pod_state)
            .filter(|charge| charge.is_placed)
            .map(|charge| charge.gpus);
        let reserved = || {
            self.resolve(
                &pod_state
                    .reservation()
                    .filter(|at| at.node == self.view().name)?
                    .devices,
            )
        };
        let softly_reserved = || {
            pod_state
                .soft_reservation()
                .filter(|at| at.node == self.view().name)
                .map(|at| at.gpus)
        };
        charged
            .or_else(reserved)
            .or_else(softly_reserved)
            .unwrap_or(GpuSet::EMPTY)
            == engine.gpus
    }
}

#[cfg(test)]
mod tests;
