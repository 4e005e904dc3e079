//! Stowage places LLM pods on single GPUs, as an extender of the stock kube-scheduler.
//!
//! From the pure core outwards, in layers. A module imports from the layers above it in this list, never from its own or from
//! one below; `tests/it/layers.rs` reads the list.
//!
//! - [`coded`]: enums whose values have codes; [`ids`], [`units`]: names and quantities, parsed once; [`build_info`]: which build this is.
//! - [`engines`]: what is known of each inference engine, in one declaration. Pure.
//! - [`scheduling`]: the decision core and the ledger. Pure; it has layers of its own.
//! - [`engine_metrics`]: what an inference engine's metrics page says. Pure.
//! - [`policy_file`]: policies as files, with diagnostics. Pure.
//! - [`policy_windows`]: which windows of a policy are open at a time. Pure.
//! - [`policy_cases`]: test cases that stand next to policies. Pure.
//! - [`capacity_plan`]: how many GPUs some pods need. Pure.
//! - [`estimate`]: how much VRAM a model needs, from its `config.json`. Pure.
//! - [`recording`]: what a flight recorder keeps, as bytes, and its replay. Pure.
//! - [`report`]: what a node agent reports of its node.
//! - [`kubernetes::port`]: what Stowage asks of an API server, or of a dump that stands in for one.
//! - [`kubernetes::objects`]: Kubernetes objects to the core's types and back; which annotations and conditions mean what.
//! - [`kubernetes::pruning`]: what is used of objects, read as a stream.
//! - [`telemetry`]: the metrics of all modules, and their spans.
//! - [`service`]: the cluster's state behind its lock, the clock, leadership.
//! - [`listening`]: sockets of the addresses, and whom they answer.
//! - The edges: [`extender`] (HTTP: four verbs, agents' reports, operators' pages), [`kubernetes`] (watches into the ledger;
//!   Bindings, reservations, Events, capacity and the Lease out), [`policy_watch`] (policy files on disk: read, watched,
//!   applied), [`flight_recorder`] (recordings on disk), and [`agent`] (on the node: NVML, pods, engines and models into reports).
//! - [`serve`]: the edges put together and run.
//! - [`lab`]: simulations and the demo.
//! - [`cli`]: the command line.

#[cfg(feature = "service")]
pub mod build_info;
pub mod capacity_plan;
mod coded;
pub mod engine_metrics;
pub mod engines;
pub mod estimate;
pub mod ids;
pub mod policy_cases;
pub mod policy_file;
pub mod policy_windows;
pub mod recording;
pub mod scheduling;
pub mod units;

#[cfg(feature = "lab")]
pub mod lab;

#[cfg(all(test, any(feature = "service", feature = "lab")))]
#[path = "../tests/it/needs.rs"]
#[expect(dead_code, reason = "the library's own tests run no program that `.ci/run` installs")]
mod needs;

#[cfg(feature = "service")]
pub mod agent;
#[cfg(feature = "service")]
pub mod cli;
#[cfg(feature = "service")]
pub mod extender;
#[cfg(feature = "service")]
pub mod flight_recorder;
#[cfg(feature = "service")]
pub mod kubernetes;
#[cfg(feature = "service")]
pub mod listening;
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
