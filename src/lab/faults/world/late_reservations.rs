//! Reservations that landed while another leader acted than the one that made them, as only a proxy lets them. The leader that
//! acts did not check them: it takes over none, and writes what stands instead, which is the end or a reservation of its own.

use super::super::oracle::shown_reservation;
use super::terms::ActingTerm;
use super::victims::ShownReservation;
use super::*;

/// A leader whose watch shows such a reservation writes within this time: writes about other pods, a plan, or a list that is read
/// again may come first.
const LEADER_WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// A client's watch that is silent is begun again after this.
pub(crate) const SILENT_WATCH_TIMEOUT: Duration = Duration::from_secs(65);
/// After its end a watch is begun again, with a list where that is needed.
pub(crate) const WATCH_RESTART_TIME: Duration = Duration::from_secs(5);
/// A reservation that is shown of a pod counts for nothing while a Binding of it may be written, and is looked at now and then.
const RECHECK_INTERVAL: Duration = Duration::from_secs(10);

/// What replicas write of reservations, whatever comes of it.
#[derive(Default)]
pub(crate) struct ReservationWrites {
    /// When last, by the replica's client and the pod's UID.
    last_written: Mutex<BTreeMap<(String, String), Instant>>,
    /// The reservations that each made.
    made: Mutex<BTreeSet<(String, ShownReservation)>>,
}

impl ReservationWrites {
    pub fn record(&self, client: &str, patch: &Value) {
        let mut conditions = patch["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten();
        if !conditions.any(|one| one["type"] == "stowage.dev/Reserved") {
            return;
        }
        if let Some(message) = shown_reservation(patch) {
            self.made
                .lock()
                .insert((client.to_owned(), ShownReservation::new(patch, &message)));
        }
        let uid = patch["metadata"]["uid"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        self.last_written
            .lock()
            .insert((client.to_owned(), uid), Instant::now());
    }

    fn has_written_since(&self, client: &str, uid: &str, since: Instant) -> bool {
        let at = self
            .last_written
            .lock()
            .get(&(client.to_owned(), uid.to_owned()))
            .copied();
        at.is_some_and(|at| at >= since)
    }

    /// Whether the replica decided the same itself.
    fn has_made(&self, client: &str, like: &ShownReservation) -> bool {
        self.made
            .lock()
            .iter()
            .any(|(by, made)| by == client && made.is_same_decision(like))
    }
}

/// Late reservations about which the acting leader has not written.
#[derive(Default)]
pub(crate) struct LateReservations {
    unanswered: Vec<LateReservation>,
    /// Until when a replica may not be shown what happens to pods.
    hidden: BTreeMap<String, Instant>,
}

struct LateReservation {
    reservation: ShownReservation,
    pod: String,
    /// The term in which it landed.
    term: ActingTerm,
    /// It landed after this.
    written_after: Instant,
    /// Since when the leader can have been shown it, and may write.
    since: Instant,
}

impl LateReservations {
    /// Whether a replica may not be shown what happens to pods.
    pub(crate) fn hides_pods_from(&self, client: &str) -> bool {
        self.hidden
            .get(client)
            .is_some_and(|until| *until > Instant::now())
    }
}

impl FaultyCluster {
    /// The replica may not be shown what happens to pods for so long.
    pub(super) fn hide_pods_from(&mut self, client: &str, lasts: Duration) {
        let until = self
            .late_reservations
            .hidden
            .entry(client.to_owned())
            .or_insert_with(Instant::now);
        *until = (*until).max(Instant::now() + lasts);
    }

    pub(super) fn record_late_reservation(&mut self, reservation: ShownReservation, pod: String) {
        let Some(term) = self.acting_term() else {
            return;
        };
        self.tally.late_reservations += 1;
        let (looked, since) = (self.last_check, Instant::now());
        self.late_reservations.unanswered.push(LateReservation {
            reservation,
            pod,
            term,
            written_after: looked,
            since,
        });
    }

    pub(super) fn check_late_reservations(&mut self, pods: &[Arc<Value>]) {
        if self.late_reservations.unanswered.is_empty() {
            return;
        }
        let acts = self.acting_term();
        // Of one that is being deleted the leader keeps nothing, and writes nothing.
        let staying = pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let shown: BTreeSet<ShownReservation> = staying
            .filter_map(|pod| Some(ShownReservation::new(pod, &shown_reservation(pod)?)))
            .collect();
        let (now, settles) = (
            Instant::now(),
            self.times.max_commit_delay() + RECHECK_INTERVAL,
        );
        let LateReservations {
            mut unanswered,
            hidden,
        } = std::mem::take(&mut self.late_reservations);
        unanswered.retain_mut(|late| {
            let (client, uid) = (late.term.client(), late.reservation.uid());
            if self
                .writes
                .reservations
                .has_written_since(client, uid, late.written_after)
            {
                self.tally.late_reservations_answered += 1;
                return false;
            }
            if hidden.get(client).is_some_and(|until| *until > now) {
                late.since = late.since.max(now);
            }
            if self.writes.bindings.is_pending(uid) {
                late.since = now + settles;
            }
            acts.as_ref() == Some(&late.term)
                && shown.contains(&late.reservation)
                && !self.writes.reservations.has_made(client, &late.reservation)
        });
        for late in unanswered
            .iter()
            .filter(|late| late.since.elapsed() > LEADER_WRITE_TIMEOUT)
        {
            let pod = &late.pod;
            self.fail(format!(
                "{pod} shows a reservation of an earlier leader, and this one does not end it"
            ));
        }
        self.late_reservations = LateReservations { unanswered, hidden };
    }
}
