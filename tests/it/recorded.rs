//! The recorded traffic of a real kube-scheduler with its extenders, in `tests/fixtures`.

use serde_json::Value;
use std::path::{Path, PathBuf};

/// Where it lies.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/kube-scheduler-v1.36.2")
}

/// A file of it, as it is written.
pub fn text(name: &str) -> String {
    let file = folder().join(name);
    std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

pub fn json(name: &str) -> Value {
    serde_json::from_str(&text(name)).unwrap()
}
