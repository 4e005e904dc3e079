//! Bind against a control plane with every possible answer: the scheduler's answer, and the ledger afterwards. OK is only
//! answered for a pod that is bound to that node.

use crate::served::{
    Served, ServedCluster, bind_args, bound_on, eventually, gpu_uuid, key_of, pod, report, uid_of,
    with_gpu_count,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_kubernetes_objects::binding;
use stowage_kubernetes_objects::port::BindOutcome;
use stowage_scheduling::control_loop::{ControlPlaneError, FreshPod, PodEventReason};
use stowage_scheduling::ids::{GpuUuid, LeaderEpoch, NodeName, PodUid};
use stowage_scheduling::ledger::PodPhase;
use stowage_scheduling::units::Bytes;

const NOTHING_CHARGED: [Bytes; 2] = [Bytes::ZERO; 2];
const FIRST_GPU_CHARGED: [Bytes; 2] = [Bytes::gib(40), Bytes::ZERO];

/// Two nodes of two GPUs, and a pod of 40 GiB that waits.
fn served(outcomes: impl IntoIterator<Item = BindOutcome>) -> (Served, Value) {
    let llm = pod("llm", "40Gi");
    let served = ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 2)])
        .with([llm.clone()])
        .serve();
    served.control_plane.binds.lock().extend(outcomes);
    (served, llm)
}

fn unknown() -> BindOutcome {
    BindOutcome::Unknown {
        message: "timed out".into(),
    }
}

/// What a fresh read shows.
fn record(pod: &Value, node: Option<&str>, gpu: u32) -> FreshPod {
    let device =
        |node| -> Arc<[GpuUuid]> { [GpuUuid::parse(&gpu_uuid(node, gpu)).unwrap()].into() };
    FreshPod {
        uid: uid_of(pod),
        node: node.map(|node| NodeName::parse(node).unwrap()),
        devices: node.map(device),
        has_started: false,
        is_over: false,
        borrows: false,
        refusal: None,
    }
}

fn set_pod_read(served: &Served, record: Option<FreshPod>) {
    served.control_plane.reads.lock().push_back(Ok(record));
}

fn bind_failures(served: &Served, code: &str) -> u64 {
    served.metric(&format!(
        "stowage_answers_total{{code=\"{code}\",outcome=\"unbound\",verb=\"bind\"}}"
    ))
}

fn bind_order_count(served: &Served) -> usize {
    served.control_plane.orders.lock().len()
}

#[test]
fn a_written_binding_is_confirmed_and_a_repeated_bind_is_ok() {
    let (served, llm) = served([BindOutcome::Written]);
    assert_eq!(served.bind(&llm, "node-a"), "");
    assert!(served.is_bound_to(&llm, "node-a"));
    assert_eq!(
        (served.charged("node-a"), served.charged("node-b")),
        (FIRST_GPU_CHARGED.into(), NOTHING_CHARGED.into())
    );
    assert_eq!(served.bind(&llm, "node-a"), "", "idempotent");
    assert_eq!(bind_order_count(&served), 1, "and not written twice");
    assert_eq!(
        served.bind(&llm, "node-b"),
        "conflict: pod is bound to another node"
    );
    assert_eq!(bind_order_count(&served), 1);
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    assert_eq!(
        served.metric("stowage_answers_total{code=\"none\",outcome=\"bound\",verb=\"bind\"}"),
        2
    );
}

#[test]
fn the_binding_names_the_gpus_that_are_charged() {
    let (served, llm) = served([]);
    assert_eq!(served.bind(&llm, "node-b"), "");
    let (order, outcome) = served.control_plane.orders.lock()[0].clone();
    assert_eq!(
        (order.uid, order.key, outcome),
        (uid_of(&llm), key_of(&llm), Some(BindOutcome::Written))
    );
    let devices: Vec<&str> = order
        .placement
        .devices
        .iter()
        .map(GpuUuid::as_str)
        .collect();
    assert_eq!(
        (order.placement.node.as_str(), devices),
        ("node-b", vec!["GPU-node-b-0"])
    );
    assert_eq!(
        (
            order.placement.granted,
            order.placement.memory_fraction.to_string().as_str()
        ),
        (Bytes::gib(40), "0.5000")
    );
    assert_eq!(served.charged("node-b"), FIRST_GPU_CHARGED);
}

/// What the Binding writes under keys of fractions, by what stands before the name.
fn fractions(served: &Served, pod: &Value) -> BTreeMap<String, String> {
    assert_eq!(served.bind(pod, "node-a"), "");
    let (order, _) = served.control_plane.orders.lock().last().unwrap().clone();
    let epoch = LeaderEpoch::new("lease", 1, "nonce");
    let binding = binding(
        &order.key,
        &order.uid,
        &order.demand,
        &order.placement,
        Some("nvidia.com/gpu"),
        &epoch,
    );
    let annotations = binding.metadata.annotations.unwrap();
    let prefix = |key: &str| key.strip_suffix("/gpu-memory-fraction").map(str::to_owned);
    annotations
        .into_iter()
        .filter_map(|(key, value)| Some((prefix(&key)?, value)))
        .collect()
}

fn pod_with_containers(name: &str, vram: &str) -> Value {
    json!({ "name": name, "resources": { "limits": { "stowage.dev/vram": vram } } })
}

#[test]
fn each_container_gets_its_own_gpu_memory_fraction() {
    let mut several = pod("several", "40Gi");
    let (llm, embed, rerank) = (
        pod_with_containers("llm", "32Gi"),
        pod_with_containers("embed", "10Gi"),
        pod_with_containers("rerank", "6Gi"),
    );
    several["spec"]["containers"] = json!([llm, embed, rerank, { "name": "logs" }]);
    let mut prepared = pod("prepared", "10Gi");
    let mut watch = pod_with_containers("watch", "2Gi");
    watch["restartPolicy"] = json!("Always");
    prepared["spec"]["initContainers"] = json!([pod_with_containers("warm", "40Gi"), watch]);
    let one = pod("one", "256Mi");
    let served = || {
        let waiting = [several.clone(), prepared.clone(), one.clone()];
        ServedCluster::with_gpus(&[("node-a", 2)])
            .with(waiting)
            .serve()
    };
    let of = |pod| fractions(&served(), pod).into_iter().collect::<Vec<_>>();
    let told = |parts: &[(&str, &str)]| -> Vec<_> {
        parts
            .iter()
            .map(|(key, value)| (key.to_string(), value.to_string()))
            .collect()
    };
    assert_eq!(
        of(&several),
        told(&[
            ("embed.container.stowage.dev", "0.1250"),
            ("llm.container.stowage.dev", "0.4000"),
            ("rerank.container.stowage.dev", "0.0750"),
            ("stowage.dev", "0.6000"),
        ])
    );
    assert_eq!(
        of(&prepared),
        told(&[
            ("engine.container.stowage.dev", "0.1250"),
            ("stowage.dev", "0.5000"),
            ("warm.container.stowage.dev", "0.5000"),
            ("watch.container.stowage.dev", "0.0250"),
        ])
    );
    assert_eq!(
        of(&one),
        told(&[("stowage.dev", "0.0031")]),
        "of one container it is the pod's"
    );
}

#[test]
fn a_pod_over_unequal_gpus_gets_the_smallest_fraction_and_an_event() {
    let two = with_gpu_count(pod("two", "40Gi"), 2);
    let served = ServedCluster::with_gpus(&[("node-a", 2)])
        .with([two.clone()])
        .serve();
    let mut unequal = report("node-a", "boot", 2, 2);
    unequal["gpus"][0]["totalBytes"] = json!(24u64 << 30);
    assert_eq!(
        served.report(unequal).json(),
        json!({ "accepted": 1, "dropped": 0 })
    );
    assert_eq!(
        fractions(&served, &two),
        [("stowage.dev".to_owned(), "0.2500".to_owned())].into()
    );
    let told = served
        .events()
        .into_iter()
        .find(|(pod, ..)| pod == "two")
        .expect("an Event");
    assert_eq!(told.1, PodEventReason::UnevenGpus);
    assert!(
        told.2.contains("0.2500") && told.2.contains("0.8333"),
        "{}",
        told.2
    );
    // Over equal ones there is nothing to say.
    let served = ServedCluster::with_gpus(&[("node-a", 2)])
        .with([two.clone()])
        .serve();
    assert_eq!(
        fractions(&served, &two),
        [("stowage.dev".to_owned(), "0.2500".to_owned())].into()
    );
    assert_eq!(served.events(), []);
}

#[test]
fn a_refused_binding_frees_its_gpu_and_can_be_retried() {
    let (served, llm) = served([BindOutcome::Refused {
        message: "forbidden: quota 17 of 16".into(),
    }]);
    assert_eq!(
        served.bind(&llm, "node-a"),
        "the API server refused the binding",
        "without what changes"
    );
    assert!(matches!(served.phase(&llm), PodPhase::Waiting(_)));
    assert_eq!(served.charged("node-a"), NOTHING_CHARGED);
    assert_eq!(bind_failures(&served, "refused"), 1);
    assert_eq!(served.bind(&llm, "node-a"), "");
    assert!(served.is_bound_to(&llm, "node-a"));
}

#[test]
fn a_conflict_with_a_binding_to_the_same_node_is_ok_with_its_gpus() {
    let (served, llm) = served([BindOutcome::Conflict]);
    set_pod_read(&served, Some(record(&llm, Some("node-a"), 1)));
    assert_eq!(served.bind(&llm, "node-a"), "");
    assert!(served.is_bound_to(&llm, "node-a"));
    assert_eq!(
        served.charged("node-a"),
        [Bytes::ZERO, Bytes::gib(40)],
        "not where it was assumed"
    );
}

#[test]
fn a_conflict_with_a_binding_to_another_node_is_an_error_and_moves_the_charge() {
    let (served, llm) = served([BindOutcome::Conflict]);
    set_pod_read(&served, Some(record(&llm, Some("node-b"), 0)));
    assert_eq!(
        served.bind(&llm, "node-a"),
        "conflict: pod is bound to another node"
    );
    assert!(served.is_bound_to(&llm, "node-b"));
    assert_eq!(
        (served.charged("node-a"), served.charged("node-b")),
        (NOTHING_CHARGED.into(), FIRST_GPU_CHARGED.into())
    );
    assert_eq!(bind_failures(&served, "bound-elsewhere"), 1);
}

#[test]
fn a_conflict_with_another_schedulers_binding_charges_all_gpus() {
    let (served, llm) = served([BindOutcome::Conflict]);
    let stolen = FreshPod {
        devices: None,
        ..record(&llm, Some("node-a"), 0)
    };
    set_pod_read(&served, Some(stolen));
    assert_eq!(served.bind(&llm, "node-a"), "", "it is where it was to be");
    assert_eq!(served.charged("node-a"), [Bytes::gib(40); 2]);
    assert_eq!(served.service.cluster().ledger().totals().unplaced, 1);
}

#[test]
fn a_conflict_over_a_deleted_or_recreated_pod_releases_it() {
    for found in [None, Some("uid-of-its-successor")] {
        let (served, llm) = served([BindOutcome::Conflict]);
        let successor = |uid| FreshPod {
            uid: PodUid::parse(uid).unwrap(),
            ..record(&llm, Some("node-a"), 0)
        };
        set_pod_read(&served, found.map(successor));
        assert_eq!(served.bind(&llm, "node-a"), "conflict: pod is gone");
        assert_eq!(
            (served.pod_state(&llm), served.charged("node-a")),
            (None, NOTHING_CHARGED.into())
        );
        assert_eq!(bind_failures(&served, "pod-gone"), 1);
    }
}

#[test]
fn a_conflict_over_an_unbound_pod_is_an_error_and_the_binding_is_retried() {
    let (served, llm) = served([BindOutcome::Conflict]);
    set_pod_read(&served, Some(record(&llm, None, 0)));
    assert_ne!(served.bind(&llm, "node-a"), "");
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    eventually("it is written", || served.is_bound_to(&llm, "node-a"));
}

#[test]
fn a_binding_without_an_answer_keeps_its_gpu_until_a_read_confirms_it() {
    let (served, llm) = served([unknown()]);
    // The first read fails, too.
    served
        .control_plane
        .reads
        .lock()
        .push_back(Err(ControlPlaneError::Unknown("no answer".into())));
    set_pod_read(&served, Some(record(&llm, Some("node-a"), 0)));
    assert_eq!(
        served.bind(&llm, "node-a"),
        "the API server did not say whether the pod is bound; it is being read"
    );
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    assert_eq!(bind_failures(&served, "unsettled"), 1);
    eventually("the read settles it", || served.is_bound_to(&llm, "node-a"));
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    assert_eq!(
        served.bind(&llm, "node-a"),
        "",
        "which is what the scheduler asks next"
    );
    assert_eq!(bind_order_count(&served), 1);
}

#[test]
fn a_binding_without_an_answer_is_rewritten_if_a_read_does_not_show_it() {
    let (served, llm) = served([unknown(), unknown()]);
    // The first write may still be applied: its GPU stays charged meanwhile.
    set_pod_read(&served, Some(record(&llm, None, 0)));
    assert_ne!(served.bind(&llm, "node-a"), "");
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    eventually("it is written", || served.is_bound_to(&llm, "node-a"));
    let orders = served.control_plane.orders.lock();
    let devices: Vec<_> = orders
        .iter()
        .map(|(order, _)| order.placement.devices.clone())
        .collect();
    assert_eq!(devices.len(), 3, "asked for, sent again, sent again");
    assert!(
        devices.iter().all(|same| *same == devices[0]),
        "and on the same GPUs each time"
    );
}

#[test]
fn a_write_or_a_read_that_panics_has_no_answer_and_is_repeated() {
    // The write; then the read of the settling loop, and its write.
    let (served, llm) = served([]);
    *served.control_plane.panics.lock() = 3;
    set_pod_read(&served, Some(record(&llm, None, 0)));
    assert_ne!(served.bind(&llm, "node-a"), "");
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    eventually("it is written", || served.is_bound_to(&llm, "node-a"));
    assert_eq!(served.service.cluster().unsettled_bindings(), 0);
}

#[test]
fn an_unsettled_binding_keeps_its_gpu_and_its_node() {
    let (served, llm) = served([unknown()]);
    served
        .control_plane
        .reads
        .lock()
        .extend((0..1000).map(|_| Err(ControlPlaneError::Unknown("no answer".into()))));
    assert_ne!(served.bind(&llm, "node-a"), "");
    assert_eq!(
        served.bind(&llm, "node-b"),
        "conflict: an earlier binding is not settled"
    );
    assert_eq!(bind_failures(&served, "unsettled"), 2);
    let whole = pod("whole", "72Gi");
    assert_eq!(served.filter_passed(&whole, &["node-a"]), ["node-a"]);
    assert_eq!(
        served.filter_passed(
            &crate::served::with_gpu_count(pod("two", "100Gi"), 2),
            &["node-a"]
        ),
        [""; 0]
    );
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
    // The watch may be faster than the reads.
    served.observe_pod(&bound_on(llm.clone(), "node-a", &[0], 40 << 30));
    assert!(served.is_bound_to(&llm, "node-a"));
}

#[test]
fn a_repeated_bind_during_an_unsettled_one_writes_the_same_gpus() {
    let (served, llm) = served([unknown(), BindOutcome::Conflict]);
    served
        .control_plane
        .reads
        .lock()
        .extend([Err(ControlPlaneError::Unknown("no answer".into()))]);
    assert_ne!(served.bind(&llm, "node-a"), "");
    eventually("the first read has failed", || {
        served.control_plane.reads.lock().is_empty()
    });
    set_pod_read(&served, Some(record(&llm, Some("node-a"), 0)));
    assert_eq!(served.bind(&llm, "node-a"), "");
    assert!(served.is_bound_to(&llm, "node-a"));
    let orders = served.control_plane.orders.lock();
    assert!(
        orders
            .iter()
            .all(|(order, _)| order.placement == orders[0].0.placement)
    );
}

#[test]
fn a_bind_completes_after_its_connection_is_closed() {
    let (served, llm) = served([]);
    served.control_plane.permits.forget_permits(usize::MAX);
    let mut client = served.client();
    let body = bind_args(&llm, "node-a").to_string();
    let head = crate::client::post_head(
        "/scheduler/bind",
        &format!("Content-Length: {}", body.len()),
    );
    client.write((head + &body).as_bytes()).unwrap();
    eventually("the write is under way", || bind_order_count(&served) == 1);
    assert!(matches!(served.phase(&llm), PodPhase::Assumed(_)));
    drop(client);
    // The server has dropped the connection and the handler before the API server answers.
    assert_eq!(
        served.filter_passed(&pod("other", "10Gi"), &["node-a"]),
        ["node-a"]
    );
    served.control_plane.permits.add_permits(1);
    eventually("the bind is confirmed", || {
        served.is_bound_to(&llm, "node-a")
    });
    assert_eq!(served.charged("node-a"), FIRST_GPU_CHARGED);
}

#[test]
fn a_cancelled_handler_lets_its_bind_complete() {
    let (served, llm) = served([]);
    served.control_plane.permits.forget_permits(usize::MAX);
    let extender = served.extender.clone();
    let args = serde_json::from_value(bind_args(&llm, "node-a")).unwrap();
    let handler =
        served.spawn(async move { stowage_server::extender::bind::bind(&extender, &args).await });
    eventually("the write is under way", || bind_order_count(&served) == 1);
    handler.abort();
    assert!(served.run(handler).unwrap_err().is_cancelled());
    assert!(matches!(served.phase(&llm), PodPhase::Assumed(_)));
    served.control_plane.permits.add_permits(1);
    eventually("the bind is confirmed", || {
        served.is_bound_to(&llm, "node-a")
    });
}

#[test]
fn a_stop_waits_for_the_binds_in_progress_and_answers_them() {
    let (mut served, llm) = served([]);
    served.control_plane.permits.forget_permits(usize::MAX);
    let mut client = served.client();
    let body = bind_args(&llm, "node-a").to_string();
    let head = crate::client::post_head(
        "/scheduler/bind",
        &format!("Content-Length: {}", body.len()),
    );
    client.write((head + &body).as_bytes()).unwrap();
    eventually("the write is under way", || bind_order_count(&served) == 1);
    served.begin_stop();
    eventually("no one new is let in", || {
        std::net::TcpStream::connect(served.scheduler).is_err()
    });
    served.control_plane.permits.add_permits(1);
    assert_eq!(client.read_answer().unwrap().json(), json!({ "Error": "" }));
    served.stop();
    assert!(served.is_bound_to(&llm, "node-a"));
}
