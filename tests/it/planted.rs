//! The patches in `tests/planted`, each of which puts a known bug back: they apply to the code of today, in order. Whether the
//! bugs are found, `tests/planted/hunt` says, which takes long.

use crate::needs::skipped;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn patches() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/planted");
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut patches: Vec<PathBuf> = files
        .filter(|file| {
            file.extension()
                .is_some_and(|extension| extension == "patch")
        })
        .collect();
    patches.sort();
    patches
}

/// The files that a patch changes, and that are there before.
fn changed(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter_map(|line| line.strip_prefix("--- a/"))
}

/// All code of the library.
fn sources(folder: &Path) -> String {
    let paths = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let of = |path: PathBuf| match path.is_dir() {
        true => sources(&path),
        false if path.extension().is_some_and(|extension| extension == "rs") => {
            fs::read_to_string(path).unwrap()
        }
        false => String::new(),
    };
    paths.map(of).collect()
}

fn is_a_test(sources: &str, name: &str) -> bool {
    sources.contains(&format!("fn {name}("))
}

#[test]
fn every_planted_bug_still_applies() {
    let (root, copy) = (
        Path::new(env!("CARGO_MANIFEST_DIR")),
        tempfile::tempdir().unwrap(),
    );
    let texts: Vec<(PathBuf, String)> = patches()
        .into_iter()
        .map(|file| (file.clone(), fs::read_to_string(file).unwrap()))
        .collect();
    assert!(texts.len() > 20, "{}", texts.len());
    let files: BTreeSet<&str> = texts.iter().flat_map(|(_, text)| changed(text)).collect();
    for file in files {
        fs::create_dir_all(copy.path().join(file).parent().unwrap()).unwrap();
        fs::copy(root.join(file), copy.path().join(file))
            .unwrap_or_else(|error| panic!("{file}: {error}"));
    }
    for (file, _) in &texts {
        let mut git = Command::new("git");
        git.args(["apply", "--verbose"])
            .arg(file)
            .current_dir(copy.path());
        let ran = match git
            .env("GIT_CEILING_DIRECTORIES", copy.path().parent().unwrap())
            .output()
        {
            Ok(ran) => ran,
            Err(error) => return skipped(format_args!("git: {error}")),
        };
        let error = String::from_utf8_lossy(&ran.stderr);
        assert!(
            ran.status.success() && !error.contains("Skipped"),
            "{}: {error}",
            file.display()
        );
    }
}

#[test]
fn every_planted_bug_says_what_it_is_and_how_it_is_found() {
    let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    for file in patches()
        .into_iter()
        .filter(|file| !file.ends_with("00-switch.patch"))
    {
        let (name, text) = (file.display(), fs::read_to_string(&file).unwrap());
        let line = |start: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(start).map(str::to_owned))
        };
        assert!(
            line("Planted: ").is_some_and(|what| what.len() > 20),
            "{name}"
        );
        let found_by = line("Found by: ").unwrap_or_default();
        let names_a_test = found_by
            .strip_prefix("test ")
            .is_some_and(|test| is_a_test(&sources, test));
        assert!(
            ["history", "decisions", "expressions"].contains(&found_by.as_str()) || names_a_test,
            "{name}: {found_by}"
        );
        let bug = file
            .file_name()
            .unwrap()
            .to_str()
            .unwrap()
            .split('-')
            .next()
            .unwrap()
            .to_owned();
        assert!(
            text.contains(&format!("planted::is(\"{bug}\")")),
            "{name} asks for another bug"
        );
    }
}
