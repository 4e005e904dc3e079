//! What a release is made of says the same everywhere: version, ports, and scripts that exist; and its files fit together.

use crate::control_plane::servers;
use crate::needs;
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

/// A page or a manifest that is forgotten would install the version before.
#[test]
fn every_image_that_a_page_or_a_manifest_names_is_of_this_version() {
    let mut named = 0;
    for file in [
        "docs/start/install.md",
        "docs/use/policies.md",
        "manifests/base/stowage.yaml",
        "manifests/base/agent.yaml",
        "manifests/base/kustomization.yaml",
    ] {
        let text = read(file).replace("/stowage\n    newTag: ", "/stowage:");
        let tags = text
            .match_indices("/stowage:")
            .map(|(at, found)| &text[at + found.len()..]);
        for tag in tags {
            assert!(tag.starts_with(VERSION), "{file}: {tag:.8}");
            named += 1;
        }
    }
    assert!(named >= 7, "{named}");
    let chart: Value = serde_saphyr::from_str(&read("manifests/chart/Chart.yaml")).unwrap();
    for key in ["version", "appVersion"] {
        assert_eq!(chart[key], VERSION, "{key}");
    }
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

fn ran(command: &mut Command) -> Output {
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

/// What a command that succeeds prints.
fn printed(command: &mut Command) -> String {
    let output = ran(command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// For which there are binaries, and what krew calls the architecture.
const TARGETS: [(&str, &str); 2] = [
    ("x86_64-unknown-linux-gnu", "amd64"),
    ("aarch64-unknown-linux-gnu", "arm64"),
];

/// The files of a release, around binaries that are none; `None`, with a line that says so, without kubectl.
fn release_files(folder: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(servers::folder()).chain(std::env::split_paths(&path));
    let path = std::env::join_paths(folders).unwrap();
    if !std::env::split_paths(&path).any(|folder| folder.join("kubectl").is_file()) {
        needs::report_skipped("kubectl is not on the path");
        return None;
    }
    let (binaries, files) = (folder.join("binaries"), folder.join("files"));
    for (target, arch) in TARGETS {
        let binary = binaries.join(target).join("image/stowage");
        std::fs::create_dir_all(binary.parent().unwrap()).unwrap();
        std::fs::write(&binary, arch).unwrap();
    }
    let mut script = Command::new(".ci/release-files");
    let script = script.arg(&files).env("PATH", path);
    printed(
        script
            .env("BINARIES", &binaries)
            .env("STOWAGE_COMMIT", "0123456789ab"),
    );
    Some(files)
}

#[test]
fn the_files_of_a_release_fit_together_and_krew_can_unpack_the_archives() {
    let folder = tempfile::tempdir().unwrap();
    let Some(files) = release_files(folder.path()) else {
        return;
    };
    let read = |name: &str| std::fs::read_to_string(files.join(name)).unwrap();
    let sums = read("SHA256SUMS");
    let checked: BTreeSet<&str> = sums
        .lines()
        .filter_map(|line| line.split("  ").nth(1))
        .collect();
    let archive = |target: &str| format!("stowage-{VERSION}-{target}.tar.gz");
    let archives = TARGETS.map(|(target, _)| archive(target));
    let manifests = [
        "install.yaml",
        "install-base.yaml",
        "install-webhook.yaml",
        "stowage.yaml",
    ];
    let expected = archives.iter().map(String::as_str).chain(manifests);
    assert_eq!(checked, expected.collect::<BTreeSet<_>>());

    let plugin: Value = serde_saphyr::from_str(&read("stowage.yaml")).unwrap();
    assert_eq!(plugin["metadata"]["name"], "stowage");
    assert_eq!(plugin["spec"]["version"], format!("v{VERSION}"));
    let platforms = plugin["spec"]["platforms"].as_array().unwrap();
    assert_eq!(platforms.len(), TARGETS.len());
    for (platform, (target, arch)) in platforms.iter().zip(TARGETS) {
        let name = archive(target);
        assert_eq!(platform["selector"]["matchLabels"]["arch"], arch);
        let uri = platform["uri"].as_str().unwrap();
        assert!(uri.ends_with(&format!("/v{VERSION}/{name}")), "{uri}");
        let sum = platform["sha256"].as_str().unwrap();
        assert!(sums.contains(&format!("{sum}  {name}\n")), "{sum}");
        // krew refuses all but files and folders in an archive, and its index a plugin without its license.
        let listed = printed(Command::new("tar").arg("-tvzf").arg(files.join(&name)));
        assert!(listed.lines().all(|line| line.starts_with('-')), "{listed}");
        let unpacked = platform["files"].as_array().unwrap().iter();
        let unpacked: Vec<&str> = unpacked
            .map(|file| file["from"].as_str().unwrap())
            .collect();
        let names = listed.lines().map(|line| line.rsplit(' ').next().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), unpacked);
        assert!(unpacked.contains(&platform["bin"].as_str().unwrap()));
        assert!(unpacked.contains(&"LICENSE"));
    }
}

#[test]
fn the_manifests_of_a_release_are_those_of_each_kind_of_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let Some(files) = release_files(folder.path()) else {
        return;
    };
    for (name, completes) in [
        ("install.yaml", Some("MutatingAdmissionPolicy")),
        ("install-webhook.yaml", Some("MutatingWebhookConfiguration")),
        ("install-base.yaml", None),
    ] {
        let text = std::fs::read_to_string(files.join(name)).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let kinds: BTreeSet<&str> = objects
            .iter()
            .filter_map(|object| object["kind"].as_str())
            .collect();
        for kind in ["Deployment", "DaemonSet", "ValidatingAdmissionPolicy"] {
            assert!(kinds.contains(kind), "{name} lacks a {kind}");
        }
        let mutating = kinds.iter().copied().find(|kind| {
            ["MutatingAdmissionPolicy", "MutatingWebhookConfiguration"].contains(kind)
        });
        assert_eq!(mutating, completes, "{name}");
        assert!(text.contains(&format!("/stowage:{VERSION}\n")), "{name}");
    }
}

#[test]
fn a_releases_notes_are_its_own_section_with_links_that_leave_the_repository() {
    let notes = printed(Command::new(".ci/release-notes").arg("0.2.0"));
    assert!(notes.contains("### Added") && notes.contains("**The extender**"));
    assert!(!notes.contains("\n## "), "another version's");
    let targets = notes.split("](").skip(1);
    for target in targets {
        assert!(target.starts_with("https://"), "{target:.60}");
    }
    let unknown = ran(Command::new(".ci/release-notes").arg("0.2"));
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no section [0.2]"));
}
