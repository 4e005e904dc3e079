//! The random numbers of the published runs: Go's `math/rand`, so that the same pods arrive in the same order and the same
//! nodes win ties. Only for that: other code uses [`stowage_scheduling::testkit::random`].
//!
//! It is an additive lagged Fibonacci generator, x_c = x_{c−607} + x_{c−273} modulo 2⁶⁴ (Mitchell and Moore; Knuth, TAOCP
//! 3.2.2), whose first 607 words are those of a linear congruential generator with the seed, each combined with a word of a
//! table. The table is the state of the same generator after 7.8 · 10¹² steps from seed 1. It is computed here, by squaring z
//! modulo z⁶⁰⁷ − z³³⁴ − 1, in some milliseconds.

use std::sync::LazyLock;

const LENGTH: usize = 607;
const LAG: usize = 273;
/// Steps after which the table was taken.
const TABLE_STEPS: u64 = 7_800_000_000_000;

type GoWords = [u64; LENGTH];

pub(crate) struct GoRandom {
    words: GoWords,
    tap: usize,
    feed: usize,
}

/// A linear congruential generator modulo a prime (Lehmer; Park and Miller's second multiplier).
struct Lehmer(u64);

impl Lehmer {
    const MODULUS: u64 = (1 << 31) - 1;
    const MULTIPLIER: u64 = 48_271;
    /// The replacement of a seed that is 0 modulo the modulus.
    const ZERO: u64 = 89_482_311;
    /// Numbers that are discarded before the first word.
    const WARM_UP: usize = 20;

    fn seeded(seed: u64) -> Self {
        let seed = seed % Self::MODULUS;
        let mut dice = Self(if seed == 0 { Self::ZERO } else { seed });
        (0..Self::WARM_UP).for_each(|_| {
            dice.next();
        });
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0 * Self::MULTIPLIER % Self::MODULUS;
        self.0
    }

    /// Three numbers in one word, each so many bits above the next.
    fn words(mut self, shift: u32) -> GoWords {
        std::array::from_fn(|_| {
            let (high, middle, low) = (self.next(), self.next(), self.next());
            (high << (2 * shift)) ^ (middle << shift) ^ low
        })
    }
}

impl GoRandom {
    pub fn seeded(seed: u64) -> Self {
        static TABLE: LazyLock<GoWords> = LazyLock::new(table);
        let mut words = Lehmer::seeded(seed).words(20);
        words
            .iter_mut()
            .zip(TABLE.iter())
            .for_each(|(word, cooked)| *word ^= cooked);
        Self {
            words,
            tap: 0,
            feed: LENGTH - LAG,
        }
    }

    /// A random number of 63 bits.
    pub(crate) fn int63(&mut self) -> u64 {
        self.tap = self.tap.checked_sub(1).unwrap_or(LENGTH - 1);
        self.feed = self.feed.checked_sub(1).unwrap_or(LENGTH - 1);
        let word = self.words[self.feed].wrapping_add(self.words[self.tap]);
        self.words[self.feed] = word;
        word & (u64::MAX >> 1)
    }

    /// One of `0..bound`, by remainder, with rejection against bias; 0 for a bound of 0.
    pub fn below(&mut self, bound: u32) -> usize {
        let range = 1u64 << 31;
        let fair = range - range.checked_rem(bound.into()).unwrap_or(0);
        loop {
            let number = self.int63() >> 32;
            if number < fair {
                return number.checked_rem(bound.into()).unwrap_or(0) as usize;
            }
        }
    }

    /// One of `0..bound`, by the high half of a product (Lemire, 2019).
    fn below_by_product(&mut self, bound: u32) -> usize {
        let unfair = bound.wrapping_neg() % bound.max(1);
        loop {
            let product = (self.int63() >> 31) * u64::from(bound);
            if product as u32 >= unfair {
                return (product >> 32) as usize;
            }
        }
    }

    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below_by_product(last as u32 + 1));
        }
    }

    /// `0..count` in some order.
    pub(crate) fn permutation(&mut self, count: usize) -> Vec<usize> {
        let mut list = vec![0; count];
        for index in 0..count {
            let other = self.below(index as u32 + 1);
            list[index] = list[other];
            list[other] = index;
        }
        list
    }
}

/// The state after [`TABLE_STEPS`] from seed 1.
///
/// Word i of a state holds the number whose count is 334 − i modulo 607. In order of their counts the numbers follow the
/// recurrence, so those a long way on are a fixed combination of the first 607: the coefficients of z^steps.
fn table() -> GoWords {
    let state_index =
        |count: u64| (LENGTH - LAG + LENGTH - (count % LENGTH as u64) as usize) % LENGTH;
    let first = Lehmer::seeded(1).words(10);
    // Counts from −606 to 0, and as many more.
    let mut numbers: Vec<u64> = (1..=LENGTH as u64)
        .map(|count| first[state_index(count)])
        .collect();
    for count in LENGTH..2 * LENGTH {
        numbers.push(numbers[count - LENGTH].wrapping_add(numbers[count - LAG]));
    }
    let power = power(TABLE_STEPS);
    let mut state = [0; LENGTH];
    for later in 0..LENGTH {
        let products = power
            .iter()
            .zip(&numbers[later..])
            .map(|(factor, number)| factor.wrapping_mul(*number));
        let sum = products.fold(0u64, u64::wrapping_add);
        state[state_index(TABLE_STEPS + later as u64 + 1)] = sum;
    }
    state
}

/// z^exponent modulo z⁶⁰⁷ − z³³⁴ − 1, by rising powers.
fn power(exponent: u64) -> GoWords {
    let mut power: GoWords = [0; LENGTH];
    power[0] = 1;
    for bit in (0..u64::BITS - exponent.leading_zeros()).rev() {
        let mut square = vec![0u64; 2 * LENGTH];
        for (i, a) in power.iter().enumerate().filter(|(_, a)| **a != 0) {
            for (j, b) in power.iter().enumerate() {
                square[i + j] = square[i + j].wrapping_add(a.wrapping_mul(*b));
            }
        }
        if exponent >> bit & 1 == 1 {
            square.rotate_right(1);
        }
        for high in (LENGTH..2 * LENGTH).rev() {
            let factor = std::mem::take(&mut square[high]);
            square[high - LENGTH] = square[high - LENGTH].wrapping_add(factor);
            square[high - LAG] = square[high - LAG].wrapping_add(factor);
        }
        power.copy_from_slice(&square[..LENGTH]);
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_that_go_documents() {
        // The first of `rand.Seed(1)`: what every Go program without a seed printed for ten years.
        let mut dice = GoRandom::seeded(1);
        let first: Vec<usize> = (0..5).map(|_| dice.below(100)).collect();
        assert_eq!(first, [81, 87, 47, 59, 81]);
        assert_eq!(GoRandom::seeded(1).int63(), 5_577_006_791_947_779_410);
    }

    #[test]
    fn a_jump_is_as_many_steps() {
        let mut numbers: Vec<u64> = (0..LENGTH as u64)
            .map(stowage_scheduling::testkit::random::mix)
            .collect();
        for count in LENGTH..3000 {
            numbers.push(numbers[count - LENGTH].wrapping_add(numbers[count - LAG]));
        }
        for steps in [0, 1, 606, 607, 1500, 2999] {
            let jump = power(steps as u64);
            let number = jump
                .iter()
                .zip(&numbers)
                .fold(0u64, |sum, (a, b)| sum.wrapping_add(a.wrapping_mul(*b)));
            assert_eq!(number, numbers[steps]);
        }
    }

    #[test]
    fn a_permutation_has_every_number_once() {
        let mut list = GoRandom::seeded(7).permutation(100);
        assert_ne!(list, (0..100).collect::<Vec<_>>());
        list.sort_unstable();
        assert_eq!(list, (0..100).collect::<Vec<_>>());
        assert!(GoRandom::seeded(7).permutation(0).is_empty());
        assert_eq!(GoRandom::seeded(7).below(0), 0);
    }
}
