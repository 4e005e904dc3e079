//! Whole runs on the generated trace. Those on the real one are integration tests.

use super::*;
use crate::simulate::openb::built_in;

fn run(setting: &WorkloadTrace, policy: SimulatedPolicy, arrivals: &Arrivals) -> Replay {
    let typical = TypicalPods::from_trace(setting);
    let mut placer = policy.placer(
        setting,
        &typical,
        arrivals,
        SimulatedEviction::Never,
        CpuRule::default(),
    );
    replay(setting, arrivals, &typical, &mut *placer)
}

#[test]
fn a_run_is_the_same_each_time() {
    let setting = WorkloadTrace::from_trace(&built_in::trace());
    for policy in SimulatedPolicy::ALL {
        let arrivals = Arrivals::draw(&setting, 42);
        assert_eq!(
            run(&setting, policy, &arrivals),
            run(&setting, policy, &arrivals),
            "{policy:?}"
        );
    }
}

#[test]
fn the_allocation_is_the_requested_share_until_a_pod_is_dropped() {
    let setting = WorkloadTrace::from_trace(&built_in::trace());
    let arrivals = Arrivals::draw(&setting, 42);
    for policy in SimulatedPolicy::ALL {
        let curve = run(&setting, policy, &arrivals).curve;
        let half = curve.at(50).unwrap();
        assert!((half.allocated - 50.0).abs() < 0.6, "{policy:?}: {half:?}");
        let full = curve.points().last().unwrap();
        assert!(
            full.allocated > 80.0 && full.allocated <= 100.0,
            "{policy:?}: {full:?}"
        );
        assert!(
            full.fragmented <= 100.0 - full.allocated + 1e-9,
            "{policy:?}: {full:?}"
        );
    }
}
