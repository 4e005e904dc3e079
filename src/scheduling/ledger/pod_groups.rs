//! Which pods belong together, by what they show.

use super::Ledger;
use crate::ids::PodUid;
use crate::scheduling::vocabulary::disruption_info::{DisruptionInfo, GroupKey};
use std::collections::BTreeSet;
use std::sync::Arc;

impl Ledger {
    /// All pods of a group that are in the books, in order of UID.
    pub fn members_of(&self, group: &GroupKey) -> impl Iterator<Item = &PodUid> {
        self.groups.get(group).into_iter().flatten()
    }

    /// Groups of which any pod is in the books.
    pub fn groups(&self) -> impl Iterator<Item = (&GroupKey, &BTreeSet<PodUid>)> {
        self.groups.iter()
    }

    /// What a pod shows counts from now on.
    pub(in crate::scheduling) fn set_disruption_info(
        &mut self,
        uid: &PodUid,
        disruption_info: DisruptionInfo,
    ) {
        let Some(pod_state) = self.pod_states.get_mut(uid) else { return };
        let before = std::mem::replace(&mut pod_state.disruption_info, Arc::new(disruption_info));
        let after = pod_state.disruption_info.clone();
        if before.group == after.group {
            return;
        }
        self.leave_group(uid, &before);
        if let Some(group) = &after.group {
            Arc::make_mut(&mut self.groups).entry(group.clone()).or_default().insert(uid.clone());
        }
    }

    pub(in crate::scheduling) fn leave_group(&mut self, uid: &PodUid, disruption_info: &DisruptionInfo) {
        let Some(group) = &disruption_info.group else { return };
        let groups = Arc::make_mut(&mut self.groups);
        if let Some(members) = groups.get_mut(group) {
            members.remove(uid);
            if members.is_empty() {
                groups.remove(group);
            }
        }
    }
}
