//! Reads policy files from disk or, as `-`, from standard input: the YAML files directly in a directory, in order of name, or one
//! file. Symlinks are followed, because a mounted ConfigMap consists of them; names that begin with a dot are internal to the
//! ConfigMap and are ignored.
//!
//! [`policy_file`](stowage_policy_file) parses the files; nothing here reads their content.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use stowage_policy_file::{MAX_FILE_BYTES, SourceText};

/// The path that stands for standard input on the command line.
const STANDARD_INPUT: &str = "-";
/// More files than any policy has; a directory with more is the wrong one.
const MAX_FILES: usize = 100;
/// Maximum bytes of one policy over all its files: eight full ConfigMaps, and small enough to be read twice a second.
const MAX_TOTAL: usize = 8 * MAX_FILE_BYTES;

/// Why there is no policy at a path. Equal as long as nothing changes, so that it is logged once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error("{} is no policy: no file in it ends in .yaml or .yml; name a policy's directory or file", path.display())]
    NoPolicy { path: PathBuf },
    #[error("{} has {count} YAML files, and a policy at most {MAX_FILES}; is this the right directory?", path.display())]
    TooManyFiles { path: PathBuf, count: usize },
    #[error(
        "the YAML files in {} have more than {} MiB together; is this the right directory?",
        path.display(),
        MAX_TOTAL >> 20
    )]
    TooLarge { path: PathBuf },
    #[error("{} is neither a file nor a directory", path.display())]
    NeitherFileNorDirectory { path: PathBuf },
}

/// The files of the policy at `path`, in order of name: a file itself, or those of a directory that end in `.yaml` or `.yml`.
/// Symlinks are followed; names that begin with a dot are ignored, as in a mounted ConfigMap. A file that is too large is read
/// only far enough to detect that.
pub fn read(path: &Path) -> Result<Vec<SourceText>, ReadError> {
    let kind = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    if !kind.is_dir() {
        return Ok(vec![read_file(path)?]);
    }
    match read_dir(path)? {
        files if files.is_empty() => Err(ReadError::NoPolicy { path: path.into() }),
        files => Ok(files),
    }
}

/// Reads the policy at a path of the command line: as [`read`], and `-` is standard input.
pub fn read_argument(path: &Path) -> Result<Vec<SourceText>, ReadError> {
    match path == Path::new(STANDARD_INPUT) {
        true => Ok(vec![read_capped(
            "standard input",
            path,
            io::stdin().lock(),
        )?]),
        false => read(path),
    }
}

/// Reads the YAML files directly in a directory, as [`read`] does; a directory without any is the empty policy.
pub fn read_dir(path: &Path) -> Result<Vec<SourceText>, ReadError> {
    let files: Vec<PathBuf> = entries(path)?
        .into_iter()
        .filter(|entry| is_yaml(entry) && !entry.is_dir())
        .collect();
    if files.len() > MAX_FILES {
        return Err(ReadError::TooManyFiles {
            path: path.into(),
            count: files.len(),
        });
    }
    let mut remaining_bytes = MAX_TOTAL;
    let mut texts = Vec::with_capacity(files.len());
    for file in &files {
        let text = read_file(file)?;
        remaining_bytes = remaining_bytes
            .checked_sub(text.bytes.len())
            .ok_or_else(|| ReadError::TooLarge { path: path.into() })?;
        texts.push(text);
    }
    Ok(texts)
}

/// The policies at `path`, which may be `-`: itself, and each directory right below it that has policy files.
pub fn read_policies(path: &Path) -> Result<Vec<(PathBuf, Vec<SourceText>)>, ReadError> {
    if !path.is_dir() {
        return Ok(vec![(path.into(), read_argument(path)?)]);
    }
    let below = entries(path)?.into_iter().filter(|entry| entry.is_dir());
    let mut found = Vec::new();
    for directory in std::iter::once(path.to_path_buf()).chain(below) {
        let files = read_dir(&directory)?;
        if !files.is_empty() {
            found.push((directory, files));
        }
    }
    if found.is_empty() {
        Err(ReadError::NoPolicy { path: path.into() })
    } else {
        Ok(found)
    }
}

/// The paths directly in a directory in order of name, without hidden ones.
fn entries(path: &Path) -> Result<Vec<PathBuf>, ReadError> {
    let listed = std::fs::read_dir(path).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let listed = listed.map_err(|error| unreadable(path, &error))?;
    let is_hidden =
        |entry: &std::fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let mut paths: Vec<PathBuf> = listed
        .into_iter()
        .filter(|entry| !is_hidden(entry))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    Ok(paths)
}

fn is_yaml(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending == "yaml" || ending == "yml")
}

fn read_file(path: &Path) -> Result<SourceText, ReadError> {
    // Opening a pipe would wait for a writer.
    let kind = std::fs::metadata(path).map_err(|error| unreadable(path, &error))?;
    if !kind.is_file() {
        return Err(ReadError::NeitherFileNorDirectory { path: path.into() });
    }
    let file = std::fs::File::open(path).map_err(|error| unreadable(path, &error))?;
    read_capped(path.display().to_string(), path, file)
}

fn read_capped(
    name: impl AsRef<str>,
    path: &Path,
    text: impl Read,
) -> Result<SourceText, ReadError> {
    let mut bytes = Vec::new();
    let read = text.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(path, &error))?;
    Ok(SourceText::new(name, bytes))
}

fn unreadable(path: &Path, error: &io::Error) -> ReadError {
    ReadError::Unreadable {
        path: path.into(),
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn names(files: &[SourceText], root: &Path) -> Vec<String> {
        let shown = format!("{}/", root.display());
        files
            .iter()
            .map(|file| file.name.replace(&shown, ""))
            .collect()
    }

    #[test]
    fn a_mounted_config_map_is_read_once_through_its_symlinks() {
        let dir = tempfile::tempdir().unwrap();
        let version = dir.path().join("..2026_01_01");
        fs::create_dir(&version).unwrap();
        fs::write(version.join("b.yaml"), "mode: shadow\n").unwrap();
        fs::write(version.join("a.yml"), "").unwrap();
        fs::write(version.join("readme.md"), "").unwrap();
        std::os::unix::fs::symlink("..2026_01_01", dir.path().join("..data")).unwrap();
        for name in ["b.yaml", "a.yml", "readme.md"] {
            std::os::unix::fs::symlink(format!("..data/{name}"), dir.path().join(name)).unwrap();
        }
        let files = read(dir.path()).unwrap();
        assert_eq!(names(&files, dir.path()), ["a.yml", "b.yaml"]);
        assert_eq!(files[1].bytes, b"mode: shadow\n");
    }

    #[test]
    fn each_directory_below_with_policy_files_is_a_policy_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["one", "two", "empty", ".hidden"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        for name in ["one/p.yaml", "two/p.yaml", ".hidden/p.yaml"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = read_policies(dir.path()).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(path, _)| path.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(found, ["one", "two"]);
    }

    #[test]
    fn a_path_without_a_policy_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(read(dir.path()), Err(ReadError::NoPolicy { .. })));
        assert!(matches!(
            read_policies(dir.path()),
            Err(ReadError::NoPolicy { .. })
        ));
        assert!(matches!(
            read(&dir.path().join("x.yaml")),
            Err(ReadError::Unreadable { .. })
        ));
        std::os::unix::fs::symlink("nowhere", dir.path().join("dangling.yaml")).unwrap();
        assert!(matches!(
            read(dir.path()),
            Err(ReadError::Unreadable { .. })
        ));
    }

    #[test]
    fn a_file_that_is_too_large_is_not_read_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("big.yaml");
        fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        assert_eq!(read(&path).unwrap()[0].bytes.len(), MAX_FILE_BYTES + 1);
    }

    #[test]
    fn a_pipe_is_no_policy_and_does_not_block() {
        let error = read(Path::new("/dev/null")).unwrap_err();
        assert!(matches!(error, ReadError::NeitherFileNorDirectory { .. }));
    }

    #[test]
    fn a_directory_with_too_many_or_too_large_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let fill = |count: usize, text: &str| {
            (0..count).for_each(|n| fs::write(dir.path().join(format!("{n}.yaml")), text).unwrap());
            read(dir.path())
        };
        assert_eq!(fill(MAX_FILES, "").unwrap().len(), MAX_FILES);
        assert!(matches!(
            fill(MAX_FILES + 1, ""),
            Err(ReadError::TooManyFiles { .. })
        ));
        fs::remove_file(dir.path().join(format!("{MAX_FILES}.yaml"))).unwrap();
        assert!(fill(8, &"#".repeat(MAX_FILE_BYTES)).is_ok());
        assert!(matches!(
            fill(9, &"#".repeat(MAX_FILE_BYTES)),
            Err(ReadError::TooLarge { .. })
        ));
    }
}
