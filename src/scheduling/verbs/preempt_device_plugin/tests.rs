//! What kube-scheduler asks again about a pod for which it evicts already.

use super::*;
use crate::ledger::{ObservedPhase, ObservedWaiting};
use crate::policy::Mode;
use crate::testkit::{LedgerCluster, demand_of, key, node, uid};
use crate::units::{Bytes, Millis};
use crate::verbs::observe::{NodeObserved, PodDeleted};
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::{GpuRequest, PluginResource};
use crate::vocabulary::disruption_info::{ObservedDisruptionInfo, PodDeletion};
use crate::vocabulary::node::NodeKind;

fn demand(priority: i32) -> Demand {
    let resource = PluginResource::parse("nvidia.com/gpu").unwrap();
    Demand {
        ask: GpuRequest::Plugin { resource, count: 2 },
        per_gpu: Bytes::ZERO,
        ..demand_of(0, 2, Sharing::Exclusive, priority)
    }
}

fn run(cluster: &mut LedgerCluster, name: &str, on: &str, priority: i32, leaving: Option<u64>) {
    let state = ObservedPhase::Bound {
        node: node(on),
        devices: None,
        starting: false,
        ran: None,
    };
    let leaving = leaving.map(|seconds| PodDeletion {
        asked_ago: Millis::default(),
        grace: Millis::seconds(seconds),
    });
    let observed = ObservedDisruptionInfo {
        leaving,
        ..ObservedDisruptionInfo::default()
    };
    cluster.observe(name, demand(priority), state, Some(observed));
}

/// Two nodes of two devices, each with a job that uses both.
fn two_full_nodes() -> LedgerCluster {
    let mut cluster = LedgerCluster::empty(Policy::default());
    for (name, job) in [("a", "on-a"), ("b", "on-b")] {
        let resource = PluginResource::parse("nvidia.com/gpu").unwrap();
        cluster.apply(NodeObserved {
            plugin_devices: [(resource, 2)].into(),
            ..NodeObserved::new(node(name), NodeKind::DevicePlugin)
        });
        run(&mut cluster, job, name, -10, None);
    }
    cluster
}

/// The node on which kube-scheduler may evict its own victims for the pod, or why there is none.
fn ask(cluster: &mut LedgerCluster, offered: &[(&str, &str)]) -> Result<String, &'static str> {
    let request = VerbRequest {
        uid: uid("high"),
        key: key("high"),
        demand: demand(100),
        waiting: ObservedWaiting::default(),
        disruption: None,
    };
    let offered: Vec<OfferedNode> = offered
        .iter()
        .map(|(node, victim)| OfferedNode {
            node: (*node).to_owned(),
            victims: vec![(*victim).to_owned()],
            pdb_violations: 0,
        })
        .collect();
    let narrowed = cluster.apply(NarrowAsked {
        request,
        offered: offered.clone(),
    });
    let chosen = narrowed
        .chosen_index
        .map(|index| offered[index].node.clone());
    chosen.ok_or(narrowed.code)
}

const BOTH: [(&str, &str); 2] = [("a", "on-a"), ("b", "on-b")];
const ONLY_B: &[(&str, &str)] = &[("b", "on-b")];

#[test]
fn no_second_node_is_emptied_while_victims_on_the_first_count_as_there() {
    let mut cluster = two_full_nodes();
    assert_eq!(ask(&mut cluster, &BOTH), Ok("a".into()));
    // kube-scheduler has seen the victim go, and this watch is behind.
    assert_eq!(ask(&mut cluster, ONLY_B), Err("victims-leaving"));
    // Its deletion has failed: the same victim again.
    assert_eq!(ask(&mut cluster, &BOTH), Ok("a".into()));
    run(&mut cluster, "on-a", "a", -10, Some(30));
    assert_eq!(ask(&mut cluster, ONLY_B), Err("victims-leaving"));
    // Another pod takes the place.
    cluster.apply(PodDeleted(uid("on-a")));
    run(&mut cluster, "higher", "a", 200, None);
    assert_eq!(ask(&mut cluster, ONLY_B), Ok("b".into()));
}

#[test]
fn a_victim_that_does_not_leave_is_not_waited_for_forever() {
    let mut cluster = two_full_nodes();
    assert_eq!(ask(&mut cluster, &BOTH), Ok("a".into()));
    cluster.advance(59);
    assert_eq!(ask(&mut cluster, ONLY_B), Err("victims-leaving"));
    cluster.advance(2);
    assert_eq!(ask(&mut cluster, ONLY_B), Ok("b".into()));
}

#[test]
fn in_shadow_mode_no_chosen_victim_counts_as_leaving() {
    let mut cluster = two_full_nodes();
    let mut shadow = Policy::default();
    shadow.mode = Mode::Shadow;
    drop(cluster.ledger.set_policy(shadow));
    assert_eq!(ask(&mut cluster, &BOTH), Ok("a".into()));
    assert_eq!(ask(&mut cluster, ONLY_B), Ok("b".into()));
}
