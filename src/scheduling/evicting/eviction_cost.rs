//! Eviction cost: what one pod's eviction loses (its share of its GPUs, the time since it last saved its work, the time its engine
//! takes to start again, and the requests that its engine works on), and the cost of a victim set, whose field order is the policy.

use crate::ids::PodUid;
use crate::ledger::{
    Ledger, NodeState, PodEvictionCost, PodState, PotentialVictim, Preemptor, QuotaStatus,
};
use crate::policy::{Class, EvictionCosts};
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::cluster_share::TenantUsage;
use serde::{Deserialize, Serialize};

/// The cost of a victim set. Less is better; the first field that differs decides. It only grows as victims are added.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub struct EvictionCost {
    /// By how many pods disruption budgets are overdrawn, summed over all budgets.
    pub violations: u32,
    /// A victim lives on its tenant's guarantee: only where borrowed capacity is not enough.
    pub from_guarantee: bool,
    /// The highest priority among the victims, relative to the lowest possible.
    pub priority: u32,
    /// How much the most spared borrower among the victims is spared.
    pub spared: u32,
    /// The sum of the losses, in thousandths of a GPU-second.
    pub cost: u64,
    /// Victims whose replacements could run on the same node only: of sets that lose as much the one with fewer of them.
    #[serde(default)]
    pub stranded: u32,
    /// The highest pod deletion cost among the victims, relative to the lowest possible.
    pub deletion_cost: u32,
    pub victims: u32,
    pub evicted: Bytes,
    /// Pods that leave anyway, and whose VRAM the set needs.
    pub awaited: u32,
}

impl EvictionCost {
    /// The cost with one more victim.
    pub fn plus(self, resident: &PotentialVictim) -> Self {
        let (guaranteed, spared) = match resident.quota_status {
            QuotaStatus::Guaranteed => (true, 0),
            QuotaStatus::Borrowed { spared } => (false, spared),
        };
        self.and(Self {
            violations: 0,
            from_guarantee: guaranteed,
            priority: resident.priority.abs_diff(i32::MIN),
            spared,
            cost: resident.eviction_cost.total(),
            stranded: u32::from(resident.eviction_cost.stranded > 0),
            deletion_cost: resident.deletion_cost.abs_diff(i32::MIN),
            victims: 1,
            evicted: resident.vram(),
            awaited: 0,
        })
    }

    /// The cost of both sets together; the caller counts overdrawn budgets.
    pub fn and(self, other: Self) -> Self {
        Self {
            violations: self.violations.saturating_add(other.violations),
            from_guarantee: self.from_guarantee || other.from_guarantee,
            priority: self.priority.max(other.priority),
            spared: self.spared.max(other.spared),
            cost: self.cost.saturating_add(other.cost),
            stranded: self.stranded.saturating_add(other.stranded),
            deletion_cost: self.deletion_cost.max(other.deletion_cost),
            victims: self.victims.saturating_add(other.victims),
            evicted: self.evicted + other.evicted,
            awaited: self.awaited.saturating_add(other.awaited),
        }
    }
}

impl Ledger {
    /// The parts of the eviction cost of one pod, which is on `node_state` and uses that much.
    pub(super) fn eviction_cost(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node_state: &NodeState,
        used: TenantUsage,
        preemptor: &Preemptor,
    ) -> PodEvictionCost {
        let EvictionCosts {
            per_pod,
            per_request,
            ..
        } = self.policy().preemption.costs;
        let part = used.milli_gpus;
        // Whole seconds, so that pods that began together cost the same.
        let of_its_gpus = |time: Millis| part.saturating_mul(time.0 / 1000);
        let evictions = pod_state
            .disruption_info
            .owner
            .as_ref()
            .map_or(0, |owner| self.recent_evictions_of(owner));
        PodEvictionCost {
            restart: per_pod.0,
            work: of_its_gpus(self.unsaved(pod_state)),
            reload: of_its_gpus(self.reload(pod_state, node_state, preemptor)),
            drain: of_its_gpus(self.termination_time(pod_state)),
            in_flight: per_request
                .0
                .saturating_mul(requests_in_flight(uid, node_state)),
            again: per_pod.0.saturating_mul(evictions),
            stranded: match preemptor.would_strand(pod_state) {
                // As long as the preemptor runs: taken to be the longest work that may be lost, but never nothing.
                true => of_its_gpus(self.longest_work(self.policy().class(pod_state.demand.class)))
                    .max(1),
                false => 0,
            },
        }
    }

    /// The parts of the eviction cost of a pod that leaves its node, as it is now; `None` if it is not there.
    pub(crate) fn cost_of_leaving(
        &self,
        uid: &PodUid,
        node_state: &NodeState,
        preemptor: &Preemptor,
    ) -> Option<PodEvictionCost> {
        let pod_state = self.pod_state(uid)?;
        let used = node_state.usage_of(pod_state)?;
        Some(self.eviction_cost(uid, pod_state, node_state, used, preemptor))
    }

    /// How long it has worked since it last saved its work, up to a cap. A pod that never reports a checkpoint has saved
    /// nothing.
    fn unsaved(&self, pod_state: &PodState) -> Millis {
        let class = self.policy().class(pod_state.demand.class);
        pod_state
            .unsaved_since()
            .map_or(Millis::default(), |since| self.work_lost(since, class))
    }

    pub(super) fn work_lost(&self, since: Moment, class: &Class) -> Millis {
        self.now().since(since).min(self.longest_work(class))
    }

    fn longest_work(&self, class: &Class) -> Millis {
        class
            .max_lost_work
            .unwrap_or(self.policy().preemption.costs.max_lost_work)
    }

    /// How long its engine takes to start again where its model is nearest, on GPUs like its own; zero for a pod without a model.
    /// By what the cluster has learned of such starts: which node it will be is not known.
    fn reload(
        &self,
        pod_state: &PodState,
        node_state: &NodeState,
        preemptor: &Preemptor,
    ) -> Millis {
        let demand = &pod_state.demand;
        let Some(model) = &demand.model else {
            return Millis::default();
        };
        let (gpu, holding) = (
            node_state.view().gpu_model(),
            preemptor.nearest_holding(model),
        );
        let speeds = &self.policy().loading;
        self.start_model()
            .cluster_engine_start(gpu, demand.engine, holding, demand.weights(), speeds)
            .total()
    }
}

/// Requests that the pod's engine works on by the node's latest reading; zero once that has expired.
fn requests_in_flight(uid: &PodUid, node_state: &NodeState) -> u64 {
    node_state
        .believed_reading()
        .and_then(|reading| reading.in_flight_of(uid))
        .unwrap_or(0)
        .into()
}
