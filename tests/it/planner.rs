//! The planner in the whole system, by HTTP alone: stand-ins for the scheduler, the API server, kubelets and GPUs around the
//! same Stowage that `serve` runs. Each test asserts only what the API server or the scheduler's own records show.

mod cascade;
mod endings;
mod gated;
mod groups;
mod room;
mod wakes;
mod world;
