//! The states of all pods, and what follows from them: which pods form a group, and when reservations, soft reservations and
//! start gates expire.
//!
//! Every change of a pod goes through a method here, so that groups and deadlines always agree with the pods. What a change of
//! a pod means for nodes is answered as a [`PodMove`], and is for [`super::node_states`] to follow.

use super::copy_on_write::PodMap;
use super::pod_state::{PodPhase, PodState};
use super::waiting_pod::WaitingPod;
use crate::ids::{NodeName, PodUid};
use crate::units::Moment;
use crate::vocabulary::disruption_info::{DisruptionInfo, GroupKey};
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

/// What becomes of reservations whose deadline has passed: a replica that does not act lets them stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExpiredReservations {
    End,
    Stand,
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
            let deadlines = PodFootprint::of(&pod_state).deadlines;
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
            .map(|pod_state| PodFootprint::of(pod_state).nodes)
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
        let of = |(deadline, uid): &(Moment, PodUid)| {
            let pod_state = self.get(uid)?;
            Some((
                pod_state,
                pod_state
                    .reservation()
                    .filter(|reservation| reservation.deadline == *deadline)?,
            ))
        };
        self.deadlines
            .iter()
            .filter_map(move |due| of(due).map(|(pod, reservation)| (&due.1, pod, reservation)))
    }

    /// All pods of a group, in order of UID.
    pub(super) fn members_of(&self, group: &GroupKey) -> impl Iterator<Item = &PodUid> + use<'_> {
        self.groups.get(group).into_iter().flatten()
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = (&GroupKey, &BTreeSet<PodUid>)> {
        self.groups.iter()
    }

    /// Changes a pod; one that is not known stays unknown.
    pub(super) fn edit(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodState)) -> PodMove {
        self.change(uid, |pods| {
            if let Some(pod_state) = pods.get_mut(uid) {
                edit(pod_state);
            }
        })
    }

    /// Changes a pod, which is `new` if it was not known.
    pub(super) fn edit_or_insert(
        &mut self,
        uid: &PodUid,
        new: PodState,
        edit: impl FnOnce(&mut PodState),
    ) -> PodMove {
        self.change(uid, |pods| edit(pods.get_or_insert(uid.clone(), new)))
    }

    /// Puts a pod in place of what was known of it, except for what its disruption depends on.
    pub(super) fn put(&mut self, uid: &PodUid, mut pod_state: PodState) -> PodMove {
        self.change(uid, |pods| {
            if let Some(known) = pods.get(uid) {
                (pod_state.disruption_info, pod_state.is_unwatched) =
                    (known.disruption_info.clone(), known.is_unwatched);
            }
            pods.insert(uid.clone(), pod_state);
        })
    }

    pub(super) fn remove(&mut self, uid: &PodUid) -> PodMove {
        if let Some(disruption_info) = self.get(uid).map(|known| known.disruption_info.clone()) {
            self.leave_group(uid, &disruption_info);
        }
        self.change(uid, |pods| pods.remove(uid))
    }

    /// Notes something that has no deadline and takes nothing of any node. Answers `None` for a pod that is not known.
    pub(super) fn note<R>(
        &mut self,
        uid: &PodUid,
        note: impl FnOnce(&mut PodState) -> R,
    ) -> Option<R> {
        let pod_state = self.pods.get_mut(uid)?;
        let before = cfg!(debug_assertions).then(|| PodFootprint::of(pod_state));
        let noted = note(pod_state);
        debug_assert!(
            before == Some(PodFootprint::of(pod_state)),
            "a note moves {uid}"
        );
        Some(noted)
    }

    /// The same, of a pod that waits for a node.
    pub(super) fn note_waiting<R>(
        &mut self,
        uid: &PodUid,
        note: impl FnOnce(&mut WaitingPod) -> R,
    ) -> Option<R> {
        // A pod that is bound needs no copy of its own for that.
        self.waiting(uid)?;
        self.note(uid, |pod_state| match &mut pod_state.phase {
            PodPhase::Waiting(waiting) => Some(note(waiting)),
            _ => None,
        })?
    }

    /// What a pod shows counts from now on, its group too.
    pub(super) fn set_disruption_info(&mut self, uid: &PodUid, disruption_info: DisruptionInfo) {
        let Some(pod_state) = self.pods.get_mut(uid) else {
            return;
        };
        let before = std::mem::replace(&mut pod_state.disruption_info, Arc::new(disruption_info));
        let after = pod_state.disruption_info.clone();
        if before.group == after.group {
            return;
        }
        self.leave_group(uid, &before);
        if let Some(group) = &after.group {
            Arc::make_mut(&mut self.groups)
                .entry(group.clone())
                .or_default()
                .insert(uid.clone());
        }
    }

    /// The same pods, each changed by itself and in no way that moves it.
    pub(super) fn with_each_changed(&self, change: impl FnMut(&mut PodState)) -> Self {
        let mut changed = self.clone();
        changed.pods.change_each(change);
        changed
    }

    /// Takes the pods of `changed`, which were made of an `earlier` copy by that change. Pods that have come or changed since the
    /// copy are changed now, and those that went stay away. Answers the pods that were here.
    pub(super) fn take_changed(
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

    /// Takes out the first deadline that has passed by `now`, and answers it with its pod.
    pub(super) fn take_due(
        &mut self,
        now: Moment,
        reservations: ExpiredReservations,
    ) -> Option<(Moment, PodUid)> {
        let mut due = self
            .deadlines
            .iter()
            .take_while(|(deadline, _)| *deadline <= now);
        let is_of_reservation = |(deadline, uid): &(Moment, PodUid)| {
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
            .find(|due| reservations == ExpiredReservations::End || !is_of_reservation(due))
            .cloned()?;
        self.deadlines.remove(&due);
        Some(due)
    }

    fn change(&mut self, uid: &PodUid, edit: impl FnOnce(&mut PodMap)) -> PodMove {
        let before = self.pods.get(uid).map(PodFootprint::of).unwrap_or_default();
        edit(&mut self.pods);
        let after = self.pods.get(uid).map(PodFootprint::of).unwrap_or_default();
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

    fn leave_group(&mut self, uid: &PodUid, disruption_info: &DisruptionInfo) {
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
    pub(super) fn left(&self) -> impl Iterator<Item = &NodeName> {
        self.before.difference(&self.after)
    }

    /// Nodes on which the pod has something, in order of name.
    pub(super) fn now_on(&self) -> impl Iterator<Item = &NodeName> {
        self.after.iter()
    }

    /// All nodes that the change concerns, in order of name.
    pub(super) fn touched(&self) -> impl Iterator<Item = &NodeName> {
        self.before.union(&self.after)
    }
}

/// Where a pod has something, and when any of it expires.
#[derive(Debug, Default, PartialEq, Eq)]
struct PodFootprint {
    nodes: BTreeSet<NodeName>,
    deadlines: Vec<Moment>,
}

impl PodFootprint {
    fn of(pod_state: &PodState) -> Self {
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
