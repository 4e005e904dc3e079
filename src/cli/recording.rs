//! The part of `stowage serve`'s command line about the flight recorder.

use super::duration;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;
use stowage_server::flight_recorder::{RecordOptions, RingLimits};

#[derive(Debug, Args)]
#[command(next_help_heading = "Flight recorder")]
pub struct RecordArgs {
    /// The directory to record to. A recording has every input of a decision, in order, and the answers; `stowage replay` replays
    /// it. It contains names of pods, namespaces and nodes, and only those of their fields that Stowage reads
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,

    /// How much to keep there, in MiB; the oldest goes first
    #[arg(long, value_name = "MIB", default_value_t = 512, requires = "record", value_parser = clap::value_parser!(u32).range(8..))]
    record_size: u32,

    /// How long to keep it
    #[arg(long, value_name = "TIME", default_value = "1h", requires = "record", value_parser = age)]
    record_age: Duration,
}

impl RecordArgs {
    pub fn options(self) -> Option<RecordOptions> {
        let limits = RingLimits {
            max_bytes: u64::from(self.record_size) << 20,
            max_age: self.record_age,
        };
        self.record
            .map(|directory| RecordOptions { directory, limits })
    }
}

fn age(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        age if age >= Duration::from_secs(60) => Ok(age),
        _ => Err("write a duration from 1m on, such as 1h".into()),
    }
}
