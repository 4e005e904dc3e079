//! Leadership: whether this replica may act. It must hold the Lease, whose end is checked at every write, must have listed the
//! cluster since it took the Lease, and must have seen every write of earlier leaders.
//!
//! This module decides nothing and writes nothing: `kubernetes::leader` reports the Lease, and the watches report what they
//! have listed.

use super::Clock;
use super::change_count::{ChangeCount, ChangeReceiver};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::units::{Millis, Moment};

/// Whether this replica leads.
///
/// ```text
///  Standby ──► AwaitingEarlierWrites ───────────► Leading ──► Standby
///   the Lease   until the latest commit of what   │ until the Lease's safe end,
///   is taken    an earlier leader may have sent;  │ compared at every write;
///               the cluster is listed             │ acts once the pods' watch has caught up
///                     ▲                           │
///                     └───────────────────────────┘
///                      its ledger is discarded: it awaits its own writes
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tenure {
    /// Another replica may act.
    Standby,
    /// This replica holds the Lease. Until `from`, writes of the previous holder, or of a discarded ledger, may still commit.
    AwaitingEarlierWrites { from: Moment },
    /// No other replica acts, and no other replica's write can commit any more. This replica may begin writes before `until`.
    Leading { epoch: LeaderEpoch, until: Moment },
}

impl Tenure {
    /// For a replica without a Lease, which cannot lose it.
    pub fn without_end() -> Self {
        Self::Leading {
            epoch: LeaderEpoch::new("no-lease", 0, "no-nonce"),
            until: Moment(u64::MAX),
        }
    }

    pub fn epoch(&self) -> Option<&LeaderEpoch> {
        match self {
            Self::Leading { epoch, .. } => Some(epoch),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub struct Leadership {
    clock: Clock,
    tenure: Mutex<Tenure>,
    /// The longest time from the start of a write to its commit.
    max_commit_delay: OnceLock<Duration>,
    /// The moment until which writes of a discarded ledger may commit.
    own_writes_settled_at: AtomicU64,
    /// The Lease's holder as it was last read: `NAME_SUFFIX`, where the shipped manifests make the name a pod's.
    holder: Mutex<Option<Arc<str>>>,
    /// The generation of lists: grows whenever the cluster has to be relisted. Lists of an earlier generation do not count.
    list_generation: ChangeCount,
    /// One more than the generation whose lists the ledger contains; zero before the first list.
    next_unsynced_generation: AtomicU64,
    /// How often this replica began to lead. What earlier leaders wrote is committed by then, and counts once it is in the ledger.
    takeovers: ChangeCount,
    /// The takeover up to which the ledger contains what happened to pods.
    caught_up_takeover: AtomicU64,
    stopping: AtomicBool,
}

impl Leadership {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            clock,
            tenure: Mutex::new(Tenure::Standby),
            max_commit_delay: OnceLock::new(),
            own_writes_settled_at: AtomicU64::default(),
            holder: Mutex::default(),
            list_generation: ChangeCount::default(),
            next_unsynced_generation: AtomicU64::default(),
            takeovers: ChangeCount::default(),
            caught_up_takeover: AtomicU64::default(),
            stopping: AtomicBool::default(),
        }
    }

    /// Records that all lists in the ledger began in this generation or a later one, and that the ledger contains what had happened to
    /// pods by this takeover.
    pub(super) fn record_synced(&self, list_generation: u64, takeover: u64) {
        self.caught_up_takeover
            .fetch_max(takeover, Ordering::AcqRel);
        self.next_unsynced_generation
            .fetch_max(list_generation + 1, Ordering::AcqRel);
    }

    /// Starts a new list generation: every list from here on belongs to it, and no earlier list makes the replica lead. A watch whose
    /// connection died silently may not have shown what another leader did.
    pub(crate) fn require_relist(&self) {
        self.list_generation.increment();
    }

    /// Sets the longest time from the start of a write to its commit. Has no effect a second time.
    pub(crate) fn set_max_commit_delay(&self, times: WriteTimes) {
        let _ = self.max_commit_delay.set(times.max_commit_delay());
    }

    /// The ledger is discarded, and with it the record of the Bindings that were sent and not answered. This replica acts again
    /// when none of them can take effect any more, as the successor of another leader does, and relists the cluster meanwhile.
    pub(super) fn await_own_writes(&self) {
        let mut current = self.tenure.lock();
        let delay = *self
            .max_commit_delay
            .get_or_init(|| WriteTimes::default().max_commit_delay());
        let from = self.clock.now() + Millis(delay.as_millis() as u64);
        self.own_writes_settled_at.store(from.0, Ordering::Release);
        *current = self.delayed_by_own_writes(current.clone());
        self.require_relist();
    }

    fn delayed_by_own_writes(&self, tenure: Tenure) -> Tenure {
        let from = Moment(self.own_writes_settled_at.load(Ordering::Acquire));
        match tenure {
            Tenure::Leading { .. } if self.clock.now() < from => {
                Tenure::AwaitingEarlierWrites { from }
            }
            tenure => tenure,
        }
    }

    /// Whether this replica waits until no earlier write can commit any more.
    pub fn is_awaiting_earlier_writes(&self) -> bool {
        matches!(*self.tenure.lock(), Tenure::AwaitingEarlierWrites { .. })
    }

    /// Sets the tenure. A replica that takes the Lease relists while it waits for the last landing of earlier writes; one that
    /// leads without such a wait relists then. A replica that begins to lead, or leads in another epoch, acts once its ledger
    /// contains all that was written by then. Returns whether this replica leads.
    pub(super) fn set_tenure(&self, tenure: Tenure) -> bool {
        let mut current = self.tenure.lock();
        let tenure = self.delayed_by_own_writes(tenure);
        let begins_to_lead =
            tenure.epoch().is_some() && tenure.epoch() != self.leading_epoch(&current);
        let awaits_earlier_writes = matches!(tenure, Tenure::AwaitingEarlierWrites { .. });
        let was_awaiting_earlier_writes = matches!(*current, Tenure::AwaitingEarlierWrites { .. });
        *current = tenure;
        if begins_to_lead {
            self.takeovers.increment();
        }
        if (begins_to_lead || awaits_earlier_writes) && !was_awaiting_earlier_writes {
            self.require_relist();
        }
        self.leading_epoch(&current).is_some()
    }

    /// Records the Lease's holder; `None` if it has none, or there is no Lease.
    pub fn set_holder(&self, holder: Option<&str>) {
        let mut recorded = self.holder.lock();
        if recorded.as_deref() != holder {
            *recorded = holder.map(Arc::from);
        }
    }

    /// The host name of the replica that holds the Lease, as it was last read: a pod's name, if that is one.
    pub fn leader(&self) -> Option<Arc<str>> {
        let holder = self.holder.lock().clone()?;
        Some(host_of_holder(&holder).into())
    }

    /// The epoch as which this replica acts; `None` while it does not lead.
    pub fn epoch(&self) -> Option<LeaderEpoch> {
        self.leading_epoch(&self.tenure.lock()).cloned()
    }

    fn leading_epoch<'a>(&self, tenure: &'a Tenure) -> Option<&'a LeaderEpoch> {
        match tenure {
            Tenure::Leading { epoch, until } if self.clock.now() < *until => Some(epoch),
            _ => None,
        }
    }

    /// The latest state of the Lease. The Lease may have ended since: see [`Self::is_leading`].
    pub fn tenure(&self) -> Tenure {
        self.tenure.lock().clone()
    }

    pub fn list_generation(&self) -> u64 {
        self.list_generation.get()
    }

    /// A receiver of the list generation. The watches relist whenever it changes.
    pub fn watch_list_generation(&self) -> ChangeReceiver {
        self.list_generation.subscribe()
    }

    /// How often this replica began to lead.
    pub fn takeover(&self) -> u64 {
        self.takeovers.get()
    }

    pub(crate) fn watch_takeovers(&self) -> ChangeReceiver {
        self.takeovers.subscribe()
    }

    pub fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    pub fn is_synced(&self) -> bool {
        self.next_unsynced_generation.load(Ordering::Acquire) > self.list_generation()
            && self.caught_up_takeover.load(Ordering::Acquire) >= self.takeover()
    }

    pub fn is_leading(&self) -> bool {
        self.leading_epoch(&self.tenure.lock()).is_some()
    }

    /// Whether requests are answered and writes are made.
    pub fn is_open(&self) -> bool {
        self.acting_epoch().is_ok()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Why this replica does not act, as text for operators.
    pub fn reason_not_leading(&self) -> Option<&'static str> {
        self.acting_epoch().err()
    }

    /// Why the ledger is not complete: until then no page describes the cluster.
    pub(crate) fn reason_not_synced(&self) -> Option<&'static str> {
        self.reason_not_leading().filter(|_| !self.is_synced())
    }

    /// The epoch as which this replica acts now, or why it does not act.
    pub(crate) fn acting_epoch(&self) -> Result<LeaderEpoch, &'static str> {
        // Locked before the lists are compared: leadership begins with a takeover that no watch has caught up with yet.
        let tenure = self.tenure.lock();
        if matches!(*tenure, Tenure::AwaitingEarlierWrites { .. }) {
            return Err(
                "this replica is about to lead: it waits until no earlier write can take effect",
            );
        }
        match (self.is_synced(), self.leading_epoch(&tenure)) {
            (true, Some(epoch)) => Ok(epoch.clone()),
            (false, _) => Err("the watches have not synced yet"),
            (true, None) => {
                Err("this replica does not lead: its kube-scheduler does not hold the Lease")
            }
        }
    }
}

/// The host name with which client-go begins the identity of a Lease's holder: a pod's name, if it is one's.
pub fn host_of_holder(holder: &str) -> &str {
    holder.rsplit_once('_').map_or(holder, |(host, _)| host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::units::Millis;

    fn leadership() -> Leadership {
        let clock = Clock::start(super::super::TimeSource::SYSTEM);
        Leadership::new(Clock {
            stopped_at: Some(clock.now()),
            ..clock
        })
    }

    fn leading(leadership: &Leadership, nonce: &str, lasts: u64) -> Tenure {
        let until = leadership.clock.now() + Millis::seconds(lasts);
        Tenure::Leading {
            epoch: LeaderEpoch::new("lease", 1, nonce),
            until,
        }
    }

    #[test]
    fn lists_from_before_leadership_do_not_let_a_replica_act() {
        let leadership = leadership();
        let terms = leadership.watch_list_generation();
        // The first lists are still in progress when this replica becomes leader.
        leadership.set_tenure(leading(&leadership, "a", 10));
        assert_eq!(
            (leadership.list_generation(), leadership.takeover()),
            (1, 1)
        );
        assert!(terms.has_changed());
        leadership.record_synced(0, 0);
        assert!(
            !leadership.is_open(),
            "a list that began before may show the cluster as it was then"
        );
        leadership.record_synced(1, 0);
        assert!(!leadership.is_open(), "pods as they were before");
        leadership.record_synced(1, 1);
        assert!(leadership.is_open());
        leadership.set_tenure(leading(&leadership, "a", 12));
        assert_eq!(
            (leadership.list_generation(), leadership.is_open()),
            (1, true),
            "a renewal lists nothing"
        );
        leadership.set_tenure(Tenure::Standby);
        leadership.set_tenure(leading(&leadership, "a", 12));
        assert_eq!(
            (leadership.list_generation(), leadership.is_open()),
            (2, false)
        );
        leadership.record_synced(2, 2);
        leadership.set_tenure(leading(&leadership, "b", 12));
        assert_eq!(
            (leadership.list_generation(), leadership.is_open()),
            (3, false),
            "another epoch, although it led all the time"
        );
    }

    #[test]
    fn a_new_leader_relists_once_and_acts_only_after_the_pod_watch_caught_up() {
        let leadership = leadership();
        let from = leadership.clock.now() + Millis::seconds(11);
        for _ in 0..3 {
            leadership.set_tenure(Tenure::AwaitingEarlierWrites { from });
            assert_eq!(
                (leadership.list_generation(), leadership.takeover()),
                (1, 0)
            );
        }
        leadership.record_synced(1, 0);
        assert!(leadership.is_synced() && !leadership.is_open());
        for _ in 0..3 {
            leadership.set_tenure(leading(&leadership, "a", 20));
            assert_eq!(
                (leadership.list_generation(), leadership.takeover()),
                (1, 1)
            );
            assert!(!leadership.is_synced() && !leadership.is_open());
        }
        leadership.record_synced(1, 1);
        assert!(leadership.is_open());
        leadership.set_tenure(Tenure::Standby);
        leadership.set_tenure(Tenure::AwaitingEarlierWrites { from });
        assert_eq!(leadership.list_generation(), 2, "it took the Lease again");
    }

    #[test]
    fn a_leader_whose_ledger_was_discarded_relists_and_waits_for_its_own_writes() {
        let leadership = leadership();
        leadership.set_tenure(leading(&leadership, "a", 100));
        leadership.record_synced(1, 1);
        leadership.await_own_writes();
        leadership.set_tenure(leading(&leadership, "a", 100));
        assert!(
            leadership.is_awaiting_earlier_writes(),
            "it holds the Lease all the time"
        );
        leadership.record_synced(leadership.list_generation(), leadership.takeover());
        assert_eq!(
            (leadership.list_generation(), leadership.is_open()),
            (2, false)
        );
        let landed = leadership.clock.now() + Millis::seconds(16);
        let leadership = Leadership {
            clock: Clock {
                stopped_at: Some(landed),
                ..leadership.clock
            },
            ..leadership
        };
        leadership.set_tenure(leading(&leadership, "a", 100));
        assert_eq!(
            (leadership.list_generation(), leadership.takeover()),
            (2, 2)
        );
        assert!(!leadership.is_open());
        leadership.record_synced(2, 2);
        assert!(leadership.is_open());
    }

    #[test]
    fn leadership_and_list_generation_are_read_together() {
        let leadership = leadership();
        let (is_over, seen) = (AtomicBool::default(), AtomicU64::default());
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Acquire) {
                        let is_open =
                            leadership.is_open() || leadership.reason_not_leading().is_none();
                        seen.fetch_add(u64::from(is_open), Ordering::AcqRel);
                    }
                });
            }
            for nonce in 0..20_000 {
                leadership.set_tenure(Tenure::Standby);
                leadership.record_synced(leadership.list_generation(), leadership.takeover());
                // Its term begins with it, and nothing is listed in that.
                leadership.set_tenure(leading(&leadership, &nonce.to_string(), 10));
            }
            is_over.store(true, Ordering::Release);
        });
        assert_eq!(seen.into_inner(), 0);
    }

    #[test]
    fn leadership_ends_with_the_lease_and_not_with_the_next_read_of_it() {
        let leadership = leadership();
        leadership.set_tenure(leading(&leadership, "a", 10));
        leadership.record_synced(leadership.list_generation(), leadership.takeover());
        assert!(leadership.is_open() && leadership.epoch().is_some());
        let later = Clock {
            stopped_at: Some(leadership.clock.now() + Millis::seconds(10)),
            ..leadership.clock
        };
        let leadership = Leadership {
            clock: later,
            ..leadership
        };
        assert!(!leadership.is_open() && leadership.epoch().is_none());
        assert!(
            leadership
                .reason_not_leading()
                .unwrap()
                .contains("does not lead")
        );
    }

    #[test]
    fn a_replica_awaiting_earlier_writes_gives_that_as_its_reason() {
        let leadership = leadership();
        let from = leadership.clock.now() + Millis::seconds(3);
        for synced in [false, true] {
            leadership.set_tenure(Tenure::AwaitingEarlierWrites { from });
            assert!(!leadership.is_open() && leadership.epoch().is_none());
            assert!(
                leadership
                    .reason_not_leading()
                    .unwrap()
                    .contains("can take effect"),
                "synced: {synced}"
            );
            leadership.record_synced(leadership.list_generation(), leadership.takeover());
        }
    }
}
