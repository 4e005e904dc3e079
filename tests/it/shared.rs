//! Finds the recorded traffic beside the checkout, if there is any.

use serde_json::Value;
use std::path::PathBuf;

/// A file under `shared/`; `None`, with a line that says so, where the folder is absent.
pub fn json(path: &str) -> Option<Value> {
    text(path).map(|text| serde_json::from_str(&text).unwrap())
}

/// The same, as it is written.
pub fn text(path: &str) -> Option<String> {
    let file = self::path(path);
    match std::fs::read_to_string(&file) {
        Ok(text) => Some(text),
        Err(error) => {
            println!("skipped: {}: {error}", file.display());
            None
        }
    }
}

/// Where it lies: beside the checkout, or where `STOWAGE_SHARED` says.
pub fn path(path: &str) -> PathBuf {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared");
    std::env::var_os("STOWAGE_SHARED").map_or_else(beside, PathBuf::from).join(path)
}
