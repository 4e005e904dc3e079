//! How much VRAM a model needs, and how many GPUs some pods need. Pure.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod assess;
pub mod capacity_plan;
pub mod estimate;
