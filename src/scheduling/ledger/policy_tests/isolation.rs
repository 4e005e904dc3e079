//! Classes whose pods the driver keeps within their VRAM, or has to.

use super::*;
use crate::ledger::assume::AssumeResult;
use crate::reasons::AllocationFailure;
use crate::verbs::observe::ReadingReported;
use crate::vocabulary::classification::Isolation;
use crate::vocabulary::demand::VramContainer;
use crate::vocabulary::node_reading::{NodeIsolation, NodeReading};
use crate::vocabulary::node_signs::NodeSigns;
use crate::vocabulary::placement::Placement;

fn policy(isolation: Isolation) -> Policy {
    let mut classes = Policy::default().classes().to_vec();
    for class in &mut classes {
        class.isolation = isolation;
    }
    Policy::default().with_classes(classes).unwrap()
}

fn keep_limits(ledger: &mut LedgerCluster, keeps_vram_limits: bool) {
    let signs = NodeSigns {
        keeps_vram_limits,
        ..NodeSigns::default()
    };
    ledger.ledger_mut().set_signs(&node("n"), signs);
}

fn requests(policy: &Policy, sharing: Sharing, containers: &[&str]) -> Demand {
    let traits = PodTraits {
        sharing,
        ..PodTraits::default()
    };
    let container = |name: &&str| VramContainer {
        name: (*name).into(),
        vram: Bytes::gib(20),
    };
    Demand {
        containers: containers.iter().map(container).collect(),
        ..demand(policy, 20, traits)
    }
}

fn assume(ledger: &mut LedgerCluster, pod: &str) -> Result<Placement, AllocationFailure> {
    match ledger.ledger_mut().assume(&uid(pod), &node("n"))? {
        AssumeResult::New(placement) | AssumeResult::InFlight(placement) => Ok(placement),
        AssumeResult::Bound => panic!("{pod} is bound"),
    }
}

/// Whether the Binding has limits on a node that keeps them, and on one that does not; an error where the pod does not go there.
fn limited(
    isolation: Isolation,
    sharing: Sharing,
    containers: &[&str],
) -> [Result<bool, String>; 2] {
    [true, false].map(|keeps| {
        let policy = policy(isolation);
        let mut ledger = ledger(policy.clone());
        keep_limits(&mut ledger, keeps);
        ledger.add_waiting("pod", requests(&policy, sharing, containers));
        let placement = assume(&mut ledger, "pod");
        placement
            .map(|placement| placement.has_vram_limits)
            .map_err(|failure| failure.code().to_owned())
    })
}

#[test]
fn a_class_that_requires_isolation_goes_only_where_the_driver_keeps_limits() {
    let refused = || Err("no-vram-limits".to_owned());
    let (shared, alone) = (Sharing::Shared, Sharing::Exclusive);
    let longest = "c".repeat(34);
    let longer = "c".repeat(35);
    for (isolation, sharing, container, expected) in [
        (Isolation::Required, shared, "engine", [Ok(true), refused()]),
        (
            Isolation::Required,
            shared,
            &*longest,
            [Ok(true), refused()],
        ),
        (
            Isolation::Required,
            shared,
            &*longer,
            [refused(), refused()],
        ),
        (Isolation::Required, alone, "engine", [Ok(false), Ok(false)]),
        (
            Isolation::Preferred,
            shared,
            "engine",
            [Ok(true), Ok(false)],
        ),
        (
            Isolation::Preferred,
            shared,
            &*longer,
            [Ok(false), Ok(false)],
        ),
        (
            Isolation::Preferred,
            alone,
            "engine",
            [Ok(false), Ok(false)],
        ),
        (Isolation::None, shared, "engine", [Ok(false), Ok(false)]),
    ] {
        let found = limited(isolation, sharing, &[container]);
        assert_eq!(found, expected, "{isolation:?} {sharing:?} {container}");
    }
    let one_too_long = limited(Isolation::Preferred, shared, &["engine", &longer]);
    assert_eq!(
        one_too_long,
        [Ok(false), Ok(false)],
        "all containers or none"
    );
}

#[test]
fn a_node_that_stops_to_keep_limits_before_the_binding_does_not_get_the_pod() {
    let policy = policy(Isolation::Required);
    let mut ledger = ledger(policy.clone());
    ledger.add_waiting("pod", requests(&policy, Sharing::Shared, &["engine"]));
    for (keeps, fits) in [(false, false), (true, true), (false, false)] {
        keep_limits(&mut ledger, keeps);
        let snapshot = ledger.ledger_mut().snapshot();
        let demand = &ledger.ledger().pod_state(&uid("pod")).unwrap().demand;
        let misfit = fit(snapshot.node("n").unwrap(), demand).err();
        assert_eq!(misfit.is_none(), fits, "{misfit:?}");
    }
    let failure = assume(&mut ledger, "pod").unwrap_err();
    assert_eq!(
        failure,
        AllocationFailure::NoLongerFits(Misfit::NoVramLimits)
    );
}

#[test]
fn the_driver_keeps_no_limits_on_mig_slices() {
    let policy = policy(Isolation::Required);
    let slices = (0..2).map(|index| slice(0, index, "3g.40gb")).collect();
    let mut ledger = LedgerCluster::empty(policy.clone()).with_node("n", slices);
    keep_limits(&mut ledger, true);
    ledger.add_waiting("pod", requests(&policy, Sharing::Shared, &["engine"]));
    let failure = assume(&mut ledger, "pod").unwrap_err();
    assert_eq!(failure.code(), "no-vram-limits");
}

/// The variables by which limits are set keep a container from starting on cgroup v1, and do nothing in legacy mode.
#[test]
fn a_node_whose_agent_shows_that_nothing_sets_limits_keeps_none() {
    let policy = policy(Isolation::Required);
    let isolation = |cgroup_version| {
        Some(NodeIsolation {
            cgroup_version,
            dmem: false,
        })
    };
    for (isolation, has_legacy_runtime, is_kept) in [
        (None, false, true),
        (isolation(2), false, true),
        (isolation(1), false, false),
        (isolation(2), true, false),
    ] {
        let mut ledger = ledger(policy.clone());
        keep_limits(&mut ledger, true);
        let reading = NodeReading {
            sampled: ledger.ledger().now(),
            isolation,
            has_legacy_runtime,
            ..NodeReading::default()
        };
        ledger.apply(ReadingReported {
            node: node("n"),
            reading: reading.into(),
        });
        ledger.add_waiting("pod", requests(&policy, Sharing::Shared, &["engine"]));
        assert_eq!(assume(&mut ledger, "pod").is_ok(), is_kept, "{isolation:?}");
    }
}
