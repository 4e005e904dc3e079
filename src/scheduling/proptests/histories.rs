//! Random histories of a small cluster: no overallocation, a ledger that adds up, free VRAM by the formula, an identical rebuild.

pub(super) mod ledger_history;
pub(super) mod step;

use crate::audit::ledger::audit;
use crate::ids::{GpuUuid, NodeName, PodUid};
use crate::ledger::Ledger;
use crate::placing::rank::{ScheduleAttempt, shortlist};
use crate::placing::score_cache::ScoreCache;
use crate::placing::snapshot::Snapshot;
use crate::testkit::demand_of;
use crate::vocabulary::cluster_share::TenantLimit;
use crate::vocabulary::demand::{Demand, Sharing};
use crate::vocabulary::device_plugin::PluginShare;
use crate::vocabulary::gpu::{Gpu, Health};
use crate::vocabulary::placement::Reservation;
use ledger_history::LedgerHistory;
use proptest::prelude::*;
use std::sync::Arc;
use step::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_gpu_is_allocated_twice_and_the_ledger_adds_up_after_any_history(steps in prop::collection::vec(step(), 1..80)) {
        let mut bench = LedgerHistory::new();
        for step in &steps {
            bench.apply(step);
            bench.check_free();
            // A lost GPU came back as it was, so nothing can be overallocated; nothing else may differ either.
            let violations = audit(&bench.ledger);
            prop_assert!(violations.is_empty(), "after {:?}: {:?}", step, violations);
        }
    }

    #[test]
    fn cached_node_results_equal_fresh_ones(
        steps in prop::collection::vec(step(), 1..60), changes in prop::collection::vec(demand_change(), 1..4)
    ) {
        let (mut bench, mut score_cache) = (LedgerHistory::new(), ScoreCache::default());
        let demands = [(11, 1, Sharing::Shared), (30, 2, Sharing::Shared), (40, 1, Sharing::Exclusive)];
        let demands = demands.map(|(vram, gpus, sharing)| loading(demand_of(vram, gpus, sharing, 0)));
        // Each beside such as differ from it in little.
        let near = |demand: &Demand| changes.iter().map(|change| change.apply_to(demand)).collect::<Vec<_>>();
        let demands: Vec<Demand> = demands.iter().flat_map(|demand| [vec![demand.clone()], near(demand)].concat()).collect();
        for step in &steps {
            bench.apply(step);
            let (snapshot, policy) = (bench.ledger.snapshot(), bench.ledger.policy().clone());
            let names = ["node-2", "node-0", "node-1"];
            let failed = node_name(1);
            let attempt = ScheduleAttempt { limit: 2, just_failed: Some(&failed), reserved_placement: None, policy: &policy, allowance: TenantLimit::default() };
            // A snapshot made of the nodes alone has no summaries.
            let again = Snapshot::new(snapshot.generation(), snapshot.node_list_generation(), snapshot.nodes().iter().cloned().collect())
                .with_packing_model(Arc::new(snapshot.packing_model().clone()));
            for demand in &demands {
                let fresh = shortlist(&again, demand, names.into_iter(), attempt);
                // All nodes are remembered; a request about three would remember none.
                score_cache.best(&snapshot, demand, &policy);
                prop_assert_eq!(score_cache.shortlist(&snapshot, demand, names.into_iter(), attempt), fresh, "after {:?}: {:?}", step, demand);
            }
        }
    }

    #[test]
    fn the_same_history_gives_the_same_ledger(steps in prop::collection::vec(step(), 1..60)) {
        let (mut one, mut other) = (LedgerHistory::new(), LedgerHistory::new());
        let shown = |snapshot: &Snapshot| serde_json::to_string(snapshot).unwrap();
        for steps in steps.chunks(7) {
            // Taking snapshots in between, and reading them meanwhile, must not matter.
            let reader = one.ledger.snapshot();
            let before = shown(&reader);
            for step in steps {
                one.apply(step);
                other.apply(step);
            }
            prop_assert_eq!(shown(&reader), before);
        }
        prop_assert_eq!(one.ledger.snapshot(), other.ledger.snapshot());
        prop_assert_eq!(one.ledger.pod_states(), other.ledger.pod_states());
    }

    #[test]
    fn the_ledger_rebuilt_from_pods_equals_the_lost_one(steps in prop::collection::vec(step(), 1..60)) {
        let steps: Vec<_> = steps.into_iter().filter(|s| !matches!(s, LedgerStep::LoseGpu(_) | LedgerStep::RemoveNode(_) | LedgerStep::Read(..) | LedgerStep::Spare(..) | LedgerStep::Learn)).collect();
        let mut bench = LedgerHistory::new();
        steps.iter().for_each(|step| bench.apply(step));
        // Pending writes settle before a comparison means anything, and soft reservations may be lost.
        (0..14).for_each(|pod| bench.apply(&LedgerStep::Confirm(pod)));
        (0..14).for_each(|pod| drop(bench.ledger.begin_attempt(&uid(pod))));
        let mut rebuilt = bench.rebuilt();
        let gpus = |ledger: &mut Ledger| -> Vec<(NodeName, Vec<Gpu>)> {
            ledger.snapshot().nodes().iter().map(|node| (node.name.clone(), node.gpus.to_vec())).collect()
        };
        prop_assert_eq!(gpus(&mut rebuilt), gpus(&mut bench.ledger));
        let shares = |ledger: &mut Ledger| -> Vec<Vec<PluginShare>> {
            ledger.snapshot().nodes().iter().map(|node| node.plugin.to_vec()).collect()
        };
        prop_assert_eq!(shares(&mut rebuilt), shares(&mut bench.ledger));
        let pods = |ledger: &Ledger| -> Vec<(PodUid, Demand, Option<NodeName>, Option<Reservation>)> {
            let entries = ledger.pod_states().into_iter();
            entries.map(|(u, e)| (u.clone(), e.demand.clone(), e.node().cloned(), e.reservation().cloned())).collect()
        };
        prop_assert_eq!(pods(&rebuilt), pods(&bench.ledger));
    }

    #[test]
    fn after_a_restart_pods_on_lost_gpus_are_charged_on_no_other(steps in prop::collection::vec(step(), 1..60), lost in 0u8..3) {
        let steps = steps.iter().filter(|s| !matches!(s, LedgerStep::RemoveNode(_) | LedgerStep::Read(..) | LedgerStep::Spare(..) | LedgerStep::Learn));
        let mut bench = LedgerHistory::new();
        steps.for_each(|step| bench.apply(step));
        (0..14).for_each(|pod| bench.apply(&LedgerStep::Confirm(pod)));
        (0..14).for_each(|pod| drop(bench.ledger.begin_attempt(&uid(pod))));
        bench.apply(&LedgerStep::LoseGpu(lost));
        // What a lost GPU was reserved for ends with the next tick.
        bench.apply(&LedgerStep::Tick(1));
        let mut rebuilt = bench.rebuilt();
        let left = |ledger: &mut Ledger| -> Vec<(GpuUuid, Gpu)> {
            let snapshot = ledger.snapshot();
            let gpus = snapshot.nodes().iter().flat_map(|node| node.devices.iter().zip(node.gpus.iter()));
            gpus.filter(|(device, _)| device.health != Health::Lost).map(|(device, gpu)| (device.uuid.clone(), *gpu)).collect()
        };
        prop_assert_eq!(left(&mut rebuilt), left(&mut bench.ledger));
        prop_assert_eq!(audit(&rebuilt), vec![]);
    }
}
