//! The fuzz target of Kubernetes quantities; the check is `stowage_fuzz::quantity`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::quantity(data));
