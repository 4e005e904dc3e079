//! A fluid model of an inference engine that batches continuously, as vLLM does: requests are amounts, not things, and a step of
//! the model is a second, not a step of the engine. docs/inside/fleet-simulator.md has the formulas, the published figures that the
//! constants are fitted to, and what the model leaves out.
//!
//! ```text
//!  arrivals ─► waiting ─► prefilling ─► decoding ─► completed
//!              by age     KV cache held from here on
//! ```
//!
//! [`speed`] is what a GPU and a model cost; [`spec`] what one engine can do with the memory it is granted; [`engine`] the
//! requests in it, and [`outcome`] what a stretch of time makes of them; [`steady`] what it comes to at a constant load;
//! [`balancer`] splits a model's traffic over its engines; [`latency`] counts by how long requests took. No pods, no GPUs and no
//! scheduler are known here: the memory granted and what neighbors cost are arguments.

pub mod balancer;
pub mod engine;
pub mod latency;
pub mod outcome;
pub mod requests;
pub mod spec;
pub mod speed;
pub mod steady;

#[cfg(test)]
mod proptests;
#[cfg(test)]
mod published_tests;
#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
mod tests;

pub use balancer::split_arrivals;
pub use engine::{Engine, EngineBusy, EngineState};
pub(crate) use latency::{LatencyHistogram, Slo, SloTally};
pub use outcome::{AbortedRequests, StepOutcome};
pub use requests::Requests;
pub use spec::DoesNotFit;
pub(crate) use spec::EngineSpec;
pub use speed::Batching;
pub(crate) use speed::{GpuSpeed, ModelShape};
pub(crate) use steady::{max_rate_per_s, steady_state};
