//! Preemption for a serving pod that does not fit: the production search for the cheapest victims, on the nodes that would suit
//! the pod after their eviction.

use super::cpu_pods::remaining_lack;
use super::{StowagePlacer, ledger};
use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedNode};
use crate::simulate::packing::placer::{PlacedPod, PodArrival};
use crate::simulate::packing::trace::PodKind;
use stowage_scheduling::evicting;
use stowage_scheduling::evicting::{BudgetRules, SearchEffort, VictimSet};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::verbs::observe::PodReleased;
use stowage_scheduling::verbs::wait::Reserve;
use stowage_scheduling::vocabulary::demand::HostResources;
use stowage_scheduling::vocabulary::placement::Reservation;

impl StowagePlacer<'_> {
    /// Preempts for the pod: reserves GPUs, removes the victims at once, and binds the pod.
    pub(super) fn preempt(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        arrival: PodArrival,
    ) -> Option<PlacedPod> {
        let kind = &self.setting.kinds[arrival.kind];
        let victim_set = self.cheapest_victims(cluster, uid, kind)?;
        let cpu_pods = self.cpu_victims(cluster, &victim_set, kind);
        let devices = &self.cluster.ledger().node(&victim_set.node)?.devices;
        let slack = self.cluster.ledger().policy().preemption.reservation_slack;
        let reservation = Reservation {
            node: victim_set.node.clone(),
            devices: victim_set
                .gpus
                .iter()
                .map(|gpu_index| devices[gpu_index].uuid.clone())
                .collect(),
            victims: victim_set.all_victims().into(),
            deadline: self.cluster.ledger().now() + victim_set.longest_grace + slack,
        };
        self.cluster
            .apply(Reserve {
                uid: uid.clone(),
                reservation,
            })
            .ok()?;
        let mut evicted: Vec<usize> = victim_set.evicted().filter_map(number).collect();
        victim_set.evicted().for_each(|victim| {
            self.cluster.apply(PodReleased(victim.clone()));
        });
        cpu_pods
            .iter()
            .for_each(|number| self.cpu_only.evictable.remove(*number));
        evicted.extend(cpu_pods);
        let placement = self.bind(uid, &victim_set.node)?;
        Some(PlacedPod {
            placement: self.simulated_placement(&placement),
            victims: evicted,
        })
    }

    /// Pods without GPUs that kube-scheduler evicts for what the other victims do not free.
    fn cpu_victims(
        &self,
        cluster: &SimulatedCluster,
        set: &VictimSet,
        kind: &PodKind,
    ) -> Vec<usize> {
        let rank = self.rank_of(&set.node);
        let host_resources = |victim: &PodUid| {
            self.cluster
                .ledger()
                .pod_state(victim)
                .map(|entry| entry.demand.host_resources)
        };
        let freed = set.victims.iter().filter_map(host_resources);
        self.cpu_only.evictable.victims(
            rank,
            freed.fold(lack(&cluster.nodes()[rank], kind), remaining_lack),
        )
    }

    fn rank_of(&self, node: &NodeName) -> usize {
        self.node_names
            .binary_search(node)
            .expect("a candidate node is in the cluster")
    }

    /// A node is searched only if it could be the cheapest.
    fn cheapest_victims(
        &self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        kind: &PodKind,
    ) -> Option<VictimSet> {
        let demand = &self
            .cluster
            .ledger()
            .pod_state(uid)
            .filter(|entry| entry.demand.may_preempt)?
            .demand;
        let preemptor = self.cluster.ledger().preemptor(uid);
        let mut cost_bounds = self.cluster.ledger().cost_bounds(&preemptor, demand);
        cost_bounds.retain(|cost_bound| {
            kind.models[cluster.nodes()[self.rank_of(&cost_bound.node)].model]
        });
        let mut survey = self.cluster.ledger().survey(&preemptor, demand);
        let search_node = |node: &NodeName| {
            let mut candidate = survey.candidate(node)?;
            let rank = self.rank_of(node);
            let lack = lack(&cluster.nodes()[rank], kind);
            candidate.shortfall.host_resources = self.cpu_only.evictable.lack_without(rank, lack);
            evicting::examined(candidate, demand)
        };
        evicting::cheapest_among(
            cost_bounds,
            demand,
            BudgetRules::Keep,
            SearchEffort::default(),
            search_node,
        )
    }
}

/// What is missing of CPU and memory for kube-scheduler's filters: the victims must free that too.
fn lack(node: &SimulatedNode, kind: &PodKind) -> HostResources {
    HostResources {
        cpu: MilliCpu(kind.cpu.saturating_sub(node.cpu)),
        memory: Bytes(kind.memory.saturating_sub(node.memory)),
    }
}

/// The inverse of [`super::ledger::uid`].
fn number(uid: &PodUid) -> Option<usize> {
    uid.as_str()
        .strip_prefix("pod-")?
        .parse()
        .ok()
        .filter(|number| ledger::uid(*number) == *uid)
}
