//! A scan of folders that other programs write: limited in entries and time, and every limit that is reached is reported.
//!
//! Only names that a layout prescribes are read, and links are never followed further. Nothing here knows what a model is.

use rustix::fs::OFlags;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Entries read of one folder. The largest models have a few hundred files, and a node a few hundred models.
pub(crate) const MAX_ENTRIES: usize = 10_000;

/// Files kept of one model, to sample the page cache with.
const MAX_FILES_PER_MODEL: usize = 64;

/// Files kept of all models of one scan.
const SCAN_FILES: usize = 4096;

/// Reasons kept of one scan; a cache on a broken disk has one for each of its files.
const MAX_PROBLEMS: usize = 16;

/// Time limit of one scan. Local folders take milliseconds; a network disk may take seconds and is scanned on a thread of its own.
const MAX_SCAN: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum ScanProblem {
    #[error("there is no folder {}: mount it into the agent's container, or don't name it", path.display())]
    NoFolder { path: PathBuf },
    #[error("{} cannot be read: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("{} has more than {MAX_ENTRIES} entries; the others are not looked at", path.display())]
    TooMany { path: PathBuf },
    #[error("{} has entries whose names are not UTF-8, {name:?} for one; they are left out", path.display())]
    NotUtf8 {
        path: PathBuf,
        name: std::ffi::OsString,
    },
    #[error("{} is no name of a model: {error}", path.display())]
    NoModelName {
        path: PathBuf,
        error: stowage_scheduling::ids::InvalidName,
    },
    #[error("{} is larger than {limit} bytes, and is not read", path.display())]
    TooLarge { path: PathBuf, limit: u64 },
    #[error("{} is no index of weights: {reason}; fetch the model again", path.display())]
    NoIndex { path: PathBuf, reason: String },
    #[error(
        "{} is the model by which more than {SCAN_FILES} weights files are known; whether it and further ones are in the page cache is not looked at",
        path.display()
    )]
    TooManyFiles { path: PathBuf },
    #[error("the scan took longer than {} s and ended before {}", MAX_SCAN.as_secs(), path.display())]
    TooSlow { path: PathBuf },
}

/// One scan of folders: its deadline, its problems, and how many files it keeps.
#[derive(Debug)]
pub struct Walk {
    deadline: Instant,
    problems: Vec<ScanProblem>,
    dropped_problems: usize,
    is_over: bool,
    kept_files: usize,
}

impl Walk {
    pub fn start(now: Instant) -> Self {
        Self {
            deadline: now + MAX_SCAN,
            problems: vec![],
            dropped_problems: 0,
            is_over: false,
            kept_files: 0,
        }
    }

    /// Errors, in the order in which they occurred.
    pub fn reasons(&self) -> Vec<String> {
        let more = (self.dropped_problems > 0)
            .then(|| format!("and {} problems more", self.dropped_problems));
        self.problems
            .iter()
            .map(ToString::to_string)
            .chain(more)
            .collect()
    }

    pub fn record_problem(&mut self, problem: ScanProblem) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(problem);
        } else {
            self.dropped_problems += 1;
        }
    }

    /// Whether there is time left to scan `path`.
    pub(crate) fn has_time_for(&mut self, path: &Path) -> bool {
        if !self.is_over && Instant::now() >= self.deadline {
            self.is_over = true;
            self.record_problem(ScanProblem::TooSlow { path: path.into() });
        }
        !self.is_over
    }

    /// It has run out of time: the last result may be incomplete.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// How many of a model's files are kept.
    pub(crate) fn reserve_files(&mut self, path: &Path, files: usize) -> usize {
        let files = files.min(MAX_FILES_PER_MODEL);
        let before = self.kept_files;
        self.kept_files += files;
        if self.kept_files <= SCAN_FILES {
            return files;
        }
        if before <= SCAN_FILES {
            self.record_problem(ScanProblem::TooManyFiles { path: path.into() });
        }
        0
    }

    /// The names in a folder, in order; none, and a reason, if it cannot be read.
    pub fn entry_names(&mut self, path: &Path) -> BTreeSet<String> {
        match fs::read_dir(path) {
            Ok(entries) => self.read_entries(path, entries),
            Err(error) => {
                self.record_problem(folder_problem(path, error));
                BTreeSet::new()
            }
        }
    }

    /// The names in a folder, in order; none, without a reason, if the folder is missing.
    pub(crate) fn entry_names_if_present(&mut self, path: &Path) -> BTreeSet<String> {
        if path.is_dir() {
            self.entry_names(path)
        } else {
            BTreeSet::new()
        }
    }

    fn read_entries(&mut self, path: &Path, entries: fs::ReadDir) -> BTreeSet<String> {
        let (mut names, mut entry_count, mut odd) = (BTreeSet::new(), 0, None);
        for entry in entries {
            if !self.has_time_for(path) {
                break;
            }
            if entry_count == MAX_ENTRIES {
                self.record_problem(ScanProblem::TooMany { path: path.into() });
                break;
            }
            entry_count += 1;
            match entry.map(|entry| entry.file_name().into_string()) {
                Ok(Ok(name)) => drop(names.insert(name)),
                Ok(Err(name)) => drop(odd.get_or_insert(name)),
                // A folder that fails once is not tried again: some fail forever.
                Err(error) => {
                    self.record_problem(ScanProblem::Unreadable {
                        path: path.into(),
                        error,
                    });
                    break;
                }
            }
        }
        if let Some(name) = odd {
            self.record_problem(ScanProblem::NotUtf8 {
                path: path.into(),
                name,
            });
        }
        names
    }

    /// A regular file of at most this size, opened: a pipe would never end.
    pub fn open(&mut self, path: &Path, limit: u64) -> Option<io::Take<File>> {
        let opened = match file_size(path)? {
            size if size > limit => Err(ScanProblem::TooLarge {
                path: path.into(),
                limit,
            }),
            _ => open_regular(path).map_err(|error| ScanProblem::Unreadable {
                path: path.into(),
                error,
            }),
        };
        match opened {
            // It may have grown since.
            Ok(file) => Some(file?.take(limit)),
            Err(problem) => {
                self.record_problem(problem);
                None
            }
        }
    }
}

fn folder_problem(path: &Path, error: io::Error) -> ScanProblem {
    let path = path.into();
    match error.kind() {
        io::ErrorKind::NotFound => ScanProblem::NoFolder { path },
        _ => ScanProblem::Unreadable { path, error },
    }
}

/// A regular file, opened at once; `None` for anything else. What was a file when its size was read may be a pipe by now, at
/// which an opener would wait for a writer.
pub(crate) fn open_regular(path: &Path) -> io::Result<Option<File>> {
    let at_once = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(at_once)
        .open(path)?;
    Ok(file.metadata()?.is_file().then_some(file))
}

/// The size of a regular file, or of the one that a link leads to; `None` for anything else, such as a dangling or circular
/// link.
pub(crate) fn file_size(path: &Path) -> Option<u64> {
    fs::metadata(path)
        .ok()
        .filter(fs::Metadata::is_file)
        .map(|metadata| metadata.len())
}

/// When an entry was last added to a folder or removed.
pub fn modified_at(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FileType, Mode};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    fn walk() -> Walk {
        Walk::start(Instant::now())
    }

    #[test]
    fn a_folder_of_very_many_files_is_read_in_part_and_that_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        for n in 0..MAX_ENTRIES + 5 {
            File::create(folder.path().join(n.to_string())).unwrap();
        }
        let mut walk = walk();
        assert_eq!(walk.entry_names(folder.path()).len(), MAX_ENTRIES);
        assert!(
            walk.reasons()[0].contains("more than 10000 entries"),
            "{:?}",
            walk.reasons()
        );
    }

    #[test]
    fn pipes_folders_and_devices_are_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(
            open_regular(&path).unwrap().is_none(),
            "nobody writes to it, and nobody waits"
        );
        let to_pipe = folder.path().join("link");
        symlink(&path, &to_pipe).unwrap();
        assert!(open_regular(&to_pipe).unwrap().is_none());
        assert!(open_regular(folder.path()).unwrap().is_none());
        assert!(open_regular(Path::new("/dev/null")).unwrap().is_none());
        fs::write(folder.path().join("file"), "").unwrap();
        assert!(open_regular(&folder.path().join("file")).unwrap().is_some());
    }

    #[test]
    fn a_name_that_is_not_utf_8_is_left_out_and_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        for name in [&b"models--\xff"[..], b"\xfe", b"good"] {
            fs::write(folder.path().join(OsStr::from_bytes(name)), "").unwrap();
        }
        let mut walk = walk();
        assert_eq!(
            walk.entry_names(folder.path()),
            BTreeSet::from(["good".into()])
        );
        let reasons = walk.reasons();
        assert!(
            reasons.len() == 1 && reasons[0].contains("not UTF-8"),
            "{reasons:?}"
        );
    }

    #[test]
    fn a_folder_that_is_not_there_or_no_folder_or_a_loop_is_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "").unwrap();
        symlink(path("loop"), path("loop")).unwrap();
        let mut walk = walk();
        for name in ["missing", "file", "loop"] {
            assert_eq!(walk.entry_names(&path(name)), BTreeSet::new());
        }
        let reasons = walk.reasons();
        assert!(
            reasons[0].contains("there is no folder") && reasons[0].contains("mount it"),
            "{reasons:?}"
        );
        assert!(
            reasons[1].contains("cannot be read") && reasons[2].contains("cannot be read"),
            "{reasons:?}"
        );
        assert_eq!(
            walk.entry_names_if_present(&path("missing")),
            BTreeSet::new()
        );
        assert_eq!(walk.reasons().len(), 3);
    }

    #[test]
    fn a_scan_that_is_out_of_time_ends_and_says_so_once() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "").unwrap();
        let mut walk = Walk {
            deadline: Instant::now(),
            problems: vec![],
            dropped_problems: 0,
            is_over: false,
            kept_files: 0,
        };
        assert_eq!(walk.entry_names(folder.path()), BTreeSet::new());
        assert_eq!(walk.entry_names(folder.path()), BTreeSet::new());
        let reasons = walk.reasons();
        assert!(
            reasons.len() == 1 && reasons[0].contains("took longer"),
            "{reasons:?}"
        );
    }

    #[test]
    fn only_a_regular_file_within_the_limit_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let sparse = folder.path().join("sparse");
        File::create(&sparse).unwrap().set_len(2 << 30).unwrap();
        let mut walk = walk();
        assert!(walk.open(&sparse, 100).is_none());
        assert!(
            walk.reasons()[0].contains("larger than 100 bytes"),
            "{:?}",
            walk.reasons()
        );
        assert!(walk.open(&sparse, 4 << 30).is_some());
        assert!(walk.open(folder.path(), 100).is_none());
        assert!(walk.open(&folder.path().join("missing"), 100).is_none());
        assert_eq!(walk.reasons().len(), 1);
    }

    #[test]
    fn the_number_of_reasons_is_limited() {
        let mut walk = walk();
        for n in 0..100 {
            walk.record_problem(ScanProblem::NoFolder {
                path: format!("/{n}").into(),
            });
        }
        assert_eq!(walk.reasons().len(), MAX_PROBLEMS + 1);
        assert_eq!(walk.reasons().last().unwrap(), "and 84 problems more");
    }
}
