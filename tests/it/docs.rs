//! The README and the pages: what they show is what is shipped, where they point is there, and what they tell a reader to run
//! runs.

mod commands;
mod engines;
mod excerpts;
mod links;
mod markdown;

use markdown::Page;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All pages that people read, in order.
fn pages() -> Vec<Page> {
    let of = |folder: &str| {
        let files = std::fs::read_dir(root().join(folder))
            .unwrap()
            .map(|file| file.unwrap().file_name());
        let names = files
            .map(|name| name.into_string().unwrap())
            .filter(|name| name.ends_with(".md"));
        names
            .map(|name| Path::new(folder).join(name))
            .collect::<Vec<PathBuf>>()
    };
    let mut files = ["", "docs", "docs/runbooks", "docs/scenarios", "policies"]
        .map(of)
        .concat();
    files.sort();
    assert!(files.len() > 12, "{files:?}");
    files
        .into_iter()
        .map(|file| Page::read(root(), &file))
        .collect()
}
