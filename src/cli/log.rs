//! The log on standard error, and its format.

use crate::telemetry::wants_no_color;
use clap::{Args, ValueEnum};
use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// How to write the log: lines for people, or one JSON object a line
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    #[default]
    Text,
    Json,
}

impl LogArgs {
    /// `RUST_LOG` overrides the level.
    pub fn to_stderr(&self, level: &str) {
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
        // Where nobody reads the log any more, the default would say so with a panic.
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .log_internal_errors(false);
        // A second logger in one process (tests) keeps the first.
        let _ = match self.log_format {
            LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal() && !wants_no_color()).try_init(),
            LogFormat::Json => log.json().flatten_event(true).try_init(),
        };
    }
}
