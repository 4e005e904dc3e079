use super::*;

#[test]
fn a_seed_is_a_history_to_the_byte() {
    for seed in 0..4 {
        let history = History { steps: 250, ..History::of(seed) };
        let [first, second] = [play(&history), play(&history)];
        let differs = first.lines.iter().zip(&second.lines).find(|(first, second)| first != second);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(first.lines.len(), second.lines.len(), "seed {seed}");
        assert_eq!(first.tally, second.tally, "seed {seed}");
    }
}
