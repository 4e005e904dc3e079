//! The fuzz target of recordings; the check is `stowage_fuzz::recording`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::recording(data));
