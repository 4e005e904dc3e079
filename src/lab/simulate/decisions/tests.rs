//! A seed is a sequence, the oracle is silent where nothing is wrong, and planted bugs are found.

use super::planted::PlantedBug;
use super::shrink::shrink;
use super::*;

#[test]
fn a_seed_is_a_sequence_to_the_letter() {
    for seed in 0..6 {
        let sequence = DecisionSequence::of(seed);
        let [first, second] = [play_aloud(&sequence), play_aloud(&sequence)];
        let differs = first
            .lines
            .iter()
            .zip(&second.lines)
            .find(|(first, second)| first != second);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(first.tally, second.tally, "seed {seed}");
        assert_eq!(
            first.tally,
            play(&sequence).tally,
            "seed {seed}: who listens changes nothing"
        );
    }
}

#[test]
fn every_answer_of_some_hundred_sequences_is_right() {
    let mut tally = DecisionTally::default();
    for seed in 0..150 {
        let sequence = DecisionSequence::of(seed);
        let result = play(&sequence);
        assert_eq!(result.broken, None, "{}", sequence.arguments());
        tally += result.tally;
    }
    println!("{tally}");
    let quiet = tally
        .counts()
        .find(|(name, count)| *count == 0 && *name != "uncertain");
    assert_eq!(quiet, None, "all of it happens");
    assert!(
        tally.uncertain * 20 < tally.refusals,
        "most refusals are checked: {tally}"
    );
}

#[test]
fn the_oracle_finds_every_planted_bug() {
    let finds = |bug: &PlantedBug| {
        (0..200).find(|seed| {
            let sequence = DecisionSequence {
                planted: Some(*bug),
                ..DecisionSequence::of(*seed)
            };
            play(&sequence).broken.is_some()
        })
    };
    let found: Vec<(&PlantedBug, Option<u64>)> = PlantedBug::ALL
        .iter()
        .map(|bug| (bug, finds(bug)))
        .collect();
    println!("{found:?}");
    let missed: Vec<_> = found.iter().filter(|(_, seed)| seed.is_none()).collect();
    assert!(missed.is_empty(), "not found within 200 seeds: {missed:?}");
}

#[test]
fn a_failing_sequence_is_made_small_and_still_fails_at_its_last_step() {
    let planted = |seed| DecisionSequence {
        planted: Some(PlantedBug::ALL[0]),
        ..DecisionSequence::of(seed)
    };
    let failing = (0..200)
        .map(planted)
        .find(|sequence| play(sequence).broken.is_some())
        .unwrap();
    let smallest = shrink(&failing);
    assert_eq!(
        (smallest.seed, smallest.planted),
        (failing.seed, failing.planted)
    );
    assert!(
        smallest.steps <= failing.steps && smallest.nodes <= failing.nodes,
        "{smallest:?}"
    );
    assert!(
        smallest.without.len() > failing.without.len(),
        "some kinds of steps have nothing to do with it"
    );
    let (step, _) = play(&smallest).broken.expect("it still fails");
    assert_eq!(step + 1, smallest.steps, "with its last step");
}
