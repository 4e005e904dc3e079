//! The `stowage` command. What it does is in `stowage::cli`.

use std::io::{self, Write};
use std::process::ExitCode;
use stowage::cli::{Cli, is_broken_pipe};

/// jemalloc, because it returns free memory to the kernel, and does so on threads of its own. mimalloc did it on the thread that
/// frees or allocates next: after a change of policy, which frees a gigabyte in a very large cluster, a request waited for that.
/// glibc's allocator kept what reports of 0.9 MB had taken.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The exit code that a shell gives a command that SIGPIPE ended.
const BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    match Cli::from_command_line().run() {
        Ok(code) => code,
        // The reader, such as `head`, has read enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::from(BROKEN_PIPE),
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
