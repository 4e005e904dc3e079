//! Members of groups that need no place, and so are no pods of the ledger: those that ask for no GPU, and those that have succeeded.
//!
//! What counts is what the API server shows: after a restart, or by another replica, a group has the same members. A pod that has
//! ended and is deleted is no member any more.

use super::{Ledger, PodState};
use crate::ids::{OwnerUid, PodUid};
use crate::vocabulary::disruption_info::{GroupKey, PlacelessMember};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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
    /// The pod as a member that needs no place; `None` if it is none.
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
        let known = staying.map(
            |(
                _,
                PodState {
                    disruption_info: info,
                    ..
                },
            )| (info.owner.as_ref(), info.index),
        );
        let mut known: BTreeSet<(Option<&OwnerUid>, Option<u32>)> = known.collect();
        for has_ended in [false, true] {
            for member in members
                .iter()
                .map(|uid| &pods[uid])
                .filter(|member| member.has_ended == has_ended)
            {
                let owner = member.owner.as_ref();
                let next = known.range((owner, None)..).next();
                let is_of_this_run = !has_ended || next.is_some_and(|(other, _)| *other == owner);
                let is_new = is_of_this_run && known.insert((owner, member.index));
                if is_new || is_of_this_run && member.index.is_none() {
                    counts[usize::from(has_ended)] += 1;
                }
            }
        }
        counts
    }
}
