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
use super::placer::{Placed, Placer, PodArrival};
use super::trace::{PlayedTrace, PodKind};
use crate::simulate::openb::Qos;
use crate::simulate::shown;
use cpu_only::CpuOnly;
use learning::{Knowledge, SimulatedUpkeep};
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
const BETWEEN_ARRIVALS: Millis = Millis(1);

/// Which pods may be evicted for others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SimulatedEviction {
    #[default]
    Never,
    /// Best-effort pods, for serving ones.
    OfBestEffort,
}

impl SimulatedEviction {
    /// The pod's role in evictions; without evictions all roles are equal.
    pub fn standing(self, qos: Option<Qos>) -> PodTier {
        match self {
            Self::Never => PodTier::Bystander,
            Self::OfBestEffort => PodTier::of(qos),
        }
    }
}

pub(crate) struct Shipped<'s> {
    setting: &'s PlayedTrace,
    eviction: SimulatedEviction,
    pub ledger: Cluster,
    /// By rank: in order, so that of equal nodes the lower rank is taken here too.
    names: Vec<NodeName>,
    /// By kind and [`PodTier`]; none of pods without GPUs.
    demands: Vec<Option<[Demand; 3]>>,
    cpu_only: CpuOnly<'s>,
    upkeep: SimulatedUpkeep,
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

    fn of(qos: Option<Qos>) -> Self {
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

impl<'s> Shipped<'s> {
    pub fn new(
        setting: &'s PlayedTrace,
        ranks: &[usize],
        eviction: SimulatedEviction,
        cpu_rule: CpuRule,
        knowledge: Knowledge,
    ) -> Self {
        let policy = Arc::new(Policy::default());
        let names = ledger::names(setting, ranks);
        let mut ledger = shown::empty_cluster(policy.clone());
        ledger::fill(&mut ledger, setting, ranks, &names);
        Self {
            eviction,
            ledger,
            demands: setting
                .kinds
                .iter()
                .map(|kind| ledger::demands(setting, kind, &policy))
                .collect(),
            names,
            setting,
            cpu_only: CpuOnly::new(setting, cpu_rule).with(eviction),
            upkeep: SimulatedUpkeep::knowing(knowledge),
            score_cache: ScoreCache::default(),
        }
    }

    /// Filter, prioritize and bind.
    fn place_in_room(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        arrival: PodArrival,
    ) -> Option<Placed> {
        let node = self.best(cluster, uid, arrival)?;
        let placement = self.bind(uid, &node)?;
        Some(Placed::alone(self.seat(&placement)))
    }

    fn best(
        &mut self,
        cluster: &SimulatedCluster,
        uid: &PodUid,
        arrival: PodArrival,
    ) -> Option<NodeName> {
        let kind = &self.setting.kinds[arrival.kind];
        let request = self.ledger.request_of(uid)?;
        let view = self.ledger.apply(FilterAsked(request));
        let names: Vec<&str> = accepted(cluster, kind)
            .map(|rank| self.names[rank].as_str())
            .collect();
        let mut scores = self
            .score_cache
            .take(&view.snapshot, &view.request.demand, &view.policy);
        let list = filter(&view, names.into_iter(), &mut scores);
        self.score_cache.put(scores);
        list.best
            .first()
            .map(|best| view.snapshot.nodes()[best.node].name.clone())
    }

    /// The pod runs there from now on, and its engine answers at once: the start time of engines is not simulated here.
    fn bind(&mut self, uid: &PodUid, node: &NodeName) -> Option<Placement> {
        let placement = self.ledger.allocate(uid, node)?.placement;
        let devices = placement.recorded();
        self.ledger.apply(BindingWritten {
            uid: uid.clone(),
            node: node.clone(),
            devices: devices.clone(),
        });
        let demand = self.ledger.ledger().pod_state(uid)?.demand.clone();
        let state = ObservedPhase::Bound {
            node: node.clone(),
            devices,
            starting: false,
            ran: None,
        };
        self.ledger
            .apply(PodObserved(ledger::seen(uid, demand, state)));
        Some(placement)
    }

    fn seat(&self, placement: &Placement) -> SimulatedPlacement {
        ledger::seat(
            self.ledger.ledger(),
            &self.names,
            &placement.node,
            &placement.devices,
        )
    }

    fn demand(&self, arrival: PodArrival) -> Option<Demand> {
        let standing = self.eviction.standing(self.setting.pods[arrival.pod].qos);
        self.demands[arrival.kind]
            .as_ref()
            .map(|demands| demands[standing as usize].clone())
    }
}

impl Placer for Shipped<'_> {
    fn place(&mut self, cluster: &SimulatedCluster, arrival: PodArrival) -> Option<Placed> {
        self.ledger.apply(Tick {
            now: self.ledger.ledger().now() + BETWEEN_ARRIVALS,
            is_leading: true,
        });
        self.upkeep.tick(&mut self.ledger, cluster, &self.names);
        let Some(demand) = self.demand(arrival) else {
            return self.cpu_only.place(&mut self.ledger, cluster, arrival);
        };
        let uid = ledger::uid(arrival.number);
        self.ledger.apply(PodObserved(ledger::seen(
            &uid,
            demand,
            ObservedPhase::Waiting(ObservedWaiting::default()),
        )));
        let placed = self
            .place_in_room(cluster, &uid, arrival)
            .or_else(|| match self.eviction {
                SimulatedEviction::OfBestEffort => self.make_room(cluster, &uid, arrival),
                SimulatedEviction::Never => None,
            });
        if placed.is_none() {
            self.ledger.apply(FilterDecided {
                uid: uid.clone(),
                answer: FilterAnswer::Refused { asked: None },
            });
            self.ledger.apply(PodReleased(uid.clone()));
        }
        placed
    }

    fn end(&mut self, number: usize) {
        self.ledger.apply(PodReleased(ledger::uid(number)));
        self.cpu_only.evictable.remove(number);
    }
}

/// Ranks of the nodes that kube-scheduler's filters accept for the pod.
pub fn accepted(cluster: &SimulatedCluster, kind: &PodKind) -> impl Iterator<Item = usize> {
    let nodes = cluster.nodes().iter().enumerate();
    nodes
        .filter(|(_, node)| node.is_accepted(kind))
        .map(|(rank, _)| rank)
}

#[cfg(test)]
mod tests;
