//! Whole runs: the same each time, and as published.

use super::*;
use crate::sim::openb::{NODES, PODS, Trace, TraceText, built_in, orders};
use std::path::PathBuf;

fn run(setting: &Setting, policy: PackingPolicy, arrivals: &Arrivals) -> Replay {
    let typical = Typical::of(setting);
    let mut placer = policy.placer(setting, &typical, arrivals, Eviction::Never);
    replay(setting, arrivals, &typical, &mut *placer)
}

#[test]
fn a_run_is_the_same_each_time() {
    let setting = Setting::of(&built_in::trace());
    for policy in PackingPolicy::ALL {
        let arrivals = Arrivals::shuffled(&setting, 42);
        assert_eq!(run(&setting, policy, &arrivals), run(&setting, policy, &arrivals), "{policy:?}");
    }
}

#[test]
fn what_is_allocated_is_what_was_asked_for_until_something_is_dropped() {
    let setting = Setting::of(&built_in::trace());
    let arrivals = Arrivals::shuffled(&setting, 42);
    for policy in PackingPolicy::ALL {
        let curve = run(&setting, policy, &arrivals).curve;
        let half = curve.at(50).unwrap();
        assert!((half.allocated - 50.0).abs() < 0.6, "{policy:?}: {half:?}");
        let full = curve.points().last().unwrap();
        assert!(full.allocated > 80.0 && full.allocated <= 100.0, "{policy:?}: {full:?}");
        assert!(full.fragmented <= 100.0 - full.allocated + 1e-9, "{policy:?}: {full:?}");
    }
}

/// The trace beside the checkout, where there is one.
fn shared() -> Option<PathBuf> {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared");
    let shared = std::env::var_os("STOWAGE_SHARED").map_or_else(beside, PathBuf::from);
    Some(shared.join("traces/openb")).filter(|directory| directory.is_dir())
}

/// The mean over ten seeds is published; one seed is within 0.3 points of its own published figure.
#[test]
fn published_runs_are_reproduced() {
    let Some(directory) = shared() else {
        eprintln!("skipped: there is no openb trace beside the checkout");
        return;
    };
    let text = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
    let (nodes, pods, order) = (text(NODES), text(PODS), text(&orders::orders_of("default")));
    let of = |file, text| TraceText { file, text };
    let trace = Trace::read(of("nodes", &nodes), of("pods", &pods)).unwrap();
    let mut orders = orders::read(of("orders", &order), trace.pods.len()).unwrap();
    let setting = Setting::of(&trace);
    let arrivals = Arrivals::in_order(&setting, 42, orders.remove(&42).unwrap());
    for (policy, at_130) in [(PackingPolicy::BestFit, 93.13), (PackingPolicy::Fgd, 95.29)] {
        let ours = run(&setting, policy, &arrivals).curve.at(130).unwrap().allocated;
        assert!((ours - at_130).abs() < 0.3, "{policy:?}: {ours} where {at_130} was published");
    }
}
