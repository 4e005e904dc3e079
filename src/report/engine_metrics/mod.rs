//! Parses an inference engine's metrics page: its KV cache, its queue and its state.
//!
//! [`scan`] reads Prometheus' text format, [`stowage_scheduling::engines`] has the metric names of each engine, [`figures`] combines the
//! two. Pure: bytes in, figures out. The page's source and age are not known here.

pub mod figures;
pub mod histogram;
pub mod scan;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "it reads a page")]
mod page_tests;
#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;

pub use figures::{Figures, MetricsProblem, UnknownPage, parse_page};
pub use histogram::{Histogram, LATENCIES};
pub use stowage_scheduling::engines::Engine;
