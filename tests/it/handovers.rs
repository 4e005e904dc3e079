//! Faults by the seed: two replicas of the real service, one stand-in API server in the same process, a virtual clock, and
//! histories that seeds draw (`stowage_lab::faults`). No GPU is allocated twice however leadership changes hands, victims leave
//! rightly, and what fits is bound once all is quiet.
//!
//! `cargo test --test it handovers` plays a few seeds. `STOWAGE_FAULT_SEEDS=1000` plays so many; `stowage simulate faults --seeds
//! 7 --history` plays one and prints what happened.

use stowage_lab::faults::History;
use stowage_lab::faults::campaign::{CampaignRules, play_all};
use stowage_lab::faults::fault::FaultKind;

/// What a machine of a CI job plays in some seconds.
const SEEDS: u64 = 10;
/// So many have every kind of fault among them. Slow plans are drawn by the service's side, and not counted.
const ENOUGH: u64 = 50;

#[test]
fn no_gpu_is_allocated_twice_however_leadership_changes_hands() {
    let asked = std::env::var("STOWAGE_FAULT_SEEDS").ok();
    let seeds = asked.map_or(SEEDS, |text| text.parse().expect("a number of seeds"));
    let result = play_all(
        (0..seeds).map(History::from_seed),
        &CampaignRules::default(),
        |_| (),
    );
    if let Some((history, run)) = result.failure {
        let lines = run.lines.join("\n");
        panic!(
            "stowage simulate faults {}:\n{}\n\n{lines}",
            history.arguments(),
            run.violations.join("\n")
        );
    }
    let tally = result.tally;
    println!("{tally}");
    assert!(
        tally.leadership_changes >= seeds && tally.bound >= 10 * seeds,
        "{tally}"
    );
    assert!(tally.epochs.len() as u64 >= seeds, "{tally}");
    assert!(
        tally.reservations > 0 && tally.evicted > 0 && tally.total_faults() >= 100 * seeds,
        "{tally}"
    );
    if seeds < ENOUGH {
        return;
    }
    assert!(
        tally.preempted > 0
            && tally.over_allocated_by_proxy > 0
            && tally.over_allocations_reported > 0,
        "{tally}"
    );
    let is_missing =
        |kind: &&FaultKind| !tally.faults.contains_key(kind) && **kind != FaultKind::SlowPlan;
    let missing: Vec<&str> = FaultKind::ALL
        .iter()
        .filter(is_missing)
        .map(|kind| kind.name())
        .collect();
    assert!(missing.is_empty(), "no {missing:?}: {tally}");
}
