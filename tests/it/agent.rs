//! The `stowage agent` command in a simulated environment: a driver's library that plays a script, a kubelet's socket, a `/proc`
//! of files, an API server, engines that answer HTTP, and the extender it reports to.
//!
//! [`world`] makes that environment and runs the command in it; the other files cover one source or one behavior each. The
//! tests of a single source are beside it in `src/agent`.

mod arguments;
mod engines;
mod gpus;
mod life;
mod models;
mod owners;
mod reporting;
mod turns;
pub mod world;
