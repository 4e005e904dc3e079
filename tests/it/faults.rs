//! The simulation of faults itself (`stowage::lab::faults`): a seed is a history, and the oracle finds bugs that are planted.

use stowage::lab::faults::campaign::play_all;
use stowage::lab::faults::fault::FaultKind;
use stowage::lab::faults::planted::PlantedBug;
use stowage::lab::faults::shrink::shrink;
use stowage::lab::faults::{History, play};
use std::time::Duration;

#[test]
fn a_seed_is_a_history_to_the_byte() {
    for seed in 1..3 {
        let history = History { steps: 60, ..History::of(seed) };
        let [first, second] = [play(&history), play(&history)];
        let differs = first.lines.iter().zip(&second.lines).find(|(first, second)| first != second);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!((first.lines.len(), &first.tally), (second.lines.len(), &second.tally), "seed {seed}");
    }
}

/// `STOWAGE_FAULT_SEEDS=1000` seeks all of them, from seed 0 on.
#[test]
fn planted_bugs_are_found() {
    let seek = std::env::var("STOWAGE_FAULT_SEEDS").ok().map(|text| text.parse::<u64>().expect("a number of seeds"));
    for (bug, seed) in FOUND_BY {
        let seeds = seek.map_or(*seed..seed + 1, |seeds| 0..seeds);
        let planted = |seed| History { planted: Some(*bug), ..History::of(seed) };
        let found = play_all(seeds.map(planted), None, |_| ());
        let (history, run) = found.failed.unwrap_or_else(|| panic!("{bug:?} is not found"));
        println!("{bug:?} is found by seed {} after {}: {:?}", history.seed, found.tally.histories, run.broken);
    }
}

/// A seed that finds each quickly.
const FOUND_BY: &[(PlantedBug, u64)] = &[
    (PlantedBug::ConfirmsRefusedBindings, 0),
    (PlantedBug::TrustsOldLeases, 0),
    (PlantedBug::ForgetsDeletions, 0),
    (PlantedBug::ShortWriteTimes, 0),
    (PlantedBug::SkipsRelists, 0),
    (PlantedBug::NamesNoUid, 0),
];
