//! Every policy in `policies/` is valid, and its cases pass.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use stowage_policy_file::cases as policy_cases;
use stowage_policy_file::{LoadedPolicy, SourceText, diagnostic, load};
use stowage_scheduling::policy::Policy;

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("policies");
    let entries = std::fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

fn sources(folder: &Path) -> Vec<SourceText> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|end| end == "yaml"))
        .collect();
    files.sort();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    files
        .iter()
        .map(|path| SourceText::new(name(path), std::fs::read(path).unwrap()))
        .collect()
}

fn loaded(folder: &Path) -> LoadedPolicy {
    let sources = sources(folder);
    let loaded = load(&sources);
    let texts = stowage_policy_file::PolicySources::new(&sources);
    let problems = match &loaded {
        Ok(loaded) => &loaded.warnings,
        Err(problems) => problems,
    };
    let text = diagnostic::text::render(problems, &texts, diagnostic::text::Colors::Off);
    assert!(problems.is_empty(), "{}:\n{text}", folder.display());
    loaded.unwrap()
}

#[test]
fn every_shipped_policy_is_valid_and_its_cases_pass() {
    let folders = folders();
    assert!(folders.len() >= 6, "{folders:?}");
    let (mut cases, mut failures) = (0, String::new());
    for folder in &folders {
        let LoadedPolicy { policy, tests, .. } = loaded(folder);
        for test in &tests {
            for outcome in policy_cases::run(&policy, &test.test).unwrap() {
                cases += 1;
                for difference in &outcome.differences {
                    let folder = folder.file_name().unwrap().to_str().unwrap();
                    writeln!(failures, "{folder}: {}: {difference:#?}", outcome.case).unwrap();
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
    assert!(cases >= 20, "{cases}");
}

#[test]
fn the_written_default_policy_equals_the_built_in_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("policies/default");
    let written = loaded(&root).policy;
    let empty = load(&[]).unwrap().policy;
    assert_eq!(written, empty);
    assert_eq!(
        {
            let mut built_in = Policy::default();
            built_in.digest = empty.digest;
            built_in
        },
        empty
    );
}
