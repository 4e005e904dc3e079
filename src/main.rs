//! The `stowage` command. What it does is in `stowage::cli`.

use clap::Parser;
use mimalloc::MiMalloc;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use stowage::cli::Cli;

/// mimalloc, because it can give back what is free: three times 200 reports of 0.9 MB at once took a debug build with glibc's allocator
/// from 42 MiB to 60, and there it stayed; with this one and `MIMALLOC_PURGE_DELAY=0`, which the shipped Deployment sets, from 50
/// through 71 to 51. Without that variable it keeps what is free until somebody asks again: 89.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// What a shell says of one whose reader went away.
const BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(code) => code,
        // The reader, such as `head`, has read enough.
        Err(error) if is_of_broken_pipe(&error) => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            // Nobody may be there to read this either.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn is_of_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
