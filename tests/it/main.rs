//! The integration tests: one binary, a module per edge.

// The core's rules (clippy.toml) bind `scheduling`, not the tests at the edges.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod bind;
mod client;
mod concurrency;
mod golden;
mod http;
mod process;
mod refusals;
mod reports;
mod served;
mod shared;
mod tls;
