//! Where a sequence's choices come from: a seed, or the bytes of a fuzzer.

use stowage_scheduling::testkit::random::Random;

/// The dice of steps begin here among the purposes of a seed; those before are the world's.
const FIRST_STEP: u64 = 1000;

/// The source of all choices of one sequence.
#[derive(Debug, Clone)]
pub enum Draws<'b> {
    /// Each step has dice of its own, so that a sequence without some of its steps keeps the choices of the others.
    Seed { seed: u64, random: Random },
    /// One byte for each choice; once they are used up, each choice is the first.
    Bytes(&'b [u8]),
}

impl<'b> Draws<'b> {
    pub(crate) fn of_seed(seed: u64) -> Self {
        Self::Seed {
            seed,
            random: Random::seeded(seed, 0),
        }
    }

    /// The choices of one step begin.
    pub(crate) fn begin_step(&mut self, step: u32) {
        if let Self::Seed { seed, random } = self {
            *random = Random::seeded(*seed, FIRST_STEP + u64::from(step));
        }
    }

    /// Whether no choice is left.
    pub(crate) fn are_used_up(&self) -> bool {
        matches!(self, Self::Bytes([]))
    }

    /// One of `0..bound`, which is at most 256; 0 for a bound of 0.
    pub fn below(&mut self, bound: usize) -> usize {
        match self {
            Self::Seed { random, .. } => random.below(bound),
            Self::Bytes([first, rest @ ..]) => {
                let drawn = (usize::from(*first) * bound) >> 8;
                *self = Self::Bytes(rest);
                drawn
            }
            Self::Bytes([]) => 0,
        }
    }

    /// From `least` to `most`, both included.
    pub fn between(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most + 1 - least)
    }

    /// True in so many of a hundred cases.
    pub fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}
