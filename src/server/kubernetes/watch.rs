//! The watches: bring every pod, node and disruption budget, every ResourceSlice where there are any, volumes and, where a policy
//! asks for them, the labels of every namespace into the index.
//!
//! Nothing is decided here. A broken watch resumes where it was, or relists; the index accepts either. No object outlives its
//! event.

mod catching_up;
mod read_ahead;
mod slices;
mod storage;

pub use slices::slices;
pub(crate) use storage::{CLAIMS, STORAGE_RESOURCES, VOLUMES};
pub use storage::{STORAGE_CLASSES, storage};

use super::index::{ClusterIndex, namespaces};
use crate::service::{ChangeReceiver, ReadFailure, ServerState};
use catching_up::until_relist_needed;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use read_ahead::read_ahead;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects as objects;
use stowage_kubernetes_objects::port::ControlPlane;
use stowage_scheduling::control_loop::PodEvent;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::unconstrained;

/// Objects in one page of a list. A pod is some ten kilobytes of JSON on the wire: a parsed page stays in the low megabytes.
const LIST_PAGE_SIZE: u32 = 250;
/// The server ends a watch after this many seconds and it is resumed; a connection that died silently is noticed then.
const WATCH_TIMEOUT_SECONDS: u32 = 60;

/// Permissions are restored by people; asking every few seconds is often enough.
const REFUSED_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of oversized objects that the log names for one watch.
const MAX_LOGGED_OBJECTS: usize = 100;

/// What every watch feeds.
#[derive(Clone)]
pub struct WatchFeed {
    pub state: Arc<ServerState>,
    pub index: Arc<Mutex<ClusterIndex>>,
    /// Receives the Events about pods.
    pub control_plane: Arc<dyn ControlPlane>,
}

/// Pods are relisted when a policy begins to move them, or has other schedulers' names: more of them is read from then on, and most
/// never change.
pub async fn pods(client: Client, feed: WatchFeed) {
    let handler = || WatchHandler {
        apply: WatchFeed::apply_pod_event,
        on_error: always_retry,
        while_unreadable: NOTHING_PLACED,
        expect_list: ClusterIndex::expect_pod_list,
        page_size: LIST_PAGE_SIZE,
    };
    let mut moving = feed.state.pod_relists.subscribe();
    let mut takeovers = feed.state.leadership.watch_takeovers();
    loop {
        tokio::select! {
            // In this order, so that a simulation is reproducible.
            biased;
            () = watch(client.clone(), &feed, "pods", handler()) => return,
            () = moving.changed() => tracing::info!("listing pods again: the policy reads more of them from now on (planning.consolidation, planning.schedulerNames)"),
            // While a list is applied there is always a next pod, and each counts against the turn of this task.
            () = unconstrained(until_relist_needed(&client, &feed, &mut takeovers)) => tracing::info!("listing pods again: their watch has not shown that it is up to date"),
        }
    }
}

pub async fn nodes(client: Client, feed: WatchFeed) {
    let handler = WatchHandler {
        apply: WatchFeed::apply_node_event,
        on_error: always_retry,
        while_unreadable: NOTHING_PLACED,
        expect_list: ClusterIndex::expect_node_list,
        page_size: LIST_PAGE_SIZE,
    };
    watch(client, &feed, "nodes", handler).await;
}

pub async fn budgets(client: Client, feed: WatchFeed) {
    let handler = WatchHandler {
        apply: WatchFeed::apply_budget_event,
        on_error: WatchFeed::on_budget_error,
        while_unreadable: "no pod is evicted",
        expect_list: ClusterIndex::expect_budget_list,
        page_size: LIST_PAGE_SIZE,
    };
    watch(client, &feed, "poddisruptionbudgets", handler).await;
}

/// The labels of namespaces, of which nothing else is asked for, while a policy reads them.
pub async fn namespaces(client: Client, feed: WatchFeed) {
    let handler = || WatchHandler {
        apply: WatchFeed::apply_namespace_event,
        on_error: retry_or_relist,
        while_unreadable: "a policy that selects them by label (namespaceSelector) does not come into force",
        expect_list: ClusterIndex::expect_namespace_list,
        page_size: LIST_PAGE_SIZE,
    };
    let mut wanted = feed.state.namespaces_wanted();
    loop {
        if wanted.wait_for(|is_wanted| *is_wanted).await.is_err() {
            return;
        }
        tokio::select! {
            // In this order, so that a simulation is reproducible.
            biased;
            () = watch(client.clone(), &feed, "namespaces", handler()) => return,
            ended = async { wanted.wait_for(|is_wanted| !*is_wanted).await.is_err() } => {
                let mut index = feed.index.lock();
                index.forget_namespaces(&feed.state);
                feed.record_success("namespaces");
                // A policy without selectors does not wait for them.
                feed.update_sync(&index);
                if ended {
                    return;
                }
            }
        }
    }
}

/// Callbacks for the events and errors of the watch of one kind of object.
struct WatchHandler<K> {
    apply: fn(&WatchFeed, Event<K>),
    on_error: fn(&WatchFeed, &watcher::Error) -> WatchEnd,
    /// What happens while these objects may not be read, for the log.
    while_unreadable: &'static str,
    expect_list: fn(&mut ClusterIndex, u64),
    /// Objects in one page of a list.
    page_size: u32,
}

/// Why a watch ended or failed, and how it continues.
enum WatchEnd {
    /// It resumes where it was, after a pause of its own.
    Retry,
    /// What it showed is not reliable any more: it starts again, after a pause.
    RelistAfterPause,
    /// It starts again at once: this replica has taken the Lease, or its ledger is not reliable any more.
    RelistNow,
    /// The API server does not have the resource.
    NotServed,
    Ended,
}

const NOTHING_PLACED: &str = "nothing is placed before they have been listed";

/// Retries after every error: without pods and nodes nothing can be placed.
fn always_retry(_: &WatchFeed, _: &watcher::Error) -> WatchEnd {
    WatchEnd::Retry
}

fn retry_or_relist(_: &WatchFeed, error: &watcher::Error) -> WatchEnd {
    after_refusal(error).unwrap_or(WatchEnd::Retry)
}

/// Feeds the events of a watch, and starts it again with a list whenever leadership asks for one.
async fn watch<K>(client: Client, feed: &WatchFeed, what: &'static str, handler: WatchHandler<K>)
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let mut terms = feed.state.leadership.watch_list_generation();
    loop {
        let term = terms.mark_seen();
        (handler.expect_list)(&mut feed.index.lock(), term);
        let after = watch_once(client.clone(), feed, what, &handler, &mut terms).await;
        match after {
            WatchEnd::RelistNow => {
                tracing::info!(what, "relisting: the earlier list is no longer valid")
            }
            WatchEnd::RelistAfterPause => {
                drop(tokio::time::timeout(REFUSED_RETRY_INTERVAL, terms.changed()).await)
            }
            WatchEnd::Retry | WatchEnd::NotServed | WatchEnd::Ended => return,
        }
    }
}

async fn watch_once<K>(
    client: Client,
    feed: &WatchFeed,
    what: &'static str,
    handler: &WatchHandler<K>,
    terms: &mut ChangeReceiver,
) -> WatchEnd
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let mut events = read_ahead(events::<K>(client, handler.page_size));
    let mut logged = BTreeSet::new();
    loop {
        tokio::select! {
            biased;
            () = terms.changed() => return WatchEnd::RelistNow,
            event = events.next() => match event {
                Some(Ok(event)) => {
                    // The beginning of a list is told before it is asked for.
                    if !matches!(event, Event::Init) {
                        feed.state.api_server_contact.record_contact(feed.state.now());
                        feed.record_success(what);
                    }
                    if let Event::InitApply(object) | Event::Apply(object) = &event
                        && objects::is_stand_in(object.meta())
                    {
                        feed.report_oversized_object(what, object.meta(), &mut logged);
                    }
                    (handler.apply)(feed, event);
                }
                Some(Err(error)) => {
                    feed.record_failure(what, &error, handler.while_unreadable);
                    match (handler.on_error)(feed, &error) {
                        WatchEnd::Retry => {}
                        after => return after,
                    }
                }
                None => return WatchEnd::Ended,
            },
        }
    }
}

impl WatchFeed {
    fn apply_pod_event(&self, event: Event<Pod>) {
        let mut index = self.index.lock();
        let pod_event = match event {
            Event::Init => {
                index.begin_pod_list(&self.state);
                None
            }
            Event::InitApply(pod) | Event::Apply(pod) => index.apply_pod(&self.state, &pod),
            Event::Delete(pod) => {
                index.delete_pod(&self.state, &pod);
                None
            }
            Event::InitDone => {
                index.end_pod_list(&self.state);
                None
            }
        };
        self.update_sync(&index);
        drop(index);
        pod_event
            .into_iter()
            .for_each(|notice| self.record_event_if_leading(notice));
    }

    fn apply_node_event(&self, event: Event<Node>) {
        let mut index = self.index.lock();
        match event {
            Event::Init => index.begin_node_list(),
            Event::InitApply(node) | Event::Apply(node) => index.apply_node(&self.state, &node),
            Event::Delete(node) => index.delete_node(&self.state, &node),
            Event::InitDone => index.end_node_list(&self.state),
        }
        self.update_sync(&index);
    }

    fn apply_budget_event(&self, event: Event<PodDisruptionBudget>) {
        let mut index = self.index.lock();
        match event {
            Event::Init => index.begin_budget_list(&self.state),
            Event::InitApply(budget) | Event::Apply(budget) => {
                index.apply_budget(&self.state, &budget)
            }
            Event::Delete(budget) => index.delete_budget(&self.state, &budget),
            Event::InitDone => index.end_budget_list(&self.state),
        }
        self.update_sync(&index);
    }

    /// Placement needs no budgets: if they may not be read it continues, and no pod is evicted.
    fn on_budget_error(&self, error: &watcher::Error) -> WatchEnd {
        let Some(after) = after_refusal(error) else {
            return WatchEnd::Retry;
        };
        let mut index = self.index.lock();
        index.mark_budgets_forbidden(&self.state);
        self.update_sync(&index);
        after
    }

    /// What follows from labels takes seconds on a large cluster: the index, and with it what other watches show, does not wait.
    fn apply_namespace_event(&self, event: Event<PartialObjectMeta<Namespace>>) {
        match event {
            Event::Init => self.index.lock().begin_namespace_list(),
            Event::InitApply(namespace) => {
                self.index.lock().add_listed_namespace(&namespace.metadata)
            }
            Event::Apply(namespace) => {
                block_in_place_if_possible(|| namespaces::apply(&self.state, &namespace.metadata));
            }
            Event::Delete(namespace) => {
                block_in_place_if_possible(|| namespaces::delete(&self.state, &namespace.metadata));
            }
            Event::InitDone => {
                let listed = self.index.lock().take_listed_namespaces();
                block_in_place_if_possible(|| self.state.record_namespaces(listed));
                self.index.lock().end_namespace_list();
            }
        }
        self.update_sync(&self.index.lock());
    }

    /// Logs a failure when it begins and at longer and longer intervals, and blames permissions only for a refusal that lasts. A resource
    /// that is not there is not refused.
    fn record_failure(&self, what: &'static str, error: &watcher::Error, while_unreadable: &str) {
        let refused = refusal_code(error).filter(|code| *code != 404);
        if refused.is_some() {
            self.state
                .metrics
                .refused_watches
                .with_label_values(&[what])
                .set(1);
        }
        match self
            .state
            .refused_reads
            .record_failure(what, refused, self.state.now())
        {
            ReadFailure::Due => tracing::warn!(what, %error, "the watch failed and is retried"),
            ReadFailure::Persistent => tracing::error!(
                what, %error,
                "{what} may not be read: {while_unreadable} until they can be; let Stowage's service account list and watch them, as manifests/base/rbac.yaml does"
            ),
            ReadFailure::AlreadyReported => {}
        }
    }

    /// Logs the failure of a read beside a watch, as [`record_failure`](Self::record_failure) does. Of a refusal the watch of the
    /// resource speaks itself.
    fn record_read_failure(&self, what: &'static str, error: &kube::Error) {
        if matches!(error, kube::Error::Api(status) if matches!(status.code, 401 | 403)) {
            return;
        }
        let reads = &self.state.refused_reads;
        if reads.record_failure(what, None, self.state.now()) == ReadFailure::Due {
            tracing::warn!(what, %error, "the read failed and is retried");
        }
    }

    /// Counts an object that is larger than Stowage reads, and logs it unless it is in `logged` already.
    fn report_oversized_object(
        &self,
        what: &'static str,
        object: &ObjectMeta,
        logged: &mut BTreeSet<String>,
    ) {
        self.state
            .metrics
            .bounds_reached
            .with_label_values(&[what])
            .inc();
        let [namespace, name] =
            [&object.namespace, &object.name].map(|part| part.as_deref().unwrap_or_default());
        let object = format!("{namespace}/{name}");
        if logged.len() < MAX_LOGGED_OBJECTS && logged.insert(object.clone()) {
            tracing::warn!(
                what,
                object,
                "it is larger than Stowage reads: what is not known of it counts as what is safe (docs/reference/limits.md, Bounds)"
            );
        }
    }

    fn record_success(&self, what: &'static str) {
        if let Some(lasted) = self
            .state
            .refused_reads
            .record_success(what, self.state.now())
        {
            self.state
                .metrics
                .refused_watches
                .with_label_values(&[what])
                .set(0);
            tracing::info!(what, seconds = lasted.0 / 1000, "the watch works again");
        }
    }

    fn update_sync(&self, index: &ClusterIndex) {
        let leadership = &self.state.leadership;
        if leadership.is_synced() {
            return;
        }
        let synced_term =
            index
                .synced_term()
                .and_then(|term| match self.state.reads_namespaces() {
                    true => Some(index.namespaces_synced_term()?.min(term)),
                    false => Some(term),
                });
        let caught_up = index.caught_up_takeover();
        if let Some(term) = synced_term {
            // Otherwise the first request makes it, and all others wait meanwhile.
            drop(self.state.cluster().snapshot());
            self.state.record_synced(term, caught_up);
        }
        if leadership.is_synced() {
            self.state.metrics.synced.set(1);
            tracing::info!(nodes = index.nodes().len(), "the watches have synced");
        }
    }

    /// Records an Event if this replica leads: every replica sees the same objects.
    fn record_event_if_leading(&self, event: PodEvent) {
        if self.state.leadership.is_open() {
            self.control_plane.record_event(event);
        }
    }
}

/// Runs a long computation in a task; the runtime moves other tasks off its thread. A simulation has one thread and just runs it.
fn block_in_place_if_possible(work: impl FnOnce()) {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// The events of a watch that never ends. Failures are retried, each after a longer pause.
fn events<K>(
    client: Client,
    page_size: u32,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Unpin + Send + 'static
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let config = watcher::Config::default()
        .page_size(page_size)
        .timeout(WATCH_TIMEOUT_SECONDS);
    // `managedFields` are half of an object and not needed here.
    let events = watcher(Api::<K>::all(client), config)
        .modify(|object| object.meta_mut().managed_fields = None);
    objects::with_growing_pauses(events).boxed()
}

/// What to do when the resource may not be read, or is not served; `None` for any other failure. A refused list is retried by
/// the watcher; a refused watch would continue as if it had shown everything meanwhile.
fn after_refusal(error: &watcher::Error) -> Option<WatchEnd> {
    let is_list = matches!(error, watcher::Error::InitialListFailed(_));
    refusal_code(error).map(|_| {
        if is_list {
            WatchEnd::Retry
        } else {
            WatchEnd::RelistAfterPause
        }
    })
}

/// HTTP status of a refusal to show the resource (401, 403 or 404); `None` for any other failure.
fn refusal_code(error: &watcher::Error) -> Option<u16> {
    use kube::Error::Api;
    let code = match error {
        watcher::Error::InitialListFailed(Api(status))
        | watcher::Error::WatchStartFailed(Api(status))
        | watcher::Error::WatchFailed(Api(status))
        | watcher::Error::WatchError(status) => status.code,
        _ => return None,
    };
    matches!(code, 401 | 403 | 404).then_some(code)
}

#[cfg(test)]
mod takeover_tests;

#[cfg(test)]
impl WatchFeed {
    /// Empty lists of pods, nodes and disruption budgets come.
    fn apply_empty_lists(&self) {
        [Event::Init, Event::InitDone]
            .into_iter()
            .for_each(|event| self.apply_pod_event(event));
        [Event::Init, Event::InitDone]
            .into_iter()
            .for_each(|event| self.apply_node_event(event));
        [Event::Init, Event::InitDone]
            .into_iter()
            .for_each(|event| self.apply_budget_event(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubernetes::testing::Recorder;
    use crate::service::Tenure;
    use kube::core::Status;
    use serde_json::json;
    use std::sync::atomic::{AtomicU32, Ordering};
    use stowage_scheduling::ids::PodUid;
    use stowage_scheduling::policy::{Consolidation, Policy};
    use stowage_scheduling::units::Millis;

    #[test]
    fn lists_of_an_earlier_term_do_not_open_leadership() {
        let state = ServerState::new(Policy::default());
        let feed = WatchFeed {
            state,
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        let leadership = &feed.state.leadership;
        let list = |feed: &WatchFeed, kind| {
            for is_done in [false, true] {
                match kind {
                    0 => feed.apply_pod_event(if is_done {
                        Event::InitDone
                    } else {
                        Event::Init
                    }),
                    1 => feed.apply_node_event(if is_done {
                        Event::InitDone
                    } else {
                        Event::Init
                    }),
                    2 => feed.apply_slice_event(if is_done {
                        Event::InitDone
                    } else {
                        Event::Init
                    }),
                    _ => feed.apply_budget_event(if is_done {
                        Event::InitDone
                    } else {
                        Event::Init
                    }),
                }
            }
        };
        (0..4).for_each(|kind| list(&feed, kind));
        assert!(leadership.is_synced() && !leadership.is_open());

        feed.state.set_tenure(Tenure::without_end());
        let term = leadership.list_generation();
        let expect: [fn(&mut ClusterIndex, u64); 4] = [
            ClusterIndex::expect_pod_list,
            ClusterIndex::expect_node_list,
            ClusterIndex::expect_slice_list,
            ClusterIndex::expect_budget_list,
        ];
        for (kind, expect) in expect.into_iter().enumerate() {
            // Events that the old watches still deliver.
            feed.apply_pod_event(Event::Delete(Pod::default()));
            assert!(!leadership.is_open(), "{kind} of four lists are new");
            assert_eq!(
                feed.state.cluster().ledger().leader(),
                None,
                "reservations are adopted only from the new lists"
            );
            expect(&mut feed.index.lock(), term);
            list(&feed, kind);
        }
        assert!(leadership.is_open());
    }

    fn namespace(name: &str, team: &str) -> PartialObjectMeta<Namespace> {
        let labels = Some([("team".to_owned(), team.to_owned())].into());
        let metadata = ObjectMeta {
            name: Some(name.into()),
            labels,
            ..ObjectMeta::default()
        };
        PartialObjectMeta {
            types: None,
            metadata,
            _phantom: std::marker::PhantomData,
        }
    }

    #[test]
    fn readiness_waits_for_namespace_labels_only_if_the_policy_selects_by_them() {
        let text = "kind: SchedulingPolicy\nclasses: [{name: own, match: {namespaceSelector: {matchLabels: {team: a}}}}]\n";
        let selecting =
            stowage_policy_file::load(&[stowage_policy_file::SourceText::new("p.yaml", text)])
                .unwrap()
                .policy;
        for (policy, waits) in [(Policy::default(), false), (selecting, true)] {
            let state = ServerState::new(policy);
            assert_eq!(*state.namespaces_wanted().borrow(), waits);
            let feed = WatchFeed {
                state,
                index: Arc::default(),
                control_plane: Arc::new(Recorder::default()),
            };
            feed.index.lock().mark_slices_not_served();
            feed.apply_empty_lists();
            let leadership = &feed.state.leadership;
            assert_eq!(leadership.is_synced(), !waits);
            feed.apply_namespace_event(Event::Init);
            feed.apply_namespace_event(Event::InitApply(namespace("chat", "a")));
            assert_eq!(leadership.is_synced(), !waits, "half a list is none");
            feed.apply_namespace_event(Event::InitDone);
            assert!(leadership.is_synced());
            assert_eq!(feed.state.cluster().ledger().namespaces().len(), 1);
            feed.apply_namespace_event(Event::Delete(namespace("chat", "a")));
            assert!(feed.state.cluster().ledger().namespaces().is_empty());
        }
    }

    /// Applying labels takes seconds on a large cluster. If the pod watch waited, the replica would lose contact with the API server.
    #[test]
    fn the_index_stays_unlocked_while_a_namespaces_new_labels_are_applied() {
        let state = ServerState::new(Policy::default());
        let feed = WatchFeed {
            state,
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        // As long as this is held, the labels are not prepared.
        let cluster = feed.state.cluster();
        let (begins, begun) = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            threads.spawn(|| {
                begins.send(()).unwrap();
                feed.apply_namespace_event(Event::Apply(namespace("chat", "a")));
            });
            begun.recv().unwrap();
            for _ in 0..100 {
                let index = feed.index.try_lock_for(std::time::Duration::from_secs(60));
                assert!(index.is_some(), "the index waits for the labels");
                drop(index);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            drop(cluster);
        });
        assert_eq!(feed.state.cluster().ledger().namespaces().len(), 1);
    }

    /// A watch announces a list before it asks for it.
    #[tokio::test]
    async fn an_unanswered_list_does_not_count_as_contact_with_the_api_server() {
        let asked = Arc::new(tokio::sync::Notify::new());
        let notify = asked.clone();
        let unreachable = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            notify.notify_one();
            std::future::ready(Err::<http::Response<kube::client::Body>, _>(
                std::io::Error::other("down"),
            ))
        });
        let state = ServerState::new(Policy::default());
        let feed = WatchFeed {
            state,
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        let task = tokio::spawn(pods(Client::new(unreachable, "default"), feed.clone()));
        for _ in 0..2 {
            asked.notified().await;
        }
        task.abort();
        assert_eq!(
            feed.state.api_server_contact.silence(feed.state.now()),
            None
        );
    }

    #[test]
    fn a_refused_read_beside_a_watch_does_not_end_the_watchs_refusal() {
        let feed = WatchFeed {
            state: ServerState::new(Policy::default()),
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        let refused = || kube::core::Status::failure("no", "Forbidden").with_code(403);
        let reads = &feed.state.refused_reads;
        let error = watcher::Error::WatchError(Box::new(refused()));
        feed.record_failure("pods", &error, "nothing is done");
        assert!(reads.is_refused("pods"));
        feed.record_read_failure("pods", &kube::Error::Api(Box::new(refused())));
        assert!(reads.is_refused("pods"));
    }

    /// kube announces each attempt to list with an event that is no error.
    #[tokio::test(start_paused = true)]
    async fn a_watch_that_cannot_list_asks_after_longer_and_longer_pauses() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let attempts = asked.clone();
        let unreachable = tower::service_fn(move |_: http::Request<kube::client::Body>| {
            attempts.lock().push(tokio::time::Instant::now());
            std::future::ready(Err::<http::Response<kube::client::Body>, _>(
                std::io::Error::other("down"),
            ))
        });
        let feed = WatchFeed {
            state: ServerState::new(Policy::default()),
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        let task = tokio::spawn(nodes(Client::new(unreachable, "default"), feed));
        while asked.lock().len() < 5 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        task.abort();
        let asked = asked.lock();
        let pauses: Vec<Duration> = asked.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(pauses[3] > 2 * pauses[0], "{pauses:?}");
    }

    /// A policy that moves pods asks for more of bound pods than one that does not, and most of them never change.
    #[tokio::test(start_paused = true)]
    async fn pods_are_listed_anew_when_a_policy_begins_to_move_them() {
        let lists = Arc::new(AtomicU32::new(0));
        let (listed, uid) = (lists.clone(), PodUid::parse("a").unwrap());
        let server = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let is_watch = request
                .uri()
                .query()
                .is_some_and(|query| query.contains("watch=true"));
            let pods = json!({"metadata": {"resourceVersion": "1"}, "items": [bound_pod("a")]})
                .to_string();
            let listed = listed.clone();
            async move {
                if is_watch {
                    std::future::pending::<()>().await;
                }
                listed.fetch_add(1, Ordering::Relaxed);
                Ok::<_, std::io::Error>(http::Response::new(kube::client::Body::from(
                    pods.into_bytes(),
                )))
            }
        });
        let state = ServerState::new(Policy::default());
        let feed = WatchFeed {
            state: state.clone(),
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        let watching = tokio::spawn(pods(Client::new(server, "default"), feed));
        until(|| state.cluster().ledger().pod_state(&uid).is_some()).await;
        let successor_is_known = || {
            state
                .cluster()
                .kube_filters()
                .successor_requirements(&uid)
                .is_some()
        };
        assert!(!successor_is_known());

        let moving = || {
            let mut policy = Policy::default();
            policy.planning.consolidation = Some(Consolidation {
                gain: Millis::seconds(600),
            });
            policy
        };
        state.set_policy(moving());
        until(successor_is_known).await;
        state.set_policy(moving());
        state.set_policy(Policy::default());
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(
            lists.load(Ordering::Relaxed),
            2,
            "nothing more is needed then"
        );
        state.set_policy(moving());
        until(|| lists.load(Ordering::Relaxed) == 3).await;
        watching.abort();
    }

    fn bound_pod(uid: &str) -> serde_json::Value {
        json!({
            "metadata": {
                "name": uid, "namespace": "chat", "uid": uid, "resourceVersion": "1",
                "annotations": { "stowage.dev/devices": "index-0", "stowage.dev/vram-granted": (1u64 << 30).to_string() },
            },
            "spec": {
                "nodeName": "n1",
                "containers": [{ "name": "engine", "resources": { "limits": { "stowage.dev/vram": "1Gi" } } }],
            },
            "status": { "phase": "Running" },
        })
    }

    async fn until(holds: impl Fn() -> bool) {
        let holds = async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), holds)
            .await
            .expect("it holds in the end");
    }

    fn refusal(code: u16) -> kube::Error {
        kube::Error::Api(Status::failure("no", "Forbidden").with_code(code).boxed())
    }

    #[test]
    fn only_a_refusal_of_the_api_server_means_that_budgets_cannot_be_read() {
        let list = |code| after_refusal(&watcher::Error::InitialListFailed(refusal(code)));
        assert!(matches!(list(403), Some(WatchEnd::Retry)));
        assert!(matches!(list(404), Some(WatchEnd::Retry)));
        assert!(list(500).is_none() && list(429).is_none());
        assert!(after_refusal(&watcher::Error::NoResourceVersion).is_none());
    }

    #[test]
    fn a_watch_that_is_refused_lists_anew() {
        assert!(matches!(
            after_refusal(&watcher::Error::WatchStartFailed(refusal(403))),
            Some(WatchEnd::RelistAfterPause)
        ));
        let gone = Status::failure("too old", "Expired").with_code(410).boxed();
        assert!(after_refusal(&watcher::Error::WatchError(gone)).is_none());
    }
}
