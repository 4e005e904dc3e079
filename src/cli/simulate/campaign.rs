//! Many seeds of `stowage simulate faults`: seeds and minutes on the command line, and what is printed of a failed one.

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stowage_telemetry::build_info;

/// `7`, or `0..9999`, both ends included: far more than other simulations need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeedRange {
    first: u64,
    last: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SeedRangeError {
    #[error("write a whole number, or two with .. between them, such as 0..9999")]
    Malformed,
    #[error("{first} is larger than {last}; write {last}..{first}")]
    Backwards { first: u64, last: u64 },
}

/// Which build's seeds these are. The same seed is another game in another build.
#[derive(Debug, Args)]
pub struct SeedOrigin {
    /// The build in which the seeds failed, as the printed command names it: any other build refuses to play them
    #[arg(long, value_name = "BUILD")]
    found_by: Option<String>,
}

/// The commands that play a failed game again.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reproduction {
    pub reproduce: String,
    /// The command after the history was made smaller.
    pub smallest: String,
}

impl FromStr for SeedRange {
    type Err = SeedRangeError;

    fn from_str(text: &str) -> Result<Self, SeedRangeError> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        let number = |text: &str| {
            text.trim()
                .parse::<u64>()
                .map_err(|_| SeedRangeError::Malformed)
        };
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            Err(SeedRangeError::Backwards { first, last })
        } else {
            Ok(Self { first, last })
        }
    }
}

impl SeedOrigin {
    pub fn check(&self) -> Result<()> {
        let this = build_info::text();
        match &self.found_by {
            Some(found_by) if found_by != this => bail!(
                "the seeds failed in stowage {found_by}, and this is stowage {this}, where the same seeds are other games: use that \
                 build, or leave --found-by out to play what they are here"
            ),
            _ => Ok(()),
        }
    }
}

impl SeedRange {
    pub fn all(self) -> RangeInclusive<u64> {
        self.first..=self.last
    }

    pub fn count(self) -> u64 {
        (self.last - self.first).saturating_add(1)
    }

    /// The only seed, for `--history`.
    pub fn only(self) -> Result<u64> {
        if self.first != self.last {
            bail!("--history prints one history; write --seeds {}", self.first);
        }
        Ok(self.first)
    }
}

impl Reproduction {
    /// The commands of `stowage simulate faults` with these arguments.
    pub fn new(as_it_was: &str, smallest: &str) -> Self {
        let command = |arguments: &str| {
            format!(
                "stowage simulate faults {arguments} --found-by '{}'",
                build_info::text()
            )
        };
        Self {
            reproduce: command(as_it_was),
            smallest: command(smallest),
        }
    }

    pub fn text(&self) -> String {
        let Self {
            reproduce,
            smallest,
        } = self;
        let again = format!("play it again: {reproduce}\n");
        if smallest == reproduce {
            again
        } else {
            again + &format!("smaller: {smallest}\n")
        }
    }
}

/// Reads `--minutes`.
pub fn minutes(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => {
            Err("no history ends within 0 minutes; write 1 or more, or leave --minutes out".into())
        }
        Ok(minutes) => Ok(minutes),
        Err(_) => Err("write a whole number of minutes, such as 10".into()),
    }
}

pub fn time_limit(minutes: Option<u64>) -> Option<Duration> {
    minutes.map(|minutes| Duration::from_secs(minutes.saturating_mul(60)))
}

/// Becomes true at the first interruption; the second ends the process.
pub fn interrupt_flag() -> Arc<AtomicBool> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let set = interrupted.clone();
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
        else {
            return;
        };
        runtime.block_on(async {
            while tokio::signal::ctrl_c().await.is_ok() {
                if set.swap(true, Ordering::Relaxed) {
                    std::process::exit(130);
                }
            }
        });
    });
    interrupted
}

pub fn exit_code(has_failed: bool) -> ExitCode {
    if has_failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_of_another_build_are_refused() {
        let origin = |found_by: &str| SeedOrigin {
            found_by: Some(found_by.into()),
        };
        assert!(
            SeedOrigin { found_by: None }.check().is_ok()
                && origin(build_info::text()).check().is_ok()
        );
        let refused = origin("0.1.0").check().unwrap_err().to_string();
        assert!(
            refused.contains("stowage 0.1.0") && refused.contains("leave --found-by out"),
            "{refused}"
        );
        let again = Reproduction::new("--seeds 7 --steps 90", "--seeds 7 --steps 40");
        let found_by = format!("--seeds 7 --steps 40 --found-by '{}'", build_info::text());
        assert_eq!(
            again.smallest,
            format!("stowage simulate faults {found_by}")
        );
    }

    #[test]
    fn a_range_of_seeds_that_cannot_be_played_says_what_to_write() {
        let range = |text: &str| text.parse::<SeedRange>();
        assert_eq!(range("7"), Ok(SeedRange { first: 7, last: 7 }));
        assert_eq!(
            range("0..99999"),
            Ok(SeedRange {
                first: 0,
                last: 99_999
            })
        );
        assert_eq!(
            range("9..3").unwrap_err().to_string(),
            "9 is larger than 3; write 3..9"
        );
        assert_eq!(range("a..3"), Err(SeedRangeError::Malformed));
        assert!(minutes("0").unwrap_err().contains("1 or more"));
        assert_eq!(minutes("5"), Ok(5));
    }
}
