//! The README and the pages: what they show is what is shipped, where they point is there, and what they tell a reader to run
//! runs.

mod commands;
mod engines;
mod excerpts;
mod links;
pub mod markdown;
mod shown;
mod time_constants;
mod vram_limits;

use markdown::Page;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All pages that people read, in order.
fn pages() -> Vec<Page> {
    let mut files = Vec::new();
    for (folder, depth) in [("", 1), ("docs", 8), ("policies", 1)] {
        add_pages(Path::new(folder), depth, &mut files);
    }
    files.sort();
    assert!(files.len() > 40, "{files:?}");
    files
        .into_iter()
        .map(|file| Page::read(root(), &file))
        .collect()
}

/// The pages of a folder, and those of its folders down to a depth.
fn add_pages(folder: &Path, depth: usize, pages: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let file = folder.join(entry.file_name());
        if file.extension().is_some_and(|extension| extension == "md") {
            pages.push(file);
        } else if depth > 1 && entry.file_type().unwrap().is_dir() {
            add_pages(&file, depth - 1, pages);
        }
    }
}
