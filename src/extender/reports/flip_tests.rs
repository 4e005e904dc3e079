//! An agent that changes its list of GPUs with every report: what it costs everyone else.

use super::*;
use crate::extender::request::RequestLimits;
use crate::kubernetes::objects;
use crate::kubernetes::port::AgentNode;
use crate::kubernetes::testing::Recorder;
use crate::scheduling::ledger::PODS_LOOKED_AT;
use crate::scheduling::policy::Policy;
use crate::scheduling::verbs::observe::{NodeObserved, PodObserved};
use crate::scheduling::vocabulary::gpu::Health;
use crate::scheduling::vocabulary::node::{NodeIdentity, NodeKind};
use crate::service::Service;
use crate::units::Millis;
use serde_json::{Value, json};

const NODES: usize = 200;
const PODS_PER_NODE: usize = 8;

fn name(node: usize) -> NodeName {
    NodeName::parse(&format!("node-{node}")).unwrap()
}

fn gpu(index: usize) -> Value {
    json!({ "uuid": format!("GPU-{index}"), "index": index, "model": "H100", "totalBytes": 80u64 << 30 })
}

fn report(sequence: u64, gpus: usize) -> String {
    let gpus: Vec<Value> = (0..gpus).map(gpu).collect();
    json!({ "node": "node-0", "bootId": "boot", "sequence": sequence, "ageMillis": 0, "gpus": gpus })
        .to_string()
}

fn bound(node: usize, place: usize) -> k8s_openapi::api::core::v1::Pod {
    let name = format!("pod-{node}-{place}");
    let pod = json!({
        "metadata": { "name": name, "namespace": "team-a", "uid": name, "annotations": {
            "stowage.dev/devices": format!("GPU-{}", place % 2), "stowage.dev/vram-granted": (1u64 << 30).to_string(),
        } },
        "spec": { "nodeName": format!("node-{node}"), "containers": [{
            "name": "engine", "resources": { "limits": { "stowage.dev/vram": "1Gi" } },
        }] },
    });
    serde_json::from_value(pod).unwrap()
}

/// Every node has eight pods, spread over two GPUs of which its record names one.
fn crowded() -> Extender {
    let service = Service::with_stopped_clock(Policy::default());
    service.lead_from_the_start();
    let mut ledger = service.cluster();
    for node in 0..NODES {
        ledger.apply(NodeObserved::new(name(node), NodeKind::Stowage));
        for place in 0..PODS_PER_NODE {
            let pod = bound(node, place);
            let seen = objects::observation(&pod, ledger.policy(), None, jiff::Timestamp::UNIX_EPOCH);
            ledger.apply(PodObserved(seen.unwrap()));
        }
    }
    drop(ledger);
    Extender::new(service, std::sync::Arc::new(Recorder::default()), RequestLimits::default())
}

fn take_report(extender: &Extender, text: &str) -> ReportsResult {
    reports(extender, &Sender::Anyone, extender.service.now(), text.as_bytes()).unwrap()
}

#[test]
fn b12_a_change_of_one_nodes_gpus_looks_at_the_pods_of_that_node_only() {
    let extender = crowded();
    assert_eq!(take_report(&extender, &report(1, 2)).accepted, 1);
    PODS_LOOKED_AT.set(0);
    assert_eq!(take_report(&extender, &report(2, 1)).accepted, 1);
    let looked_at = PODS_LOOKED_AT.get();
    // Each of the node's pods several times, and none of the other 1,600.
    assert!(looked_at <= 20 * PODS_PER_NODE, "{looked_at} entries were looked at");
}

fn identity(uid: &str, machine: Option<&str>) -> NodeIdentity {
    NodeIdentity { uid: uid.into(), machine: machine.map(Into::into) }
}

#[test]
fn b11_a_late_report_of_the_old_machine_does_not_bring_its_gpus_back() {
    for (machines, is_taken) in
        [([Some("one"), Some("two")], false), ([None, None], false), ([Some("one"), Some("one")], true)]
    {
        let extender = crowded();
        extender.service.cluster().apply(NodeObserved {
            identity: Some(identity("uid-1", machines[0])),
            ..NodeObserved::new(name(0), NodeKind::Stowage)
        });
        assert_eq!(take_report(&extender, &report(1, 2)).accepted, 1);
        extender.service.cluster().apply(NodeObserved {
            identity: Some(identity("uid-2", machines[1])),
            ..NodeObserved::new(name(0), NodeKind::Stowage)
        });
        let late = reports(&extender, &Sender::Anyone, extender.service.now(), report(2, 2).as_bytes());
        assert_eq!(late.is_ok(), is_taken, "{machines:?}");
        let healthy = |extender: &Extender| {
            let ledger = extender.service.cluster();
            let node = ledger.node(&name(0)).unwrap();
            node.devices.iter().filter(|device| device.health == Health::Healthy).count()
        };
        assert_eq!(healthy(&extender), if is_taken { 2 } else { 0 });
        let again = report(1, 3).replace("boot\"", "boot-2\"");
        assert_eq!(
            take_report(&extender, &again).accepted,
            1,
            "an agent that starts on the new machine counts"
        );
        assert_eq!(healthy(&extender), 3);
    }
}

/// The watch shows this Node object, on a machine of its own.
fn show(extender: &Extender, node: &str) {
    let identity = Some(identity(node, Some(node)));
    let observed = NodeObserved { identity, ..NodeObserved::new(name(0), NodeKind::Stowage) };
    extender.service.cluster().apply(observed);
}

/// A report that comes so many seconds from now.
fn take_after(extender: &Extender, seconds: u64, text: &str) -> Result<ReportsResult, BadRequest> {
    let received = extender.service.now() + Millis::seconds(seconds);
    reports(extender, &Sender::Anyone, received, text.as_bytes())
}

/// A report of another boot, with other GPUs.
fn of_new(sequence: u64) -> String {
    report(sequence, 2).replace("boot\"", "boot-2\"").replace("GPU-", "GPU-NEW-")
}

/// A report of this Node's agent, by its token.
fn take_by_agent(
    extender: &Extender,
    node: &str,
    seconds: u64,
    text: &str,
) -> Result<ReportsResult, BadRequest> {
    let sender = Sender::AgentOn(AgentNode { name: name(0), uid: Some(node.into()) });
    reports(extender, &sender, extender.service.now() + Millis::seconds(seconds), text.as_bytes())
}

/// A replica that has just started knows no agent of the machine before.
#[test]
fn b11_a_late_first_report_of_the_old_machine_is_not_taken_for_the_new_ones() {
    let extender = crowded();
    show(&extender, "second");
    let late = take_by_agent(&extender, "first", 0, &report(1, 2));
    assert!(late.is_err(), "{late:?}");
    assert!(take_by_agent(&extender, "second", 1, &of_new(1)).is_ok());
    assert!(take_by_agent(&extender, "first", 2, &report(2, 2)).is_err());
    let devices = extender.service.cluster().node(&name(0)).unwrap().devices.clone();
    assert!(devices.iter().all(|device| device.uuid.as_str().starts_with("GPU-NEW-")), "{devices:?}");
}

/// The agent of a new machine may be faster than the watch that shows the new Node.
#[test]
fn an_agent_that_is_ahead_of_the_watch_of_nodes_counts_as_soon_as_its_node_shows() {
    let extender = crowded();
    show(&extender, "first");
    assert!(take_by_agent(&extender, "first", 0, &report(1, 2)).is_ok());
    assert!(take_by_agent(&extender, "second", 1, &of_new(1)).is_err(), "it is not on the first machine");
    show(&extender, "second");
    assert!(take_by_agent(&extender, "second", 2, &of_new(2)).is_ok());
}

/// A token may name the Node before, and some machines say nothing of themselves.
#[test]
fn an_agent_whose_node_registered_again_counts_at_once_or_when_no_late_report_can_come() {
    for (machine, counts_at_once) in [(Some("machine"), true), (None, false)] {
        let extender = crowded();
        let show = |uid| {
            let identity = Some(identity(uid, machine));
            let observed = NodeObserved { identity, ..NodeObserved::new(name(0), NodeKind::Stowage) };
            extender.service.cluster().apply(observed);
        };
        show("first");
        assert!(take_by_agent(&extender, "first", 0, &report(1, 2)).is_ok());
        show("second");
        assert_eq!(
            take_by_agent(&extender, "first", 1, &report(2, 2)).is_ok(),
            counts_at_once,
            "{machine:?}"
        );
        assert_eq!(
            take_by_agent(&extender, "first", 30, &report(3, 2)).is_ok(),
            counts_at_once,
            "{machine:?}"
        );
        assert!(take_by_agent(&extender, "first", 31, &report(4, 2)).is_ok(), "{machine:?}");
        assert!(take_by_agent(&extender, "first", 32, &report(5, 2)).is_ok(), "{machine:?}");
    }
}

/// This replica does not know what machine the Node before was on.
#[test]
fn a_boot_that_was_never_seen_counts_under_a_later_node_when_no_late_report_can_come() {
    let extender = crowded();
    show(&extender, "second");
    assert!(take_by_agent(&extender, "first", 0, &report(1, 2)).is_err());
    assert!(take_by_agent(&extender, "first", 29, &report(2, 2)).is_err());
    show(&extender, "third");
    assert!(take_by_agent(&extender, "first", 30, &report(3, 2)).is_err(), "the time begins again");
    assert!(take_by_agent(&extender, "first", 60, &report(4, 2)).is_ok());
}

#[test]
fn b11_an_agent_whose_machine_is_known_to_be_another_never_counts() {
    let extender = crowded();
    show(&extender, "first");
    assert!(take_by_agent(&extender, "first", 0, &report(1, 2)).is_ok());
    show(&extender, "second");
    for (sequence, seconds) in [(2, 1), (3, 100), (4, 1000)] {
        assert!(take_by_agent(&extender, "first", seconds, &report(sequence, 2)).is_err());
    }
    let devices = extender.service.cluster().node(&name(0)).unwrap().devices.clone();
    assert!(devices.iter().all(|device| device.health == Health::Lost), "{devices:?}");
}

/// Without tokens, whose reports they are shows only in whether more come.
#[test]
fn a_client_without_a_token_counts_on_the_next_machine_once_no_late_report_can_come() {
    let missing = json!([{ "part": "gpus", "reason": "no driver yet" }]);
    let without_gpus =
        json!({ "node": "node-0", "bootId": "boot", "sequence": 1, "gpus": null, "missing": missing });
    for first in [report(1, 2), without_gpus.to_string()] {
        let extender = crowded();
        let received = |seconds: u64, text: &str| take_after(&extender, seconds, text);
        show(&extender, "first");
        assert!(received(0, &first).is_ok());
        show(&extender, "second");
        assert!(received(60, &report(2, 2)).is_err(), "it may be a late report of the first machine");
        assert!(received(70, &report(3, 2)).is_err());
        assert!(received(90, &report(4, 2)).is_ok(), "the first machine's agent does not report for so long");
        assert!(received(91, &report(5, 2)).is_ok());
        show(&extender, "third");
        assert!(received(92, &report(6, 2)).is_err());
    }
}
