//! Makes a preemption candidate of a node: which pods could be evicted for the preemptor, alone or with their group, which leave
//! anyway, and what each eviction costs.

use super::{EvictionCost, MembersElsewhere, PreemptionCandidate, VictimGroup};
use crate::ids::{NodeName, PodUid};
use crate::ledger::BudgetIndex;
use crate::ledger::Ledger;
use crate::ledger::{Departure, KeepReason, Preemptor};
use crate::ledger::{NodeState, ResidentPod};
use crate::ledger::{PodPhase, PodState};
use crate::ledger::{PotentialVictim, returned_quota};
use crate::policy::ViolateBudgets;
use crate::units::Millis;
use crate::vocabulary::classification::TenantId;
use crate::vocabulary::cluster_share::TenantUsage;
use crate::vocabulary::demand::Demand;
use crate::vocabulary::disruption_budget::DisruptionBudget;
use crate::vocabulary::disruption_info::GroupKey;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The members of a pod group that would be evicted for one preemptor.
struct GroupVictims<'l> {
    /// In order of node.
    members: Vec<GroupMember<'l>>,
    /// The node and tenant of each member, in the order of `members`.
    locations: Arc<[(NodeName, Option<TenantId>)]>,
    /// In order of UID.
    uids: Arc<[PodUid]>,
    /// The sums over the first members, and over the last ones, by their number: all but those of one node are two of the sums.
    prefix_sums: Vec<GroupSum>,
    suffix_sums: Vec<GroupSum>,
    /// A member uses borrowed capacity: only a preemptor that may reclaim its tenant's guarantee evicts the group.
    is_reclaimed: bool,
}

/// The sum of eviction cost, grace period and usage over some members.
#[derive(Debug, Clone, Copy, Default)]
struct GroupSum {
    eviction_cost: EvictionCost,
    grace: Millis,
    given_back: TenantUsage,
}

struct GroupMember<'l> {
    victim: PotentialVictim,
    /// The indices of the disruption budgets that cover it.
    budgets: Vec<usize>,
    node: &'l NodeName,
}

/// Makes candidates of one node after the other. Keeps what it found of groups, because their members are on many nodes.
pub struct CandidateSurvey<'l> {
    ledger: &'l Ledger,
    preemptor: &'l Preemptor,
    demand: &'l Demand,
    groups: BTreeMap<&'l GroupKey, Result<GroupVictims<'l>, KeepReason>>,
    budget_index: BudgetIndex<'l>,
    /// Disruptions that victims of other preemptors will still use, by budget.
    spent_disruptions: BTreeMap<usize, u32>,
    /// Groups with members on other nodes are kept.
    is_single_node: bool,
}

impl Ledger {
    /// The nodes, each with every pod on it that may be evicted for the preemptor; those where the preemptor may not be placed at
    /// all are left out.
    pub fn candidates_for<'n>(
        &self,
        preemptor: &Preemptor,
        nodes: impl IntoIterator<Item = &'n NodeName>,
    ) -> Vec<PreemptionCandidate> {
        let pod_state = preemptor.uid().and_then(|uid| self.pod_state(uid));
        pod_state.map_or_else(Vec::new, |pod_state| {
            self.candidates_for_demand(preemptor, &pod_state.demand, nodes)
        })
    }

    /// [`Self::candidates_for`] as if the preemptor requested `demand`.
    pub(crate) fn candidates_for_demand<'n>(
        &self,
        preemptor: &Preemptor,
        demand: &Demand,
        nodes: impl IntoIterator<Item = &'n NodeName>,
    ) -> Vec<PreemptionCandidate> {
        let mut survey = self.survey(preemptor, demand);
        nodes
            .into_iter()
            .filter_map(|node| survey.candidate(node))
            .collect()
    }

    /// A survey that makes the candidates for the preemptor one node after the other.
    pub fn survey<'l>(
        &'l self,
        preemptor: &'l Preemptor,
        demand: &'l Demand,
    ) -> CandidateSurvey<'l> {
        CandidateSurvey::new(self, preemptor, demand)
    }

    /// Why a pod is not evicted for the preemptor, as if that requested `demand`; `None` if it may be evicted.
    pub fn keep_reason_of(
        &self,
        preemptor: &Preemptor,
        demand: &Demand,
        uid: &PodUid,
    ) -> Option<KeepReason> {
        let mut survey = CandidateSurvey::new(self, preemptor, demand);
        let Some(pod_state) = self.pod_state(uid) else {
            return Some(KeepReason::NotBound);
        };
        let Some(node_state) = pod_state.node().and_then(|node| self.node_state(node)) else {
            return Some(KeepReason::NotBound);
        };
        let wanted = node_state.max_usage_of(demand);
        self.keep_reason(uid, pod_state, demand, wanted, preemptor)
            .or_else(|| {
                self.potential_victim(uid, pod_state, node_state)
                    .is_none()
                    .then_some(KeepReason::Unplaced)
            })
            .or_else(|| survey.group_keep_reason(pod_state, wanted))
            .or_else(|| survey.budget_keep_reason(pod_state))
    }

    /// The number of pods by which disruption budgets are overdrawn if these are evicted for the pod, beside the victims of other
    /// pods' reservations.
    pub(crate) fn budget_violations<'u>(
        &self,
        preemptor_uid: &PodUid,
        victims: impl Iterator<Item = &'u PodUid>,
    ) -> u32 {
        let Some(pod_state) = self.pod_state(preemptor_uid) else {
            return 0;
        };
        let preemptor = self.preemptor_without_cost(preemptor_uid);
        let survey = CandidateSurvey::new(self, &preemptor, &pod_state.demand);
        let staying = victims.filter_map(|uid| self.pod_state(uid));
        let staying = staying.filter(|victim| self.departure_of(victim).is_none());
        let mut wanted: BTreeMap<usize, u32> = BTreeMap::new();
        for budget in staying.flat_map(|victim| survey.budgets_covering(victim)) {
            *wanted.entry(budget).or_default() += 1;
        }
        wanted
            .iter()
            .map(|(budget, wanted)| wanted.saturating_sub(survey.allowed_disruptions(*budget)))
            .sum()
    }

    /// The pod as a potential victim, with its eviction cost for the preemptor; `None` if it has no placement on the node.
    pub(super) fn with_eviction_cost(
        &self,
        uid: &PodUid,
        pod_state: &PodState,
        node_state: &NodeState,
        demand: &Demand,
        preemptor: &Preemptor,
    ) -> Option<PotentialVictim> {
        Some(self.with_cost(
            self.potential_victim(uid, pod_state, node_state)?,
            pod_state,
            node_state,
            demand,
            preemptor,
        ))
    }

    fn with_cost(
        &self,
        resident: PotentialVictim,
        pod_state: &PodState,
        node_state: &NodeState,
        demand: &Demand,
        preemptor: &Preemptor,
    ) -> PotentialVictim {
        let used = node_state.usage_on(pod_state, resident.gpus);
        PotentialVictim {
            eviction_cost: self.eviction_cost(
                &resident.uid,
                pod_state,
                node_state,
                used,
                preemptor,
            ),
            quota_status: self.quota_status(&resident.uid, pod_state, preemptor.tenant_shares()),
            returned_quota: returned_quota(pod_state, used, demand),
            ..resident
        }
    }
}

impl<'l> CandidateSurvey<'l> {
    fn new(ledger: &'l Ledger, preemptor: &'l Preemptor, demand: &'l Demand) -> Self {
        let budget_index = ledger.budget_index();
        let mut spent = BTreeMap::new();
        for pod_state in preemptor
            .victims_of_others()
            .iter()
            .filter_map(|uid| ledger.pod_state(uid))
        {
            // Once it is leaving, the budget itself says so.
            if ledger.departure_of(pod_state).is_none() {
                budget_index
                    .consulted_by_eviction(
                        &pod_state.demand.traits,
                        pod_state.disruption_info.health,
                    )
                    .into_iter()
                    .for_each(|budget| *spent.entry(budget).or_default() += 1);
            }
        }
        Self {
            ledger,
            preemptor,
            demand,
            groups: BTreeMap::new(),
            budget_index,
            spent_disruptions: spent,
            is_single_node: false,
        }
    }

    /// Restricts the survey to victims on one node: a group with members on others is not evicted.
    pub(crate) fn on_one_node(self) -> Self {
        Self {
            is_single_node: true,
            ..self
        }
    }

    /// The node with every pod on it that may be evicted; `None` if the preemptor may not be placed there at all, or the kubelet
    /// picks its GPUs: who must leave is unknown then.
    pub fn candidate(&mut self, node: &NodeName) -> Option<PreemptionCandidate> {
        let Self {
            ledger,
            preemptor,
            demand,
            ..
        } = *self;
        if demand.is_allocated_externally() {
            return None;
        }
        let node_state = ledger
            .node_state(node)
            .filter(|node_state| node_state.can_be_emptied_for(demand))?;
        let preemptor_uid = preemptor.uid()?;
        let gpus = match node_state.pods().contains(preemptor_uid) {
            true => ledger.gpus_without(node_state, preemptor_uid),
            false => node_state.view().gpus.to_vec(),
        };
        let keeps_apart = ledger.policy().has_class_exclusions();
        let mut candidate = PreemptionCandidate {
            class_exclusions: if keeps_apart {
                ledger.class_exclusions_without(node_state, preemptor_uid)
            } else {
                Vec::new()
            },
            potential_victims: Vec::with_capacity(node_state.pods().len()),
            are_budgets_known: ledger.are_budgets_known(),
            tenant_quota: preemptor.quota(),
            ..PreemptionCandidate::new(node.clone(), gpus)
        };
        // Only tenants' limits depend on this.
        let has_tenants = !ledger.policy().tenants().is_empty();
        let wanted = if has_tenants {
            node_state.max_usage_of(demand)
        } else {
            TenantUsage::default()
        };
        let mut candidate_index = CandidateIndex::default();
        for resident in node_state
            .residents()
            .iter()
            .filter(|resident| resident.is_placed && resident.uid != *preemptor_uid)
        {
            self.add_resident(
                &mut candidate,
                &mut candidate_index,
                node_state,
                resident,
                wanted,
            );
        }
        let ended = ledger.ended_victims(node_state);
        candidate
            .awaited
            .extend(ended.filter(|ended| !preemptor.victims_of_others().contains(&ended.uid)));
        candidate.budget_indices = candidate_index.budgets;
        self.refresh_budgets(&mut candidate);
        Some(candidate)
    }

    /// Updates the budgets of a candidate that was made earlier: other pods may have become victims since,
    /// on other nodes.
    pub fn refresh_budgets(&self, candidate: &mut PreemptionCandidate) {
        candidate.budgets = candidate
            .budget_indices
            .iter()
            .map(|budget| self.allowed_disruptions(*budget))
            .collect();
    }

    fn add_resident(
        &mut self,
        candidate: &mut PreemptionCandidate,
        candidate_index: &mut CandidateIndex<'l>,
        node_state: &NodeState,
        resident: &ResidentPod,
        wanted: TenantUsage,
    ) {
        let Self {
            ledger,
            preemptor,
            demand,
            ..
        } = *self;
        let (uid, pod_state) = (&resident.uid, ledger.expect_pod(&resident.uid));
        let as_victim = || ledger.potential_victim_at(uid, pod_state, node_state, resident.gpus);
        if let Some(Departure::Soon(left)) = ledger.departure_of(pod_state) {
            if !preemptor.victims_of_others().contains(uid) {
                let given_back = returned_quota(
                    pod_state,
                    node_state.usage_on(pod_state, resident.gpus),
                    demand,
                );
                candidate.awaited.push(PotentialVictim {
                    grace: left,
                    returned_quota: given_back,
                    ..as_victim()
                });
            }
            return;
        }
        if !demand.may_preempt
            || ledger
                .keep_reason(uid, pod_state, demand, wanted, preemptor)
                .is_some()
        {
            return;
        }
        let Some(gang) = self.gang_index(candidate, candidate_index, pod_state, wanted) else {
            return;
        };
        let victim = ledger.with_cost(as_victim(), pod_state, node_state, demand, preemptor);
        let over = self.budgets_covering(pod_state);
        let budgets = over
            .into_iter()
            .map(|budget| candidate_index.budget(budget))
            .collect();
        candidate.potential_victims.push(PotentialVictim {
            budgets,
            gang,
            ..victim
        });
    }

    /// The budgets that may keep the pod: none where its class ignores them, or once it is being deleted.
    fn budgets_covering(&self, pod_state: &PodState) -> Vec<usize> {
        let honors = self
            .ledger
            .policy()
            .class(pod_state.demand.class)
            .honors_budgets();
        match honors && self.ledger.departure_of(pod_state).is_none() {
            true => self
                .budget_index
                .consulted_by_eviction(&pod_state.demand.traits, pod_state.disruption_info.health),
            false => Vec::new(),
        }
    }

    /// The budget that allows no eviction of the pod, unless the policy may violate it.
    fn budget_keep_reason(&self, pod_state: &PodState) -> Option<KeepReason> {
        let Self { ledger, .. } = self;
        let keeps_budgets = ledger.policy().preemption.violate_budgets == ViolateBudgets::Never;
        let over = if keeps_budgets {
            self.budgets_covering(pod_state)
        } else {
            Vec::new()
        };
        match &over[..] {
            [] => None,
            [only] => {
                let (
                    DisruptionBudget {
                        namespace, name, ..
                    },
                    allowed,
                ) = (&*ledger.budgets()[*only], self.allowed_disruptions(*only));
                let name = format!("{namespace}/{name}");
                (allowed == 0).then_some(KeepReason::Budget { name, allowed })
            }
            _ => Some(KeepReason::Budgets),
        }
    }

    /// The index in the candidate of the group with which a pod is evicted, if it has one; `None` if that group stays.
    fn gang_index(
        &mut self,
        candidate: &mut PreemptionCandidate,
        candidate_index: &mut CandidateIndex<'l>,
        pod_state: &'l PodState,
        wanted: TenantUsage,
    ) -> Option<Option<u16>> {
        let Some(key) = self.group_of(pod_state) else {
            return Some(None);
        };
        if let Some(index) = candidate_index.gangs.get(key) {
            return Some(Some(*index));
        }
        let (may_reclaim, is_of_one_node) = (
            self.preemptor.tenant_shares().may_reclaim(wanted),
            self.is_single_node,
        );
        let group_victims = self.group_victims(key).as_ref().ok()?;
        if group_victims.is_reclaimed && !may_reclaim
            || is_of_one_node && group_victims.has_members_elsewhere(&candidate.node)
        {
            return None;
        }
        let index = candidate.gangs.len() as u16;
        candidate
            .gangs
            .push(group_victims.victim_group(&candidate.node, candidate_index));
        candidate_index.gangs.insert(key, index);
        Some(Some(index))
    }

    fn group_keep_reason(
        &mut self,
        pod_state: &'l PodState,
        wanted: TenantUsage,
    ) -> Option<KeepReason> {
        let key = self.group_of(pod_state)?;
        let may_reclaim = self.preemptor.tenant_shares().may_reclaim(wanted);
        match self.group_victims(key) {
            Ok(group_victims) if group_victims.is_reclaimed && !may_reclaim => {
                Some(KeepReason::Group(key.clone()))
            }
            Ok(_) => None,
            Err(keep_reason) => Some(keep_reason.clone()),
        }
    }

    /// The group of a pod that is not alone in it. One that is being deleted leaves the others behind anyway.
    fn group_of(&self, pod_state: &'l PodState) -> Option<&'l GroupKey> {
        let key = pod_state.disruption_info.group.as_ref()?;
        let has_others = self.ledger.member_uids(key).nth(1).is_some();
        (has_others && self.ledger.departure_of(pod_state).is_none()).then_some(key)
    }

    fn group_victims(&mut self, key: &'l GroupKey) -> &Result<GroupVictims<'l>, KeepReason> {
        if !self.groups.contains_key(key) {
            let group_victims = self
                .find_group_victims(key)
                .ok_or_else(|| KeepReason::Group(key.clone()));
            self.groups.insert(key, group_victims);
        }
        &self.groups[key]
    }

    /// All members that are on a node and not leaving already; `None` if one of them may not be evicted.
    fn find_group_victims(&self, key: &GroupKey) -> Option<GroupVictims<'l>> {
        let Self {
            ledger,
            preemptor,
            demand,
            ..
        } = *self;
        let (mut members, mut is_reclaimed) = (Vec::new(), false);
        for uid in ledger.member_uids(key) {
            let pod_state = ledger.expect_pod(uid);
            let is_placed = !matches!(pod_state.phase, PodPhase::Waiting(_))
                && ledger.departure_of(pod_state).is_none();
            if !is_placed {
                continue;
            }
            // Whether the preemptor may reclaim that much depends on the node that it would get.
            if ledger
                .keep_reason(uid, pod_state, demand, TenantUsage::default(), preemptor)
                .is_some()
            {
                return None;
            }
            is_reclaimed |= preemptor.tenant_shares().is_of_other_tenant(pod_state);
            let node = pod_state.node()?;
            let victim = ledger.with_eviction_cost(
                uid,
                pod_state,
                ledger.node_state(node)?,
                demand,
                preemptor,
            )?;
            members.push(GroupMember {
                victim,
                budgets: self.budgets_covering(pod_state),
                node,
            });
        }
        Some(GroupVictims::new(members, is_reclaimed))
    }

    fn allowed_disruptions(&self, budget: usize) -> u32 {
        let allowed = self
            .ledger
            .budgets()
            .get(budget)
            .map_or(0, |budget| budget.allowed);
        allowed.saturating_sub(self.spent_disruptions.get(&budget).copied().unwrap_or(0))
    }
}

impl GroupSum {
    fn and(self, other: Self) -> Self {
        let mut given_back = self.given_back;
        given_back += other.given_back;
        Self {
            eviction_cost: self.eviction_cost.and(other.eviction_cost),
            grace: self.grace.max(other.grace),
            given_back,
        }
    }
}

impl<'l> GroupVictims<'l> {
    /// The members in order of UID.
    fn new(mut members: Vec<GroupMember<'l>>, is_reclaimed: bool) -> Self {
        let uids = members
            .iter()
            .map(|member| member.victim.uid.clone())
            .collect();
        members.sort_by_key(|member| member.node);
        let locations = members
            .iter()
            .map(|member| (member.node.clone(), member.victim.tenant))
            .collect();
        let sum = |GroupMember { victim, .. }: &GroupMember<'_>| GroupSum {
            eviction_cost: EvictionCost::default().plus(victim),
            grace: victim.grace,
            given_back: victim.returned_quota,
        };
        let mut before = vec![GroupSum::default()];
        before.extend(members.iter().scan(GroupSum::default(), |so_far, member| {
            *so_far = so_far.and(sum(member));
            Some(*so_far)
        }));
        let mut behind = vec![GroupSum::default()];
        behind.extend(
            members
                .iter()
                .rev()
                .scan(GroupSum::default(), |so_far, member| {
                    *so_far = so_far.and(sum(member));
                    Some(*so_far)
                }),
        );
        behind.reverse();
        Self {
            members,
            locations,
            uids,
            prefix_sums: before,
            suffix_sums: behind,
            is_reclaimed,
        }
    }

    /// The group as part of one node's candidate: members on that node are potential victims there, the others are summed up.
    fn victim_group(
        &self,
        node: &NodeName,
        candidate_index: &mut CandidateIndex<'_>,
    ) -> VictimGroup {
        let here = self.range_on(node);
        let GroupSum {
            eviction_cost,
            grace,
            given_back,
        } = self.prefix_sums[here.start].and(self.suffix_sums[here.end]);
        let elsewhere = self.members[..here.start]
            .iter()
            .chain(&self.members[here.end..]);
        VictimGroup {
            members: self.uids.clone(),
            eviction_cost,
            grace,
            given_back,
            budgets: elsewhere
                .flat_map(|member| &member.budgets)
                .map(|budget| candidate_index.budget(*budget))
                .collect(),
            elsewhere: MembersElsewhere::new(self.locations.clone(), here),
        }
    }

    /// The members on a node.
    fn range_on(&self, node: &NodeName) -> Range<usize> {
        let first = self.members.partition_point(|member| member.node < node);
        first..first + self.members[first..].partition_point(|member| member.node == node)
    }

    fn has_members_elsewhere(&self, node: &NodeName) -> bool {
        self.range_on(node).len() < self.members.len()
    }
}

/// The indices of groups and budgets in one candidate.
#[derive(Default)]
struct CandidateIndex<'l> {
    gangs: BTreeMap<&'l GroupKey, u16>,
    budgets: Vec<usize>,
    /// The position of each budget in `budgets`.
    budget_positions: BTreeMap<usize, u16>,
}

impl CandidateIndex<'_> {
    fn budget(&mut self, budget: usize) -> u16 {
        *self.budget_positions.entry(budget).or_insert_with(|| {
            self.budgets.push(budget);
            (self.budgets.len() - 1) as u16
        })
    }
}
