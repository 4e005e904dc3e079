//! Which pods the reader of an explanation may see. Of the others it has sums, and no names.

use crate::ids::PodKey;
use crate::units::plural;
use std::collections::BTreeSet;

/// The pods that a reader may see, of whom it is known that it may see the explained one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PodAccess {
    #[default]
    All,
    /// The pods of the explained pod's namespace.
    Namespace,
    /// The explained pod only.
    Own,
}

impl PodAccess {
    pub fn may_see(self, explained: &PodKey, other: &PodKey) -> bool {
        match self {
            Self::All => true,
            Self::Namespace => explained.namespace == other.namespace,
            Self::Own => explained == other,
        }
    }

    /// The names of these pods, after the number of those that may not be seen.
    pub(super) fn names<'a>(
        self,
        own: &PodKey,
        others: impl IntoIterator<Item = &'a PodKey>,
    ) -> Vec<String> {
        let each: BTreeSet<&PodKey> = others.into_iter().collect();
        let (shown, hidden): (Vec<_>, Vec<_>) =
            each.into_iter().partition(|other| self.may_see(own, other));
        let hidden =
            (!hidden.is_empty()).then(|| format!("{} of others", plural(hidden.len(), "pod")));
        hidden
            .into_iter()
            .chain(shown.into_iter().map(ToString::to_string))
            .collect()
    }
}
