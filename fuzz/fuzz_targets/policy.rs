//! The fuzz target of policy files; the check is `stowage_fuzz::policy`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::policy(data));
