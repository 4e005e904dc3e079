//! Parses an inference engine's metrics page: its KV cache, its queue and its state.
//!
//! [`scan`] reads Prometheus' text format, [`dialect`] is the table of metric names by engine, [`figures`] combines the two.
//! Pure: bytes in, figures out. The page's source and age are not known here.

pub mod dialect;
pub mod figures;
pub mod scan;

#[cfg(test)]
mod page_tests;
#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;

pub use dialect::Engine;
pub use figures::{Figures, MetricsProblem, UnknownPage, read};
