//! Preemption for a serving pod that does not fit: the production search for the cheapest victims, on the nodes that would suit
//! the pod after their eviction.

use super::cpu_pods::less;
use super::{Shipped, ledger};
use crate::simulate::packing::cluster::{SimulatedCluster, SimulatedNode};
use crate::simulate::packing::placer::{Placed, PodArrival};
use crate::simulate::packing::trace::PodKind;
use stowage_scheduling::evicting;
use stowage_scheduling::evicting::{BudgetRules, SearchEffort, VictimSet};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::units::{Bytes, MilliCpu};
use stowage_scheduling::verbs::observe::PodReleased;
use stowage_scheduling::verbs::wait::Reserve;
use stowage_scheduling::vocabulary::demand::HostResources;
use stowage_scheduling::vocabulary::placement::Reservation;

impl Shipped<'_> {
    /// Preempts for the pod: reserves GPUs, removes the victims at once, and binds the pod.
    pub(super) fn make_room(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        arrival: PodArrival,
    ) -> Option<Placed> {
        let kind = &self.setting.kinds[arrival.kind];
        let set = self.cheapest(cluster, uid, kind)?;
        let cpu_pods = self.cpu_pods_leaving(cluster, &set, kind);
        let devices = &self.ledger.ledger().node(&set.node)?.devices;
        let slack = self.ledger.ledger().policy().preemption.reservation_slack;
        let reservation = Reservation {
            node: set.node.clone(),
            devices: set
                .gpus
                .iter()
                .map(|place| devices[place].uuid.clone())
                .collect(),
            victims: set.all_victims().into(),
            deadline: self.ledger.ledger().now() + set.longest_grace + slack,
        };
        self.ledger
            .apply(Reserve {
                uid: uid.clone(),
                reservation,
            })
            .ok()?;
        let mut evicted: Vec<usize> = set.evicted().filter_map(number).collect();
        set.evicted().for_each(|victim| {
            self.ledger.apply(PodReleased(victim.clone()));
        });
        cpu_pods
            .iter()
            .for_each(|number| self.cpu_only.evictable.remove(*number));
        evicted.extend(cpu_pods);
        let placement = self.bind(uid, &set.node)?;
        Some(Placed {
            seat: self.seat(&placement),
            evicted,
        })
    }

    /// Pods without GPUs that kube-scheduler evicts for what the other victims do not free.
    fn cpu_pods_leaving(
        &self,
        cluster: &SimulatedCluster,
        set: &VictimSet,
        kind: &PodKind,
    ) -> Vec<usize> {
        let rank = self.rank_of(&set.node);
        let host_resources = |victim: &PodUid| {
            self.ledger
                .ledger()
                .pod_state(victim)
                .map(|entry| entry.demand.host_resources)
        };
        let freed = set.victims.iter().filter_map(host_resources);
        self.cpu_only
            .evictable
            .leavers(rank, freed.fold(lack(&cluster.nodes()[rank], kind), less))
    }

    fn rank_of(&self, node: &NodeName) -> usize {
        self.names
            .binary_search(node)
            .expect("a candidate node is in the cluster")
    }

    /// A node is searched only if it could be the cheapest.
    fn cheapest(
        &self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        kind: &PodKind,
    ) -> Option<VictimSet> {
        let demand = &self
            .ledger
            .ledger()
            .pod_state(uid)
            .filter(|entry| entry.demand.may_preempt)?
            .demand;
        let preemptor = self.ledger.ledger().preemptor(uid);
        let mut cost_bounds = self.ledger.ledger().cost_bounds(&preemptor, demand);
        cost_bounds.retain(|cost_bound| {
            kind.models[cluster.nodes()[self.rank_of(&cost_bound.node)].model]
        });
        let mut survey = self.ledger.ledger().survey(&preemptor, demand);
        let look = |node: &NodeName| {
            let mut candidate = survey.candidate(node)?;
            let rank = self.rank_of(node);
            let lack = lack(&cluster.nodes()[rank], kind);
            candidate.shortfall.host_resources = self.cpu_only.evictable.lack_without(rank, lack);
            evicting::seen(candidate, demand)
        };
        evicting::cheapest_among(
            cost_bounds,
            demand,
            BudgetRules::Keep,
            SearchEffort::default(),
            look,
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
