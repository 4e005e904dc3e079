//! The fuzz target of the ledger's history over two replicas; the check is `stowage_fuzz::ledger`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::ledger(data));
