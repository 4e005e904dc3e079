//! Nodes as a search for victims sees them: who could leave for a pod, alone or with its group, who leaves anyway, and what each
//! of them costs.

use super::Ledger;
use super::book::{NodeState, ResidentPod};
use super::claim::{Departure, KeepReason, Preemptor};
use super::coverage::BudgetIndex;
use super::entry::{PodPhase, PodState};
use super::tenancy::TenantHold;
use crate::ids::{NodeName, PodUid};
use crate::scheduling::device::GpuSet;
use crate::scheduling::policy::TenantUsage;
use crate::scheduling::preempt::{
    EvictionCost, PodEvictionCost, PotentialVictim, PreemptionCandidate, QuotaStatus, TenantQuota,
    VictimGroup,
};
use crate::scheduling::request::{Demand, Sharing};
use crate::scheduling::stake::GroupKey;
use crate::units::{Bytes, Millis};
use std::collections::BTreeMap;

/// The members of a group that would leave for one pod.
struct GroupVictims {
    /// In order of UID, with the budgets that cover each.
    members: Vec<(PotentialVictim, Vec<usize>)>,
    /// Only who may take its guarantee back has them leave.
    is_reclaimed: bool,
}

/// One room on its way, and what was found of groups so far: their members are on many nodes.
pub struct CandidateSurvey<'l> {
    ledger: &'l Ledger,
    claim: &'l Preemptor,
    demand: &'l Demand,
    groups: BTreeMap<&'l GroupKey, Result<GroupVictims, KeepReason>>,
    coverage: BudgetIndex<'l>,
    /// Of each budget, what others will use of it who are to leave for other pods.
    spent: BTreeMap<usize, u32>,
}

impl Ledger {
    /// The node with everyone on it who may be evicted for the one whose claim it is; `None` if it may not be placed there at
    /// all.
    pub fn candidate_for(&self, claim: &Preemptor, node: &NodeName) -> Option<PreemptionCandidate> {
        let demand = &self.entries.get(claim.uid.as_ref()?)?.demand;
        self.candidates_for_demand(claim, demand, [node]).pop()
    }

    /// The same of many nodes; those where it may not be placed are left out.
    pub fn candidates_for<'n>(
        &self,
        claim: &Preemptor,
        nodes: impl IntoIterator<Item = &'n NodeName>,
    ) -> Vec<PreemptionCandidate> {
        let entry = claim.uid.as_ref().and_then(|uid| self.entries.get(uid));
        entry.map_or_else(Vec::new, |entry| self.candidates_for_demand(claim, &entry.demand, nodes))
    }

    /// The same, if the pod asked for this instead.
    pub fn candidates_for_demand<'n>(
        &self,
        claim: &Preemptor,
        demand: &Demand,
        nodes: impl IntoIterator<Item = &'n NodeName>,
    ) -> Vec<PreemptionCandidate> {
        if demand.asks_plugin() {
            return Vec::new();
        }
        let mut survey = self.survey(claim, demand);
        nodes.into_iter().filter_map(|node| survey.room(node)).collect()
    }

    /// The same, one node after the other.
    pub fn survey<'l>(&'l self, claim: &'l Preemptor, demand: &'l Demand) -> CandidateSurvey<'l> {
        CandidateSurvey::new(self, claim, demand)
    }

    /// Why a pod does not leave for the one whose claim it is, if it asked for this; `None` if it may be evicted.
    pub fn keep_reason_of(&self, claim: &Preemptor, demand: &Demand, uid: &PodUid) -> Option<KeepReason> {
        let mut survey = CandidateSurvey::new(self, claim, demand);
        let Some(entry) = self.entries.get(uid) else { return Some(KeepReason::NotBound) };
        let Some(book) = entry.node().and_then(|node| self.books.get(node)) else {
            return Some(KeepReason::NotBound);
        };
        let wanted = book.most_used_by(demand);
        self.stays(uid, entry, demand, wanted, claim)
            .or_else(|| self.resident(uid, entry, book).is_none().then_some(KeepReason::Unplaced))
            .or_else(|| survey.group_is_kept(entry, wanted))
    }

    /// A pod as part of what its node holds, if it is placed there.
    pub fn resident_on(&self, uid: &PodUid, node: &NodeName) -> Option<PotentialVictim> {
        self.resident(uid, self.entries.get(uid)?, self.books.get(node)?)
    }

    /// The same, without its price.
    pub(super) fn resident(
        &self,
        uid: &PodUid,
        entry: &PodState,
        book: &NodeState,
    ) -> Option<PotentialVictim> {
        let charge = book.charge_of(entry).filter(|charge| charge.placed)?;
        Some(self.resident_at(uid, entry, book, charge.gpus))
    }

    fn resident_at(&self, uid: &PodUid, entry: &PodState, book: &NodeState, gpus: GpuSet) -> PotentialVictim {
        PotentialVictim {
            uid: uid.clone(),
            gpus,
            per_gpu: entry.demand.per_gpu,
            // A pod that has its GPUs to itself has all of them: nothing of theirs is beyond it.
            beyond: match entry.demand.sharing {
                Sharing::Shared => book.beyond(uid, entry.demand.per_gpu, gpus),
                Sharing::Exclusive => Bytes::ZERO,
            },
            sharing: entry.demand.sharing,
            priority: entry.demand.priority,
            class: entry.demand.class,
            tenant: entry.demand.tenant,
            companion: entry.demand.companion,
            grace: self.time_to_leave(entry),
            loss: PodEvictionCost::default(),
            deletion_cost: entry.stake.deletion_cost,
            standing: QuotaStatus::Borrowed { spared: 0 },
            given_back: TenantUsage::default(),
            budgets: Vec::new(),
            gang: None,
        }
    }

    /// With its price for `preemptor`.
    pub(super) fn with_eviction_cost(
        &self,
        uid: &PodUid,
        entry: &PodState,
        book: &NodeState,
        preemptor: &Demand,
        claim: &Preemptor,
    ) -> Option<PotentialVictim> {
        Some(self.with_cost(self.resident(uid, entry, book)?, entry, book, preemptor, claim))
    }

    fn with_cost(
        &self,
        resident: PotentialVictim,
        entry: &PodState,
        book: &NodeState,
        preemptor: &Demand,
        claim: &Preemptor,
    ) -> PotentialVictim {
        let used = book.use_on(entry, resident.gpus);
        PotentialVictim {
            loss: self.loss(&resident.uid, entry, book, used, claim),
            standing: claim.tenancy.standing(&resident.uid, entry),
            given_back: given_back(entry, used, preemptor),
            ..resident
        }
    }

    /// What the pod's tenant may have, and has beside this pod.
    pub(super) fn tenant_quota(&self, uid: &PodUid) -> TenantQuota {
        let of = || {
            let id = self.entries.get(uid)?.demand.tenant?;
            let tenant = self.policy.tenant(id)?;
            Some(TenantQuota { ceiling: tenant.ceiling(), used: self.used_by(id).minus(self.use_of(uid)) })
        };
        of().unwrap_or_default()
    }
}

/// What a pod gives back of what the tenant of the one who asks may have.
pub(super) fn given_back(entry: &PodState, used: TenantUsage, preemptor: &Demand) -> TenantUsage {
    let is_own = entry.demand.tenant.is_some() && entry.demand.tenant == preemptor.tenant;
    if is_own { used } else { TenantUsage::default() }
}

impl<'l> CandidateSurvey<'l> {
    fn new(ledger: &'l Ledger, claim: &'l Preemptor, demand: &'l Demand) -> Self {
        let coverage = BudgetIndex::new(&ledger.budgets);
        let mut spent = BTreeMap::new();
        for entry in claim.spoken_for.iter().filter_map(|uid| ledger.entries.get(uid)) {
            // Once it is leaving, the budget itself says so.
            if ledger.departure_of(entry).is_none() {
                coverage
                    .of(&entry.demand.traits)
                    .into_iter()
                    .for_each(|budget| *spent.entry(budget).or_default() += 1);
            }
        }
        Self { ledger, claim, demand, groups: BTreeMap::new(), coverage, spent }
    }

    /// A node with everyone on it who may be evicted; `None` if the pod may not be placed there at all.
    pub fn room(&mut self, node: &NodeName) -> Option<PreemptionCandidate> {
        let Self { ledger, claim, demand, .. } = *self;
        let book = ledger.books.get(node).filter(|book| book.can_be_emptied_for(demand))?;
        let asks = claim.uid.as_ref()?;
        let gpus = match book.pods.contains(asks) {
            true => book.gpus_without(asks, &ledger.entries, &ledger.policy),
            false => book.view.gpus.to_vec(),
        };
        let keeps_apart = ledger.policy.keeps_classes_apart();
        let mut room = PreemptionCandidate {
            bars: if keeps_apart { book.bars(asks, &ledger.entries) } else { Vec::new() },
            candidates: Vec::with_capacity(book.pods.len()),
            budgets_known: ledger.budgets_known(),
            tenant: claim.tenant,
            ..PreemptionCandidate::new(node.clone(), gpus)
        };
        // Only where there are tenants does anybody ask.
        let has_tenants = !ledger.policy.tenants().is_empty();
        let wanted = if has_tenants { book.most_used_by(demand) } else { TenantUsage::default() };
        let mut places = CandidateIndex::default();
        for tenant in book.tenants.iter().filter(|tenant| tenant.placed && tenant.uid != *asks) {
            self.enter(&mut room, &mut places, book, tenant, wanted);
        }
        room.budget_places = places.budgets;
        self.allow(&mut room);
        Some(room)
    }

    /// Brings a room that was found before to what budgets let leave now. Others may have been told to leave since, on other
    /// nodes.
    pub fn allow(&self, room: &mut PreemptionCandidate) {
        room.budgets = room.budget_places.iter().map(|budget| self.allowed(*budget)).collect();
    }

    fn enter(
        &mut self,
        room: &mut PreemptionCandidate,
        places: &mut CandidateIndex<'l>,
        book: &NodeState,
        tenant: &ResidentPod,
        wanted: TenantUsage,
    ) {
        let Self { ledger, claim, demand, .. } = *self;
        let (uid, entry) = (&tenant.uid, &ledger.entries[&tenant.uid]);
        let resident = || ledger.resident_at(uid, entry, book, tenant.gpus);
        if let Some(Departure::Soon(left)) = ledger.departure_of(entry) {
            if !claim.spoken_for.contains(uid) {
                let given_back = given_back(entry, book.use_on(entry, tenant.gpus), demand);
                room.awaited.push(PotentialVictim { grace: left, given_back, ..resident() });
            }
            return;
        }
        if !demand.may_preempt || ledger.stays(uid, entry, demand, wanted, claim).is_some() {
            return;
        }
        let Some(gang) = self.gang(room, places, entry, wanted) else { return };
        let resident = ledger.with_cost(resident(), entry, book, demand, claim);
        let over = self.budgets_over(entry);
        let budgets = over.into_iter().map(|budget| places.budget(budget)).collect();
        room.candidates.push(PotentialVictim { budgets, gang, ..resident });
    }

    /// The budgets that may keep the pod: none where its class ignores them.
    fn budgets_over(&self, entry: &PodState) -> Vec<usize> {
        match self.ledger.policy.class(entry.demand.class).honors_budgets() {
            true => self.coverage.of(&entry.demand.traits),
            false => Vec::new(),
        }
    }

    /// The place in the room of the group with which a pod leaves, if there is one; `None` if that group stays.
    fn gang(
        &mut self,
        room: &mut PreemptionCandidate,
        places: &mut CandidateIndex<'l>,
        entry: &'l PodState,
        wanted: TenantUsage,
    ) -> Option<Option<u16>> {
        let Some(key) = self.group_of(entry) else { return Some(None) };
        if let Some(known) = places.gangs.get(key) {
            return Some(Some(*known));
        }
        let (ledger, may_reclaim) = (self.ledger, self.claim.tenancy.may_reclaim(wanted));
        let leavers = self.leavers(key).as_ref().ok()?;
        if leavers.is_reclaimed && !may_reclaim {
            return None;
        }
        let place = room.gangs.len() as u16;
        room.gangs.push(leavers.gang(ledger, &room.node, places));
        places.gangs.insert(key, place);
        Some(Some(place))
    }

    fn group_is_kept(&mut self, entry: &'l PodState, wanted: TenantUsage) -> Option<KeepReason> {
        let key = self.group_of(entry)?;
        let may_reclaim = self.claim.tenancy.may_reclaim(wanted);
        match self.leavers(key) {
            Ok(leavers) if leavers.is_reclaimed && !may_reclaim => Some(KeepReason::Group(key.clone())),
            Ok(_) => None,
            Err(stays) => Some(stays.clone()),
        }
    }

    /// The group of a pod that is not alone in it.
    fn group_of(&self, entry: &'l PodState) -> Option<&'l GroupKey> {
        let key = entry.stake.group.as_ref()?;
        (self.ledger.members_of(key).nth(1).is_some()).then_some(key)
    }

    fn leavers(&mut self, key: &'l GroupKey) -> &Result<GroupVictims, KeepReason> {
        if !self.groups.contains_key(key) {
            let leavers = self.find_group_victims(key).ok_or_else(|| KeepReason::Group(key.clone()));
            self.groups.insert(key, leavers);
        }
        &self.groups[key]
    }

    /// All members that are there and not leaving already; `None` if one of them stays.
    fn find_group_victims(&self, key: &GroupKey) -> Option<GroupVictims> {
        let Self { ledger, claim, demand, .. } = *self;
        let mut leavers = GroupVictims { members: Vec::new(), is_reclaimed: false };
        for uid in ledger.members_of(key) {
            let entry = &ledger.entries[uid];
            let is_there =
                !matches!(entry.phase, PodPhase::Waiting(_)) && ledger.departure_of(entry).is_none();
            if !is_there {
                continue;
            }
            // Whether the claim reaches so far depends on the node that the pod would get.
            if ledger.stays(uid, entry, demand, TenantUsage::default(), claim).is_some() {
                return None;
            }
            leavers.is_reclaimed |= claim.tenancy.bond(uid, entry) == TenantHold::Borrowed;
            let book = ledger.books.get(entry.node()?)?;
            let resident = ledger.with_eviction_cost(uid, entry, book, demand, claim)?;
            leavers.members.push((resident, self.budgets_over(entry)));
        }
        Some(leavers)
    }

    fn allowed(&self, budget: usize) -> u32 {
        let allowed = self.ledger.budgets.get(budget).map_or(0, |budget| budget.allowed);
        allowed.saturating_sub(self.spent.get(&budget).copied().unwrap_or(0))
    }
}

impl GroupVictims {
    /// As the node sees them: its own members are candidates there, the others are summed up.
    fn gang(&self, ledger: &Ledger, node: &NodeName, places: &mut CandidateIndex<'_>) -> VictimGroup {
        let mut gang = VictimGroup {
            members: self.members.iter().map(|(member, _)| member.uid.clone()).collect(),
            price: EvictionCost::default(),
            grace: Millis::default(),
            given_back: TenantUsage::default(),
            budgets: Vec::new(),
            elsewhere: Vec::new(),
        };
        let is_elsewhere = |uid: &PodUid| ledger.entries[uid].node() != Some(node);
        for (member, over) in self.members.iter().filter(|(member, _)| is_elsewhere(&member.uid)) {
            gang.price = gang.price.plus(member);
            gang.grace = gang.grace.max(member.grace);
            gang.given_back += member.given_back;
            gang.budgets.extend(over.iter().map(|budget| places.budget(*budget)));
            let at = ledger.entries[&member.uid].node().cloned();
            gang.elsewhere.extend(at.map(|at| (at, member.tenant)));
        }
        gang
    }
}

/// Where groups and budgets stand in one room.
#[derive(Default)]
struct CandidateIndex<'l> {
    gangs: BTreeMap<&'l GroupKey, u16>,
    budgets: Vec<usize>,
}

impl CandidateIndex<'_> {
    fn budget(&mut self, budget: usize) -> u16 {
        let known = self.budgets.iter().position(|known| *known == budget);
        known.unwrap_or_else(|| {
            self.budgets.push(budget);
            self.budgets.len() - 1
        }) as u16
    }
}
