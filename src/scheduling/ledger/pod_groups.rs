//! Pod groups, by what pods show.

use super::Ledger;
use crate::ids::PodUid;
use crate::scheduling::vocabulary::disruption_info::GroupKey;
use std::collections::BTreeSet;

impl Ledger {
    /// All known pods of a group, in order of UID.
    pub(in crate::scheduling) fn members_of(&self, group: &GroupKey) -> impl Iterator<Item = &PodUid> {
        self.pod_states.members_of(group)
    }

    /// Groups of which any pod is known.
    pub(in crate::scheduling) fn groups(&self) -> impl Iterator<Item = (&GroupKey, &BTreeSet<PodUid>)> {
        self.pod_states.groups()
    }
}
