//! Where the operators' address gets a bundle from: the recorder knows its directory, and the HTTP edge does not.

use std::io::{self, Write};
use std::time::Duration;

pub trait BundleSource: Send + Sync {
    /// Writes the segments of the last time, whole entries only. May take a while: not on a thread that answers requests.
    fn write_bundle(&self, last: Duration, out: &mut dyn Write) -> io::Result<()>;
}
