//! What a replica lists when it takes over, and what makes it act.

use super::*;
use crate::kubernetes::testing::Recorder;
use crate::service::Tenure;
use axum::body::Body;
use http::{Request, Response};
use serde_json::{Value, json};
use stowage_scheduling::ids::LeaderEpoch;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use tokio::sync::{mpsc, oneshot};

/// The pods of an API server: what it answers to lists, and what its watches show.
#[derive(Default)]
struct PodsServed {
    /// Its latest change.
    revision: u64,
    /// The limit that each list asked for.
    lists: Vec<u32>,
    /// What lists of one pod say of the resourceVersion, in place of the latest. `Some(None)`: they are not answered.
    said: Option<Option<&'static str>>,
    /// How many pages of a list follow the first.
    further_pages: usize,
    /// The next one of these waits for this.
    held: Option<oneshot::Receiver<()>>,
    watches: Vec<mpsc::UnboundedSender<Result<String, std::io::Error>>>,
}

/// A replica that stands by, and the API server whose pods it watches. Everything else is listed in each term at once.
struct Standby {
    feed: WatchFeed,
    served: Arc<Mutex<PodsServed>>,
}

impl Standby {
    async fn synced() -> Self {
        let served = Arc::new(Mutex::new(PodsServed {
            revision: 100,
            ..PodsServed::default()
        }));
        let feed = WatchFeed {
            state: ServerState::new(Policy::default()),
            index: Arc::default(),
            control_plane: Arc::new(Recorder::default()),
        };
        let answering = served.clone();
        let server =
            tower::service_fn(move |request| std::future::ready(answer(&answering, &request)));
        tokio::spawn(pods(Client::new(server, "default"), feed.clone()));
        let standby = Self { feed, served };
        standby.list_others();
        standby
            .until("it has synced", || {
                standby.feed.state.leadership.is_synced()
            })
            .await;
        standby
    }

    fn list_others(&self) {
        let term = self.feed.state.leadership.list_generation();
        {
            let mut index = self.feed.index.lock();
            index.expect_node_list(term);
            index.expect_budget_list(term);
            index.expect_slice_list(term);
            index.mark_slices_not_served();
        }
        [Event::Init, Event::InitDone]
            .into_iter()
            .for_each(|event| self.feed.apply_node_event(event));
        [Event::Init, Event::InitDone]
            .into_iter()
            .for_each(|event| self.feed.apply_budget_event(event));
    }

    /// It takes the Lease, and lists in its wait.
    async fn take_lease_and_wait(&self) {
        let state = &self.feed.state;
        state.set_tenure(Tenure::AwaitingEarlierWrites {
            from: state.now() + Millis::seconds(11),
        });
        self.list_others();
        tokio::time::sleep(Duration::from_secs(11)).await;
    }

    fn begin_to_lead(&self) {
        let until = self.feed.state.now() + Millis::seconds(1_000);
        self.feed.state.set_tenure(Tenure::Leading {
            epoch: LeaderEpoch::new("lease", 1, "nonce"),
            until,
        });
        // Nothing happens if these lists are not needed.
        self.list_others();
    }

    /// A pod changes. All watches show it.
    fn pod_changes(&self) {
        let mut served = self.served.lock();
        served.revision += 1;
        let revision = served.revision;
        drop(served);
        self.send_pod_event(revision);
    }

    fn send_pod_event(&self, revision: u64) {
        let event = json!({ "type": "MODIFIED", "object": pod(revision) });
        self.served
            .lock()
            .watches
            .retain(|watch| watch.send(Ok(format!("{event}\n"))).is_ok());
    }

    /// Something else changes, such as a Lease.
    fn other_changes(&self) {
        self.served.lock().revision += 1;
    }

    fn is_open(&self) -> bool {
        self.feed.state.leadership.is_open()
    }

    /// How often all pods were listed.
    fn full_lists(&self) -> usize {
        self.served
            .lock()
            .lists
            .iter()
            .filter(|limit| **limit > 1)
            .count()
    }

    async fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let holds = async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), holds)
            .await
            .unwrap_or_else(|_| panic!("never: {what}"));
    }
}

fn answer(
    served: &Mutex<PodsServed>,
    request: &Request<kube::client::Body>,
) -> Result<Response<Body>, std::io::Error> {
    let query = request.uri().query().unwrap_or_default();
    let parameter = |name: &str| {
        query
            .split('&')
            .find_map(|one| one.strip_prefix(name)?.strip_prefix('='))
    };
    let mut served = served.lock();
    if parameter("watch") == Some("true") {
        let (watch, mut shown) = mpsc::unbounded_channel();
        served.watches.push(watch);
        let lines = futures::stream::poll_fn(move |context| shown.poll_recv(context));
        return Ok(Response::new(Body::from_stream(lines)));
    }
    let limit: u32 = parameter("limit").map_or(0, |limit| limit.parse().expect("a number"));
    served.lists.push(limit);
    let mut version = served.revision.to_string();
    match served.said {
        Some(None) if limit == 1 => {
            return Ok(Response::new(Body::from_stream(
                futures::stream::pending::<std::io::Result<String>>(),
            )));
        }
        Some(Some(said)) if limit == 1 => version = said.to_owned(),
        _ => {}
    }
    let page: usize = parameter("continue").map_or(0, |page| page.parse().expect("a number"));
    let mut metadata = json!({ "resourceVersion": version });
    if limit > 1 && page < served.further_pages {
        metadata["continue"] = json!((page + 1).to_string());
    }
    let items = if served.further_pages == 0 {
        1
    } else {
        limit as usize
    };
    let list = json!({ "metadata": metadata, "items": vec![pod(7); items] }).to_string();
    let held = if page > 0 { served.held.take() } else { None };
    let answered = async move {
        if let Some(held) = held {
            held.await.expect("it is released");
        }
        std::io::Result::Ok(list)
    };
    Ok(Response::new(Body::from_stream(futures::stream::once(
        answered,
    ))))
}

fn pod(version: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "a", "namespace": "chat", "uid": "a", "resourceVersion": version.to_string() },
        "spec": { "containers": [{ "name": "engine" }] },
    })
}

#[tokio::test(start_paused = true)]
async fn pods_are_listed_in_the_wait_for_late_writes_and_not_again_after_it() {
    let standby = Standby::synced().await;
    standby.take_lease_and_wait().await;
    assert_eq!(standby.full_lists(), 2, "once since it holds the Lease");
    standby.begin_to_lead();
    tokio::time::sleep(Duration::from_millis(100)).await;
    standby.pod_changes();
    standby.until("it acts", || standby.is_open()).await;
    assert_eq!(standby.full_lists(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_does_not_act_before_its_watch_shows_the_last_write_of_another() {
    let standby = Standby::synced().await;
    standby.take_lease_and_wait().await;
    // Another leader's write lands at the last moment, and the watch is late.
    standby.served.lock().revision += 1;
    standby.begin_to_lead();
    for _ in 0..9 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!standby.is_open());
    }
    let latest = standby.served.lock().revision;
    standby.send_pod_event(latest);
    standby.until("it acts", || standby.is_open()).await;
    assert_eq!(standby.full_lists(), 2);
}

#[tokio::test(start_paused = true)]
async fn where_no_pod_changes_a_new_leader_lists_once_more() {
    let standby = Standby::synced().await;
    standby.take_lease_and_wait().await;
    standby.other_changes();
    standby.begin_to_lead();
    standby.until("it acts", || standby.is_open()).await;
    assert_eq!(standby.full_lists(), 3);
    // Nothing is listed after that.
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(standby.full_lists(), 3);
}

#[tokio::test(start_paused = true)]
async fn pods_are_listed_once_more_where_their_resource_version_says_nothing() {
    // It is no number, is that of a history before a restore of etcd, or is not answered.
    for said in [Some("a"), Some(""), Some("3"), None] {
        let standby = Standby::synced().await;
        standby.take_lease_and_wait().await;
        standby.served.lock().said = Some(said);
        standby.begin_to_lead();
        standby.pod_changes();
        standby.until("it acts", || standby.is_open()).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(standby.full_lists(), 3, "{said:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn changing_pods_do_not_replace_an_unreadable_resource_version() {
    for said in [Some("a"), Some("3"), None] {
        let standby = Standby::synced().await;
        standby.take_lease_and_wait().await;
        standby.served.lock().said = Some(said);
        standby.begin_to_lead();
        for _ in 0..100 {
            standby.pod_changes();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(standby.is_open(), "{said:?}");
        assert_eq!(standby.full_lists(), 3, "{said:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_resource_version_that_is_not_answered_while_pods_are_listed_is_read_again() {
    let standby = Standby::synced().await;
    let (release, held) = oneshot::channel();
    {
        let mut served = standby.served.lock();
        (served.further_pages, served.held) = (1, Some(held));
    }
    standby.take_lease_and_wait().await;
    standby.served.lock().said = Some(None);
    standby.begin_to_lead();
    tokio::time::sleep(Duration::from_secs(12)).await;
    standby.served.lock().said = None;
    release.send(()).unwrap();
    let changes = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            standby.pod_changes();
        }
    };
    tokio::select! {
        () = changes => {}
        () = standby.until("it acts", || standby.is_open()) => {}
    }
    assert_eq!(
        standby.full_lists(),
        3,
        "two pages since it holds the Lease"
    );
}

#[tokio::test(start_paused = true)]
async fn the_resource_version_is_read_although_pods_are_there_to_be_applied_all_the_time() {
    const PAGES: usize = 20;
    let standby = Standby::synced().await;
    standby.served.lock().further_pages = PAGES;
    let state = &standby.feed.state;
    state.set_tenure(Tenure::AwaitingEarlierWrites { from: state.now() });
    standby.list_others();
    let lists = || standby.served.lock().lists.clone();
    while lists().len() < PAGES / 2 {
        tokio::task::yield_now().await;
    }
    standby.begin_to_lead();
    while lists().len() < PAGES + 3 {
        tokio::task::yield_now().await;
    }
    let place_of = |limit: u32| lists().iter().rposition(|asked| *asked == limit);
    assert!(
        place_of(1) < place_of(LIST_PAGE_SIZE),
        "it is read once nothing of the list is left: {:?}",
        lists()
    );
}

#[tokio::test(start_paused = true)]
async fn a_lagging_watch_that_makes_progress_is_waited_for() {
    let standby = Standby::synced().await;
    standby.take_lease_and_wait().await;
    let behind = standby.served.lock().revision;
    standby.served.lock().revision += 100;
    standby.begin_to_lead();
    for step in 1..=100 {
        tokio::time::sleep(Duration::from_millis(900)).await;
        assert!(
            !standby.is_open(),
            "it has shown {} of 100 changes",
            step - 1
        );
        standby.send_pod_event(behind + step);
    }
    standby.until("it acts", || standby.is_open()).await;
    assert_eq!(standby.full_lists(), 2);
}
