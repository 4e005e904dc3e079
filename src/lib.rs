//! Stowage places LLM pods on single GPUs, as an extender of the stock kube-scheduler.
//!
//! From the pure core outwards; imports point one way, up this list:
//!
//! - [`ids`], [`units`]: names and quantities, parsed once.
//! - [`scheduling`]: the decision core and the ledger. Pure.
//! - [`engine_metrics`]: what an inference engine's metrics page says. Pure.
//! - [`policy_file`]: policies as files, with diagnostics; [`trial`]: cases that stand beside them. Pure.
//! - [`sim`]: workloads in simulated time, played on the core beside other ways to decide. Pure.
//! - [`report`]: what a node agent says of its node.
//! - [`contract`]: which keys on pods and nodes mean what; Kubernetes objects to the core's types and back.
//! - [`control_plane`]: what Stowage asks of an API server, or of a dump that stands in for one.
//! - [`telemetry`], [`service`]: metrics; the ledger behind its lock, the clock, whether to act.
//! - [`extender`]: the HTTP edge: four verbs, agents' reports, operators' pages.
//! - [`policy_watch`]: the edge to policy files on disk: read, watched, brought into force.
//! - [`cluster`]: the Kubernetes edge: watches into the ledger; Bindings, holds, Events, capacity and the Lease out.
//! - [`agent`]: the node edge: NVML, pods, engines and models into reports.
//! - [`serve`]: the edges put together and run. [`demo`]: the same on a cluster of stand-ins, in one process.
//! - [`cli`]: the command line.
//!
//! `extender`, `cluster`, `policy_watch` and `agent` never import each other.

pub mod engine_metrics;
pub mod ids;
pub mod policy_file;
pub mod scheduling;
pub mod sim;
pub mod trial;
pub mod units;

#[cfg(feature = "service")]
pub mod agent;
#[cfg(feature = "service")]
pub mod cli;
#[cfg(feature = "service")]
pub mod cluster;
#[cfg(feature = "service")]
pub mod contract;
#[cfg(feature = "service")]
pub mod control_plane;
#[cfg(feature = "service")]
pub mod demo;
#[cfg(feature = "service")]
pub mod extender;
#[cfg(feature = "service")]
pub mod policy_watch;
#[cfg(feature = "service")]
pub mod report;
#[cfg(feature = "service")]
pub mod serve;
#[cfg(feature = "service")]
pub mod service;
#[cfg(feature = "service")]
pub mod telemetry;
