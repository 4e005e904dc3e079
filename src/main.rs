//! The `stowage` command. What it does is in `stowage::cli`.

use mimalloc::MiMalloc;
use std::io::{self, Write};
use std::process::ExitCode;
use stowage::cli::{Cli, is_of_broken_pipe};

/// mimalloc, because it returns free memory to the kernel: three times 200 reports of 0.9 MB at once took a debug build with
/// glibc's allocator from 42 MiB to 60 MiB, where it stayed; with mimalloc and `MIMALLOC_PURGE_DELAY=0` from 50 MiB through 71
/// MiB to 51 MiB, and without that variable to 89 MiB. At once is too soon, though: what is freed and needed again a moment
/// later, as the pages of a list are, would come from the kernel each time. The shipped Deployment sets a tenth of a second, with
/// which free memory goes back as soon as others allocate. As huge pages it would take the kernel milliseconds to clear: the
/// Deployment sets `MIMALLOC_ALLOW_THP=0`, too.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// The exit code that a shell gives a command that SIGPIPE ended.
const BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    match Cli::parsed().run() {
        Ok(code) => code,
        // The reader, such as `head`, has read enough.
        Err(error) if is_of_broken_pipe(&error) => ExitCode::from(BROKEN_PIPE),
        Err(error) => {
            if let Some(invalid) = error.downcast_ref::<clap::Error>() {
                invalid.exit();
            }
            // Standard error may be closed too.
            let _ = writeln!(io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
