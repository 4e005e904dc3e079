//! The fuzz target of the scheduler's requests and agents' reports; the check is `stowage_fuzz::wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::wire(data));
