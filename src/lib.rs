//! Stowage places LLM pods on single GPUs, as an extender of the stock kube-scheduler.
//!
//! From the pure core outwards; imports point one way, up this list:
//!
//! - [`ids`], [`units`]: names and quantities, parsed once.
//! - [`scheduling`]: the decision core and the ledger. Pure.

// The core's rules (clippy.toml) bind `scheduling`, which denies these itself.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

#[cfg(feature = "service")]
pub mod demo;
pub mod ids;
pub mod scheduling;
pub mod units;
