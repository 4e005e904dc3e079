//! How much VRAM a model needs, and how many GPUs some pods need. Pure.

pub mod capacity_plan;
pub mod estimate;
