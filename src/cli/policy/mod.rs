//! `stowage policy …`: checks and previews of policy files before they are used. One file for each subcommand; this file has
//! their list.

mod check;
mod diff;
mod schema;
mod show;
mod test;

pub use diff::load_policy_at as policy_at;
pub use schema::{SchemaArgs, print_policy_schema};

use crate::cli::print_to_stderr;
use anyhow::Result;
use clap::{Args, Subcommand};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use stowage_policy_file::diagnostic::Diagnostic;
use stowage_policy_file::diagnostic::text::{Colors, render};
use stowage_policy_file::{PolicySources, SourceText};
use stowage_telemetry::wants_no_color;

#[derive(Debug, Args)]
pub struct PolicyArgs {
    #[command(subcommand)]
    command: PolicyCommand,
}

#[derive(Debug, Subcommand)]
enum PolicyCommand {
    /// Check policies and print all problems: exit code 1 if they would be refused, 2 if they cannot be read
    Check(check::CheckArgs),
    /// Print the JSON Schema of policy files, for editors
    Schema(SchemaArgs),
    /// Run the test cases next to policies: exit code 1 if one fails
    Test(test::TestArgs),
    /// Show how decisions for a cluster's pods differ between two policies
    Diff(diff::DiffArgs),
    /// Print a policy with all its files merged and every default, and where each value was set
    Show(show::ShowArgs),
}

/// The exit code for files that cannot be read, as for invalid arguments: CI can distinguish it from a broken policy.
const UNREADABLE: u8 = 2;

impl PolicyArgs {
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            PolicyCommand::Check(args) => args.run(),
            PolicyCommand::Schema(args) => args.run(),
            PolicyCommand::Show(args) => args.run(),
            PolicyCommand::Test(args) => args.run(),
            PolicyCommand::Diff(args) => args.run(),
        }
    }
}

/// Prints the problems to standard error.
fn print_diagnostics(found: &[Diagnostic], files: &[SourceText]) {
    let mut to = std::io::stderr();
    let _ = write!(to, "{}", diagnostics_text(found, files, &to));
}

/// The problems, in colors for a terminal.
fn diagnostics_text(found: &[Diagnostic], files: &[SourceText], to: &impl IsTerminal) -> String {
    let plain = !to.is_terminal() || wants_no_color();
    let colors = if plain { Colors::Off } else { Colors::On };
    render(found, &PolicySources::new(files), colors)
}

fn unreadable(error: &dyn std::error::Error) -> ExitCode {
    print_to_stderr(format_args!("error: {error}"));
    ExitCode::from(UNREADABLE)
}
