//! The cluster as it changes: one task makes the events for all clients that watch, and keeps sums of the last hour.
//!
//! While clients watch, a view of the cluster is taken at most twice a second and compared with the one before; what differs is
//! rendered once, and all clients share it. While none does, only the sums are made. On a large cluster the task
//! pauses for longer, so that it never takes more than a tenth of a core. A client that does not keep up is sent the whole again
//! and costs no memory beyond that.

use crate::service::{ActivityEntry, ServerState, WorkKind};
use bytes::Bytes;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use stowage_scheduling::explaining::fleet::Fleet;
use stowage_scheduling::explaining::fleet::changes::FleetChanges;
use stowage_scheduling::explaining::fleet::history::{FleetHistory, FleetSums};
use stowage_scheduling::policy::Mode;
use stowage_scheduling::units::Millis;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Time between two views: a person notices no difference between this and less.
const VIEW_INTERVAL: Duration = Duration::from_millis(500);
/// The pause after a view as a multiple of its CPU time, so that the task takes at most a tenth of a core.
const PAUSE_FACTOR: u32 = 9;
/// After this long something is sent although nothing changed, so that a client knows that the connection lives.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Changes that a client may lag behind before it is sent the whole: eight seconds' worth.
const MAX_CHANGES: usize = 16;
/// How long changes are made after the last client has gone: longer than a client takes to connect again.
const UNWATCHED_GRACE: Duration = Duration::from_secs(10);
/// Sums of an hour, one every ten seconds: more than a plot has pixels for, and some ten kilobytes.
const HISTORY_LENGTH: usize = 360;
/// Time between two sums of the history: with its length they make an hour.
const HISTORY_INTERVAL: Millis = Millis::seconds(10);
/// Clients that are sent the whole at one time; of a large cluster it is some ten megabytes.
const MAX_CONCURRENT_WHOLES: usize = 2;

pub struct LiveFleet {
    /// The latest view; `None` while no client watches.
    latest: watch::Sender<Option<Arc<PublishedFleet>>>,
    watchers: AtomicUsize,
    watch_started: Notify,
    history: Mutex<FleetHistory>,
    /// Distinguishes this process' events from those of another.
    source: String,
    is_running: AtomicBool,
    pub(super) stopped: CancellationToken,
    pub(super) whole_slots: Arc<Semaphore>,
}

impl Default for LiveFleet {
    fn default() -> Self {
        Self {
            latest: watch::Sender::default(),
            watchers: AtomicUsize::default(),
            watch_started: Notify::new(),
            history: Mutex::new(FleetHistory::new(HISTORY_LENGTH, HISTORY_INTERVAL)),
            source: format!("{:x}", jiff::Timestamp::now().as_millisecond()),
            is_running: AtomicBool::default(),
            stopped: CancellationToken::new(),
            whole_slots: Arc::new(Semaphore::new(MAX_CONCURRENT_WHOLES)),
        }
    }
}

/// A view of the cluster, and how clients that have an earlier one get there.
pub struct PublishedFleet {
    pub number: u64,
    fleet: Fleet,
    status: ReplicaStatus,
    /// The number of the latest activity that has been sent.
    activity: u64,
    sent: Instant,
    /// Rendered events, each with the number of the view that it leads to.
    changes: VecDeque<(u64, Bytes)>,
    whole: OnceLock<Bytes>,
}

/// The status of this replica, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ReplicaStatus {
    leading: bool,
    /// Why it does not lead, or why what is shown may be incomplete.
    state: Option<String>,
    mode: Mode,
    policy: String,
    version: &'static str,
}

impl ReplicaStatus {
    fn new(state: &ServerState) -> Self {
        let (leadership, policy) = (&state.leadership, state.policy());
        let silence = state.api_server_contact.unreachable_for(state.now());
        let silent = silence
            .map(|silence| format!("the API server has not answered for {} s", silence.0 / 1000));
        Self {
            leading: leadership.is_leading(),
            state: silent.or_else(|| leadership.reason_not_leading().map(str::to_owned)),
            mode: policy.mode,
            policy: policy.digest.to_string(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}

/// Everything: the first event of a client.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WholeEvent<'a> {
    fleet: &'a Fleet,
    #[serde(rename = "standing")]
    status: &'a ReplicaStatus,
    history: VecDeque<FleetSums>,
    activity: Vec<Arc<ActivityEntry>>,
}

/// The changes since the previous event.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ChangesEvent<'a> {
    fleet: &'a FleetChanges,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "standing")]
    status: Option<&'a ReplicaStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sums: Option<&'a FleetSums>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    activity: Vec<Arc<ActivityEntry>>,
}

/// A client that watches: changes are computed as long as one exists.
pub struct WatchGuard(Arc<LiveFleet>);

impl Drop for WatchGuard {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::AcqRel);
    }
}

impl LiveFleet {
    pub fn watch(self: &Arc<Self>) -> (WatchGuard, watch::Receiver<Option<Arc<PublishedFleet>>>) {
        self.watchers.fetch_add(1, Ordering::AcqRel);
        self.watch_started.notify_one();
        (WatchGuard(self.clone()), self.latest.subscribe())
    }

    /// The number of the view that a client has, by the id of its last event; `None` if that is not of this process.
    pub fn parse_event_id(&self, id: &str) -> Option<u64> {
        id.strip_prefix(&*self.source)?
            .strip_prefix('-')?
            .parse()
            .ok()
    }

    /// Makes events until `stop`. Clients' streams end then, too.
    pub async fn run(self: Arc<Self>, state: Arc<ServerState>, stop: CancellationToken) {
        if self.is_running.swap(true, Ordering::AcqRel) {
            return stop.cancelled().await;
        }
        stop.run_until_cancelled(self.make_events(state)).await;
        self.stopped.cancel();
        self.is_running.store(false, Ordering::Release);
    }

    async fn make_events(self: &Arc<Self>, state: Arc<ServerState>) {
        let (mut last_number, mut last_watched) = (0, None::<Instant>);
        let mut pause = Duration::ZERO;
        loop {
            let is_watched = self.watchers.load(Ordering::Acquire) > 0;
            if is_watched {
                last_watched = Some(Instant::now());
            }
            if last_watched.is_some_and(|watched| watched.elapsed() < UNWATCHED_GRACE) {
                tokio::time::sleep(pause).await;
            } else {
                self.latest.send_replace(None);
                let due =
                    Duration::from_millis(self.history.lock().due_in(state.now()).0).max(pause);
                tokio::select! {
                    () = tokio::time::sleep(due) => {}
                    () = self.watch_started.notified() => {}
                }
            }
            let (live, state, heavy_work) = (self.clone(), state.clone(), state.heavy_work.clone());
            let (before, began) = (self.latest.borrow().clone(), Instant::now());
            let is_watched = self.watchers.load(Ordering::Acquire) > 0 || before.is_some();
            let round = move || {
                let began = thread_cpu_time();
                let published =
                    live.take_view(&state, before.as_deref(), last_number + 1, is_watched);
                (published, thread_cpu_time() - began)
            };
            let took = match heavy_work.spawn_in_background(WorkKind::Page, round).await {
                Ok((published, took)) => {
                    if let Some(published) = published {
                        last_number = published.number;
                        self.latest.send_replace(Some(Arc::new(published)));
                    }
                    took
                }
                // A view that fails is tried again; the log has the panic.
                Err(_) => HEARTBEAT_INTERVAL / PAUSE_FACTOR,
            };
            pause = VIEW_INTERVAL
                .saturating_sub(began.elapsed())
                .max(took * PAUSE_FACTOR);
        }
    }

    /// Takes a view, and compares it with the one before. `None` if there is nothing to send.
    fn take_view(
        &self,
        state: &ServerState,
        before: Option<&PublishedFleet>,
        number: u64,
        is_watched: bool,
    ) -> Option<PublishedFleet> {
        if !is_watched {
            // A statement of its own, so that the history is not locked meanwhile.
            let sums = super::current_sums(state);
            self.history.lock().record(sums);
            return None;
        }
        let (fleet, status) = (super::current_fleet(state), ReplicaStatus::new(state));
        let sums = FleetSums::from_fleet(&fleet);
        let is_kept = self.history.lock().record(sums.clone());
        let sent = Instant::now();
        let Some(before) = before else {
            let activity = state
                .activity
                .after(0)
                .last()
                .map_or(0, |entry| entry.number);
            let (changes, whole) = (VecDeque::new(), OnceLock::new());
            return Some(PublishedFleet {
                number,
                fleet,
                status,
                activity,
                sent,
                changes,
                whole,
            });
        };
        let changes = FleetChanges::between(&before.fleet, &fleet);
        let activity = state.activity.after(before.activity);
        let latest = activity
            .last()
            .map_or(before.activity, |entry| entry.number);
        let event = ChangesEvent {
            fleet: &changes,
            status: (status != before.status).then_some(&status),
            sums: is_kept.then_some(&sums),
            activity,
        };
        let is_empty = changes.is_empty()
            && event.status.is_none()
            && event.sums.is_none()
            && event.activity.is_empty();
        if is_empty && before.sent.elapsed() < HEARTBEAT_INTERVAL {
            return None;
        }
        let rendered = self.render_event("changes", number, &event);
        let mut recent_changes = before.changes.clone();
        recent_changes.push_back((number, rendered));
        if recent_changes.len() > MAX_CHANGES {
            recent_changes.pop_front();
        }
        let whole = OnceLock::new();
        Some(PublishedFleet {
            number,
            fleet,
            status,
            activity: latest,
            sent,
            changes: recent_changes,
            whole,
        })
    }

    /// Everything as one event; rendered once for each view.
    pub(super) fn whole(&self, state: &ServerState, published: &PublishedFleet) -> Bytes {
        let render = || {
            let event = WholeEvent {
                fleet: &published.fleet,
                status: &published.status,
                history: self.history.lock().sums().clone(),
                activity: state.activity.after(0),
            };
            self.render_event("whole", published.number, &event)
        };
        published.whole.get_or_init(render).clone()
    }

    fn render_event(&self, name: &str, number: u64, event: &impl Serialize) -> Bytes {
        let mut text = format!("id: {}-{number}\nevent: {name}\ndata: ", self.source).into_bytes();
        serde_json::to_writer(&mut text, event).expect("an event is plain data");
        text.extend_from_slice(b"\n\n");
        text.into()
    }
}

/// The CPU time of this thread, without the time in which it waited for a core.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

impl PublishedFleet {
    /// The events since the view of that number; `None` if some are no longer stored.
    pub(crate) fn changes_since(&self, number: u64) -> Option<Vec<Bytes>> {
        if number == self.number {
            return Some(Vec::new());
        }
        let first = self
            .changes
            .iter()
            .position(|(leads_to, _)| *leads_to == number + 1)?;
        Some(
            self.changes
                .range(first..)
                .map(|(_, event)| event.clone())
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_scheduling::policy::Policy;

    #[test]
    fn a_client_gets_the_changes_it_lacks_and_one_that_lacks_more_gets_the_whole() {
        let (state, live) = (
            ServerState::with_stopped_clock(Policy::default()),
            LiveFleet::default(),
        );
        let mut published = live.take_view(&state, None, 1, true).unwrap();
        assert!(
            live.take_view(&state, Some(&published), 2, true).is_none(),
            "nothing changed"
        );
        for number in 2..=MAX_CHANGES as u64 + 2 {
            // Something to tell in each.
            state.leadership.set_stopping();
            published.status.leading = true;
            published = live
                .take_view(&state, Some(&published), number, true)
                .unwrap();
        }
        let lacks = |number| published.changes_since(number).map(|events| events.len());
        let last = published.number;
        assert_eq!(
            (lacks(last), lacks(last - 1), lacks(2)),
            (Some(0), Some(1), Some(MAX_CHANGES))
        );
        assert_eq!((lacks(1), lacks(last + 1)), (None, None));
        let (first, again) = (
            live.whole(&state, &published),
            live.whole(&state, &published),
        );
        assert_eq!(first.as_ptr(), again.as_ptr(), "it is rendered once");
    }

    #[test]
    fn an_id_is_understood_by_the_process_that_gave_it() {
        let live = LiveFleet::default();
        let id = format!("{}-17", live.source);
        assert_eq!(live.parse_event_id(&id), Some(17));
        let other = LiveFleet {
            source: "another".into(),
            ..LiveFleet::default()
        };
        assert_eq!(
            (other.parse_event_id(&id), live.parse_event_id("")),
            (None, None)
        );
    }

    #[test]
    fn sums_are_kept_while_no_client_watches() {
        let (state, live) = (
            ServerState::with_stopped_clock(Policy::default()),
            LiveFleet::default(),
        );
        assert!(live.take_view(&state, None, 1, false).is_none());
        assert_eq!(live.history.lock().sums().len(), 1);
    }
}
