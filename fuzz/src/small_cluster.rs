//! A cluster of two nodes with bound, sleeping and waiting pods, as the inputs that lead to it; and what must hold of any cluster.

use crate::ledger::made::{bind, device, epoch, pod, sleeping};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_kubernetes_objects as objects;
use stowage_scheduling::audit::ledger::{Violation, audit};
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::ledger::ObservedWaiting;
use stowage_scheduling::placing::score_cache::ScoreCache;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Moment, Percent};
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::filter::{FilterAsked, filter};
use stowage_scheduling::verbs::observe::{
    DevicesReported, NodeObserved, PodObserved, ReadingReported,
};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::verbs::tick::{ClockAdvanced, LeadershipBegan, Tick};
use stowage_scheduling::verbs::wait::TakePending;
use stowage_scheduling::verbs::{Cluster, Input};
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_reading::{EngineLoad, GpuReading, NodeReading};

pub const NOW: Moment = Moment(1_000_000);
const GPUS: u32 = 2;
/// Number of pods. Those before the first waiting one are bound.
const PODS: u8 = 6;
const FIRST_WAITING_POD: u8 = 4;

/// Inputs that build the cluster, which leads.
pub fn inputs() -> Vec<Input> {
    let mut inputs: Vec<Input> = vec![ClockAdvanced(NOW).into(), LeadershipBegan(epoch(0)).into()];
    for number in 0..2 {
        let (node, devices) = (
            name(number),
            (0..GPUS).map(|index| device(number, 0, index, 0)).collect(),
        );
        inputs.push(NodeObserved::new(node.clone(), NodeKind::Stowage).into());
        inputs.push(
            DevicesReported {
                node,
                devices,
                are_all: true,
            }
            .into(),
        );
    }
    for number in 0..PODS {
        let mut pod = pod(uid(number).as_str(), number, 10 + number);
        let gpu = device(number % 2, 0, u32::from(number / 2) % GPUS, 0).uuid;
        if number < FIRST_WAITING_POD {
            let record = [("stowage.dev/devices".to_owned(), gpu.to_string())].into();
            bind(&mut pod, &mut None, &name(number % 2), record);
        }
        let seen =
            objects::observation(&pod, &Policy::default(), None, jiff::Timestamp::UNIX_EPOCH);
        inputs.extend(seen.map(|seen| Input::from(PodObserved(seen))));
    }
    inputs.extend((0..2).map(|number| reading(number).into()));
    inputs
}

pub fn cluster() -> Cluster {
    let mut cluster = Cluster::new(Arc::new(Policy::default()));
    inputs().into_iter().for_each(|input| cluster.apply(input));
    cluster
}

pub fn name(number: u8) -> NodeName {
    NodeName::parse(&format!("node-{number}")).expect("a name")
}

pub fn uid(number: u8) -> PodUid {
    PodUid::parse(&format!("uid-{number}")).expect("a name")
}

/// Request of kube-scheduler for a pod that the cluster has.
pub fn request(cluster: &Cluster, uid: &PodUid) -> Option<VerbRequest> {
    let pod = cluster.ledger().pod_state(uid)?;
    let (key, demand) = (pod.key.clone(), pod.demand.clone());
    Some(VerbRequest {
        uid: uid.clone(),
        key,
        demand,
        waiting: ObservedWaiting::default(),
        disruption: None,
    })
}

/// Filters and binds every pod, takes the pending ones and audits the ledger. `may_overcommit`: earlier allocations may exceed
/// what the current policy allows.
pub fn decide_and_audit(cluster: &mut Cluster, may_overcommit: bool) {
    for number in 0..PODS {
        let uid = uid(number);
        let Some(request) = request(cluster, &uid) else {
            continue;
        };
        let view = cluster.apply(FilterAsked(request));
        let mut scores =
            ScoreCache::default().take(&view.snapshot, &view.request.demand, &view.policy);
        let names: Vec<&str> = view
            .snapshot
            .nodes()
            .iter()
            .map(|node| node.name.as_str())
            .collect();
        let best = filter(&view, names.into_iter(), &mut scores)
            .best
            .first()
            .map(|best| best.node_index);
        let node = best.map(|place| view.snapshot.nodes()[place].name.clone());
        if let Some(asked) = node.and_then(|node| BindAsked::for_pod(cluster.ledger(), &uid, &node))
        {
            drop(cluster.apply(asked));
        }
    }
    drop(cluster.apply(TakePending { limit: 8 }));
    drop(cluster.apply(Tick {
        now: NOW,
        is_leading: true,
    }));
    let mut violations = audit(cluster.ledger());
    if may_overcommit {
        let may_be_older = |one: &Violation| {
            matches!(
                one,
                Violation::OverPromised { .. } | Violation::ExclusiveShared { .. }
            )
        };
        violations.retain(|one| !may_be_older(one));
    }
    assert!(violations.is_empty(), "{violations:?}");
}

/// Reading of a node's agent: bound pods run, and one engine sleeps.
fn reading(number: u8) -> ReadingReported {
    let devices: Vec<_> = (0..GPUS).map(|index| device(number, 0, index, 0)).collect();
    let runs: BTreeMap<u32, PodUid> = (0..FIRST_WAITING_POD)
        .filter(|pod| pod % 2 == number)
        .map(|pod| (u32::from(pod / 2) % GPUS, uid(pod)))
        .collect();
    let gpu = |index: u32| GpuReading {
        uuid: devices[index as usize].uuid.clone(),
        used: Some(Bytes::gib(12)),
        attributed: runs
            .get(&index)
            .map(|pod| (pod.clone(), Bytes::gib(11)))
            .into_iter()
            .collect(),
        engine_load: EngineLoad::new(Percent::new(40), Some(2)),
    };
    let reading = NodeReading {
        sampled: NOW,
        gpus: (0..GPUS).map(gpu).collect(),
        engines: runs
            .get(&0)
            .map(|pod| sleeping(pod, &devices[0], 1))
            .into_iter()
            .collect(),
        ..NodeReading::default()
    };
    ReadingReported {
        node: name(number),
        reading: reading.into(),
    }
}
