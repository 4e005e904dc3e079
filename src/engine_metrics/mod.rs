//! Parses an inference engine's metrics page: its KV cache, its queue and its state.
//!
//! [`scan`] reads Prometheus' text format, [`crate::engines`] has the metric names of each engine, [`figures`] combines the two.
//! Pure: bytes in, figures out. The page's source and age are not known here.

pub mod figures;
pub mod scan;

#[cfg(test)]
mod page_tests;
#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;

pub use crate::engines::Engine;
pub use figures::{Figures, MetricsProblem, UnknownPage, read};
