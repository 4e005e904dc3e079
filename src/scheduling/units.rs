//! Quantities with their unit in the type. Integers throughout: accounting never rounds.
//!
//! Nothing here knows a clock. The owner of a clock passes a [`Moment`] in.

pub mod setting;
pub mod text;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

/// Memory, in bytes. Addition saturates: a sum that does not fit 64 bits is "more than any GPU has" either way.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub struct Bytes(pub u64);

impl Bytes {
    pub const ZERO: Self = Self(0);

    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `self − other`, or nothing where that would be negative.
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    pub const fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }

    /// The time to move this many bytes at `speed` bytes a second, rounded up; `u64::MAX` ms at speed 0.
    pub const fn transfer_time(self, speed: Self) -> Millis {
        match (speed.0, self.0.checked_mul(1000)) {
            (0, _) => Millis(u64::MAX),
            // As good as always, and many times as fast.
            (speed, Some(thousandths)) => Millis(thousandths.div_ceil(speed)),
            (speed, None) => {
                let millis = (self.0 as u128 * 1000).div_ceil(speed as u128);
                Millis(if millis > u64::MAX as u128 {
                    u64::MAX
                } else {
                    millis as u64
                })
            }
        }
    }

    /// An equal part of `self` for each of `n`, rounded up so that the parts never add up to less.
    pub const fn split(self, n: u32) -> Self {
        Self(self.0.div_ceil(n as u64))
    }

    /// A Kubernetes quantity that must be a whole number of bytes, such as `40Gi` or `1e9`.
    pub fn parse_quantity(text: &str) -> Result<Self, QuantityError> {
        Ok(Self(parse_quantity(text, 0, Rounding::Refuse)?))
    }

    /// A Kubernetes quantity in bytes, a fraction of a byte rounded up, as kube-scheduler rounds it.
    pub fn parse_quantity_rounding_up(text: &str) -> Result<Self, QuantityError> {
        Ok(Self(parse_quantity(text, 0, Rounding::Up)?))
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, unit) = match self.0 {
            n if n >= 1 << 30 => (n as f64 / (1u64 << 30) as f64, "GiB"),
            n if n >= 1 << 20 => (n as f64 / (1u64 << 20) as f64, "MiB"),
            n if n >= 1 << 10 => (n as f64 / (1u64 << 10) as f64, "KiB"),
            n => return write!(f, "{n} B"),
        };
        write!(f, "{n:.1} {unit}")
    }
}

/// CPU, in thousandths of a core.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct MilliCpu(pub u64);

impl MilliCpu {
    /// A Kubernetes quantity of cores, such as `2` or `500m`, rounded up as the scheduler does.
    pub fn parse_quantity(text: &str) -> Result<Self, QuantityError> {
        Ok(Self(parse_quantity(text, 3, Rounding::Up)?))
    }
}

/// Whole per cent, 0 to 100.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
)]
pub struct Percent(u8);

impl Percent {
    pub const FULL: Self = Self(100);

    pub const fn get(self) -> u8 {
        self.0
    }

    /// `None` above 100.
    pub const fn new(percent: u8) -> Option<Self> {
        if percent <= 100 {
            Some(Self(percent))
        } else {
            None
        }
    }

    /// A share of 1, rounded up; `None` for what is no share.
    pub fn from_share(share: f64) -> Option<Self> {
        // 0.55 × 100 is a little more than 55 in binary.
        (0.0..=1.0)
            .contains(&share)
            .then(|| Self((share * 100.0 - 1e-9).ceil() as u8))
    }

    /// This share of `whole`, rounded up.
    pub fn share_of(self, whole: Bytes) -> Bytes {
        Bytes((u128::from(whole.0) * u128::from(self.0)).div_ceil(100) as u64)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}

/// A length of time in milliseconds.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub struct Millis(pub u64);

impl Millis {
    pub const fn seconds(n: u64) -> Self {
        Self(n.saturating_mul(1000))
    }

    pub const fn times(self, n: u64) -> Self {
        Self(self.0.saturating_mul(n))
    }
}

impl Add for Millis {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

/// A latency in microseconds.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub struct Micros(pub u64);

impl Micros {
    /// `None` for what is no latency: a negative or an infinite one.
    pub fn from_seconds(seconds: f64) -> Option<Self> {
        (seconds >= 0.0 && seconds.is_finite()).then(|| Self((seconds * 1e6).round() as u64))
    }

    /// In two digits: what changes no decision changes no reading.
    pub fn rounded(self) -> Self {
        let mut unit = 1;
        while self.0 / unit >= 100 {
            unit *= 10;
        }
        Self(self.0.saturating_add(unit / 2) / unit * unit)
    }

    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

impl From<Millis> for Micros {
    fn from(millis: Millis) -> Self {
        Self(millis.0.saturating_mul(1000))
    }
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n >= 1_000_000 => write!(f, "{:.1} s", self.as_seconds()),
            n => write!(f, "{:.1} ms", n as f64 / 1e3),
        }
    }
}

/// A point on some monotonic clock: milliseconds since that clock's owner started. Two moments compare only
/// when they come from the same clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Moment(pub u64);

impl Moment {
    /// The moment that long ago, or the clock's start if that is later.
    pub const fn before(self, length: Millis) -> Self {
        Self(self.0.saturating_sub(length.0))
    }

    /// How long it is from `earlier` to this; nothing if it is later.
    pub const fn since(self, earlier: Self) -> Millis {
        Millis(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Millis> for Moment {
    type Output = Self;
    fn add(self, length: Millis) -> Self {
        Self(self.0.saturating_add(length.0))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    #[error("it is not a quantity; write a number with an optional unit, such as 40Gi")]
    Malformed,
    #[error("it is negative")]
    Negative,
    #[error("it is not a whole number")]
    Fractional,
    #[error("it does not fit 64 bits")]
    TooLarge,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    Up,
    Refuse,
}

/// `text` as an integer count of 10^−`decimals`. The grammar is Kubernetes' `resource.Quantity`.
fn parse_quantity(text: &str, decimals: i32, rounding: Rounding) -> Result<u64, QuantityError> {
    let (negative, text) = match text.as_bytes() {
        [b'-', ..] => (true, &text[1..]),
        [b'+', ..] => (false, &text[1..]),
        _ => (false, text),
    };
    let digits_end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits_end);
    let (mantissa, fraction_digits) = parse_decimal(number)?;
    let (tens, twos) = parse_suffix(suffix)?;
    match (mantissa, negative) {
        (0, _) => return Ok(0),
        (_, true) => return Err(QuantityError::Negative),
        _ => {}
    }
    let tens = tens
        .saturating_sub(fraction_digits)
        .saturating_add(decimals);
    let scaled = mantissa
        .checked_mul(1u128 << twos)
        .ok_or(QuantityError::TooLarge)?;
    let value = if tens >= 0 {
        let factor = 10u128
            .checked_pow(tens.unsigned_abs())
            .ok_or(QuantityError::TooLarge)?;
        scaled.checked_mul(factor).ok_or(QuantityError::TooLarge)?
    } else {
        // A divisor beyond 128 bits leaves less than one of anything.
        let divisor = 10u128.checked_pow(tens.unsigned_abs()).unwrap_or(u128::MAX);
        if rounding == Rounding::Refuse && !scaled.is_multiple_of(divisor) {
            return Err(QuantityError::Fractional);
        }
        scaled.div_ceil(divisor)
    };
    u64::try_from(value).map_err(|_| QuantityError::TooLarge)
}

/// The digits of `12.50` as 1250, and how many of them stand behind the point.
fn parse_decimal(number: &str) -> Result<(u128, i32), QuantityError> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.len() + fraction.len() == 0 || fraction.contains('.') {
        return Err(QuantityError::Malformed);
    }
    let fraction = fraction.trim_end_matches('0');
    let mut mantissa = 0u128;
    for digit in whole.bytes().chain(fraction.bytes()) {
        mantissa = mantissa
            .checked_mul(10)
            .and_then(|m| m.checked_add(u128::from(digit - b'0')))
            .ok_or(QuantityError::TooLarge)?;
    }
    Ok((mantissa, fraction.len() as i32))
}

/// A unit as (power of ten, power of two).
fn parse_suffix(suffix: &str) -> Result<(i32, u32), QuantityError> {
    Ok(match suffix {
        "" => (0, 0),
        "n" => (-9, 0),
        "u" => (-6, 0),
        "m" => (-3, 0),
        "k" => (3, 0),
        "M" => (6, 0),
        "G" => (9, 0),
        "T" => (12, 0),
        "P" => (15, 0),
        "E" => (18, 0),
        "Ki" => (0, 10),
        "Mi" => (0, 20),
        "Gi" => (0, 30),
        "Ti" => (0, 40),
        "Pi" => (0, 50),
        "Ei" => (0, 60),
        _ => {
            let exponent = suffix
                .strip_prefix(['e', 'E'])
                .ok_or(QuantityError::Malformed)?;
            (exponent.parse().map_err(|_| QuantityError::Malformed)?, 0)
        }
    })
}

/// A number of things, with the noun in singular or plural: `1 pod`, `3 pods`.
pub fn plural(count: impl TryInto<u64>, noun: &str) -> String {
    match count.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    }
}

/// `1.2 s`, `3 min`, `2 h 5 min`, `4 days`: as exact as a person needs it.
pub fn human_duration(time: Millis) -> String {
    let seconds = time.0 / 1000;
    match seconds {
        0..10 => format!("{}.{} s", seconds, time.0 % 1000 / 100),
        10..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// The verb after so many things: `is` or `are`.
pub fn is_or_are(count: impl TryInto<u64>) -> &'static str {
    if count.try_into().is_ok_and(|count| count == 1) {
        "is"
    } else {
        "are"
    }
}

/// The verb after so many things: `has` or `have`.
pub fn has_or_have(count: impl TryInto<u64>) -> &'static str {
    if count.try_into().is_ok_and(|count| count == 1) {
        "has"
    } else {
        "have"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantities_read_as_kubernetes_reads_them() {
        for (text, bytes) in [
            ("24576", 24_576),
            ("40Gi", 40 << 30),
            ("1.5Gi", 3 << 29),
            ("1e3", 1_000),
            ("2E", 2_000_000_000_000_000_000),
            ("1E2", 100),
            ("500000m", 500),
            (".5k", 500),
            ("0.0", 0),
            ("-0", 0),
            ("1.0", 1),
        ] {
            assert_eq!(Bytes::parse_quantity(text), Ok(Bytes(bytes)), "{text}");
        }
        for (text, error) in [
            ("", QuantityError::Malformed),
            ("Gi", QuantityError::Malformed),
            ("4 Gi", QuantityError::Malformed),
            ("1.2.3", QuantityError::Malformed),
            ("4gi", QuantityError::Malformed),
            ("1e", QuantityError::Malformed),
            ("-4Gi", QuantityError::Negative),
            ("0.5", QuantityError::Fractional),
            ("100m", QuantityError::Fractional),
            ("1e-400", QuantityError::Fractional),
            ("9e99", QuantityError::TooLarge),
            ("99999999999Ei", QuantityError::TooLarge),
            ("1e2147483647", QuantityError::TooLarge),
        ] {
            assert_eq!(Bytes::parse_quantity(text), Err(error), "{text}");
        }
        assert_eq!(MilliCpu::parse_quantity("2"), Ok(MilliCpu(2000)));
        assert_eq!(MilliCpu::parse_quantity("0.0001"), Ok(MilliCpu(1)));
        assert_eq!(Bytes::parse_quantity_rounding_up("100m"), Ok(Bytes(1)));
    }

    #[test]
    fn a_share_is_rounded_up_to_whole_per_cent() {
        let percent = |share| Percent::from_share(share).map(Percent::get);
        assert_eq!(
            [0.0, 0.001, 0.07, 0.55, 0.901, 1.0].map(percent),
            [0, 1, 7, 55, 91, 100].map(Some)
        );
        assert_eq!([-0.1, 1.001, f64::NAN].map(percent), [None; 3]);
    }

    #[test]
    fn the_parts_of_a_split_never_add_up_to_less() {
        assert_eq!(Bytes(10).split(3), Bytes(4));
        assert_eq!(Bytes(9).split(3), Bytes(3));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "[-+]?[0-9.]{0,40}[a-zA-Z0-9+-]{0,12}") {
            let _ = Bytes::parse_quantity(&text);
        }

        #[test]
        fn a_share_is_never_more_than_the_whole(percent in 0u8..=100, whole: u64) {
            prop_assert!(Percent::new(percent).unwrap().share_of(Bytes(whole)) <= Bytes(whole));
        }
    }
}
