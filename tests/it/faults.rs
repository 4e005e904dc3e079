//! The simulation of faults itself (`stowage_lab::faults`): a seed is a history, the oracle finds bugs that are planted, and the
//! command says what to write.

use std::process::Command;
use std::time::Duration;
use stowage_lab::faults::campaign::{CampaignRules, play_all};
use stowage_lab::faults::planted::PlantedBug;
use stowage_lab::faults::shrink::shrink;
use stowage_lab::faults::{History, play};

#[test]
fn the_same_seed_gives_the_same_history() {
    for seed in 1..3 {
        let history = History {
            steps: 60,
            ..History::from_seed(seed)
        };
        let [first, second] = [play(&history), play(&history)];
        let differs = first
            .lines
            .iter()
            .zip(&second.lines)
            .find(|(first, second)| first != second);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(
            (first.lines.len(), &first.tally),
            (second.lines.len(), &second.tally),
            "seed {seed}"
        );
    }
}

/// The bugs that are found soonest, which a CI job has time for: the first seeds find each, in whatever way histories change.
const FAST_BUGS: [PlantedBug; 3] = [
    PlantedBug::SkipsRelists,
    PlantedBug::ForgetsDeletions,
    PlantedBug::TrustsOldLeases,
];
const FIRST_SEEDS: u64 = 12;

/// `STOWAGE_FAULT_SEEDS=1000` looks for every one of them, from seed 0 on.
#[test]
fn planted_bugs_are_found() {
    let asked = std::env::var("STOWAGE_FAULT_SEEDS").ok();
    let asked = asked.map(|text| text.parse::<u64>().expect("a number of seeds"));
    let hunted: Vec<(PlantedBug, std::ops::Range<u64>)> = match asked {
        Some(seeds) => PlantedBug::ALL
            .into_iter()
            .map(|bug| (bug, 0..seeds))
            .collect(),
        None => FAST_BUGS
            .into_iter()
            .map(|bug| (bug, 0..FIRST_SEEDS))
            .collect(),
    };
    let mut missed = Vec::new();
    for (bug, seeds) in hunted {
        let planted = |seed| History {
            planted: Some(bug),
            ..History::from_seed(seed)
        };
        match play_all(seeds.map(planted), &CampaignRules::default(), |_| ()).failure {
            Some((history, run)) => {
                println!(
                    "{bug:?} is found by seed {}: {:?}",
                    history.seed, run.violations
                );
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn a_failing_history_is_made_smaller_and_still_fails() {
    let planted = |seed| History {
        planted: Some(PlantedBug::ForgetsDeletions),
        ..History::from_seed(seed)
    };
    let failing = (0..FIRST_SEEDS)
        .map(planted)
        .find(|history| !play(history).violations.is_empty())
        .unwrap();
    let smallest = shrink(&failing, Duration::from_secs(20));
    assert_eq!(
        (smallest.seed, smallest.planted),
        (failing.seed, failing.planted)
    );
    assert!(smallest.steps <= failing.steps && smallest.without.is_superset(&failing.without));
    assert_ne!(smallest, failing);
    assert!(!play(&smallest).violations.is_empty(), "{smallest:?}");
}

#[test]
fn a_mistake_on_the_command_line_says_what_to_write() {
    for (arguments, says) in [
        (&["--seeds", "9..3"][..], "9 is larger than 3; write 3..9"),
        (&["--seeds", "some"], "such as 0..9999"),
        (&["--minutes", "0"], "write 1 or more"),
        (
            &["--without", "kil"],
            "there is no kind of fault \"kil\"; write one of late-write,",
        ),
        (&["--seeds", "0..3", "--history"], "write --seeds 0"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        let ran = command
            .args(["simulate", "faults"])
            .args(arguments)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&ran.stderr);
        assert!(
            !ran.status.success() && error.contains(says),
            "{arguments:?}: {error}"
        );
    }
}
