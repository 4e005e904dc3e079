//! The states of all pods, and what follows from them: which pods form a group, and when reservations, soft reservations and
//! start gates expire.
//!
//! Every change of a pod goes through a method here, so that groups and deadlines always agree with the pods. What a change of
//! a pod means for nodes is answered as a [`PodMove`], and is for [`super::node_states`] to follow.
//!
//! Beside them are the members of groups that need no place, and so are no pods of the ledger: those that ask for no GPU, and those
//! that have succeeded. What counts is what the API server shows: after a restart, or by another replica, a group has the same
//! members. A pod that has ended and is deleted is no member any more.
//!
//! What the replicas of a workload show alike is kept once ([`SharedParts`]). Of a million pods it would be most of the ledger's
//! memory.

use super::Ledger;
use super::copy_on_write::PodMap;
use super::pod_state::{PodPhase, PodState, WaitingPod};
use crate::ids::{GpuModel, NodeName, OwnerUid, PodUid};
use crate::sharing::Interner;
use crate::units::Moment;
use crate::vocabulary::classification::PodTraits;
use crate::vocabulary::demand::{Demand, VramContainer};
use crate::vocabulary::disruption_info::{DisruptionInfo, GroupKey, PlacelessMember};
use crate::vocabulary::image::ImageId;
use crate::vocabulary::placement::Reservation;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Index;
use std::sync::Arc;

#[derive(Debug, Clone, Default)]
pub(super) struct PodStates {
    pods: PodMap,
    /// When reservations, soft reservations and start gates expire.
    deadlines: BTreeSet<(Moment, PodUid)>,
    /// The pods of each group, by what they show.
    groups: Arc<BTreeMap<GroupKey, BTreeSet<PodUid>>>,
}

/// The nodes on which a pod had something before a change, and those on which it has something now.
#[derive(Debug)]
#[must_use]
pub(super) struct PodMove {
    before: BTreeSet<NodeName>,
    after: BTreeSet<NodeName>,
}

/// What happens to reservations whose deadline has passed: a standby keeps them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpiredReservations {
    End,
    Keep,
}

impl PodStates {
    /// The pods, from which deadlines and groups follow.
    pub(super) fn export(&self) -> BTreeMap<PodUid, Arc<PodState>> {
        self.pods.shared()
    }

    pub(super) fn load(pods: BTreeMap<PodUid, Arc<PodState>>) -> Self {
        let mut loaded = Self::default();
        let mut groups: BTreeMap<GroupKey, BTreeSet<PodUid>> = BTreeMap::new();
        for (uid, pod_state) in pods {
            if let Some(group) = &pod_state.disruption_info.group {
                groups.entry(group.clone()).or_default().insert(uid.clone());
            }
            let deadlines = PodFootprint::from_pod(&pod_state).deadlines;
            loaded.deadlines.extend(
                deadlines
                    .into_iter()
                    .map(|deadline| (deadline, uid.clone())),
            );
            loaded.pods.insert_shared(uid, pod_state);
        }
        loaded.groups = Arc::new(groups);
        loaded
    }

    /// The nodes on which a pod has something, in order of name.
    pub(super) fn nodes_of(&self, uid: &PodUid) -> BTreeSet<NodeName> {
        self.get(uid)
            .map(|pod_state| PodFootprint::from_pod(pod_state).nodes)
            .unwrap_or_default()
    }

    pub(super) fn get(&self, uid: &PodUid) -> Option<&PodState> {
        self.pods.get(uid)
    }

    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid)
    }

    /// The pod, if it waits for a node.
    pub(super) fn waiting(&self, uid: &PodUid) -> Option<&WaitingPod> {
        self.get(uid)?.waiting()
    }

    pub(super) fn reservation(&self, uid: &PodUid) -> Option<&Reservation> {
        self.get(uid)?.reservation()
    }

    /// All pods, in no order.
    pub(super) fn in_no_order(&self) -> impl Iterator<Item = (&PodUid, &PodState)> {
        self.pods.in_no_order()
    }

    /// All reservations, in order of deadline.
    pub(super) fn reservations(&self) -> impl Iterator<Item = (&PodUid, &PodState, &Reservation)> {
        let due_reservation = |(deadline, uid): &(Moment, PodUid)| {
            let pod_state = self.get(uid)?;
            Some((
                pod_state,
                pod_state
                    .reservation()
                    .filter(|reservation| reservation.deadline == *deadline)?,
            ))
        };
        self.deadlines.iter().filter_map(move |due| {
            due_reservation(due).map(|(pod, reservation)| (&due.1, pod, reservation))
        })
    }

    /// All pods of a group, in order of UID.
    pub(super) fn member_uids(&self, group: &GroupKey) -> impl Iterator<Item = &PodUid> + use<'_> {
        self.groups.get(group).into_iter().flatten()
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = (&GroupKey, &BTreeSet<PodUid>)> {
        self.groups.iter()
    }

    /// Changes a pod. Does nothing if there is no such pod.
    pub(super) fn edit(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodState)) -> PodMove {
        self.change(uid, |pods| {
            if let Some(pod_state) = pods.get_mut(uid) {
                edit(pod_state);
            }
        })
    }

    /// Changes a pod, which is inserted as `new` if there is none.
    pub(super) fn edit_or_insert(
        &mut self,
        uid: &PodUid,
        new: PodState,
        edit: impl FnOnce(&mut PodState),
    ) -> PodMove {
        self.change(uid, |pods| edit(pods.get_or_insert(uid.clone(), new)))
    }

    /// Replaces a pod's state, but keeps its disruption info.
    pub(super) fn replace(&mut self, uid: &PodUid, mut pod_state: PodState) -> PodMove {
        self.change(uid, |pods| {
            if let Some(previous) = pods.get(uid) {
                (pod_state.disruption_info, pod_state.is_unwatched) =
                    (previous.disruption_info.clone(), previous.is_unwatched);
            }
            pods.insert(uid.clone(), pod_state);
        })
    }

    pub(super) fn remove(&mut self, uid: &PodUid) -> PodMove {
        if let Some(disruption_info) = self
            .get(uid)
            .map(|pod_state| pod_state.disruption_info.clone())
        {
            self.remove_from_group(uid, &disruption_info);
        }
        self.change(uid, |pods| pods.remove(uid))
    }

    /// Changes something of a pod that neither moves it to another node nor changes a deadline. `None` if there is no such pod.
    pub(super) fn edit_without_move<R>(
        &mut self,
        uid: &PodUid,
        edit: impl FnOnce(&mut PodState) -> R,
    ) -> Option<R> {
        let pod_state = self.pods.get_mut(uid)?;
        let before = cfg!(debug_assertions).then(|| PodFootprint::from_pod(pod_state));
        let result = edit(pod_state);
        debug_assert!(
            before == Some(PodFootprint::from_pod(pod_state)),
            "a note moves {uid}"
        );
        Some(result)
    }

    /// Changes something of a waiting pod that neither moves it nor changes a deadline. `None` for any other pod.
    pub(super) fn edit_waiting<R>(
        &mut self,
        uid: &PodUid,
        edit: impl FnOnce(&mut WaitingPod) -> R,
    ) -> Option<R> {
        // A pod that is bound needs no copy of its own for that.
        self.waiting(uid)?;
        self.edit_without_move(uid, |pod_state| match &mut pod_state.phase {
            PodPhase::Waiting(waiting) => Some(edit(waiting)),
            _ => None,
        })?
    }

    /// Replaces a pod's disruption info, and moves it to the group that this names.
    pub(super) fn set_disruption_info(&mut self, uid: &PodUid, disruption_info: DisruptionInfo) {
        let Some(pod_state) = self.pods.get_mut(uid) else {
            return;
        };
        let before = std::mem::replace(&mut pod_state.disruption_info, Arc::new(disruption_info));
        let after = pod_state.disruption_info.clone();
        if before.group == after.group {
            return;
        }
        self.remove_from_group(uid, &before);
        if let Some(group) = &after.group {
            Arc::make_mut(&mut self.groups)
                .entry(group.clone())
                .or_default()
                .insert(uid.clone());
        }
    }

    /// A copy in which each pod is changed by itself, in no way that moves it.
    pub(super) fn with_each_changed(&self, change: impl FnMut(&mut PodState)) -> Self {
        let mut changed = self.clone();
        changed.pods.change_each(change);
        changed
    }

    /// Installs the pods of `changed`, which `change` made from an `earlier` copy. Pods that came or changed since that copy are
    /// changed now, and pods that are gone stay gone. Returns the pods from before.
    pub(super) fn merge_prepared(
        &mut self,
        earlier: &Self,
        changed: Self,
        change: impl Fn(&mut PodState),
    ) -> PodMap {
        let mut pods = changed.pods;
        for (uid, pod_state) in self.pods.changed_since(&earlier.pods) {
            let mut pod_state = PodState::clone(pod_state);
            change(&mut pod_state);
            pods.insert(uid.clone(), pod_state);
        }
        for (uid, _) in earlier
            .pods
            .changed_since(&self.pods)
            .filter(|(uid, _)| !self.contains(uid))
        {
            pods.remove(uid);
        }
        std::mem::replace(&mut self.pods, pods)
    }

    /// Removes the first deadline that has passed by `now`, and returns it with its pod.
    pub(super) fn pop_due(
        &mut self,
        now: Moment,
        reservations: ExpiredReservations,
    ) -> Option<(Moment, PodUid)> {
        let mut due = self
            .deadlines
            .iter()
            .take_while(|(deadline, _)| *deadline <= now);
        let is_kept_reservation = |(deadline, uid): &(Moment, PodUid)| {
            self.get(uid).is_some_and(|pod_state| {
                pod_state
                    .soft_reservation()
                    .is_none_or(|soft| soft.expires > *deadline)
                    && pod_state
                        .reservation()
                        .is_some_and(|reservation| reservation.deadline <= *deadline)
            })
        };
        let due = due
            .find(|due| reservations == ExpiredReservations::End || !is_kept_reservation(due))
            .cloned()?;
        self.deadlines.remove(&due);
        Some(due)
    }

    fn change(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodMap)) -> PodMove {
        let before = self
            .pods
            .get(uid)
            .map(PodFootprint::from_pod)
            .unwrap_or_default();
        edit(&mut self.pods);
        let after = self
            .pods
            .get(uid)
            .map(PodFootprint::from_pod)
            .unwrap_or_default();
        for deadline in &before.deadlines {
            self.deadlines.remove(&(*deadline, uid.clone()));
        }
        self.deadlines.extend(
            after
                .deadlines
                .iter()
                .map(|deadline| (*deadline, uid.clone())),
        );
        PodMove {
            before: before.nodes,
            after: after.nodes,
        }
    }

    fn remove_from_group(&mut self, uid: &PodUid, disruption_info: &DisruptionInfo) {
        let Some(group) = &disruption_info.group else {
            return;
        };
        let groups = Arc::make_mut(&mut self.groups);
        if let Some(members) = groups.get_mut(group) {
            members.remove(uid);
            if members.is_empty() {
                groups.remove(group);
            }
        }
    }
}

impl Index<&PodUid> for PodStates {
    type Output = PodState;

    fn index(&self, uid: &PodUid) -> &PodState {
        self.get(uid)
            .expect("a pod that a node or another pod names has a state")
    }
}

impl PodMove {
    /// Nodes on which the pod has nothing any more, in order of name.
    pub(super) fn nodes_left(&self) -> impl Iterator<Item = &NodeName> {
        self.before.difference(&self.after)
    }

    /// Nodes on which the pod has something, in order of name.
    pub(super) fn nodes_after(&self) -> impl Iterator<Item = &NodeName> {
        self.after.iter()
    }

    /// All nodes that the change concerns, in order of name.
    pub(super) fn affected_nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.before.union(&self.after)
    }
}

/// The nodes of a pod's placement and reservations, and when these expire.
#[derive(Debug, Default, PartialEq, Eq)]
struct PodFootprint {
    nodes: BTreeSet<NodeName>,
    deadlines: Vec<Moment>,
}

impl PodFootprint {
    fn from_pod(pod_state: &PodState) -> Self {
        let soft_reservation = pod_state.soft_reservation();
        let reservation = pod_state.reservation();
        let nodes = [
            pod_state.node(),
            soft_reservation.map(|soft_reservation| &soft_reservation.node),
            reservation.map(|reservation| &reservation.node),
        ];
        let deadlines = [
            soft_reservation.map(|soft_reservation| soft_reservation.expires),
            reservation.map(|reservation| reservation.deadline),
            // An engine whose Binding may still land may begin to start at any moment.
            pod_state.starting.filter(|_| !pod_state.is_assumed()),
        ];
        Self {
            nodes: nodes.into_iter().flatten().cloned().collect(),
            deadlines: deadlines.into_iter().flatten().collect(),
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct PlacelessMembers {
    pods: Arc<BTreeMap<PodUid, PlacelessMember>>,
    groups: Arc<BTreeMap<GroupKey, BTreeSet<PodUid>>>,
}

impl PlacelessMembers {
    /// The pods, from which the groups follow.
    pub(super) fn export(&self) -> Arc<BTreeMap<PodUid, PlacelessMember>> {
        self.pods.clone()
    }

    pub(super) fn load(pods: &BTreeMap<PodUid, PlacelessMember>) -> Self {
        let mut loaded = Self::default();
        pods.iter()
            .for_each(|(uid, member)| loaded.set(uid, Some(member.clone())));
        loaded
    }

    fn set(&mut self, uid: &PodUid, member: Option<PlacelessMember>) {
        if self.pods.get(uid) == member.as_ref() {
            return;
        }
        let (pods, groups) = (
            Arc::make_mut(&mut self.pods),
            Arc::make_mut(&mut self.groups),
        );
        if let Some(before) = pods.remove(uid) {
            let members = groups.entry(before.group.clone()).or_default();
            members.remove(uid);
            if members.is_empty() {
                groups.remove(&before.group);
            }
        }
        if let Some(member) = member {
            groups
                .entry(member.group.clone())
                .or_default()
                .insert(uid.clone());
            pods.insert(uid.clone(), member);
        }
    }
}

impl Ledger {
    /// Records the pod as a group member that needs no GPU; `None` removes it.
    pub(crate) fn set_placeless_member(&mut self, uid: &PodUid, member: Option<PlacelessMember>) {
        self.placeless_members.set(uid, member);
    }

    pub fn placeless_members(&self) -> &BTreeMap<PodUid, PlacelessMember> {
        &self.placeless_members.pods
    }

    /// How many members of a group are there and ask for no GPU, and how many have succeeded. Of these only pods of an owner count
    /// that has others in the group: the rest are of an earlier run. One number of an owner's pods is one member.
    pub fn count_placeless(&self, group: &GroupKey) -> [u32; 2] {
        let PlacelessMembers { pods, groups } = &self.placeless_members;
        let mut counts = [0; 2];
        let Some(members) = groups.get(group) else {
            return counts;
        };
        let staying = self
            .members(group)
            .filter(|(_, pod_state)| !pod_state.is_leaving());
        let staying_members = staying.map(
            |(
                _,
                PodState {
                    disruption_info: info,
                    ..
                },
            )| (info.owner.as_ref(), info.index),
        );
        let mut counted: BTreeSet<(Option<&OwnerUid>, Option<u32>)> = staying_members.collect();
        for has_ended in [false, true] {
            for member in members
                .iter()
                .map(|uid| &pods[uid])
                .filter(|member| member.has_ended == has_ended)
            {
                let owner = member.owner.as_ref();
                let next = counted.range((owner, None)..).next();
                let is_of_this_run = !has_ended || next.is_some_and(|(other, _)| *other == owner);
                let is_new = is_of_this_run && counted.insert((owner, member.index));
                if is_new || is_of_this_run && member.index.is_none() {
                    counts[usize::from(has_ended)] += 1;
                }
            }
        }
        counts
    }
}

impl Ledger {
    /// All known pods of a group, in order of UID.
    pub(crate) fn member_uids(&self, group: &GroupKey) -> impl Iterator<Item = &PodUid> {
        self.pod_states.member_uids(group)
    }

    /// Whether others are evicted for the pod only together with the rest of its group, although no gate keeps it.
    pub(crate) fn is_planned_with_group(&self, uid: &PodUid) -> bool {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return false;
        };
        let info = &pod_state.disruption_info;
        let is_larger_group = info.group_size.is_some_and(|size| size > 1);
        is_larger_group
            && info
                .group
                .as_ref()
                .is_some_and(|group| group.kind.is_planned_without_gate())
    }

    /// All groups, each with its pods.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (&GroupKey, &BTreeSet<PodUid>)> {
        self.pod_states.groups()
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct SharedParts {
    traits: Interner<PodTraits>,
    models: Interner<[GpuModel]>,
    containers: Interner<[VramContainer]>,
    images: Interner<[ImageId]>,
}

impl SharedParts {
    pub(super) fn share(&mut self, demand: &mut Demand) {
        self.traits.share(&mut demand.traits);
        self.models.share(&mut demand.models);
        self.containers.share(&mut demand.containers);
        self.images.share(&mut demand.images);
    }
}
