//! The fuzz target of an inference engine's metrics page; the check is `stowage_fuzz::engine_page`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stowage_fuzz::engine_page(data));
