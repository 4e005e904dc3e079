//! `stowage plan …`: answers about clusters that do not exist yet, by the code that places pods. One file for each subcommand;
//! this file has their list.

mod capacity;
pub(super) mod gather;
pub(super) mod objects;
mod text;

use anyhow::Result;
use clap::{Args, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(subcommand)]
    command: PlanCommand,
}

#[derive(Debug, Subcommand)]
enum PlanCommand {
    /// The fewest GPUs that hold some pods, a lower bound beside it, and who shares which GPU
    Capacity(Box<capacity::CapacityArgs>),
}

impl PlanArgs {
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            PlanCommand::Capacity(args) => args.run(),
        }
    }
}
