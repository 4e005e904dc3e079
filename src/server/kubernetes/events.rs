//! Events on pods: one per pod and kind in ten minutes, so that a pod refused a thousand times has one Event. Kinds that are
//! new each time ([`PodEventReason::is_new_each_time`]) are recorded each time.
//!
//! [`EventRecorder`] accepts Events without waiting; [`publish`] is the task that writes them. Nothing here decides anything,
//! and a slow API server loses only Events.

use crate::service::ServerState;
use k8s_openapi::api::core::v1::{Namespace, ObjectReference, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client};
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use stowage_scheduling::control_loop::{PodEvent, PodEventReason};
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::policy::namespaces::{ALL_GPUS_LABEL, ALL_GPUS_NAMESPACE};
use stowage_scheduling::units::{Millis, Moment};
use tokio::sync::mpsc;

/// How long another Event of the same kind is suppressed for a pod.
const SUPPRESSION_PERIOD: Millis = Millis::seconds(600);
/// Maximum number of pods remembered for each kind, a few megabytes. Events of further pods are dropped in that time: forgotten
/// pods would get a new Event at each attempt, and there may be tens of thousands.
const MAX_REMEMBERED_PODS: usize = 32_768;
/// Maximum number of Events waiting to be written. Beyond it the API server is too slow for them to be useful.
const QUEUE_CAPACITY: usize = 1024;
/// A write that takes longer is given up, so that others get their turn.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The API's limits on an Event's note, and on names.
const MAX_NOTE_BYTES: usize = 1024;
const MAX_NAME_BYTES: usize = 253;
const MAX_INSTANCE_BYTES: usize = 128;
/// The Event's `reportingController`.
const REPORTING_CONTROLLER: &str = "stowage.dev/scheduler";

/// The sending end: accepts Events from any thread, without waiting.
pub struct EventRecorder {
    state: Arc<ServerState>,
    recent: Mutex<RecentEvents>,
    queue: mpsc::Sender<PodEvent>,
}

impl EventRecorder {
    /// Makes a recorder, and the receiving end of its queue for [`publish`].
    pub fn new(state: Arc<ServerState>) -> (Self, mpsc::Receiver<PodEvent>) {
        let (queue, receiver) = mpsc::channel(QUEUE_CAPACITY);
        (
            Self {
                state,
                recent: Mutex::default(),
                queue,
            },
            receiver,
        )
    }

    pub fn record_event(&self, mut event: PodEvent) {
        // It may contain kube-scheduler's text, and a thousand may wait.
        event.text = truncated(&event.text, MAX_NOTE_BYTES).to_owned();
        let (uid, kind) = (event.uid.clone(), event.kind);
        let now = self.state.now();
        let mut recent = self.recent.lock();
        let is_new = kind.is_new_each_time();
        if !is_new && recent.has_recent(&uid, kind, now) {
            return count(&self.state, kind, "suppressed");
        }
        if !is_new && recent.is_full(kind) {
            return count(&self.state, kind, "dropped");
        }
        // What finds no place was not told.
        let Ok(permit) = self.queue.try_reserve() else {
            return count(&self.state, kind, "dropped");
        };
        if !is_new {
            recent.remember(uid, kind, now);
        }
        permit.send(event);
    }
}

/// Which Events were recorded recently.
#[derive(Debug, Default)]
struct RecentEvents(FxHashMap<PodEventReason, RecentPods>);

/// The pods with a recent Event of one kind.
#[derive(Debug, Default)]
struct RecentPods {
    uids: FxHashSet<PodUid>,
    /// The pods with the time of their latest Event, oldest first.
    order: VecDeque<(Moment, PodUid)>,
}

impl RecentEvents {
    /// Whether the pod has had such an Event recently.
    fn has_recent(&mut self, uid: &PodUid, kind: PodEventReason, now: Moment) -> bool {
        self.forget_expired(now);
        self.0
            .get(&kind)
            .is_some_and(|pods| pods.uids.contains(uid))
    }

    fn is_full(&self, kind: PodEventReason) -> bool {
        self.0
            .get(&kind)
            .is_some_and(|pods| pods.order.len() >= MAX_REMEMBERED_PODS)
    }

    /// Remembers an Event of a pod that had none of this kind.
    fn remember(&mut self, uid: PodUid, kind: PodEventReason, now: Moment) {
        let pods = self.0.entry(kind).or_default();
        pods.uids.insert(uid.clone());
        pods.order.push_back((now, uid));
    }

    fn forget_expired(&mut self, now: Moment) {
        for RecentPods { uids, order } in self.0.values_mut() {
            while let Some((_, uid)) =
                order.pop_front_if(|(recorded_at, _)| *recorded_at + SUPPRESSION_PERIOD <= now)
            {
                uids.remove(&uid);
            }
        }
    }
}

/// Writes Events until all senders are gone. `identity` names this replica.
pub async fn publish(
    client: Client,
    state: Arc<ServerState>,
    identity: String,
    mut queue: mpsc::Receiver<PodEvent>,
) {
    let params = PostParams::default();
    while let Some(pod_event) = queue.recv().await {
        if pod_event.kind == PodEventReason::Ungranted
            && let Some(why) = reason_to_withhold(&client, &pod_event).await
        {
            count(&state, pod_event.kind, why);
            continue;
        }
        let events: Api<Event> = Api::namespaced(client.clone(), &pod_event.key.namespace);
        let event = event_object(&pod_event, &identity, state.clock.wall());
        let write = events.create(&params, &event);
        let outcome = match tokio::time::timeout(WRITE_TIMEOUT, write).await {
            Ok(Ok(_)) => "published",
            Ok(Err(error)) => {
                tracing::debug!(pod = %pod_event.key, %error, "an Event was not written");
                "failed"
            }
            Err(_) => "failed",
        };
        count(&state, pod_event.kind, outcome);
    }
}

/// Why a pod that an agent reported gets no Event. Its UID is known to be on the agent's node; only the agent vouches for its name.
async fn reason_to_withhold(
    client: &Client,
    PodEvent { key, uid, .. }: &PodEvent,
) -> Option<&'static str> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &key.namespace);
    let found = tokio::time::timeout(WRITE_TIMEOUT, pods.get_metadata(&key.name)).await;
    let is_it = found
        .is_ok_and(|pod| pod.is_ok_and(|pod| pod.metadata.uid.as_deref() == Some(uid.as_str())));
    match is_it {
        true => sees_all_gpus(client, &key.namespace)
            .await
            .then_some("exempt"),
        false => Some("unconfirmed"),
    }
}

/// Whether an administrator lets the namespace's pods see all GPUs, as the admission policy has it. Asked at that moment: labels of
/// namespaces are watched only where a policy needs them.
async fn sees_all_gpus(client: &Client, namespace: &str) -> bool {
    let selector = ListParams::default()
        .fields(&format!("metadata.name={namespace}"))
        .labels(ALL_GPUS_LABEL);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let listed = tokio::time::timeout(WRITE_TIMEOUT, namespaces.list_metadata(&selector)).await;
    namespace == ALL_GPUS_NAMESPACE
        || listed.is_ok_and(|listed| listed.is_ok_and(|listed| !listed.items.is_empty()))
}

fn event_object(pod_event: &PodEvent, identity: &str, now: jiff::Timestamp) -> Event {
    let suffix = format!(".{:x}", now.as_nanosecond());
    let namespace = pod_event.key.namespace.to_string();
    Event {
        metadata: ObjectMeta {
            name: Some(format!(
                "{}{suffix}",
                truncated(&pod_event.key.name, MAX_NAME_BYTES - suffix.len())
            )),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        regarding: Some(ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            name: Some(pod_event.key.name.to_string()),
            namespace: Some(namespace),
            uid: Some(pod_event.uid.to_string()),
            ..ObjectReference::default()
        }),
        action: Some("Scheduling".into()),
        reason: Some(pod_event.kind.into_str().into()),
        note: Some(truncated(&pod_event.text, MAX_NOTE_BYTES).into()),
        type_: Some(
            if pod_event.kind.is_warning() {
                "Warning"
            } else {
                "Normal"
            }
            .into(),
        ),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(REPORTING_CONTROLLER.into()),
        reporting_instance: Some(truncated(identity, MAX_INSTANCE_BYTES).into()),
        ..Event::default()
    }
}

/// At most `bytes` of `text`, on a character's boundary.
fn truncated(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

fn count(state: &ServerState, kind: PodEventReason, outcome: &str) {
    state
        .metrics
        .events
        .with_label_values(&[kind.into_str(), outcome])
        .inc();
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use stowage_scheduling::ids::PodKey;
    use stowage_scheduling::policy::Policy;

    fn uid(n: usize) -> PodUid {
        PodUid::parse(&format!("uid-{n}")).unwrap()
    }

    fn refusal(n: usize) -> PodEvent {
        let key = PodKey::parse("team-a", "llama").unwrap();
        PodEvent {
            key,
            uid: uid(n),
            kind: PodEventReason::Unschedulable,
            text: "no GPU has 40 GiB free".into(),
        }
    }

    #[test]
    fn a_pod_gets_the_same_event_once_in_ten_minutes() {
        let mut told = RecentEvents::default();
        let at = |seconds| Moment(0) + Millis::seconds(seconds);
        let (refused, unplaced) = (PodEventReason::Unschedulable, PodEventReason::Unplaced);
        told.remember(uid(1), refused, at(0));
        assert!(told.has_recent(&uid(1), refused, at(599)));
        assert!(
            !told.has_recent(&uid(1), unplaced, at(599)),
            "another kind is other news"
        );
        assert!(
            !told.has_recent(&uid(2), refused, at(599)),
            "another pod, too"
        );
        assert!(!told.has_recent(&uid(1), refused, at(600)));
    }

    #[test]
    fn pods_beyond_the_remembered_maximum_get_no_event_until_others_expire() {
        let state = ServerState::with_stopped_clock(Policy::default());
        let (notices, mut receiver) = EventRecorder::new(state.clone());
        for n in 0..MAX_REMEMBERED_PODS {
            notices.record_event(refusal(n));
            assert!(receiver.try_recv().is_ok());
        }
        notices.record_event(refusal(MAX_REMEMBERED_PODS));
        assert!(
            receiver.try_recv().is_err(),
            "each attempt of so many pods would be one"
        );
        notices.record_event(PodEvent {
            kind: PodEventReason::Evicted,
            ..refusal(MAX_REMEMBERED_PODS)
        });
        assert!(
            receiver.try_recv().is_ok(),
            "many of one kind silence no other"
        );
        let counted = |outcome| {
            state
                .metrics
                .events
                .with_label_values(&["StowageUnschedulable", outcome])
                .get()
        };
        assert_eq!(counted("dropped"), 1);
        notices
            .recent
            .lock()
            .forget_expired(state.now() + SUPPRESSION_PERIOD);
        notices.record_event(refusal(MAX_REMEMBERED_PODS));
        assert!(receiver.try_recv().is_ok());
    }

    #[test]
    fn an_event_dropped_by_a_full_queue_is_not_remembered() {
        let state = ServerState::new(Policy::default());
        let (notices, mut receiver) = EventRecorder::new(state.clone());
        (0..=QUEUE_CAPACITY).for_each(|n| notices.record_event(refusal(n)));
        notices.record_event(refusal(0));
        let counted = |outcome| {
            state
                .metrics
                .events
                .with_label_values(&["StowageUnschedulable", outcome])
                .get()
        };
        assert_eq!((counted("dropped"), counted("suppressed")), (1, 1));
        receiver.try_recv().unwrap();
        notices.record_event(refusal(QUEUE_CAPACITY));
        assert_eq!(
            counted("dropped"),
            1,
            "what was dropped may be said when there is room"
        );
    }

    #[test]
    fn dropped_events_do_not_displace_remembered_pods() {
        let state = ServerState::new(Policy::default());
        let (notices, mut receiver) = EventRecorder::new(state.clone());
        (0..QUEUE_CAPACITY).for_each(|n| notices.record_event(refusal(n)));
        (0..2 * MAX_REMEMBERED_PODS).for_each(|_| notices.record_event(refusal(QUEUE_CAPACITY)));
        while receiver.try_recv().is_ok() {}
        (0..QUEUE_CAPACITY).for_each(|n| notices.record_event(refusal(n)));
        let counted = |outcome| {
            state
                .metrics
                .events
                .with_label_values(&["StowageUnschedulable", outcome])
                .get()
        };
        assert_eq!(
            (counted("dropped"), counted("suppressed")),
            (2 * MAX_REMEMBERED_PODS as u64, QUEUE_CAPACITY as u64)
        );
    }

    /// An API server with one pod, and whose namespaces see no more GPUs than others'.
    fn api_server(writes: Arc<Mutex<Vec<String>>>) -> Client {
        let answer = move |request: http::Request<kube::client::Body>| {
            let (path, is_read) = (
                request.uri().path().to_owned(),
                request.method() == http::Method::GET,
            );
            let (code, body) = match (&*path, is_read) {
                ("/api/v1/namespaces/team-a/pods/llama", true) => (
                    200,
                    json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "name": "llama", "namespace": "team-a", "uid": "uid-1" } }),
                ),
                ("/api/v1/namespaces", true) => (
                    200,
                    json!({ "kind": "List", "apiVersion": "v1", "metadata": {}, "items": [] }),
                ),
                (_, true) => (
                    404,
                    json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": "" }),
                ),
                (_, false) => (201, json!({ "metadata": {} })),
            };
            if !is_read {
                writes.lock().push(path);
            }
            let body = kube::client::Body::from(body.to_string().into_bytes());
            let answer = http::Response::builder().status(code).body(body).unwrap();
            std::future::ready(Ok::<_, std::io::Error>(answer))
        };
        Client::new(tower::service_fn(answer), "default")
    }

    #[tokio::test]
    async fn an_agent_makes_no_event_on_a_pod_that_it_only_names() {
        let state = ServerState::new(Policy::default());
        let (recorder, receiver) = EventRecorder::new(state.clone());
        // Of a pod on its own node it says the name of another, of a pod that is gone, and the right one.
        for (n, namespace, name) in [
            (2, "team-a", "llama"),
            (3, "kube-public", "victim"),
            (4, "team-b", "llama"),
            (1, "team-a", "llama"),
        ] {
            let key = PodKey::parse(namespace, name).unwrap();
            let notice = PodEvent {
                key,
                kind: PodEventReason::Ungranted,
                ..refusal(n)
            };
            recorder.record_event(notice);
        }
        drop(recorder);
        let writes = Arc::new(Mutex::new(Vec::new()));
        publish(
            api_server(writes.clone()),
            state.clone(),
            "here".into(),
            receiver,
        )
        .await;
        let counted = |outcome| {
            state
                .metrics
                .events
                .with_label_values(&["StowageUngranted", outcome])
                .get()
        };
        assert_eq!(
            [
                counted("unconfirmed"),
                counted("published"),
                counted("failed")
            ],
            [3, 1, 0]
        );
        assert_eq!(
            *writes.lock(),
            ["/apis/events.k8s.io/v1/namespaces/team-a/events"]
        );
    }

    #[test]
    fn queued_events_are_truncated_to_the_note_limit() {
        let state = ServerState::new(Policy::default());
        let (notices, mut receiver) = EventRecorder::new(state);
        notices.record_event(PodEvent {
            text: "ä".repeat(20_000),
            ..refusal(1)
        });
        let waiting = receiver.try_recv().unwrap();
        assert!(
            waiting.text.capacity() <= 1024,
            "{}",
            waiting.text.capacity()
        );
    }

    #[test]
    fn each_change_of_the_policy_is_an_event() {
        let state = ServerState::new(Policy::default());
        let (notices, mut receiver) = EventRecorder::new(state.clone());
        for text in ["first", "second"] {
            notices.record_event(PodEvent {
                kind: PodEventReason::PolicyRejected,
                text: text.into(),
                ..refusal(1)
            });
        }
        let told: Vec<String> =
            std::iter::from_fn(|| Some(receiver.try_recv().ok()?.text)).collect();
        assert_eq!(told, ["first", "second"]);
    }

    #[test]
    fn an_event_keeps_to_the_limits_of_the_api() {
        let key = PodKey::parse("team-a", &"x".repeat(253)).unwrap();
        let notice = PodEvent {
            key,
            text: "ä".repeat(600),
            ..refusal(1)
        };
        let event = event_object(&notice, &"h".repeat(200), jiff::Timestamp::now());
        assert_eq!(event.metadata.name.unwrap().len(), 253);
        assert_eq!(event.note.unwrap().len(), 1024);
        assert_eq!(event.reporting_instance.unwrap().len(), 128);
        assert_eq!(event.type_.unwrap(), "Warning");
        assert_eq!(event.regarding.unwrap().uid.unwrap(), "uid-1");
    }
}
