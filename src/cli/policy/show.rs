//! `stowage policy show`: one policy in full.

use super::{print_diagnostics, unreadable};
use crate::cli::output::OutputArgs;
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_policy_file::load;
use stowage_server::policy_watch::read;

const EXIT_CODES: &str = "Exit codes: 0 for a sound policy, 1 if it would be refused, 2 if it cannot be read or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct ShowArgs {
    /// A policy: a directory of YAML files, one file, or `-` for standard input
    #[arg(value_name = "PATH")]
    path: PathBuf,

    #[command(flatten)]
    output: OutputArgs,
}

impl ShowArgs {
    pub fn run(self) -> Result<ExitCode> {
        let files = match read::read_argument(&self.path) {
            Ok(files) => files,
            Err(error) => return Ok(unreadable(&error)),
        };
        match load(&files) {
            Ok(loaded) => {
                self.output.print(&loaded.to_json(), |_, _| {
                    let (path, digest) = (self.path.display(), loaded.policy.digest);
                    format!("# {path}, digest {digest}\n{}", loaded.show(&files))
                })?;
                Ok(ExitCode::SUCCESS)
            }
            Err(found) => {
                print_diagnostics(&found, &files);
                Ok(ExitCode::FAILURE)
            }
        }
    }
}
