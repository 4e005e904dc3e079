//! Placement of pods without GPUs. In a real cluster they never come to Stowage: kube-scheduler places them, by rules that are
//! the owner's. Two policies stand in for it here: one that uses the learned packing, as Stowage does, and one that does not.
//! The CPU that these pods take decides which GPUs can still be used, so the choice matters.

use super::cpu_pods::BestEffortCpuPods;
use super::{PodTier, SimulatedEviction};
use crate::simulate::packing::baseline::fit::BestFit;
use crate::simulate::packing::baseline::scored::ScoredPlacer;
use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedPlacement};
use crate::simulate::packing::placer::{PlacedPod, Placer, PodArrival};
use crate::simulate::packing::trace::{PodKind, WorkloadTrace};
use stowage_scheduling::evicting::WithoutEvictable;
use stowage_scheduling::ledger::Ledger;
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::vocabulary::demand::HostResources;
use stowage_scheduling::vocabulary::node::Node;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CpuRule {
    /// The lowest packing cost by the learned packing. A pod that stays is scored by what would be free without the evictable
    /// pods. Best fit until something was learned.
    #[default]
    Learned,
    /// The least CPU and GPU left over.
    BestFit,
}

pub struct CpuOnly<'s> {
    setting: &'s WorkloadTrace,
    rule: CpuRule,
    eviction: SimulatedEviction,
    best_fit: ScoredPlacer<'s, BestFit>,
    /// Evictable pods.
    pub evictable: BestEffortCpuPods,
}

impl<'s> CpuOnly<'s> {
    /// A placer that evicts nothing.
    pub fn new(setting: &'s WorkloadTrace, rule: CpuRule) -> Self {
        let best_fit = ScoredPlacer::new(setting, BestFit);
        Self {
            setting,
            rule,
            eviction: SimulatedEviction::Never,
            best_fit,
            evictable: BestEffortCpuPods::default(),
        }
    }

    pub fn with_eviction(self, eviction: SimulatedEviction) -> Self {
        Self { eviction, ..self }
    }

    pub fn place(
        &mut self,
        ledger: &mut Cluster,
        cluster: &SimulatedCluster,
        arrival: PodArrival,
    ) -> Option<PlacedPod> {
        let kind = &self.setting.kinds[arrival.kind];
        let tier = self.eviction.tier(self.setting.pods[arrival.pod].qos);
        let placed = match self.rule {
            CpuRule::Learned if ledger.snapshot().packing_model().is_learned() => {
                let node = self.cheapest_node(ledger, cluster, kind, tier)?;
                PlacedPod::without_victims(SimulatedPlacement {
                    node,
                    gpus: Default::default(),
                })
            }
            CpuRule::Learned | CpuRule::BestFit => self.best_fit.place(cluster, arrival)?,
        };
        if tier == PodTier::BestEffort {
            self.evictable
                .add(placed.placement.node, arrival.number, kind);
        }
        Some(placed)
    }

    /// The node's rank, which is its index in a snapshot too.
    fn cheapest_node(
        &self,
        ledger: &mut Cluster,
        cluster: &SimulatedCluster,
        kind: &PodKind,
        tier: PodTier,
    ) -> Option<usize> {
        let snapshot = ledger.snapshot();
        let (ledger, request) = (
            &*ledger,
            HostResources {
                cpu: MilliCpu(kind.cpu),
                memory: Bytes(kind.memory),
            },
        );
        let packing_cost = |rank: &usize| {
            let (node, packing_model) = (&snapshot.nodes()[*rank], snapshot.packing_model());
            match self.without_evictable(ledger.ledger(), node, *rank, tier) {
                Some(cleared) => packing_model.host_packing_cost(
                    &packing_model.node_summary(cleared.node_gpus(node)),
                    request,
                ),
                None => packing_model.host_packing_cost(snapshot.node_summary(*rank), request),
            }
        };
        super::accepted_ranks(cluster, kind).min_by_key(|rank| (packing_cost(rank), *rank))
    }

    /// The node as the pod should see it, if that differs from its state. A pod that stays is placed as if the evictable pods
    /// were gone: later pods that stay will get their GPUs, and need CPU beside them.
    fn without_evictable(
        &self,
        ledger: &Ledger,
        node: &Node,
        rank: usize,
        tier: PodTier,
    ) -> Option<WithoutEvictable> {
        if self.eviction == SimulatedEviction::Never || tier == PodTier::BestEffort {
            return None;
        }
        let cleared = ledger.without_evictable(&node.name, tier.priority())?;
        Some(cleared.and_freed(self.evictable.freed(rank)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::StowagePlacer;
    use super::super::learning::DemandKnowledge;
    use super::*;
    use crate::simulate::openb::Qos;
    use crate::simulate::packing::run::PackingRun;
    use crate::simulate::packing::testing::{kind, setting};

    /// On which of two nodes a pod of ten cores is placed: one with 16 cores or one with 64, the GPUs of both used by pods that
    /// need a core each. Later pods need six.
    fn node_for(qos: Qos, eviction: SimulatedEviction) -> usize {
        let kinds = [kind(1000, 1, 1000), kind(6000, 1, 1000), kind(10_000, 0, 0)];
        let mut setting = setting(&[(16_000, 2), (64_000, 2)], &kinds);
        setting.pods[0].qos = Some(Qos::BestEffort);
        setting.pods[2].qos = Some(qos);
        setting.pods.extend([setting.pods[1]; 9]);
        let mut world = PackingRun::new(&setting, &[0, 1], None);
        let mut shipped = StowagePlacer::new(
            &setting,
            &[0, 1],
            eviction,
            CpuRule::Learned,
            DemandKnowledge::of_full_trace(&setting),
        );
        let mut admit = |number, kind| {
            world
                .admit(
                    PodArrival {
                        number,
                        pod: kind,
                        kind,
                    },
                    &mut shipped,
                )
                .node
        };
        assert!((0..4).all(|number| admit(number, 0).is_some()));
        admit(4, 2).unwrap()
    }

    #[test]
    fn a_pod_that_stays_keeps_off_cpu_that_others_will_need_when_best_effort_pods_have_left() {
        assert_eq!(
            node_for(Qos::LatencySensitive, SimulatedEviction::BestEffortPods),
            1
        );
        assert_eq!(
            node_for(Qos::BestEffort, SimulatedEviction::BestEffortPods),
            0,
            "it leaves with them"
        );
        assert_eq!(
            node_for(Qos::LatencySensitive, SimulatedEviction::Never),
            0,
            "they never leave"
        );
    }
}
