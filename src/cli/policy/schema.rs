//! `stowage policy schema`: the JSON Schema of policy files, for editors that complete and check.

use anyhow::Result;
use clap::{Args, ValueEnum};
use std::io::Write;
use std::process::ExitCode;
use stowage_policy_file::shape::{policy_schema, test_schema};

#[derive(Debug, Args)]
pub struct SchemaArgs {
    #[arg(long, value_enum, default_value_t = SchemaKind::Policy)]
    of: SchemaKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SchemaKind {
    /// kind: SchedulingPolicy
    Policy,
    /// kind: PolicyTest
    Test,
}

impl SchemaArgs {
    pub fn run(self) -> Result<ExitCode> {
        match self.of {
            SchemaKind::Policy => print_policy_schema(),
            SchemaKind::Test => print(&test_schema()),
        }
    }
}

pub fn print_policy_schema() -> Result<ExitCode> {
    print(&policy_schema())
}

fn print(schema: &serde_json::Value) -> Result<ExitCode> {
    writeln!(
        std::io::stdout(),
        "{}",
        serde_json::to_string_pretty(schema)?
    )?;
    Ok(ExitCode::SUCCESS)
}
