//! Stores the last good policy on disk for the next start of this process: its files as they were found, so that another
//! version of Stowage parses them again.
//!
//! Nothing here decides when it is used, and no decision waits for it. A copy that is truncated, changed or of another path is
//! rejected.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use stowage_policy_file::SourceText;

/// Its name in the directory.
const FILE_NAME: &str = "last-good-policy.json";
/// Its name while it is written.
const TEMPORARY_FILE_NAME: &str = ".last-good-policy.json.new";
/// More than any policy takes, written as JSON.
const MAX_BYTES: u64 = 64 << 20;

/// Why there is no last good policy.
#[derive(Debug, thiserror::Error)]
pub enum LastGoodError {
    #[error("there is no last good policy in {}", .0.display())]
    Missing(PathBuf),
    #[error("the last good policy in {} is of --policy {other}", .path.display())]
    ForAnotherPath { path: PathBuf, other: String },
    #[error("the last good policy in {} cannot be read: {reason}", .path.display())]
    Unreadable { path: PathBuf, reason: String },
}

/// A directory that outlives the process, such as an emptyDir.
#[derive(Debug, Clone)]
pub struct LastGoodStore {
    directory: PathBuf,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct CachedPolicy {
    /// Digest of `policy` as it is written here.
    sha256: String,
    policy: CachedPolicyFiles,
}

#[derive(Serialize, Deserialize)]
struct CachedPolicyFiles {
    /// The path of its files: `--policy`.
    path: String,
    files: Vec<CachedFile>,
}

#[derive(Serialize, Deserialize)]
struct CachedFile {
    name: String,
    text: String,
}

impl LastGoodStore {
    pub fn in_directory(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Stores the files of the current policy. A concurrent reader finds either the previous or this one, complete.
    pub fn store(&self, path: &Path, texts: &[SourceText]) -> io::Result<()> {
        let file = |text: &SourceText| {
            let name = text.name.clone();
            Ok(CachedFile {
                name,
                text: std::str::from_utf8(&text.bytes)
                    .map_err(io::Error::other)?
                    .to_owned(),
            })
        };
        let files = texts.iter().map(file).collect::<io::Result<_>>()?;
        let policy = CachedPolicyFiles {
            path: path.display().to_string(),
            files,
        };
        let stored = CachedPolicy {
            sha256: checksum(&policy),
            policy,
        };
        std::fs::create_dir_all(&self.directory)?;
        let new = self.directory.join(TEMPORARY_FILE_NAME);
        let mut file = std::fs::File::create(&new)?;
        file.write_all(&serde_json::to_vec(&stored)?)?;
        file.sync_all()?;
        std::fs::rename(new, self.file())
    }

    /// The files of the last good policy of this path.
    pub fn load(&self, path: &Path) -> Result<Vec<SourceText>, LastGoodError> {
        let unreadable = |reason: String| LastGoodError::Unreadable {
            path: self.file(),
            reason,
        };
        let file = match std::fs::File::open(self.file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(LastGoodError::Missing(self.directory.clone()));
            }
            file => file.map_err(|error| unreadable(error.to_string()))?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES)
            .read_to_end(&mut bytes)
            .map_err(|error| unreadable(error.to_string()))?;
        let CachedPolicy { sha256, policy }: CachedPolicy =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if checksum(&policy) != sha256 {
            return Err(unreadable(
                "its checksum is another: it was changed or cut off".into(),
            ));
        }
        if policy.path != path.display().to_string() {
            return Err(LastGoodError::ForAnotherPath {
                path: self.file(),
                other: policy.path,
            });
        }
        Ok(policy
            .files
            .into_iter()
            .map(|file| SourceText::new(file.name, file.text))
            .collect())
    }

    fn file(&self) -> PathBuf {
        self.directory.join(FILE_NAME)
    }
}

fn checksum(policy: &CachedPolicyFiles) -> String {
    let text = serde_json::to_vec(policy).expect("texts are always JSON");
    Sha256::digest(text)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_stored_policy_is_loaded_again_and_a_damaged_one_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let last_good = LastGoodStore::in_directory(folder.path().join("made/on/the/way"));
        let path = Path::new("/etc/stowage-policy");
        assert!(matches!(
            last_good.load(path),
            Err(LastGoodError::Missing(_))
        ));
        let texts = vec![
            SourceText::new("a.yaml", "mode: shadow\n"),
            SourceText::new("b.yaml", "{}"),
        ];
        last_good.store(path, &texts).unwrap();
        assert_eq!(last_good.load(path).unwrap(), texts);
        assert!(matches!(
            last_good.load(Path::new("/other")),
            Err(LastGoodError::ForAnotherPath { .. })
        ));
        let whole = fs::read_to_string(last_good.file()).unwrap();
        for broken in [
            &whole[..whole.len() / 2],
            "",
            &whole.replace("shadow", "enforce"),
            "[]",
        ] {
            fs::write(last_good.file(), broken).unwrap();
            assert!(
                matches!(last_good.load(path), Err(LastGoodError::Unreadable { .. })),
                "{broken}"
            );
        }
        last_good.store(path, &texts[..1]).unwrap();
        assert_eq!(last_good.load(path).unwrap(), texts[..1]);
        let left: Vec<_> = fs::read_dir(&last_good.directory).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing half written stays");
    }

    #[test]
    fn a_failed_write_keeps_the_stored_policy() {
        let folder = tempfile::tempdir().unwrap();
        let last_good = LastGoodStore::in_directory(folder.path().into());
        let (path, texts) = (Path::new("p"), vec![SourceText::new("a.yaml", "{}")]);
        last_good.store(path, &texts).unwrap();
        assert!(
            last_good
                .store(path, &[SourceText::new("b.yaml", [0xff])])
                .is_err()
        );
        fs::create_dir(folder.path().join(TEMPORARY_FILE_NAME)).unwrap();
        assert!(last_good.store(path, &[]).is_err());
        assert_eq!(last_good.load(path).unwrap(), texts);
    }
}
