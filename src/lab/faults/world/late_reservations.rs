//! Reservations that landed while another leader acted than the one that made them, as only a proxy lets them. The leader that
//! acts did not check them: it takes over none, and writes what stands instead, which is the end or a reservation of its own.

use super::super::oracle::reservation;
use super::terms::ActingTerm;
use super::victims::ShownReservation;
use super::*;

/// A leader whose watch shows such a reservation writes within this time: writes about other pods, a plan, or a list that is read
/// again may come first.
const WRITES_WITHIN: Duration = Duration::from_secs(30);
/// A client's watch that is silent is begun again after this.
pub(crate) const SILENT_FOR: Duration = Duration::from_secs(65);
/// After its end a watch is begun again, with a list where that is needed.
pub(crate) const BEGINS_AGAIN: Duration = Duration::from_secs(5);
/// A reservation that is shown of a pod counts for nothing while a Binding of it may be written, and is looked at now and then.
const LOOKED_AT: Duration = Duration::from_secs(10);

/// What replicas write of reservations, whatever comes of it.
#[derive(Default)]
pub(crate) struct ReservationWrites {
    /// When last, by the replica's client and the pod's UID.
    at: Mutex<BTreeMap<(String, String), Instant>>,
    /// The reservations that each made.
    made: Mutex<BTreeSet<(String, ShownReservation)>>,
}

impl ReservationWrites {
    pub fn note(&self, client: &str, patch: &Value) {
        let mut conditions = patch["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten();
        if !conditions.any(|one| one["type"] == "stowage.dev/Reserved") {
            return;
        }
        if let Some(message) = reservation(patch) {
            self.made
                .lock()
                .insert((client.to_owned(), ShownReservation::new(patch, &message)));
        }
        let uid = patch["metadata"]["uid"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        self.at
            .lock()
            .insert((client.to_owned(), uid), Instant::now());
    }

    fn has_since(&self, client: &str, uid: &str, since: Instant) -> bool {
        let at = self
            .at
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
            .any(|(by, made)| by == client && made.is_like(like))
    }
}

/// Late reservations about which the acting leader has not written.
#[derive(Default)]
pub(crate) struct LateReservations {
    standing: Vec<LateReservation>,
    /// Until when a replica may not be shown what happens to pods.
    hidden: BTreeMap<String, Instant>,
}

struct LateReservation {
    reservation: ShownReservation,
    pod: String,
    /// The term in which it landed.
    term: ActingTerm,
    /// It landed after this.
    looked: Instant,
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

    pub(super) fn note_late_reservation(&mut self, reservation: ShownReservation, pod: String) {
        let Some(term) = self.acting_term() else {
            return;
        };
        self.tally.late_reservations += 1;
        let (looked, since) = (self.last_look, Instant::now());
        self.late_reservations.standing.push(LateReservation {
            reservation,
            pod,
            term,
            looked,
            since,
        });
    }

    pub(super) fn check_late_reservations(&mut self, pods: &[Arc<Value>]) {
        if self.late_reservations.standing.is_empty() {
            return;
        }
        let acts = self.acting_term();
        // Of one that is being deleted the leader keeps nothing, and writes nothing.
        let staying = pods
            .iter()
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let shown: BTreeSet<ShownReservation> = staying
            .filter_map(|pod| Some(ShownReservation::new(pod, &reservation(pod)?)))
            .collect();
        let (now, settles) = (Instant::now(), self.times.latest_landing() + LOOKED_AT);
        let LateReservations {
            mut standing,
            hidden,
        } = std::mem::take(&mut self.late_reservations);
        standing.retain_mut(|late| {
            let (client, uid) = (late.term.client(), late.reservation.uid());
            if self.writes.reservations.has_since(client, uid, late.looked) {
                self.tally.late_answered += 1;
                return false;
            }
            if hidden.get(client).is_some_and(|until| *until > now) {
                late.since = late.since.max(now);
            }
            if self.writes.bindings.concern(uid) {
                late.since = now + settles;
            }
            acts.as_ref() == Some(&late.term)
                && shown.contains(&late.reservation)
                && !self.writes.reservations.has_made(client, &late.reservation)
        });
        for late in standing
            .iter()
            .filter(|late| late.since.elapsed() > WRITES_WITHIN)
        {
            let pod = &late.pod;
            self.break_with(format!(
                "{pod} shows a reservation of an earlier leader, and this one does not end it"
            ));
        }
        self.late_reservations = LateReservations { standing, hidden };
    }
}
