//! `stowage wait-turn`: what an init container runs before its pod's engine starts.

use super::{duration, note};
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

const EXIT_CODES: &str =
    "Exit codes: 0, with or without a turn: nothing that fails here holds a pod; 2 for invalid arguments.";
const TRY_AGAIN: Duration = Duration::from_millis(500);

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
    pub async fn run(self) -> Result<ExitCode> {
        let turn = async {
            let Ok(agent) = timeout(self.agent_limit, connected(&self.socket)).await else {
                return "no agent answers: the pod starts without a turn";
            };
            // The agent sends nothing, and closes the connection when it is this pod's turn.
            let _ = agent.readable().await;
            "it is this pod's turn"
        };
        let outcome = timeout(self.limit, turn).await;
        note(format_args!("{}", outcome.unwrap_or("the limit has passed: the pod starts without a turn")));
        Ok(ExitCode::SUCCESS)
    }
}

async fn connected(socket: &Path) -> UnixStream {
    loop {
        match UnixStream::connect(socket).await {
            Ok(agent) => return agent,
            Err(_) => sleep(TRY_AGAIN).await,
        }
    }
}
