//! The simulation of faults itself (`stowage::lab::faults`): a seed is a history, the oracle finds bugs that are planted, and the
//! command says what to write.

use std::process::Command;
use stowage::lab::faults::campaign::play_all;
use stowage::lab::faults::planted::PlantedBug;
use stowage::lab::faults::{History, play};

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

/// The first seed that finds each.
const FOUND_BY: &[(PlantedBug, u64)] = &[
    (PlantedBug::ConfirmsRefusedBindings, 6),
    (PlantedBug::TrustsOldLeases, 0),
    (PlantedBug::ForgetsDeletions, 0),
    (PlantedBug::ShortWriteTimes, 14),
    (PlantedBug::SkipsRelists, 2),
    (PlantedBug::NamesNoUid, 1),
];

/// The bugs whose histories end soonest: what a CI job has time for.
const CHEAP: [PlantedBug; 2] = [PlantedBug::SkipsRelists, PlantedBug::NamesNoUid];

/// `STOWAGE_FAULT_SEEDS=1000` looks for every one of them, from seed 0 on.
#[test]
fn planted_bugs_are_found() {
    let asked = std::env::var("STOWAGE_FAULT_SEEDS").ok();
    let seeds = asked.map(|text| text.parse::<u64>().expect("a number of seeds"));
    let mut missed = Vec::new();
    for (bug, seed) in FOUND_BY.iter().filter(|(bug, _)| seeds.is_some() || CHEAP.contains(bug)) {
        let seeds = seeds.map_or(*seed..seed + 1, |seeds| 0..seeds);
        let planted = |seed| History { planted: Some(*bug), ..History::of(seed) };
        let found = play_all(seeds.map(planted), None, |_| ());
        match found.failed {
            Some((history, run)) => {
                println!(
                    "{bug:?} is found by seed {} of {}: {:?}",
                    history.seed, found.tally.histories, run.broken
                );
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn a_mistake_on_the_command_line_says_what_to_write() {
    for (arguments, says) in [
        (&["--seeds", "9..3"][..], "9 is larger than 3; write 3..9"),
        (&["--seeds", "some"], "such as 0..9999"),
        (&["--minutes", "0"], "write 1 or more"),
        (&["--without", "kil"], "there is no kind of fault \"kil\"; write one of late-write,"),
        (&["--seeds", "0..3", "--history"], "write --seeds 0"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        let ran = command.args(["simulate", "faults"]).args(arguments).output().unwrap();
        let error = String::from_utf8_lossy(&ran.stderr);
        assert!(!ran.status.success() && error.contains(says), "{arguments:?}: {error}");
    }
}
