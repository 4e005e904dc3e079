//! `stowage wait-turn`: what an init container runs before its pod's engine starts.

use super::{duration, print_to_stderr};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use stowage_agent::turns;

const EXIT_CODES: &str = "Exit codes: 0, with or without a turn: nothing that fails here holds a pod; 2 for invalid arguments.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct WaitTurnArgs {
    /// The socket of the node's agent (`agent --turns`)
    #[arg(long, value_name = "FILE", default_value = "/run/stowage/turns.sock")]
    socket: PathBuf,

    /// How long to wait for the turn
    #[arg(long, value_name = "DURATION", default_value = "30m", value_parser = duration)]
    limit: Duration,

    /// How long to wait for an agent, which starts at the same time after a boot
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    agent_limit: Duration,
}

impl WaitTurnArgs {
    pub async fn run(self) -> ExitCode {
        print_to_stderr(format_args!(
            "{}",
            turns::wait_for_turn(&self.socket, self.limit, self.agent_limit).await
        ));
        ExitCode::SUCCESS
    }
}
