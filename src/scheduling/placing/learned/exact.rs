//! Floating-point figures as their bits, for `#[serde(with = "exact")]`: a figure that is read back from a decimal text may be
//! another one, and with it the next placement.

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value of floating-point figures.
pub(super) trait ExactFigures: Sized {
    type Bits: Serialize + DeserializeOwned;

    fn to_bits(&self) -> Self::Bits;

    /// `None` for another number of figures than the value has.
    fn from_bits(bits: Self::Bits) -> Option<Self>;
}

impl ExactFigures for f64 {
    type Bits = u64;

    fn to_bits(&self) -> u64 {
        f64::to_bits(*self)
    }

    fn from_bits(bits: u64) -> Option<Self> {
        Some(f64::from_bits(bits))
    }
}

impl<T: ExactFigures> ExactFigures for Vec<T> {
    type Bits = Vec<T::Bits>;

    fn to_bits(&self) -> Self::Bits {
        self.iter().map(T::to_bits).collect()
    }

    fn from_bits(bits: Self::Bits) -> Option<Self> {
        bits.into_iter().map(T::from_bits).collect()
    }
}

impl<const N: usize> ExactFigures for [f64; N] {
    type Bits = Vec<u64>;

    fn to_bits(&self) -> Vec<u64> {
        self.iter().copied().map(f64::to_bits).collect()
    }

    fn from_bits(bits: Vec<u64>) -> Option<Self> {
        bits.into_iter()
            .map(f64::from_bits)
            .collect::<Vec<f64>>()
            .try_into()
            .ok()
    }
}

/// A figure beside what it belongs to.
impl<T: Clone + Serialize + DeserializeOwned> ExactFigures for (T, f64) {
    type Bits = (T, u64);

    fn to_bits(&self) -> (T, u64) {
        (self.0.clone(), self.1.to_bits())
    }

    fn from_bits((owner, bits): (T, u64)) -> Option<Self> {
        Some((owner, f64::from_bits(bits)))
    }
}

pub(super) fn serialize<T: ExactFigures, S: Serializer>(
    figures: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    figures.to_bits().serialize(serializer)
}

pub(super) fn deserialize<'de, T: ExactFigures, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    T::from_bits(T::Bits::deserialize(deserializer)?)
        .ok_or_else(|| D::Error::custom("another number of figures"))
}
