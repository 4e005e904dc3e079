//! The fuzz target of policies that are swapped under a running cluster; the check is `stowage_fuzz::reload`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::reload(data));
