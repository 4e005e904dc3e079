//! The index against a ledger: what comes, changes, goes, and is relisted.

mod kube_filters;

use super::*;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde_json::{Value, json};
use std::sync::Arc;
use stowage_scheduling::audit::ledger::audit;
use stowage_scheduling::control_loop::PodEventReason;
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::bind::{BindAnswer, BindAsked, BindDecision};
use stowage_scheduling::verbs::observe::PodObserved;
use stowage_scheduling::verbs::tick::Tick;

fn pod(name: &str, uid: &str, gib: u64) -> Value {
    json!({
        "metadata": { "name": name, "namespace": "team-a", "uid": uid, "annotations": {} },
        "spec": { "containers": [{
            "name": "engine",
            "resources": { "limits": { "stowage.dev/vram": format!("{gib}Gi") } },
        }] },
        "status": { "phase": "Pending" },
    })
}

pub(super) fn bound(name: &str, uid: &str, gib: u64, node: &str, devices: Option<&str>) -> Value {
    let mut pod = pod(name, uid, gib);
    pod["spec"]["nodeName"] = json!(node);
    if let Some(devices) = devices {
        pod["metadata"]["annotations"]["stowage.dev/devices"] = json!(devices);
        pod["metadata"]["annotations"]["stowage.dev/vram-granted"] = json!((gib << 30).to_string());
    }
    pod
}

fn holding(pod: &Value, deadline: jiff::Timestamp) -> Value {
    let message =
        json!({ "node": "a", "devices": ["index-0"], "victims": [], "deadline": deadline });
    let condition =
        json!({ "type": "stowage.dev/Reserved", "status": "True", "message": message.to_string() });
    let mut pod = pod.clone();
    pod["status"]["conditions"] = json!([condition]);
    pod
}

pub(super) fn node(name: &str, gpus: u32) -> Node {
    read(json!({
        "metadata": { "name": name, "labels": {
            "nvidia.com/gpu.count": gpus.to_string(),
            "nvidia.com/gpu.memory": "81920",
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        } },
        "status": {},
    }))
}

pub(super) fn read<T: serde::de::DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap()
}

pub(super) struct IndexFixture {
    pub(super) state: Arc<ServerState>,
    pub(super) index: ClusterIndex,
}

impl IndexFixture {
    /// Node `a` with two GPUs, seen by an empty index.
    pub(super) fn new() -> Self {
        // No kubelet runs these pods: an engine among them would be starting forever.
        let mut classes = Policy::default().classes().to_vec();
        classes.iter_mut().for_each(|class| class.engine = false);
        let policy = Policy::default().with_classes(classes).unwrap();
        let mut bench = Self {
            state: ServerState::new(policy),
            index: ClusterIndex::default(),
        };
        bench.index.replace_nodes(&bench.state, &[node("a", 2)]);
        bench
    }

    pub(super) fn apply(&mut self, pod: &Value) -> Option<PodEvent> {
        self.index.apply_pod(&self.state, &read(pod.clone()))
    }

    fn phase(&self, uid: &str) -> Option<PodPhase> {
        self.state
            .cluster()
            .ledger()
            .pod_state(&uid_of(uid))
            .map(|entry| entry.phase.clone())
    }

    pub(super) fn charged(&self) -> [Bytes; 2] {
        let cluster = self.state.cluster();
        assert_eq!(audit(cluster.ledger()), []);
        let node = cluster
            .ledger()
            .node(&NodeName::parse("a").unwrap())
            .unwrap();
        [node.gpus[0].charged, node.gpus[1].charged]
    }

    fn warnings(&self, code: &str) -> u64 {
        self.state
            .metrics
            .pod_warnings
            .with_label_values(&[code])
            .get()
    }
}

fn uid_of(text: &str) -> PodUid {
    PodUid::parse(text).unwrap()
}

#[test]
fn a_gpu_is_free_again_after_its_pod_has_finished() {
    let mut bench = IndexFixture::new();
    assert_eq!(bench.apply(&pod("p", "1", 40)), None);
    assert!(matches!(bench.phase("1"), Some(PodPhase::Waiting(_))));
    let mut on_gpu = bound("p", "1", 40, "a", Some("index-1"));
    assert_eq!(bench.apply(&on_gpu), None);
    assert_eq!(bench.charged(), [Bytes::ZERO, Bytes::gib(40)]);
    on_gpu["status"]["phase"] = json!("Succeeded");
    bench.apply(&on_gpu);
    assert_eq!(bench.phase("1"), None);
    assert_eq!(bench.charged(), [Bytes::ZERO; 2]);
    assert!(bench.index.pods.is_empty(), "nothing of it is kept");
}

#[test]
fn a_deleted_pod_is_released_even_while_its_binding_is_on_its_way() {
    let mut bench = IndexFixture::new();
    bench.apply(&pod("p", "1", 40));
    bench.assume("1");
    let gone: Pod = read(pod("p", "1", 40));
    bench.index.delete_pod(&bench.state, &gone);
    assert_eq!(bench.charged(), [Bytes::ZERO; 2]);
}

#[test]
fn pods_that_ask_for_no_vram_are_not_kept() {
    let mut bench = IndexFixture::new();
    let mut other = pod("p", "1", 40);
    other["spec"]["containers"][0]["resources"] = json!({ "limits": { "cpu": "1" } });
    assert_eq!(bench.apply(&other), None);
    assert_eq!(bench.phase("1"), None);
    assert!(bench.index.pods.is_empty());
}

#[test]
fn a_pod_of_the_same_name_with_another_uid_replaces_the_old_one() {
    let mut bench = IndexFixture::new();
    bench.apply(&bound("p-0", "1", 40, "a", Some("index-0")));
    bench.apply(&pod("p-0", "2", 30));
    assert_eq!(bench.phase("1"), None);
    assert!(matches!(bench.phase("2"), Some(PodPhase::Waiting(_))));
    assert_eq!(bench.charged(), [Bytes::ZERO; 2]);
    // The late deletion of the old one does not affect the new one.
    let late: Pod = read(bound("p-0", "1", 40, "a", Some("index-0")));
    bench.index.delete_pod(&bench.state, &late);
    assert!(bench.phase("2").is_some());
}

#[test]
fn a_pending_pod_edited_into_an_invalid_request_leaves_the_ledger() {
    let mut bench = IndexFixture::new();
    bench.apply(&pod("p", "1", 40));
    let mut edited = pod("p", "1", 40);
    edited["metadata"]["annotations"]["stowage.dev/gpus"] = json!("many");
    bench.apply(&edited);
    assert_eq!(bench.phase("1"), None);
}

#[test]
fn a_new_list_releases_pods_not_in_it_and_keeps_those_that_came_during_it() {
    let mut bench = IndexFixture::new();
    bench.apply(&bound("kept", "1", 40, "a", Some("index-0")));
    bench.apply(&bound("gone", "2", 40, "a", Some("index-1")));
    bench.apply(&pod("assumed", "3", 10));
    bench.assume("3");

    bench.index.begin_pod_list(&bench.state);
    bench.apply(&bound("kept", "1", 40, "a", Some("index-0")));
    // Younger than the list: it came by a filter request and is being bound already.
    bench.apply_from_request(&pod("young", "4", 20));
    bench.assume("4");
    bench.apply(&pod("assumed", "3", 10));
    bench.index.end_pod_list(&bench.state);

    assert_eq!(bench.phase("2"), None);
    assert!(
        matches!(bench.phase("3"), Some(PodPhase::Assumed(_))),
        "listed as waiting, and still promised"
    );
    assert!(matches!(bench.phase("4"), Some(PodPhase::Assumed(_))));
    assert_eq!(
        bench.charged().iter().copied().sum::<Bytes>(),
        Bytes::gib(40 + 10 + 20)
    );
    let keys: Vec<&str> = bench
        .index
        .pods
        .values()
        .map(|known| known.uid.as_str())
        .collect();
    assert!(!keys.contains(&"2"), "a name that is gone is not kept");
}

#[test]
fn a_pod_absent_from_a_list_is_gone_whatever_was_allocated_to_it() {
    let mut bench = IndexFixture::new();
    bench.apply(&pod("p", "1", 40));
    bench.assume("1");
    bench.index.replace_pods(&bench.state, &[]);
    assert_eq!(bench.phase("1"), None);
    assert_eq!(bench.charged(), [Bytes::ZERO; 2]);
}

#[test]
fn an_unplaced_pod_is_charged_on_every_gpu_reported_and_counted_once() {
    let mut bench = IndexFixture::new();
    let unplannable_pod = bound("unmanaged", "1", 40, "a", None);
    let event = bench.apply(&unplannable_pod).unwrap();
    assert_eq!(
        (event.kind, event.uid.as_str()),
        (PodEventReason::Unplaced, "1")
    );
    assert!(
        event.text.contains("40.0 GiB are charged on every GPU"),
        "{}",
        event.text
    );
    assert_eq!(bench.charged(), [Bytes::gib(40); 2]);
    assert!(bench.apply(&unplannable_pod).is_some());
    assert_eq!(
        bench.warnings("unplaced"),
        1,
        "one pod, however often it is seen"
    );
    assert_eq!(bench.index.current_warning_events(&bench.state).len(), 1);
    bench.index.replace_pods(&bench.state, &[]);
    assert_eq!(bench.index.current_warning_events(&bench.state), []);
}

#[test]
fn edits_after_the_bind_are_ignored_and_reported() {
    let mut bench = IndexFixture::new();
    bench.apply(&bound("p", "1", 40, "a", Some("index-0")));
    let moved = bench
        .apply(&bound("p", "1", 40, "a", Some("index-1")))
        .unwrap();
    assert_eq!(moved.kind, PodEventReason::EditIgnored);
    assert!(
        moved.text.contains("charged on index-0 of a"),
        "{}",
        moved.text
    );
    assert_eq!(
        (bench.charged(), bench.warnings("devices-edited")),
        ([Bytes::gib(40), Bytes::ZERO], 1)
    );

    let mut alone = bound("p", "1", 40, "a", Some("index-0"));
    alone["metadata"]["annotations"]["stowage.dev/exclusive"] = json!("true");
    let event = bench.apply(&alone).unwrap();
    assert_eq!(event.kind, PodEventReason::EditIgnored);
    assert_eq!(
        (bench.charged(), bench.warnings("demand-edited")),
        ([Bytes::gib(40), Bytes::ZERO], 1)
    );

    assert_eq!(
        bench.apply(&bound("p", "1", 40, "a", Some("index-0"))),
        None,
        "the edit was taken back"
    );
    assert_eq!(bench.index.current_warning_events(&bench.state), []);
}

#[test]
fn a_reservation_condition_keeps_its_vram_until_its_deadline() {
    let mut bench = IndexFixture::new();
    let deadline = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
    bench.apply(&holding(&pod("p", "1", 40), deadline));
    assert_eq!(bench.charged(), [Bytes::gib(40), Bytes::ZERO]);
    let now = bench.state.now();
    assert_eq!(
        bench.state.cluster().apply(Tick {
            now: now + Millis::seconds(50),
            is_leading: true
        }),
        []
    );
    assert_eq!(
        bench.state.cluster().apply(Tick {
            now: now + Millis::seconds(70),
            is_leading: true
        }),
        [uid_of("1")]
    );
    assert_eq!(bench.charged(), [Bytes::ZERO; 2]);
}

#[test]
fn a_cleared_reservation_ends_on_a_standby_and_stays_on_the_leader() {
    let deadline = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
    for leads in [false, true] {
        let mut bench = IndexFixture::new();
        bench.apply(&holding(&pod("p", "1", 40), deadline));
        if leads {
            bench.state.lead_from_the_start();
        }
        bench.apply(&pod("p", "1", 40));
        let held = bench.charged()[0] == Bytes::gib(40);
        assert_eq!(
            held, leads,
            "who leads may hold room whose condition is still on its way"
        );
    }
}

#[test]
fn a_sweep_releases_pods_that_only_a_request_has_shown_at_the_second_time() {
    let mut bench = IndexFixture::new();
    bench.apply(&pod("watched", "1", 10));
    bench.apply_from_request(&pod("ghost", "2", 10));
    bench.apply_from_request(&pod("bound-meanwhile", "3", 10));
    bench.sweep();
    assert!(bench.phase("2").is_some(), "the watch may be late");
    bench.assume("3");
    bench.apply_from_request(&pod("new", "4", 10));
    bench.sweep();
    assert_eq!(bench.phase("2"), None);
    assert!(["1", "3", "4"].iter().all(|uid| bench.phase(uid).is_some()));
}

#[test]
fn a_node_is_added_changed_deleted_and_removed_when_absent_from_a_list() {
    let mut bench = IndexFixture::new();
    bench.index.apply_node(&bench.state, &node("b", 4));
    let names = |bench: &IndexFixture| -> Vec<String> {
        let snapshot = bench.state.cluster().snapshot();
        snapshot
            .nodes()
            .iter()
            .map(|node| format!("{}:{}", node.name, node.gpus.len()))
            .collect()
    };
    assert_eq!(names(&bench), ["a:2", "b:4"]);
    bench
        .index
        .replace_nodes(&bench.state, &[node("b", 4), node("c", 1)]);
    assert_eq!(names(&bench), ["b:4", "c:1"]);
    bench.index.delete_node(&bench.state, &node("b", 4));
    assert_eq!(names(&bench), ["c:1"]);
    assert_eq!(bench.index.nodes().len(), 1);
    let changed: Vec<String> = bench
        .index
        .take_changed_nodes()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        changed,
        ["c"],
        "those that are gone would add up on a replica that advertises nothing"
    );
}

#[test]
fn a_node_with_a_device_plugin_has_no_gpus_to_place_on() {
    let mut bench = IndexFixture::new();
    let mut plugin = node("a", 2);
    let status = json!({
        "capacity": { "stowage.dev/vram": "144Gi" },
        "allocatable": { "nvidia.com/gpu": "2", "nvidia.com/mig-1g.10gb": "0" },
    });
    plugin.status = Some(read(status));
    bench.index.apply_node(&bench.state, &plugin);
    let record = bench.index.nodes()[&NodeName::parse("a").unwrap()];
    assert_eq!(
        record,
        IndexedNode {
            kind: NodeKind::DevicePlugin,
            advertised_vram: Some(Bytes::gib(144))
        }
    );
    assert_eq!(
        bench
            .state
            .cluster()
            .ledger()
            .node(&NodeName::parse("a").unwrap())
            .unwrap()
            .gpus
            .len(),
        0
    );

    plugin.status = Some(read(
        json!({ "allocatable": { "nvidia.com/gpu": "0" }, "capacity": { "nvidia.com/gpu": "2" } }),
    ));
    bench.index.apply_node(&bench.state, &plugin);
    let kind = bench.index.nodes()[&NodeName::parse("a").unwrap()].kind;
    assert_eq!(
        kind,
        NodeKind::DevicePlugin,
        "while the plugin restarts its pods still have their GPUs"
    );

    plugin.status = Some(read(json!({ "allocatable": { "nvidia.com/gpu": "0" } })));
    bench.index.apply_node(&bench.state, &plugin);
    assert_eq!(
        bench
            .state
            .cluster()
            .ledger()
            .node(&NodeName::parse("a").unwrap())
            .unwrap()
            .gpus
            .len(),
        2
    );
}

#[test]
fn the_index_is_complete_once_all_lists_are_in() {
    let mut bench = IndexFixture::new();
    bench.index.begin_budget_list(&bench.state);
    bench.index.end_budget_list(&bench.state);
    bench.index.begin_slice_list(&bench.state);
    bench.index.end_slice_list(&bench.state);
    bench.index.begin_pod_list(&bench.state);
    bench.apply(&pod("p", "1", 10));
    assert_eq!(bench.index.synced_term(), None);
    bench.index.end_pod_list(&bench.state);
    assert_eq!(bench.index.synced_term(), Some(0));
    bench.index.expect_pod_list(1);
    assert_eq!(bench.index.synced_term(), None, "a new list is on its way");
    bench.index.begin_pod_list(&bench.state);
    bench.index.end_pod_list(&bench.state);
    assert_eq!(
        bench.index.synced_term(),
        Some(0),
        "the others are still those of before"
    );
}

#[test]
fn without_access_to_budgets_the_index_is_complete_and_budgets_are_unknown() {
    let mut bench = IndexFixture::new();
    bench.index.replace_pods(&bench.state, &[]);
    bench.index.mark_slices_not_served();
    assert_eq!(bench.index.synced_term(), None);
    bench.index.mark_budgets_forbidden(&bench.state);
    assert_eq!(bench.index.synced_term(), Some(0));
    assert!(!bench.state.cluster().ledger().are_budgets_known());
    bench.index.begin_budget_list(&bench.state);
    bench.index.end_budget_list(&bench.state);
    assert!(bench.state.cluster().ledger().are_budgets_known());
}

fn budget(name: &str, allowed: i32) -> PodDisruptionBudget {
    read(json!({
        "metadata": { "name": name, "namespace": "team-a" },
        "spec": { "selector": {} },
        "status": { "disruptionsAllowed": allowed, "observedGeneration": 1 },
    }))
}

#[test]
fn a_budget_that_a_new_list_does_not_have_is_gone() {
    let mut bench = IndexFixture::new();
    let known = |bench: &IndexFixture| {
        let cluster = bench.state.cluster();
        cluster
            .ledger()
            .budgets()
            .iter()
            .map(|budget| (budget.name.clone(), budget.allowed))
            .collect::<Vec<_>>()
    };
    for (name, allowed) in [("a", 1), ("b", 2), ("c", 3)] {
        bench
            .index
            .apply_budget(&bench.state, &budget(name, allowed));
    }
    bench.index.delete_budget(&bench.state, &budget("c", 3));
    assert_eq!(known(&bench), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
    bench.index.begin_budget_list(&bench.state);
    bench.index.apply_budget(&bench.state, &budget("b", 0));
    bench.index.end_budget_list(&bench.state);
    assert_eq!(known(&bench), [("b".to_owned(), 0)]);
}

#[test]
fn objects_without_a_name_or_uid_change_nothing() {
    let mut bench = IndexFixture::new();
    let mut nameless = pod("p", "1", 10);
    nameless["metadata"].as_object_mut().unwrap().remove("uid");
    assert_eq!(bench.apply(&nameless), None);
    bench.index.apply_node(&bench.state, &Node::default());
    assert_eq!(bench.index.nodes().len(), 1);
    assert_eq!(bench.state.cluster().ledger().pod_states().len(), 0);
}

/// A UUID an agent reported and a record of it, seen again after a restart.
#[test]
fn the_ledger_rebuilt_from_the_pods_is_the_one_that_was_lost() {
    let pods = [
        bound("a", "1", 40, "a", Some("index-0")),
        bound("b", "2", 20, "a", Some("index-1,index-0")),
        bound("unmanaged", "3", 10, "a", None),
        pod("waits", "4", 30),
    ];
    let [mut one, mut two] = [IndexFixture::new(), IndexFixture::new()];
    pods.iter().for_each(|pod| drop(one.apply(pod)));
    let list: Vec<Pod> = pods.iter().rev().map(|pod| read(pod.clone())).collect();
    two.index.replace_pods(&two.state, &list);
    // When a replica learned of a pod differs from replica to replica.
    let timeless = |bench: &IndexFixture| -> BTreeMap<PodUid, PodState> {
        let cluster = bench.state.cluster();
        let entries = cluster
            .ledger()
            .pod_states()
            .into_iter()
            .map(|(uid, entry)| {
                let mut entry = entry.clone();
                match &mut entry.phase {
                    PodPhase::Bound(bound) => (bound.since, bound.started) = Default::default(),
                    PodPhase::Waiting(waiting) => waiting.since = Default::default(),
                    PodPhase::Assumed(_) => {}
                }
                (uid.clone(), entry)
            });
        entries.collect()
    };
    assert_eq!(timeless(&one), timeless(&two));
    assert_eq!(one.charged(), two.charged());
    let devices = [GpuUuid::from_index(1), GpuUuid::from_index(0)];
    assert_eq!(
        two.state
            .cluster()
            .ledger()
            .pod_state(&uid_of("2"))
            .unwrap()
            .devices()
            .unwrap()[..],
        devices
    );
}

impl IndexFixture {
    /// A bind on node `a` allocates GPUs to the pod; its Binding is not written yet.
    fn assume(&self, uid: &str) {
        let mut cluster = self.state.cluster();
        let asked = BindAsked::for_pod(
            cluster.ledger(),
            &uid_of(uid),
            &NodeName::parse("a").unwrap(),
        )
        .unwrap();
        let answer = cluster.apply(asked);
        assert!(
            matches!(
                answer,
                Ok(BindAnswer::Write(BindDecision { is_new: true, .. }))
            ),
            "{answer:?}"
        );
    }

    fn sweep(&mut self) {
        let index = Mutex::new(std::mem::take(&mut self.index));
        ClusterIndex::sweep(&index, &self.state);
        self.index = index.into_inner();
    }

    /// As the extender brings a pod in: past the index.
    fn apply_from_request(&self, pod: &Value) {
        let mut cluster = self.state.cluster();
        let seen = objects::observation(
            &read(pod.clone()),
            cluster.ledger().policy(),
            None,
            jiff::Timestamp::UNIX_EPOCH,
        )
        .unwrap();
        cluster.apply(PodObserved(seen));
    }
}
