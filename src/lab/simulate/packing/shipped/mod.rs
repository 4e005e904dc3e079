//! Stowage in the simulation: a ledger with the trace's nodes, and for each pod the same calls that filter, prioritize and bind
//! make. The stand-in for kube-scheduler's filters decides which nodes it is asked about: those with CPU, memory, the model and
//! a pod slot. None of Stowage's own rules are here.
//!
//! [`ledger`] fills the ledger, [`learning`] lets it learn, [`evict`] preempts where a pod does not fit, [`cpu_only`] stands in
//! for the scheduler of pods without GPUs, [`cpu_pods`] knows which of those may be evicted.

pub mod cpu_only;
mod cpu_pods;
mod evict;
pub mod learning;
pub mod ledger;

pub use cpu_only::CpuRule;

use super::cluster::{SimulatedCluster, SimulatedPlacement};
use super::placer::{PlacedPod, Placer, PodArrival};
use super::trace::{PodKind, WorkloadTrace};
use crate::simulate::core_inputs;
use crate::simulate::openb::Qos;
use cpu_only::CpuOnly;
use learning::{CoreUpkeep, DemandKnowledge};
use std::sync::Arc;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting};
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::Cluster;
use stowage_scheduling::verbs::binding::BindingWritten;
use stowage_scheduling::verbs::filter::{FilterAnswer, FilterDecided};
use stowage_scheduling::verbs::filter::{FilterAsked, filter};
use stowage_scheduling::verbs::observe::{PodObserved, PodReleased};
use stowage_scheduling::verbs::tick::Tick;
use stowage_scheduling::vocabulary::demand::Demand;
use stowage_scheduling::vocabulary::placement::Placement;

/// Time between two arrivals: so short that no victim has lost relevant work, and pods differ only in their requests.
const ARRIVAL_INTERVAL: Millis = Millis(1);

/// Which pods may be evicted for others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SimulatedEviction {
    #[default]
    Never,
    /// Best-effort pods, for serving ones.
    BestEffortPods,
}

impl SimulatedEviction {
    /// The pod's role in evictions; without evictions all roles are equal.
    pub fn tier(self, qos: Option<Qos>) -> PodTier {
        match self {
            Self::Never => PodTier::Bystander,
            Self::BestEffortPods => PodTier::from_qos(qos),
        }
    }
}

pub(crate) struct StowagePlacer<'s> {
    setting: &'s WorkloadTrace,
    eviction: SimulatedEviction,
    pub cluster: Cluster,
    /// By rank: in order, so that of equal nodes the lower rank is taken here too.
    node_names: Vec<NodeName>,
    /// By kind and [`PodTier`]; none of pods without GPUs.
    demands: Vec<Option<[Demand; 3]>>,
    cpu_only: CpuOnly<'s>,
    core_upkeep: CoreUpkeep,
    score_cache: ScoreCache,
}

/// A pod's role in evictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodTier {
    /// It serves; others may be evicted for it.
    Preemptor,
    /// Neither.
    Bystander,
    /// It may be evicted.
    BestEffort,
}

impl PodTier {
    pub const ALL: [Self; 3] = [Self::Preemptor, Self::Bystander, Self::BestEffort];

    fn from_qos(qos: Option<Qos>) -> Self {
        match qos {
            Some(Qos::LatencySensitive | Qos::Guaranteed) => Self::Preemptor,
            Some(Qos::BestEffort) => Self::BestEffort,
            Some(Qos::Burstable) | None => Self::Bystander,
        }
    }

    fn priority(self) -> i32 {
        match self {
            Self::Preemptor | Self::Bystander => 1000,
            Self::BestEffort => -10,
        }
    }
}

impl<'s> StowagePlacer<'s> {
    pub fn new(
        setting: &'s WorkloadTrace,
        ranks: &[usize],
        eviction: SimulatedEviction,
        cpu_rule: CpuRule,
        knowledge: DemandKnowledge,
    ) -> Self {
        let policy = Arc::new(Policy::default());
        let names = ledger::names(setting, ranks);
        let mut ledger = core_inputs::empty_cluster(policy.clone());
        ledger::add_nodes(&mut ledger, setting, ranks, &names);
        Self {
            eviction,
            cluster: ledger,
            demands: setting
                .kinds
                .iter()
                .map(|kind| ledger::demands(setting, kind, &policy))
                .collect(),
            node_names: names,
            setting,
            cpu_only: CpuOnly::new(setting, cpu_rule).with_eviction(eviction),
            core_upkeep: CoreUpkeep::new(knowledge),
            score_cache: ScoreCache::default(),
        }
    }

    /// Filter, prioritize and bind.
    fn place_without_eviction(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        arrival: PodArrival,
    ) -> Option<PlacedPod> {
        let node = self.best_node(cluster, uid, arrival)?;
        let placement = self.bind(uid, &node)?;
        Some(PlacedPod::without_victims(
            self.simulated_placement(&placement),
        ))
    }

    fn best_node(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        arrival: PodArrival,
    ) -> Option<NodeName> {
        let kind = &self.setting.kinds[arrival.kind];
        let request = self.cluster.request_of(uid)?;
        let view = self.cluster.apply(FilterAsked(request));
        let names: Vec<&str> = accepted_ranks(cluster, kind)
            .map(|rank| self.node_names[rank].as_str())
            .collect();
        let mut scores = self
            .score_cache
            .take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter(&view, names.into_iter(), &mut scores);
        self.score_cache.put(scores);
        list.best
            .first()
            .map(|best| view.snapshot.nodes()[best.node_index].name.clone())
    }

    /// The pod runs there from now on, and its engine answers at once: the start time of engines is not simulated here.
    fn bind(&mut self, uid: &PodUid, node: &NodeName) -> Option<Placement> {
        let placement = self.cluster.allocate(uid, node)?.placement;
        let devices = placement.recorded_gpus();
        self.cluster.apply(BindingWritten {
            uid: uid.clone(),
            node: node.clone(),
            devices: devices.clone(),
        });
        let demand = self.cluster.ledger().pod_state(uid)?.demand.clone();
        let state = ObservedPhase::Bound {
            node: node.clone(),
            devices,
            starting: false,
            ran: None,
        };
        self.cluster
            .apply(PodObserved(ledger::observation(uid, demand, state)));
        Some(placement)
    }

    fn simulated_placement(&self, placement: &Placement) -> SimulatedPlacement {
        ledger::placement(
            self.cluster.ledger(),
            &self.node_names,
            &placement.node,
            &placement.devices,
        )
    }

    fn demand(&self, arrival: PodArrival) -> Option<Demand> {
        let tier = self.eviction.tier(self.setting.pods[arrival.pod].qos);
        self.demands[arrival.kind]
            .as_ref()
            .map(|demands| demands[tier as usize].clone())
    }
}

impl Placer for StowagePlacer<'_> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<PlacedPod> {
        self.cluster.apply(Tick {
            now: self.cluster.ledger().now() + ARRIVAL_INTERVAL,
            is_leading: true,
        });
        self.core_upkeep
            .tick(&mut self.cluster, cluster, &self.node_names);
        let Some(demand) = self.demand(arrival) else {
            return self.cpu_only.place(&mut self.cluster, cluster, arrival);
        };
        let uid = ledger::uid(arrival.number);
        self.cluster.apply(PodObserved(ledger::observation(
            &uid,
            demand,
            ObservedPhase::Waiting(ObservedWaiting::default()),
        )));
        let placed = self
            .place_without_eviction(cluster, &uid, arrival)
            .or_else(|| match self.eviction {
                SimulatedEviction::BestEffortPods => self.preempt(cluster, &uid, arrival),
                SimulatedEviction::Never => None,
            });
        if placed.is_none() {
            self.cluster.apply(FilterDecided {
                uid: uid.clone(),
                answer: FilterAnswer::Refused {
                    queried_nodes: None,
                },
            });
            self.cluster.apply(PodReleased(uid.clone()));
        }
        placed
    }

    fn end(&mut self, number: usize) {
        self.cluster.apply(PodReleased(ledger::uid(number)));
        self.cpu_only.evictable.remove(number);
    }
}

/// Ranks of the nodes that kube-scheduler's filters accept for the pod.
pub fn accepted_ranks(cluster: &SimulatedCluster, kind: &PodKind) -> impl Iterator<Item = usize> {
    let nodes = cluster.nodes().iter().enumerate();
    nodes
        .filter(|(_, node)| node.is_accepted(kind))
        .map(|(rank, _)| rank)
}

#[cfg(test)]
mod tests;
