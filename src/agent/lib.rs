//! The node agent: samples one node once a second and reports it to every replica of Stowage.
//!
//! ```text
//!  nvml ──────► GPUs, processes ─┐
//!  ownership ─► their pods ──────┤
//!  pods ──────► pods on the node ┼─► round ─► one report ─► publish ─► every replica
//!  engines ───► KV, queue, state ┤
//!  models ────► models on disk ──┘   findings: deviations from what Stowage assigned
//! ```
//!
//! Each source is behind a small trait and may fail alone; the report then says which part is missing and why. [`blocking`]
//! keeps a source that hangs from delaying the rest. [`run`] is the command's loop, [`mod@print`] its tables, [`metrics_page`]
//! what Prometheus sees of it, [`turns`] in which order pods start after a
//! boot. Nothing here decides where a pod goes, and nothing here knows the extender except its address.

pub mod blocking;
pub mod engines;
pub mod findings;
pub(crate) mod metrics_page;
pub mod models;
pub mod nvml;
pub mod ownership;
pub mod pods;
pub mod print;
pub mod publish;
pub mod round;
pub mod run;
pub mod turns;

#[cfg(test)]
#[path = "../../tests/it/needs.rs"]
#[expect(
    dead_code,
    reason = "the agent's own tests run no program that `.ci/run` installs"
)]
mod needs;
