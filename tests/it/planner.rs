//! The planner in the whole system, by HTTP alone: stand-ins for the scheduler, the API server, kubelets and GPUs around the very
//! Stowage that `serve` runs. What each test asserts, the API server shows, or the scheduler's own notes.

mod cascade;
mod endings;
mod gated;
mod groups;
mod room;
mod wakes;
mod world;
