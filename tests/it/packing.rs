//! The packing simulator on the real trace, where there is one: pods arrive as in the published runs, and the
//! published policies reach the published figures.

use crate::needs;
use serde_json::Value;
use std::process::Command;
use stowage_lab::simulate::openb::published;
use stowage_lab::simulate::openb::published::PUBLISHED;
use stowage_lab::simulate::openb::{NODES, PODS, Trace, TraceText};
use stowage_lab::simulate::packing::{
    Arrivals, CpuRule, SimulatedEviction, SimulatedPolicy, TypicalPods, WorkloadTrace, replay,
};

fn text(name: &str) -> Option<String> {
    needs::trace(&format!("openb/{name}"))
}

fn setting() -> Option<WorkloadTrace> {
    let (nodes, pods) = (text(NODES)?, text(PODS)?);
    let of = |file, text| TraceText { file, text };
    Some(WorkloadTrace::from_trace(
        &Trace::read(of(NODES, &nodes), of(PODS, &pods)).unwrap(),
    ))
}

#[test]
fn pods_arrive_in_the_order_of_the_published_runs() {
    let (Some(setting), Some(orders)) = (setting(), text("default_arrivals_130pct.csv")) else {
        return;
    };
    let mut seeds = 0;
    for line in orders.lines().skip(1) {
        let (seed, rows) = line.split_once(',').unwrap();
        let rows: Vec<usize> = rows.split(' ').map(|row| row.parse().unwrap()).collect();
        assert!(
            Arrivals::draw(&setting, seed.parse().unwrap()).pods == rows,
            "seed {seed}"
        );
        seeds += 1;
    }
    assert_eq!(seeds, 10);
}

#[test]
fn a_published_policy_reaches_its_published_figure() {
    let (Some(setting), Some(runs)) = (setting(), text(PUBLISHED)) else {
        return;
    };
    let runs = published::read(TraceText {
        file: PUBLISHED,
        text: &runs,
    })
    .unwrap();
    let (typical, arrivals) = (
        TypicalPods::from_trace(&setting),
        Arrivals::draw(&setting, 42),
    );
    for policy in [SimulatedPolicy::BestFit, SimulatedPolicy::Packing] {
        let mut placer = policy.placer(
            &setting,
            &typical,
            &arrivals,
            SimulatedEviction::Never,
            CpuRule::default(),
        );
        let curve = replay(&setting, &arrivals, &typical, &mut *placer).curve;
        let was =
            published::means(&runs, "default", policy.published_as().unwrap(), &[42]).unwrap();
        for (load, was) in [(100, was.at_100), (130, was.at_130)] {
            let ours = curve.at(load).unwrap().allocated;
            assert!(
                (ours - was).abs() < 0.0051,
                "{policy:?} at {load} %: {ours} where {was} was published"
            );
        }
    }
}

/// Scores 0 to 10 and ties at random cost next to nothing against what the core would choose.
#[test]
fn stowage_behind_its_verbs_packs_as_well_as_its_core() {
    let allocated = |flags: &[&str]| -> f64 {
        let arguments = [
            "simulate", "packing", "--policy", "stowage", "--seeds", "42..44", "--json",
        ];
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        let output = command.args(arguments).args(flags).output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
        printed["results"][0]["at_100"].as_f64().unwrap()
    };
    let (core, verbs) = (allocated(&[]), allocated(&["--through-extender"]));
    assert!(
        core > 90.0 && (core - verbs).abs() < 1.0,
        "{core} % and {verbs} %"
    );
}
