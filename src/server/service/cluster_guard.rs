//! The guard of the cluster's lock, through which every change goes, so that it can be recorded. A panic under the lock discards
//! the cluster's state.
//!
//! A panic may leave a change half made, and no later check can find out which half. The pods on the API server are consistent:
//! leadership closes, and everything is relisted into an empty state; if Bindings are under way, leadership opens only once they
//! have landed. This module does not know what else the state contains.

use super::{ServerState, Tenure};
use parking_lot::MutexGuard;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use stowage_recording::answer::AnsweredInput;
use stowage_recording::entry::Gap;
use stowage_scheduling::control_loop::{ClusterAccess, LockedCluster};
#[cfg(test)]
use stowage_scheduling::ledger::PODS_LOOKED_AT;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::tick::ClockAdvanced;
use stowage_scheduling::verbs::{Change, Cluster, Input};
use tracing::{error, info};

/// The locked cluster. Take it for one call or a few; never across an await.
pub struct ClusterGuard<'a> {
    cluster: MutexGuard<'a, Cluster>,
    state: &'a ServerState,
    /// Whether the thread was already unwinding when it took the lock; then the panic did not interrupt a change under this
    /// lock.
    was_panicking: bool,
    #[cfg(test)]
    visited_before: usize,
}

#[cfg(debug_assertions)]
thread_local! {
    /// Guards that this thread holds.
    static GUARDS_HELD: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
thread_local! {
    /// How many pods this thread has visited under the lock.
    pub(crate) static PODS_VISITED_UNDER_LOCK: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// In a debug build: panics if this thread holds the lock. Call it where something begins that takes time. A guard that is a
/// temporary lives until the end of its statement, which is easily overlooked.
pub(crate) fn assert_cluster_unlocked() {
    #[cfg(debug_assertions)]
    assert_eq!(
        GUARDS_HELD.get(),
        0,
        "the ledger is locked while something is done that takes time"
    );
}

impl<'a> ClusterGuard<'a> {
    pub(super) fn new(state: &'a ServerState, cluster: MutexGuard<'a, Cluster>) -> Self {
        #[cfg(debug_assertions)]
        GUARDS_HELD.set(GUARDS_HELD.get() + 1);
        Self {
            cluster,
            state,
            was_panicking: std::thread::panicking(),
            #[cfg(test)]
            visited_before: PODS_LOOKED_AT.get(),
        }
    }

    /// Applies a change and records it. The only way in which the cluster changes.
    pub fn apply<C: Change + Clone + Into<Input>>(&mut self, change: C) -> C::Output {
        if let Some(tap) = self.state.recording_tap.get() {
            tap.record_input(|| change.clone().into());
        }
        self.cluster.apply(change)
    }

    /// Applies a change and records `recorded` in its place: the input from which the rest of the change follows.
    pub(super) fn apply_recorded_as<C: Change>(
        &mut self,
        change: C,
        recorded: impl FnOnce(&C) -> Input,
    ) -> C::Output {
        if let Some(tap) = self.state.recording_tap.get() {
            tap.record_input(|| recorded(&change));
        }
        self.cluster.apply(change)
    }

    /// Lets a request that waits for the lock have it now; call it between two of many changes. Otherwise this thread, which is
    /// awake, would take the lock again first.
    pub(crate) fn yield_to_waiters(&mut self) {
        MutexGuard::bump(&mut self.cluster);
    }

    /// Sets the cluster's time.
    pub(super) fn set_time(&mut self, now: Moment) {
        if let Some(tap) = self.state.recording_tap.get() {
            tap.set_time(now);
        }
        self.cluster.apply(ClockAdvanced(now));
    }

    /// The input that was recorded last, to record its answer by; `None` if it is not recorded.
    pub fn last_recorded_input(&self) -> Option<AnsweredInput> {
        let number = self.state.recording_tap.get()?.last_recorded()?;
        Some(AnsweredInput {
            number,
            generation: self.cluster.ledger().generation(),
        })
    }

    /// Sends a copy of the state to the recorder, from which a replay can start.
    pub(super) fn record_checkpoint(&self) {
        if let Some(tap) = self.state.recording_tap.get() {
            tap.record_checkpoint(self.cluster.copy());
        }
    }
}

/// Access of the control loop to the locked cluster.
pub(crate) struct SharedCluster(pub Arc<ServerState>);

impl ClusterAccess for SharedCluster {
    type Locked<'a> = ClusterGuard<'a>;

    fn lock(&mut self) -> ClusterGuard<'_> {
        self.0.cluster()
    }
}

impl LockedCluster for ClusterGuard<'_> {
    fn apply<C: Change + Clone + Into<Input>>(&mut self, change: C) -> C::Output {
        ClusterGuard::apply(self, change)
    }

    fn yield_lock(&mut self) {
        ClusterGuard::yield_to_waiters(self);
    }
}

impl Deref for ClusterGuard<'_> {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

/// For reads that bring the snapshot up to date. A change that goes around [`ClusterGuard::apply`] is missing in a recording, and
/// shows when it is replayed: the next checkpoint is another.
impl DerefMut for ClusterGuard<'_> {
    fn deref_mut(&mut self) -> &mut Cluster {
        &mut self.cluster
    }
}

impl Drop for ClusterGuard<'_> {
    fn drop(&mut self) {
        #[cfg(debug_assertions)]
        GUARDS_HELD.set(GUARDS_HELD.get() - 1);
        #[cfg(test)]
        PODS_VISITED_UNDER_LOCK
            .set(PODS_VISITED_UNDER_LOCK.get() + PODS_LOOKED_AT.get() - self.visited_before);
        if !std::thread::panicking() || self.was_panicking {
            return;
        }
        // Leadership closes first, so that no reader mistakes the empty state for the cluster.
        match self.cluster.unsettled_bindings() {
            0 => self.state.leadership.require_relist(),
            _ => self.state.leadership.await_own_writes(),
        }
        *self.cluster = self.cluster.emptied();
        if let Some(tap) = self.state.recording_tap.get() {
            tap.interrupt(Gap::Discarded);
        }
        self.set_time(self.state.now());
        self.state.metrics.ledgers_discarded.inc();
        error!(
            "a panic while the ledger was locked: the ledger is discarded, and the cluster is relisted"
        );
        if let Tenure::AwaitingEarlierWrites { from } = self.state.leadership.tenure() {
            let seconds = from.since(self.state.now()).0.div_ceil(1000);
            info!(
                seconds,
                "this replica waits until no earlier write can take effect"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use stowage_kubernetes_objects::port::WriteTimes;
    use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation};
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::testkit::{demand_of, h100, key, node, uid};
    use stowage_scheduling::units::Millis;
    use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked};
    use stowage_scheduling::verbs::observe::{DevicesReported, NodeObserved, PodObserved};
    use stowage_scheduling::vocabulary::demand::Sharing;
    use stowage_scheduling::vocabulary::node::NodeKind;

    fn synced() -> std::sync::Arc<ServerState> {
        let state = ServerState::with_stopped_clock(Policy::default());
        state.lead_from_the_start();
        state
    }

    fn add_node(cluster: &mut ClusterGuard<'_>) {
        cluster.apply(NodeObserved::new(node("a"), NodeKind::Stowage));
    }

    #[test]
    fn a_panic_under_the_lock_ends_leadership_and_discards_the_ledger() {
        let state = synced();
        let terms = state.leadership.watch_list_generation();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let mut cluster = state.cluster();
            add_node(&mut cluster);
            panic!("in the middle of a change");
        }));
        assert!(result.is_err());
        assert!(
            !state.leadership.is_synced(),
            "nobody is answered from half a change"
        );
        assert!(terms.has_changed(), "everything is relisted");
        assert_eq!(state.cluster().ledger().totals().nodes, 0);
        assert_eq!(state.cluster().ledger().now(), state.now());
        assert_eq!(state.metrics.ledgers_discarded.get(), 1);
    }

    /// The pod is placed, and its Binding is about to be written.
    fn begin_binding(cluster: &mut ClusterGuard<'_>) {
        add_node(cluster);
        cluster
            .apply(DevicesReported {
                node: node("a"),
                devices: [h100("a", 0)].into(),
                are_all: true,
            })
            .unwrap();
        cluster.apply(PodObserved(PodObservation {
            uid: uid("x"),
            key: key("x"),
            demand: demand_of(40 << 30, 1, Sharing::Shared, 0),
            state: ObservedPhase::Waiting(ObservedWaiting::default()),
            observed: None,
        }));
        let bound = cluster.apply(BindAsked {
            uid: uid("x"),
            key: key("x"),
            node: node("a"),
        });
        assert!(matches!(bound, Ok(BindAnswer::Write(_))), "{bound:?}");
    }

    #[test]
    fn after_a_panic_a_replica_waits_until_no_binding_of_the_discarded_ledger_can_commit() {
        let after_a_panic = |before: fn(&mut ClusterGuard<'_>)| {
            let state = synced();
            before(&mut state.cluster());
            let generation = state.cluster().ledger().generation();
            let result = catch_unwind(AssertUnwindSafe(|| {
                let _cluster = state.cluster();
                panic!("in the middle of a change");
            }));
            assert!(result.is_err());
            let is_new = state.cluster().ledger().generation() > generation;
            assert!(
                is_new,
                "what was kept of another state is not taken for this one"
            );
            // It holds the Lease all the time, and has listed everything again.
            state.lead_from_the_start();
            state
        };
        assert!(
            after_a_panic(add_node).leadership.is_open(),
            "nothing was under way"
        );
        let state = after_a_panic(begin_binding);
        assert!(
            !state.leadership.is_open(),
            "the pod may be bound on a GPU that the lists show free"
        );
        let from =
            state.now() + Millis(WriteTimes::default().max_commit_delay().as_millis() as u64);
        assert_eq!(
            state.leadership.tenure(),
            Tenure::AwaitingEarlierWrites { from }
        );
    }

    #[test]
    fn a_ledger_locked_during_an_unrelated_unwind_is_kept() {
        struct LooksAtTheEnd<'a>(&'a ServerState);
        impl Drop for LooksAtTheEnd<'_> {
            fn drop(&mut self) {
                add_node(&mut self.0.cluster());
            }
        }
        let state = synced();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let _looks = LooksAtTheEnd(&state);
            panic!("elsewhere");
        }));
        assert!(result.is_err());
        assert!(state.leadership.is_synced());
        assert_eq!(state.cluster().ledger().totals().nodes, 1);
    }
}
