//! `stowage serve`: HTTP in, watches in, writes out. In layers: a module imports only from those above it in this list.
//!
//! - [`service`]: the cluster's state behind its lock, the clock, leadership.
//! - [`extender`] (HTTP: four verbs, agents' reports, operators' pages), [`kubernetes`] (watches into the ledger; Bindings,
//!   reservations, Events, capacity and the Lease out), [`policy_watch`] (policy files on disk: read, watched, applied) and
//!   [`flight_recorder`] (recordings on disk).
//! - [`serve`]: these put together and run.

pub mod extender;
pub mod flight_recorder;
pub mod kubernetes;
pub mod policy_watch;
pub mod serve;
pub mod service;
