//! The fuzz target of sequences at the core's entry point; the check is `stowage_fuzz::decisions`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::decisions(data));
