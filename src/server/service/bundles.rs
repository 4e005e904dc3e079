//! Where the operators' address gets a bundle from: the recorder knows its directory, and the HTTP edge does not.

use std::io::{self, Write};
use std::time::Duration;

/// The names in a bundle: of pods, nodes and everything else that has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BundleNames {
    AsRecorded,
    Pseudonyms,
}

pub trait BundleSource: Send + Sync {
    /// Writes the recording's segments of the last `period`, whole entries only. May take a while: not on a thread that answers requests.
    fn write_bundle(
        &self,
        period: Duration,
        names: BundleNames,
        out: &mut dyn Write,
    ) -> io::Result<()>;
}
