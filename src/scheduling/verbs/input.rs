//! Every change of a cluster, as one value that can be recorded and applied again.

use super::bind::BindAsked;
use super::binding::{BindingAnswered, BindingFailed, BindingRead, BindingWritten, SettlingAsked};
use super::filter::{FilterAsked, FilterDecided};
use super::namespaces::{NamespaceDeleted, NamespaceObserved, NamespacesListed};
use super::observe::{
    BudgetDeleted, BudgetObserved, BudgetsVisible, DevicesReported, EngineStartObserved,
    FilterPodObserved, FreeHostKnown, NodeDeleted, NodeImagesObserved, NodeObserved,
    PlacelessMemberObserved, PodDeleted, PodObserved, PodReleased, ReadingReported,
    ReservationGone,
};
use super::observe::{SliceDeleted, SliceObserved};
use super::observe::{StorageDeleted, StorageObserved};
use super::preempt::{LeftToPlanner, OfferedNode, PreemptAsked, PreemptDecided};
use super::preempt_device_plugin::NarrowAsked;
use super::prioritize::PrioritizeAsked;
use super::shadow::LetThrough;
use super::tick::{
    ClockAdvanced, LeadershipBegan, LeadershipEnded, PackingModelLearned, PartOfTick, PolicySet,
    TakeOveruse, Tick,
};
use super::wait::{
    AllMayBeRefused, EvictionFailed, EvictionRefused, EvictionsNotMade, EvictionsOrdered,
    ExtendReservation, LoansRecalled, MayBeRefused, NoPlacementFound, PodEvicted, PodRequeued,
    PutBack, ReleaseReservation, Reserve, ReservePlaces, ScopeReserved, TakePending,
    TakeUnknownReservations,
};
use super::{Change, Cluster};
use serde::{Deserialize, Serialize};

/// Declares what changes do to a cluster and what follows for the caller, where that is little: fields, output, effect. A change
/// that does more implements [`Change`] itself.
macro_rules! changes {
    ($cluster:ident, $($(#[$doc:meta])* $change:ident $fields:tt -> $output:ty $effect:block)+) => {
        $(impl $crate::verbs::Change for $change {
            $(#[$doc])*
            type Output = $output;

            fn apply_to(self, $cluster: &mut $crate::verbs::Cluster) -> $output {
                let $change $fields = self;
                $effect
            }
        })+
    };
}
pub(super) use changes;

/// Declares [`Input`] with one variant for each kind of change, named as its type.
macro_rules! inputs {
    ($($change:ident),+ $(,)?) => {
        /// A change of a [`Cluster`], of any kind.
        #[derive(Debug, Clone, Serialize, Deserialize)]
        pub enum Input {
            $($change(Box<$change>),)+
        }

        impl Change for Input {
            /// What follows from it shows in the cluster.
            type Output = ();

            fn apply_to(self, cluster: &mut Cluster) {
                match self {
                    $(Self::$change(change) => drop(change.apply_to(cluster)),)+
                }
            }
        }

        $(impl From<$change> for Input {
            fn from(change: $change) -> Self {
                Self::$change(Box::new(change))
            }
        })+
    };
}

impl Input {
    /// Roughly how much memory it takes.
    pub fn bytes(&self) -> usize {
        /// The memory of a change that names few objects.
        const SMALL: usize = 1 << 10;
        let offered = |offered: &[OfferedNode]| offered.iter().map(OfferedNode::bytes).sum();
        let beyond: usize = match self {
            Self::PreemptAsked(query) => offered(&query.offered),
            Self::NarrowAsked(query) => offered(&query.offered),
            Self::ReadingReported(reported) => reported.reading.approximate_bytes(),
            _ => 0,
        };
        SMALL + beyond
    }
}

inputs! {
    ClockAdvanced, Tick, PartOfTick, LeadershipBegan, LeadershipEnded, PolicySet, PackingModelLearned,
    NodeObserved, NodeDeleted, PodObserved, FilterPodObserved, PodDeleted, PodReleased, ReservationGone,
    PlacelessMemberObserved, NamespacesListed, NamespaceObserved, NamespaceDeleted, DevicesReported, ReadingReported, NodeImagesObserved, EngineStartObserved, BudgetObserved, BudgetDeleted, BudgetsVisible, FreeHostKnown, SliceObserved, SliceDeleted, StorageObserved, StorageDeleted,
    FilterAsked, FilterDecided, PrioritizeAsked, PreemptAsked, PreemptDecided, LeftToPlanner, NarrowAsked, LetThrough,
    BindAsked, BindingAnswered, BindingRead, SettlingAsked, BindingWritten, BindingFailed,
    TakePending, PutBack, PodRequeued, NoPlacementFound, AllMayBeRefused, MayBeRefused,
    Reserve, ReservePlaces, ReleaseReservation, ExtendReservation, TakeUnknownReservations,
    EvictionsOrdered, EvictionsNotMade, PodEvicted, EvictionRefused, EvictionFailed, ScopeReserved, LoansRecalled, TakeOveruse,
}
