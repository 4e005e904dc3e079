//! The fuzz target of agents' reports that a cluster takes; the check is `stowage_fuzz::report`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::report(data));
