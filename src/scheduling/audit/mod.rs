//! Two audits. [`ledger`] rebuilds what the ledger caches from the pods and nodes in it, and names every difference and every broken
//! invariant: tests, simulations and fuzzers call it after each step. [`conflicts`] reads bound pods and reservations as the
//! API server shows them, never the ledger, and finds GPUs that are promised more than once.
//!
//! Neither mends anything.

pub mod conflicts;
pub mod ledger;
