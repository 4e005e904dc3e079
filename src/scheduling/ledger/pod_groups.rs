//! Pod groups, by what pods show.

use super::Ledger;
use crate::ids::PodUid;
use crate::vocabulary::disruption_info::GroupKey;
use std::collections::BTreeSet;

impl Ledger {
    /// All known pods of a group, in order of UID.
    pub(crate) fn members_of(&self, group: &GroupKey) -> impl Iterator<Item = &PodUid> {
        self.pod_states.members_of(group)
    }

    /// Whether others are evicted for the pod only together with the rest of its group, although no gate keeps it.
    pub(crate) fn is_planned_with_group(&self, uid: &PodUid) -> bool {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return false;
        };
        let info = &pod_state.disruption_info;
        let has_others = info.group_size.is_some_and(|size| size > 1);
        has_others
            && info
                .group
                .as_ref()
                .is_some_and(|group| group.kind.is_planned_without_gate())
    }

    /// Groups of which any pod is known.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (&GroupKey, &BTreeSet<PodUid>)> {
        self.pod_states.groups()
    }
}
