//! The log on standard error, and its format.

use clap::{Args, ValueEnum};
use std::io::IsTerminal;
use stowage_telemetry::wants_no_color;
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
        if let Some(word) = std::env::var("RUST_LOG")
            .ok()
            .and_then(|levels| unknown_level(&levels))
        {
            super::print_to_stderr(format_args!(
                "warning: RUST_LOG says {word:?}, which is no level (error, warn, info, debug, trace, off) and no module of stowage"
            ));
        }
        // Where nobody reads the log any more, the default would say so with a panic.
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .log_internal_errors(false);
        // A second logger in one process (tests) keeps the first.
        let _ = match self.log_format {
            LogFormat::Text => log
                .with_ansi(std::io::stderr().is_terminal() && !wants_no_color())
                .try_init(),
            LogFormat::Json => log.json().flatten_event(true).try_init(),
        };
    }
}

/// A word that stands where a level should, and would turn the log off.
fn unknown_level(levels: &str) -> Option<String> {
    const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
    let is_level = |word: &str| {
        LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level))
            || matches!(word, "0" | "1" | "2" | "3" | "4" | "5")
    };
    // Only the command line is in the package `stowage` itself.
    let is_there =
        |target: &str| !target.starts_with("stowage::") || target.starts_with("stowage::cli");
    let is_known = |word: &str| match word.rsplit_once('=') {
        _ if word.contains('[') => true,
        Some((target, level)) => is_level(level) && is_there(target),
        None => is_level(word) || word.starts_with("stowage") && is_there(word),
    };
    levels
        .split(',')
        .map(str::trim)
        .find(|word| !word.is_empty() && !is_known(word))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::unknown_level;

    #[test]
    fn a_misspelt_level_is_named() {
        for fine in [
            "info",
            "DEBUG",
            "stowage=trace,warn",
            "stowage_agent",
            "hyper=off",
            "",
        ] {
            assert_eq!(unknown_level(fine), None, "{fine}");
        }
        assert_eq!(unknown_level("debgu").as_deref(), Some("debgu"));
        assert_eq!(
            unknown_level("stowage=debgu").as_deref(),
            Some("stowage=debgu")
        );
        assert_eq!(unknown_level("2"), None);
        let former = "stowage::agent=debug";
        assert_eq!(
            unknown_level(former).as_deref(),
            Some(former),
            "it would match nothing"
        );
        assert_eq!(unknown_level("stowage=info,wran").as_deref(), Some("wran"));
    }
}
