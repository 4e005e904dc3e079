//! What is fuzzed: `cargo fuzz run --features fuzzing TARGET`. `cargo test` replays the corpus without the fuzzer.

use std::sync::Arc;
use stowage::ids::{GpuModel, GpuUuid, NodeName, PodKey, PodUid};
use stowage::scheduling::audit::audit;
use stowage::scheduling::decision::Hold;
use stowage::scheduling::device::{Device, Health};
use stowage::scheduling::ledger::{Ledger, Seen, SeenState, SeenWaiting};
use stowage::scheduling::node::NodeKind;
use stowage::scheduling::policy::Policy;
use stowage::scheduling::preempt::{Rules, cheapest_victims};
use stowage::scheduling::request::{ContainerRequest, Demand, PodRequest};
use stowage::units::{Bytes, MilliCpu, Millis, Moment};

/// Requests of the scheduler and reports of agents: whatever comes is read or refused, never a panic.
pub fn wire(data: &[u8]) {
    use stowage::extender::reports::validate;
    use stowage::extender::wire::{BindingArgs, ExtenderArgs, PreemptionArgs};
    use stowage::report::NodeReport;
    if let Ok(args) = serde_json::from_slice::<ExtenderArgs<'_>>(data) {
        let policy = Policy::default();
        let _ = stowage::contract::identity(&args.pod);
        let _ = stowage::contract::demand(&args.pod, &policy);
        let _ = stowage::contract::seen(&args.pod, &policy, None, Default::default());
        if let Some(Ok(nodes)) = args.asked_nodes() {
            assert_eq!(nodes.names().count(), nodes.len());
        }
    }
    if let Ok(args) = serde_json::from_slice::<PreemptionArgs<'_>>(data) {
        let _ = args.offered();
    }
    let _ = serde_json::from_slice::<BindingArgs>(data);
    if let Ok(Ok(report)) = serde_json::from_slice::<NodeReport>(data).map(validate::check) {
        assert!(validate::devices(&report).unwrap_or_default().len() <= 64);
        assert_eq!(validate::check(report.clone()), Ok(report), "checked twice is checked once");
    }
}

/// A policy's file: it is read, or everything that is wrong is told at places that are in it; what was read judges every pod,
/// and the same text always means the same.
pub fn policy(data: &[u8]) {
    use stowage::policy_file::{SourceText, load};
    use stowage::scheduling::policy::Traits;
    let files = [SourceText::new("policy.yaml", data)];
    match (load(&files), load(&files)) {
        (Ok(loaded), Ok(again)) => {
            assert_eq!(loaded.policy, again.policy);
            let judged = loaded.policy.judge(&Traits::default());
            assert!(judged.class.place() < loaded.policy.classes().len());
        }
        (Err(found), Err(_)) => {
            assert!(!found.is_empty());
            assert!(found.iter().all(|one| one.span.range().end <= data.len().max(1)), "{found:?}");
        }
        (first, second) => panic!("{} and then {}", first.is_ok(), second.is_ok()),
    }
}

/// Quantities: what is read back from what was written is the same.
pub fn quantity(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _ = MilliCpu::parse_quantity(text);
    if let Ok(bytes) = Bytes::parse_quantity(text) {
        assert_eq!(Bytes::parse_quantity(&bytes.0.to_string()), Ok(bytes));
    }
}

/// An engine's metrics page, behind one byte that is the hint: whatever it says, the figures are ones that can be.
pub fn engine_page(data: &[u8]) {
    use stowage::engine_metrics::{Engine, read};
    let Some((&hint, page)) = data.split_first() else { return };
    let Ok(figures) = read(page, Engine::ALL.get(usize::from(hint)).copied()) else { return };
    assert!(figures.kv_cache_usage.is_none_or(|usage| (0.0..=1.0).contains(&usage)), "{figures:?}");
    assert!(figures.sleep_level.is_none_or(|level| level == 1 || level == 2), "{figures:?}");
    // A count of one rank is at most 10^12, and 256 ranks are read.
    for count in [figures.kv_cache_tokens, figures.waiting, figures.running].into_iter().flatten() {
        assert!(count <= 256_000_000_000_000, "{figures:?}");
    }
    assert!(figures.problems.iter().all(|problem| problem.to_string().len() < 400), "{figures:?}");
}

/// Any history of a small cluster: after every step the books add up and no GPU is promised more than it has.
pub fn ledger(data: &[u8]) {
    let mut ledger = Ledger::new(Arc::new(Policy::default()));
    let mut now = Moment(0);
    for step in data.chunks_exact(4) {
        apply(&mut ledger, &mut now, [step[0], step[1], step[2], step[3]]);
        let violations = audit(&ledger);
        assert!(violations.is_empty(), "{step:?}: {violations:?}");
        let _ = ledger.snapshot();
    }
}

fn apply(ledger: &mut Ledger, now: &mut Moment, [verb, pod, node, amount]: [u8; 4]) {
    let pod_uid = PodUid::parse(&format!("uid-{}", pod % 16)).expect("a name");
    let node_name = NodeName::parse(&format!("node-{}", node % 4)).expect("a name");
    match verb % 9 {
        0 => arrive(ledger, pod, amount),
        1 | 2 => drop(ledger.assume(&pod_uid, &node_name)),
        3 => confirm(ledger, &pod_uid),
        4 => ledger.forget(&pod_uid),
        5 => drop(ledger.release(&pod_uid)),
        6 => hold(ledger, *now, &pod_uid, &node_name),
        7 => {
            *now = *now + Millis(u64::from(amount) * 500);
            ledger.expire(*now);
        }
        _ if amount == 0 => ledger.remove_node(&node_name),
        _ => {
            ledger.set_node(&node_name, NodeKind::Stowage, None);
            let devices = (0..u32::from(amount % 5)).map(|index| device(node, index)).collect();
            ledger.report_devices(&node_name, devices).expect("the node was just set");
        }
    }
}

fn confirm(ledger: &mut Ledger, uid: &PodUid) {
    if let Some(entry) = ledger.entry(uid).filter(|entry| entry.is_assumed()).cloned() {
        let node = entry.node().expect("an assumed pod has a node");
        ledger.confirm(uid, node, entry.devices().cloned());
    }
}

fn arrive(ledger: &mut Ledger, pod: u8, amount: u8) {
    let uid = PodUid::parse(&format!("uid-{}", pod % 16)).expect("a name");
    if ledger.entry(&uid).is_some() {
        return;
    }
    let (vram, gpus) = (format!("{}Gi", 1 + amount % 90), (1 + pod / 16 % 3).to_string());
    let containers = [ContainerRequest { vram: Some(&vram), ..ContainerRequest::plain("engine") }];
    let request = PodRequest {
        priority: i32::from(amount % 5) - 2,
        grace: Millis::seconds(1),
        gpus: Some(&gpus),
        exclusive: (pod >= 128).then_some("true"),
        ..PodRequest::plain("default", &containers)
    };
    let demand = Demand::of(&request, ledger.policy()).expect("the request is a proper one");
    let key = PodKey::parse("default", uid.as_str()).expect("a name");
    ledger.see(Seen { uid, key, demand, state: SeenState::Waiting(SeenWaiting::default()), shown: None });
}

fn hold(ledger: &mut Ledger, now: Moment, uid: &PodUid, node: &NodeName) {
    let Some(demand) = ledger.entry(uid).map(|entry| entry.demand.clone()) else { return };
    let Some(room) = ledger.room_for(&ledger.claim(uid), node) else { return };
    let Some(set) = cheapest_victims(&room, &demand, Rules::Keep) else { return };
    let devices = &ledger.node(node).expect("the node has room").devices;
    let devices = set.gpus.iter().map(|place| devices[place].uuid.clone()).collect();
    let hold = Hold {
        node: node.clone(),
        devices,
        victims: set.everyone().into(),
        deadline: now + Millis::seconds(30),
    };
    // Refused if the pod does not wait, or holds room already.
    let _ = ledger.hold(uid, hold);
}

fn device(node: u8, index: u32) -> Device {
    Device {
        uuid: GpuUuid::parse(&format!("GPU-{}-{index}", node % 4)).expect("a name"),
        index,
        model: GpuModel::parse("H100").expect("a name"),
        parent: None,
        total: Bytes::gib(80),
        reserved: Bytes::ZERO,
        health: Health::Healthy,
        island: None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn replay(target: &str, run: impl Fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        let files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty(), "the corpus of {target} is there");
        files.iter().for_each(|file| run(&std::fs::read(file).unwrap()));
    }

    #[test]
    fn the_wire_corpus_passes() {
        replay("wire", super::wire);
    }

    #[test]
    fn the_engine_page_corpus_passes() {
        replay("engine_page", super::engine_page);
    }

    #[test]
    fn the_ledger_corpus_passes() {
        replay("ledger", super::ledger);
    }

    #[test]
    fn the_policy_corpus_passes() {
        replay("policy", super::policy);
    }

    #[test]
    fn the_quantity_corpus_passes() {
        replay("quantity", super::quantity);
    }
}
