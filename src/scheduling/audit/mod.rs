//! Two audits. [`ledger`] rebuilds what the ledger caches from the pods and nodes in it, and names every difference and every
//! broken invariant: tests, simulations and fuzzers call it after each step. [`conflicts`] reads bound pods and reservations as
//! the API server shows them, never the ledger, and finds GPUs that are allocated beyond their capacity.
//!
//! Neither repairs anything.

pub mod conflicts;
pub mod ledger;
