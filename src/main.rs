//! The `stowage` command. What it does is in `stowage::cli`.

use clap::Parser;
use std::process::ExitCode;
use stowage::cli::Cli;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
