//! Reservations that landed while another leader acted than the one that made them, as only a proxy lets them. The leader that acts
//! did not check them: it takes over none, and asks the API server for the end of each.

use super::super::oracle::reservation;
use super::terms::ActingTerm;
use super::victims::ShownReservation;
use super::*;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::Response;

/// A leader that is shown such a reservation asks for its end within this time: writes about other pods, a plan, or a list that is read
/// again may come first.
const ASKED_WITHIN: Duration = Duration::from_secs(30);
/// The leader may be shown it before the oracle looks.
const LOOKS_APART: Duration = Duration::from_secs(5);
/// A silent watch is noticed after a minute.
pub const WATCH_ENDS: Duration = Duration::from_secs(60);

/// Who asked for the end of a pod's reservation, and when last, whatever came of it: by the replica's client and the pod's name.
#[derive(Default)]
pub struct EndsAskedFor(Mutex<BTreeMap<(String, String), Instant>>);

impl EndsAskedFor {
    /// The API server as a replica sees it, watched.
    pub fn watching(self: &Arc<Self>, client: &str, server: axum::Router) -> axum::Router {
        let (this, client) = (self.clone(), client.to_owned());
        server.layer(from_fn(move |request: Request, next: Next| {
            let (this, client) = (this.clone(), client.clone());
            async move { this.pass(client, request, next).await }
        }))
    }

    async fn pass(&self, client: String, request: Request, next: Next) -> Response {
        let Some(pod) = pod_of_status(request.uri().path()).map(str::to_owned) else {
            return next.run(request).await;
        };
        let (head, body) = request.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap_or_default();
        if ends_reservation(&bytes) {
            self.0.lock().insert((client, pod), Instant::now());
        }
        next.run(Request::from_parts(head, Body::from(bytes))).await
    }

    fn has_since(&self, client: &str, pod: &str, since: Instant) -> bool {
        let asked = self.0.lock().get(&(client.to_owned(), pod.to_owned())).copied();
        asked.is_some_and(|at| at + LOOKS_APART >= since)
    }
}

fn pod_of_status(path: &str) -> Option<&str> {
    let (_, pod) = path.strip_suffix("/status")?.split_once("/pods/")?;
    Some(pod)
}

fn ends_reservation(patch: &[u8]) -> bool {
    let patch: Value = serde_json::from_slice(patch).unwrap_or_default();
    let mut conditions = patch["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|one| one["type"] == "stowage.dev/Reserved" && one["status"] == "False")
}

/// One of which the leader has not asked for the end.
pub struct LateReservation {
    reservation: ShownReservation,
    pod: String,
    /// In which it landed.
    term: ActingTerm,
    /// Since when the leader can have been shown it.
    since: Instant,
}

impl FaultyCluster {
    /// The replica may not be shown what happens to pods for so long.
    pub(super) fn hide_pods_from(&mut self, client: &str, lasts: Duration) {
        let until = self.hidden.entry(client.to_owned()).or_insert_with(Instant::now);
        *until = (*until).max(Instant::now() + lasts);
    }

    pub(super) fn note_late_reservation(&mut self, reservation: ShownReservation, pod: String) {
        let Some(term) = self.acting_term() else { return };
        self.late_reservations.push(LateReservation { reservation, pod, term, since: Instant::now() });
    }

    pub(super) fn judge_late_reservations(&mut self, pods: &[Arc<Value>]) {
        if self.late_reservations.is_empty() {
            return;
        }
        let acts = self.acting_term();
        let shown: BTreeSet<ShownReservation> =
            pods.iter().filter_map(|pod| Some(ShownReservation::new(pod, &reservation(pod)?))).collect();
        let now = Instant::now();
        let (hidden, asked) = (&self.hidden, &self.ends_asked_for);
        self.late_reservations.retain_mut(|late| {
            if hidden.get(late.term.client()).is_some_and(|until| *until > now) {
                late.since = now;
            }
            acts.as_ref() == Some(&late.term)
                && shown.contains(&late.reservation)
                && !asked.has_since(late.term.client(), &late.pod, late.since)
        });
        let stands = |late: &&LateReservation| late.since.elapsed() > ASKED_WITHIN;
        let standing: Vec<String> =
            self.late_reservations.iter().filter(stands).map(|late| late.pod.clone()).collect();
        for pod in standing {
            self.break_with(format!(
                "{pod} shows a reservation of an earlier leader, and this one does not end it"
            ));
        }
    }
}
