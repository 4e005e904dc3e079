//! Which pods the reader of an explanation may see. Of the others it has sums, and no names.

use crate::ids::PodKey;

/// Stands for every pod that the reader may not see.
const OTHERS: &str = "pods of others";

/// The pods that a reader may see, of whom it is known that it may see the explained one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PodAccess {
    #[default]
    All,
    /// Those of its namespace.
    Namespace,
    /// That one.
    Own,
}

impl PodAccess {
    pub fn shows(self, own: &PodKey, other: &PodKey) -> bool {
        match self {
            Self::All => true,
            Self::Namespace => own.namespace == other.namespace,
            Self::Own => own == other,
        }
    }

    pub fn name(self, own: &PodKey, other: &PodKey) -> String {
        if self.shows(own, other) { other.to_string() } else { OTHERS.into() }
    }

    /// The names of these pods; all that may not be seen have one together.
    pub(super) fn names<'a>(self, own: &PodKey, others: impl IntoIterator<Item = &'a PodKey>) -> Vec<String> {
        let (shown, hidden): (Vec<_>, Vec<_>) = others.into_iter().partition(|other| self.shows(own, other));
        let hidden = hidden.first().map(|_| OTHERS.to_owned());
        shown.into_iter().map(ToString::to_string).chain(hidden).collect()
    }
}
