//! Policy files, read from disk: the yaml files directly in a directory, in order of name, or one file. Symlinks are
//! followed, as a mounted ConfigMap consists of them; names that begin with a dot are its own business, and nobody's policy.
//!
//! Nothing here knows what is in them.

use crate::policy_file::{MAX_FILE, SourceText};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Files of one policy. Far more than a person keeps apart, and few enough to be read twice a second.
const MAX_FILES: usize = 256;
/// Bytes of one policy over all its files: eight full ConfigMaps.
const MAX_TOTAL: usize = 8 * MAX_FILE;

/// Why there is no policy at a path. Equal as long as nothing changes, so that it can be said once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {}: {reason}", .path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error(
        "{} has no policy in it: no file whose name ends in .yaml or .yml and does not begin with a dot; write one, an \
         empty one is a good policy",
        .path.display()
    )]
    NoFiles { path: PathBuf },
    #[error("{} is no file; a policy is files, or one directory of them", .path.display())]
    NoFile { path: PathBuf },
    #[error("{} is larger than {} KiB; split it into several files", .path.display(), MAX_FILE >> 10)]
    TooLarge { path: PathBuf },
    #[error("{} has more than {MAX_FILES} policy files, or more than {} MiB of them", .path.display(), MAX_TOTAL >> 20)]
    TooMany { path: PathBuf },
}

/// The texts of the policy at `path`, each under its path as its name.
pub fn read(path: &Path) -> Result<Vec<SourceText>, ReadError> {
    if !metadata(path)?.is_dir() {
        return Ok(vec![read_file(path)?]);
    }
    let files = files_in(path)?;
    if files.is_empty() {
        return Err(ReadError::NoFiles { path: path.into() });
    }
    let too_many = || ReadError::TooMany { path: path.into() };
    if files.len() > MAX_FILES {
        return Err(too_many());
    }
    let mut texts: Vec<SourceText> = Vec::with_capacity(files.len());
    let mut left = MAX_TOTAL;
    for file in files {
        let text = read_file(&file)?;
        left = left.checked_sub(text.bytes.len()).ok_or_else(too_many)?;
        texts.push(text);
    }
    Ok(texts)
}

/// The policy files directly in a directory, in order of name.
fn files_in(directory: &Path) -> Result<Vec<PathBuf>, ReadError> {
    let failed = |error: io::Error| unreadable(directory, &error);
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if is_policy_file(&path) && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort_unstable();
    Ok(files)
}

fn is_policy_file(path: &Path) -> bool {
    let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    !is_hidden && path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

fn read_file(path: &Path) -> Result<SourceText, ReadError> {
    let metadata = metadata(path)?;
    // To open a pipe would be to wait for whoever writes into it.
    if !metadata.is_file() {
        return Err(ReadError::NoFile { path: path.into() });
    }
    let too_large = || ReadError::TooLarge { path: path.into() };
    if metadata.len() > MAX_FILE as u64 {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    // It may have grown since.
    let file = File::open(path).map_err(|error| unreadable(path, &error))?;
    let read = file.take(MAX_FILE as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| unreadable(path, &error))?;
    if bytes.len() > MAX_FILE {
        Err(too_large())
    } else {
        Ok(SourceText::new(path.display().to_string(), bytes))
    }
}

fn metadata(path: &Path) -> Result<fs::Metadata, ReadError> {
    fs::metadata(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &io::Error) -> ReadError {
    ReadError::Unreadable { path: path.into(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn folder(files: &[(&str, &str)]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        folder
    }

    fn names(folder: &TempDir) -> Vec<String> {
        let texts = read(folder.path()).unwrap();
        let name = |text: &SourceText| text.name.rsplit('/').next().unwrap().to_owned();
        texts.iter().map(name).collect()
    }

    #[test]
    fn a_policy_is_the_yaml_files_of_a_directory_in_order_of_name() {
        let folder = folder(&[
            ("b.yml", ""),
            ("a.yaml", ""),
            (".hidden.yaml", ""),
            ("README.md", ""),
            ("c.yaml~", ""),
        ]);
        fs::create_dir(folder.path().join("d.yaml")).unwrap();
        assert_eq!(names(&folder), ["a.yaml", "b.yml"]);
    }

    #[test]
    fn one_file_is_a_policy_whatever_its_name() {
        let folder = folder(&[("policy.txt", "mode: enforce\n")]);
        let texts = read(&folder.path().join("policy.txt")).unwrap();
        assert_eq!(texts.len(), 1);
        assert_eq!(texts[0].bytes, b"mode: enforce\n");
    }

    #[test]
    fn a_mounted_config_map_is_read_through_its_links_once() {
        let folder = folder(&[]);
        fs::create_dir(folder.path().join("..2026_1")).unwrap();
        fs::write(folder.path().join("..2026_1/policy.yaml"), "mode: enforce\n").unwrap();
        std::os::unix::fs::symlink("..2026_1", folder.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/policy.yaml", folder.path().join("policy.yaml")).unwrap();
        assert_eq!(names(&folder), ["policy.yaml"]);
        assert_eq!(read(folder.path()).unwrap()[0].bytes, b"mode: enforce\n");
    }

    #[test]
    fn what_is_no_policy_is_refused_and_named_with_the_way_out() {
        let empty = folder(&[("README.md", "")]);
        assert_eq!(read(empty.path()), Err(ReadError::NoFiles { path: empty.path().into() }));
        let gone = empty.path().join("gone");
        let error = read(&gone).unwrap_err().to_string();
        assert!(error.contains("gone: No such file"), "{error}");
        let dangling = folder(&[]);
        std::os::unix::fs::symlink("nowhere", dangling.path().join("a.yaml")).unwrap();
        assert!(matches!(read(dangling.path()), Err(ReadError::Unreadable { .. })));
        assert!(matches!(read(Path::new("/dev/null")), Err(ReadError::NoFile { .. })));
    }

    #[test]
    fn a_file_at_its_limit_is_read_and_one_beyond_it_is_not() {
        let folder = folder(&[("a.yaml", &"#".repeat(MAX_FILE))]);
        assert_eq!(read(folder.path()).unwrap()[0].bytes.len(), MAX_FILE);
        fs::write(folder.path().join("a.yaml"), "#".repeat(MAX_FILE + 1)).unwrap();
        assert!(matches!(read(folder.path()), Err(ReadError::TooLarge { .. })));
    }

    #[test]
    fn a_directory_of_more_than_a_person_keeps_apart_is_refused() {
        let names: Vec<String> = (0..=MAX_FILES).map(|n| format!("{n}.yaml")).collect();
        let files: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "")).collect();
        assert!(matches!(read(folder(&files).path()), Err(ReadError::TooMany { .. })));
        assert_eq!(read(folder(&files[1..]).path()).unwrap().len(), MAX_FILES);
        let large = "#".repeat(MAX_FILE);
        let files: Vec<(&str, &str)> =
            names.iter().take(9).map(|name| (name.as_str(), large.as_str())).collect();
        assert!(matches!(read(folder(&files).path()), Err(ReadError::TooMany { .. })));
    }
}
