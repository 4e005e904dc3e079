//! A bundle: the ring's segments of the last minutes, one behind the other.

use super::ring::Ring;
use crate::recording::whole_entries::copy_whole_entries;
use crate::service::BundleSource;
use std::fs::File;
use std::io::{self, BufReader, Write};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// The recordings of a directory.
#[derive(Debug, Clone)]
pub struct Recordings {
    pub directory: PathBuf,
}

impl BundleSource for Recordings {
    fn write_bundle(&self, last: Duration, out: &mut dyn Write) -> io::Result<()> {
        let since = SystemTime::now().checked_sub(last).unwrap_or(SystemTime::UNIX_EPOCH);
        for segment in Ring::segments(&self.directory)? {
            if segment.written < since {
                continue;
            }
            match File::open(&segment.path) {
                Ok(file) => drop(copy_whole_entries(&mut BufReader::with_capacity(1 << 18, file), out)?),
                // The ring went on meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
