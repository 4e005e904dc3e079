//! What an inference engine's metrics page says of its KV cache, its queue and its state.
//!
//! [`scan`] reads Prometheus' text format, [`dialect`] is the table of what each engine calls what, [`figures`] puts
//! the two together. Pure: bytes in, figures out. Where a page comes from, and how old it is, is nobody's business here.

pub mod dialect;
pub mod figures;
pub mod scan;

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod tests;

pub use dialect::Engine;
pub use figures::{Figures, MetricsProblem, UnknownPage, read};
