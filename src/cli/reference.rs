//! Shell completions and man pages, made from the same definition as `--help`.

use super::Cli;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// A folder for the pages, one for each command; it is made if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

impl CompletionArgs {
    pub fn run(self) -> Result<ExitCode> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "stowage", &mut script);
        std::io::stdout().write_all(&script)?;
        Ok(ExitCode::SUCCESS)
    }
}

impl ManArgs {
    pub fn run(self) -> Result<ExitCode> {
        let folder = || format!("DIR {}", self.folder.display());
        std::fs::create_dir_all(&self.folder).with_context(folder)?;
        clap_mangen::generate_to(Cli::command(), &self.folder).with_context(folder)?;
        Ok(ExitCode::SUCCESS)
    }
}
