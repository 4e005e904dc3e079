//! What a release is made of says the same everywhere: version, ports, and scripts that exist.

use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const VERSION: &str = env!("CARGO_PKG_VERSION");

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn the_image_has_the_crates_version_and_names_every_port_that_the_service_opens() {
    let containerfile = read("Containerfile");
    assert!(containerfile.contains(&format!("org.opencontainers.image.version=\"{VERSION}\"")));
    let tags = containerfile
        .match_indices("stowage-dev/stowage:")
        .map(|(at, found)| &containerfile[at + found.len()..]);
    let mut tags = tags.peekable();
    assert!(tags.peek().is_some());
    assert!(
        tags.all(|tag| tag.starts_with(VERSION)),
        "its examples are of this version"
    );
    let exposed = containerfile
        .lines()
        .find_map(|line| line.strip_prefix("EXPOSE "))
        .unwrap();
    let help = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["serve", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    for port in exposed.split_whitespace() {
        assert!(
            help.contains(&format!("127.0.0.1:{port}]")),
            "{port} is no default of serve's"
        );
    }
    assert_eq!(
        help.matches("[default: 127.0.0.1:").count(),
        exposed.split_whitespace().count()
    );
}

/// The lab is no part of it, and its memory was measured with this allocator.
#[test]
fn the_image_and_the_release_are_built_with_the_features_that_were_measured() {
    for file in ["Containerfile", ".ci/release-files"] {
        let built = "--profile image --package stowage --no-default-features --features jemalloc ";
        assert!(read(file).contains(built), "{file}");
    }
}

/// A function that is renamed would drop out of the list in silence.
#[test]
fn every_function_with_planted_mistakes_exists() {
    let (listed, sources) = (read(".cargo/mutants.toml"), sources());
    let quoted = listed
        .lines()
        .filter_map(|line| line.trim().strip_prefix('\''));
    for mistake in quoted {
        let (place, _) = mistake.split_once(" -> ").unwrap_or((mistake, ""));
        let place = place.rsplit(' ').next().unwrap();
        let name = place.rsplit("::").next().unwrap();
        let name = name.trim_matches(|c: char| !c.is_alphanumeric());
        let is_there = |source: &String| {
            source.contains(&format!("fn {name}")) || source.contains(&format!("struct {name}"))
        };
        assert!(sources.iter().any(is_there), "{mistake}: no {name}");
    }
}

fn sources() -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(std::fs::read_to_string(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn the_version_command_prints_version_and_commit() {
    let said = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .arg("--version")
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let commit =
        option_env!("STOWAGE_COMMIT").map_or(String::new(), |commit| format!(" (commit {commit})"));
    assert_eq!(said, format!("stowage {VERSION}{commit}\n"));
}

#[test]
fn every_script_that_a_workflow_runs_exists() {
    let mut scripts = 0;
    for file in [".github/workflows/ci.yml", ".github/workflows/release.yml"] {
        let workflow: Value = serde_saphyr::from_str(&read(file)).unwrap();
        let jobs = workflow["jobs"].as_object().unwrap().values();
        for run in jobs
            .flat_map(|job| job["steps"].as_array().unwrap())
            .filter_map(|step| step["run"].as_str())
        {
            for word in run
                .split_whitespace()
                .filter(|word| word.starts_with(".ci/"))
            {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(word);
                let mode = path
                    .metadata()
                    .unwrap_or_else(|error| panic!("{file}: {word}: {error}"))
                    .permissions()
                    .mode();
                assert!(mode & 0o111 != 0, "{file}: {word} cannot be executed");
                scripts += 1;
            }
        }
    }
    assert!(scripts >= 3, "{scripts}");
}
