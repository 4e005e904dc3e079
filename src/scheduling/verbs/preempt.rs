//! The `preempt` verb: of the nodes on which kube-scheduler could preempt, the one with the cheapest victims, and a reservation
//! there.
//!
//! kube-scheduler's candidates come from a dry run of its own filters, which count the sum of the node. Stowage chooses its own
//! victims: on the GPUs that the pod needs, and enough of them that kube-scheduler's sum is satisfied too. Where a device
//! plugin allocates the GPUs Stowage cannot choose them, and [`preempt_device_plugin`](super::preempt_device_plugin) chooses
//! among kube-scheduler's candidates.
//!
//! [`PreemptAsked`] takes a copy of everything that the decision depends on; [`preempt`] searches the candidates and assesses
//! those that could be cheapest, which may take a while on a large cluster; [`PreemptDecided`] makes the reservation, if
//! everything still stands.

use super::request::VerbRequest;
use super::{Change, Cluster};
#[cfg(any(test, feature = "testkit"))]
use crate::evicting::EvictionCost;
use crate::evicting::{
    self, BudgetRules, CandidateSource, CandidateSurvey, ExaminedCandidate, NodeCostBound,
    PreemptionCandidate, SearchEffort, Shortfall, VictimSet,
};
use crate::ids::{NodeName, PodUid};
use crate::kube_filters::{
    AssumedNodeChange, FilterQuery, FilterReason, FilterSnapshot, FilterVerdict, Requirements,
};
use crate::ledger::{AllocationFailure, Ledger, PodState, PotentialVictim, Preemptor};
use crate::policy::{Digest, Mode, ViolateBudgets};
use crate::units::Millis;
use crate::vocabulary::demand::{Demand, HostResources};
use crate::vocabulary::placement::Reservation;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Grace period assumed for pods that request no VRAM; they are not in the ledger. Kubernetes' default.
const UNKNOWN_POD_GRACE: Millis = Millis::seconds(30);

/// A node on which kube-scheduler could preempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedNode {
    pub node: String,
    /// UIDs of the pods that it would evict there.
    pub victims: Vec<String>,
    /// How many disruption budgets that would violate.
    pub pdb_violations: i64,
}

impl OfferedNode {
    /// Roughly how much memory it takes.
    pub(super) fn bytes(&self) -> usize {
        let victims = self
            .victims
            .iter()
            .map(|uid| size_of::<String>() + uid.len());
        size_of::<Self>() + self.node.len() + victims.sum::<usize>()
    }
}

/// kube-scheduler asks where the pod may preempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreemptAsked {
    pub request: VerbRequest,
    /// What the pod requires of a node besides GPUs. kube-scheduler may have seen the pod before the watch here did.
    pub wants: Requirements,
    /// Each once.
    pub offered: Vec<OfferedNode>,
}

/// The offered nodes, with everything that their eviction cost depends on.
#[derive(Debug, Clone)]
pub struct PreemptView {
    uid: PodUid,
    requirements: Requirements,
    offered: Vec<OfferedNode>,
    ledger: Box<Ledger>,
    kube_filters: FilterSnapshot,
}

/// The answer to kube-scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PreemptDecision {
    /// These pods leave.
    Evict {
        victims: VictimSet,
        /// Victims that request no VRAM.
        victims_without_vram: Vec<String>,
    },
    /// On no node may enough pods be evicted.
    NoCandidate,
    /// VRAM has become free since the pod was rejected, so no pod is evicted; the ledger requeues the pod.
    FitsNow,
}

/// The victims are chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreemptDecided {
    pub uid: PodUid,
    pub victims: VictimSet,
    /// Version of the policy that they were chosen by.
    pub policy: u64,
}

/// A reservation that is in the ledger and is to be written to the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationMade {
    pub reservation: Reservation,
    /// The policy of the decision.
    pub policy: Digest,
}

/// Why no reservation is made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotReserved {
    #[error("the policy changed while victims were chosen")]
    PolicyChanged,
    #[error("the eviction rates allow no more evictions within this minute")]
    EvictionRates,
    #[error("the disruption budgets allow less than when victims were chosen")]
    Budgets,
    #[error("the node or a GPU of it is gone")]
    NodeGone,
    #[error("the node changed while victims were chosen: {0}")]
    AssumeFailed(#[from] AllocationFailure),
}

/// Preemption led to no eviction; the planner tries to place the pod. If the sum of every node is too small kube-scheduler never
/// calls `filter`, and only this call shows that the pod is pending.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftToPlanner(pub PodUid);

/// Which pods of an offered node may leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum VictimChoice {
    /// Whichever may be evicted, as few as are needed.
    Any,
    /// All that kube-scheduler would evict, and the rest of their groups. It knows what Stowage chooses no victims by: ports,
    /// other resources than CPU and memory, how many pods a node may have.
    Proposed,
}

/// The offered nodes, of which only those are examined that could be cheapest; and the state that they are assessed by.
struct OfferedCandidates<'a> {
    ledger: &'a Ledger,
    /// The demand of the preempting pod.
    demand: &'a Demand,
    /// That demand beside GPUs that are kept free.
    demand_beside_spare: &'a Demand,
    /// The survey of all offered nodes, so that what they have in common is read once.
    survey: CandidateSurvey<'a>,
    /// CPU, memory and other resources that it requests besides GPUs.
    query: FilterQuery<'a>,
    offered: BTreeMap<NodeName, OfferedNode>,
    choice: VictimChoice,
    /// The nodes that were examined, with their candidates.
    examined: BTreeMap<NodeName, Option<ExaminedCandidate<Rc<PreemptionCandidate>>>>,
    /// The victims that kube-scheduler proposes and that request no VRAM, by node: their CPU or memory is needed.
    victims_without_vram: BTreeMap<NodeName, Vec<String>>,
}

/// The decision: least eviction cost, then node name. Sets that violate no disruption budget come first; others are allowed only
/// if the policy permits it.
pub fn preempt(view: PreemptView) -> PreemptDecision {
    choose_victims(view, |candidates, preemptor, searched| {
        candidates
            .ledger
            .cost_bounds_on(candidates.offered.keys(), preemptor, searched)
    })
}

/// [`preempt`] with every offered node examined.
#[cfg(any(test, feature = "testkit"))]
pub(crate) fn preempt_examining_all(view: PreemptView) -> PreemptDecision {
    choose_victims(view, |candidates, _, _| {
        let zero_bound = |node: &NodeName| NodeCostBound {
            floor: EvictionCost::default(),
            node: node.clone(),
            least_evicted: 0,
        };
        candidates.offered.keys().map(zero_bound).collect()
    })
}

/// `bounds` says what the eviction cost on each offered node is at least.
fn choose_victims(
    view: PreemptView,
    bounds: impl FnOnce(&OfferedCandidates<'_>, &Preemptor, &Demand) -> Vec<NodeCostBound>,
) -> PreemptDecision {
    let PreemptView {
        uid,
        requirements,
        offered,
        ledger,
        kube_filters,
    } = view;
    let Some(PodState { demand, .. }) = ledger.pod_state(&uid) else {
        return PreemptDecision::NoCandidate;
    };
    let preemptor = ledger.preemptor(&uid).with_volumes(&kube_filters);
    let query = kube_filters.query(None, &requirements);
    let demand_beside_spare = ledger.with_spare_rules(demand);
    let offered = offered
        .into_iter()
        .filter_map(|node| Some((NodeName::parse(&node.node).ok()?, node)));
    let mut candidates = OfferedCandidates {
        ledger: &ledger,
        demand,
        demand_beside_spare: &demand_beside_spare,
        // kube-scheduler evicts pods of one node.
        survey: ledger.survey(&preemptor, demand).on_one_node(),
        query,
        offered: offered.collect(),
        choice: VictimChoice::Any,
        examined: BTreeMap::new(),
        victims_without_vram: BTreeMap::new(),
    };
    let cost_bounds = bounds(&candidates, &preemptor, &demand_beside_spare);
    let mut search = |choice, rules| {
        candidates.set_choice(choice);
        let bounds = cost_bounds.iter().cloned();
        evicting::cheapest_among(
            bounds,
            &demand_beside_spare,
            rules,
            SearchEffort::default(),
            &mut candidates,
        )
    };
    let mut search_within =
        |rules| search(VictimChoice::Any, rules).or_else(|| search(VictimChoice::Proposed, rules));
    let found = match ledger.policy().preemption.violate_budgets {
        ViolateBudgets::Never => search_within(BudgetRules::Keep),
        ViolateBudgets::WhenNothingElse => {
            search_within(BudgetRules::Keep).or_else(|| search_within(BudgetRules::Violate))
        }
    };
    let Some(mut victims) = found else {
        return PreemptDecision::NoCandidate;
    };
    let victims_without_vram = candidates
        .victims_without_vram
        .remove(&victims.node)
        .unwrap_or_default();
    if victims.victims.is_empty() && victims_without_vram.is_empty() && victims.awaited.is_empty() {
        return PreemptDecision::FitsNow;
    }
    if !victims_without_vram.is_empty() {
        victims.longest_grace = victims.longest_grace.max(UNKNOWN_POD_GRACE);
    }
    PreemptDecision::Evict {
        victims,
        victims_without_vram,
    }
}

impl Change for PreemptAsked {
    /// `None` if the pod has a reservation already.
    type Output = Option<(VerbRequest, PreemptView)>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        let Self {
            mut request,
            wants,
            offered,
        } = self;
        let Cluster {
            ledger,
            kube_filters,
            ..
        } = cluster;
        request.reclassify_by(ledger.policy());
        request.record_in(ledger);
        if ledger.reserved_placement(&request.uid).is_some() {
            return None;
        }
        ledger.record_preempt_query(&request.uid, offered.len());
        // The planner makes room for the whole group, or none: kube-scheduler would do so for one pod after the other.
        let offered = if ledger.is_planned_with_group(&request.uid) {
            Vec::new()
        } else {
            offered
        };
        let (ledger, kube_filters) = (Box::new(ledger.scratch()), kube_filters.snapshot());
        let view = PreemptView {
            uid: request.uid.clone(),
            requirements: wants,
            offered,
            ledger,
            kube_filters,
        };
        Some((request, view))
    }
}

impl CandidateSource for &mut OfferedCandidates<'_> {
    type Candidate = Rc<PreemptionCandidate>;

    fn examine(&mut self, node: &NodeName) -> Option<ExaminedCandidate<Rc<PreemptionCandidate>>> {
        if let Some(examined) = self.examined.get(node) {
            return examined.clone();
        }
        let examined = self
            .candidate(node)
            .and_then(|candidate| evicting::examined(candidate, self.demand_beside_spare));
        let examined = examined.map(|(floor, candidate)| (floor, Rc::new(candidate)));
        self.examined.insert(node.clone(), examined.clone());
        examined
    }

    /// Whether kube-scheduler's own filters accept the pod once the victims are gone, as far as is known here.
    fn accepts(&mut self, set: &VictimSet) -> bool {
        let others = self
            .victims_without_vram
            .get(&set.node)
            .into_iter()
            .flatten();
        let leaving: Vec<PodUid> = set
            .all_victims()
            .into_iter()
            .chain(parse_uids(others))
            .collect();
        match self.verdict(&set.node, &leaving) {
            FilterVerdict::Accepts | FilterVerdict::Rejects(FilterReason::UnknownNode) => true,
            // kube-scheduler asks because it would evict pods there. Nothing says that it would not have to.
            FilterVerdict::Unsupported(_) => !leaving.is_empty(),
            // If its own victims would not do either, it knows something that is not known here.
            FilterVerdict::Rejects(_) => {
                let proposed: Vec<PodUid> = parse_uids(
                    self.offered
                        .get(&set.node)
                        .into_iter()
                        .flat_map(|node| &node.victims),
                )
                .collect();
                self.verdict(&set.node, &proposed) != FilterVerdict::Accepts
            }
        }
    }
}

fn parse_uids<'u>(uids: impl Iterator<Item = &'u String>) -> impl Iterator<Item = PodUid> {
    uids.filter_map(|uid| PodUid::parse(uid).ok())
}

impl OfferedCandidates<'_> {
    /// The verdict of kube-scheduler's own filters on the node once these pods are gone.
    fn verdict(&self, node: &NodeName, leaving: &[PodUid]) -> FilterVerdict {
        let coming = self.ledger.incoming_pods(node);
        self.query
            .verdict(node, &AssumedNodeChange { leaving, coming })
    }

    /// Sets the choice, and forgets what was examined for another one.
    fn set_choice(&mut self, choice: VictimChoice) {
        self.choice = choice;
        self.examined.clear();
        self.victims_without_vram.clear();
    }

    fn candidate(&mut self, node: &NodeName) -> Option<PreemptionCandidate> {
        let Self {
            ledger,
            demand,
            survey,
            query,
            offered,
            ..
        } = self;
        let offered = offered.get(node)?;
        // If kube-scheduler itself would evict no pod, it rejects the node for another reason.
        if offered.victims.is_empty() {
            return None;
        }
        let mut candidate = survey.candidate(node)?;
        let mut residents = Vec::new();
        let mut victims_without_vram = Vec::new();
        for victim in &offered.victims {
            let uid = PodUid::parse(victim).ok()?;
            match ledger.potential_victim_on(&uid, node) {
                Some(resident) => residents.push(resident),
                // What its eviction would free, and whether it is allowed, is unknown: skip this node.
                None if ledger.pod_state(&uid).is_some() => return None,
                None => victims_without_vram.push(victim.clone()),
            }
        }
        let mut shortfall = Shortfall::from_victims(residents.iter());
        match self.choice {
            VictimChoice::Any => {
                // At most what the node falls short by: what kube-scheduler's victims free beyond that is not needed.
                let missing = demand.vram().minus(ledger.remaining_capacity_on(node));
                shortfall.vram = shortfall.vram.min(missing);
                let coming = ledger.incoming_pods(node);
                let missing_host = query.shortfall(
                    node,
                    &AssumedNodeChange {
                        leaving: &[],
                        coming,
                    },
                );
                let HostResources { cpu, memory } = shortfall.host_resources;
                shortfall.host_resources = HostResources {
                    cpu: cpu.min(missing_host.cpu),
                    memory: memory.min(missing_host.memory),
                };
            }
            // What all of them free: none stays. With one of a group, all of it leaves.
            VictimChoice::Proposed => {
                let in_proposal =
                    |victim: &PotentialVictim| residents.iter().any(|one| one.uid == victim.uid);
                let proposed = candidate
                    .potential_victims
                    .iter()
                    .filter(|victim| in_proposal(victim));
                let gangs: BTreeSet<u16> = proposed.filter_map(|victim| victim.gang).collect();
                let leaves_with_one = |gang: u16| gangs.contains(&gang);
                candidate.potential_victims.retain(|victim| {
                    in_proposal(victim) || victim.gang.is_some_and(leaves_with_one)
                });
            }
        }
        candidate.shortfall = shortfall;
        // Whatever kube-scheduler's victims must free, and none that Stowage knows frees, the chosen victims must free.
        let violations = known_violations(&candidate, &residents);
        candidate.violations = u32::try_from(offered.pdb_violations)
            .unwrap_or(0)
            .saturating_sub(violations);
        if victims_without_vram.is_empty() {
            candidate.violations = 0;
        }
        self.victims_without_vram
            .insert(node.clone(), victims_without_vram);
        Some(candidate)
    }
}

/// The number of pods by which the known disruption budgets are exceeded if these pods are evicted.
fn known_violations(candidate: &PreemptionCandidate, residents: &[PotentialVictim]) -> u32 {
    let leaves =
        |victim: &&PotentialVictim| residents.iter().any(|resident| resident.uid == victim.uid);
    let covered = candidate
        .potential_victims
        .iter()
        .filter(leaves)
        .flat_map(|victim| &victim.budgets);
    let mut counts = vec![0u32; candidate.budgets.len()];
    covered.for_each(|budget| counts[usize::from(*budget)] += 1);
    counts
        .iter()
        .zip(&candidate.budgets)
        .map(|(count, allowed)| count.saturating_sub(*allowed))
        .sum()
}

impl Change for PreemptDecided {
    type Output = Result<ReservationMade, NotReserved>;

    fn apply_to(self, cluster: &mut Cluster) -> Self::Output {
        let Self {
            uid,
            victims,
            policy: chosen_by,
        } = self;
        let ledger = &mut cluster.ledger;
        let policy = ledger.policy().clone();
        // The version also differs if shadow mode began just before the candidates were read.
        if policy.version != chosen_by || policy.mode == Mode::Shadow {
            return Err(NotReserved::PolicyChanged);
        }
        let leaving = victims.all_victims();
        // One limit for all evictions; within it the planner may find another node.
        if !ledger.is_within_eviction_rates(&leaving) {
            return Err(NotReserved::EvictionRates);
        }
        // kube-scheduler deletes the victims whatever their budgets say.
        if ledger.budget_violations(&uid, victims.evicted()) > victims.eviction_cost.violations {
            return Err(NotReserved::Budgets);
        }
        let node = ledger.node(&victims.node).ok_or(NotReserved::NodeGone)?;
        let devices = node.uuids(victims.gpus);
        if devices.len() < victims.gpus.iter().count() {
            return Err(NotReserved::NodeGone);
        }
        let reservation = Reservation {
            node: victims.node.clone(),
            devices,
            victims: leaving.clone().into(),
            deadline: ledger.now() + victims.longest_grace + policy.preemption.reservation_slack,
        };
        ledger.reserve(&uid, reservation.clone())?;
        ledger.record_evictions(&leaving);
        victims
            .victims
            .iter()
            .for_each(|victim| ledger.record_owner_eviction(victim));
        Ok(ReservationMade {
            reservation,
            policy: policy.digest,
        })
    }
}

impl Change for LeftToPlanner {
    type Output = ();

    fn apply_to(self, cluster: &mut Cluster) {
        if cluster
            .ledger
            .pod_state(&self.0)
            .is_some_and(|pod| pod.refusal().is_none())
        {
            cluster.ledger.record_refusal(&self.0, None);
        }
    }
}

#[cfg(test)]
mod tests;
