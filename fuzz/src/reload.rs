//! A policy that is swapped under a running cluster, and an agent's report that comes to one.

use crate::small_cluster::{self, NOW};
use std::sync::Arc;
use stowage_policy_file::{SourceText, load};
use stowage_report::NodeReport;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::verbs::tick::PolicySet;
use stowage_server::extender::reports::validate;

/// A policy file, swapped under bound, sleeping and waiting pods, and back: the ledger adds up under each of them.
pub fn reload(data: &[u8]) {
    let Ok(loaded) = load(&[SourceText::new("policy.yaml", data)]) else {
        return;
    };
    let mut cluster = small_cluster::cluster();
    for policy in [loaded.policy, Policy::default()] {
        cluster.apply(PolicySet {
            policy,
            prepared: None,
        });
        small_cluster::decide_and_audit(&mut cluster, true);
    }
}

/// A report, taken by the cluster as the service takes it: refused, or the ledger adds up with what it says.
pub fn report(data: &[u8]) {
    let Ok(Ok(report)) = serde_json::from_slice::<NodeReport>(data).map(validate::check) else {
        return;
    };
    let mut cluster = small_cluster::cluster();
    let (fresh, lost_after) = (
        cluster.ledger().policy().telemetry.fresh,
        cluster.ledger().policy().telemetry.lost_after,
    );
    for node in [report.node.clone(), small_cluster::name(0)] {
        if !cluster.ledger().has_node(&node) {
            continue;
        }
        let before = cluster
            .ledger()
            .node(&node)
            .map(|node| Arc::clone(&node.devices));
        let Some(devices) = validate::devices(&report, lost_after) else {
            return;
        };
        match cluster.apply(DevicesReported {
            node: node.clone(),
            devices: devices.into(),
            are_all: true,
        }) {
            Ok(_) => {
                let reading = report.reading(NOW, fresh);
                reading.map(|reading| {
                    cluster.apply(ReadingReported {
                        node,
                        reading: reading.into(),
                    })
                });
            }
            Err(_) => assert_eq!(
                cluster
                    .ledger()
                    .node(&node)
                    .map(|node| node.devices.clone()),
                before
            ),
        }
        // GPUs that shrink or go have what was bound there.
        small_cluster::decide_and_audit(&mut cluster, true);
    }
}
