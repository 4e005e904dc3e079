//! Diagnostics of broken policies, word for word: each directory of `tests/golden/policy/broken` is a policy, and `expected.txt`
//! in it is what a user reads. `STOWAGE_BLESS=1` writes them again; read them then as that user would.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use stowage_policy_file::diagnostic::text::{Colors, render};
use stowage_policy_file::{PolicySources, SourceText, load};

fn broken() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/policy/broken")
}

fn in_order(path: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = fs::read_dir(path)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths
}

/// Named as they lie in their directory.
fn files(directory: &Path) -> Vec<SourceText> {
    let yaml = in_order(directory)
        .into_iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    yaml.map(|path| {
        SourceText::new(
            path.file_name().unwrap().to_str().unwrap(),
            fs::read(&path).unwrap(),
        )
    })
    .collect()
}

fn diagnostics(directory: &Path) -> String {
    let files = files(directory);
    let found = match load(&files) {
        Ok(loaded) => loaded.warnings,
        Err(found) => found,
    };
    render(&found, &PolicySources::new(&files), Colors::Off)
}

#[test]
fn each_broken_policy_gets_its_committed_diagnostics() {
    let bless = std::env::var_os("STOWAGE_BLESS").is_some();
    let mut different = Vec::new();
    let directories = in_order(&broken());
    for directory in &directories {
        let (expected, told) = (directory.join("expected.txt"), diagnostics(directory));
        if bless {
            fs::write(&expected, &told).unwrap();
        }
        if fs::read_to_string(&expected).unwrap_or_default() != told {
            different.push(format!("{}:\n{told}", directory.display()));
        }
    }
    assert!(
        directories.len() >= 60,
        "only {} of the broken policies are here",
        directories.len()
    );
    assert!(
        different.is_empty(),
        "{} differ from expected.txt:\n{}",
        different.len(),
        different.join("\n")
    );
}

#[test]
fn every_broken_policy_has_a_diagnostic_with_a_remedy() {
    for directory in in_order(&broken()) {
        let told = diagnostics(&directory);
        assert!(
            !told.contains("no errors, no warnings"),
            "{}",
            directory.display()
        );
        assert!(told.contains("help: "), "{}:\n{told}", directory.display());
    }
}

fn stowage(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    command
        .arg("policy")
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_exit_code_distinguishes_valid_refused_and_unreadable_policies() {
    let code = |path: &str| stowage(&["check", path]).status.code();
    assert_eq!(code("policies"), Some(0));
    assert_eq!(
        code("tests/golden/policy/broken/one-sided-sharing"),
        Some(0),
        "a warning"
    );
    assert_eq!(code("tests/golden/policy/broken/unknown-field"), Some(1));
    assert_eq!(code("tests/golden/policy"), Some(2), "no policy there");
    assert_eq!(code("nowhere"), Some(2));
}

#[test]
fn a_path_that_cannot_be_read_hides_none_of_the_others() {
    let broken = "tests/golden/policy/broken";
    let [first, last] = ["unknown-field", "many-at-once"].map(|name| format!("{broken}/{name}"));
    let output = stowage(&["check", &first, "nowhere", &last, "elsewhere"]);
    assert_eq!(output.status.code(), Some(2));
    let (told, failed) = (stdout(&output), String::from_utf8_lossy(&output.stderr));
    for path in [first, last] {
        assert!(told.contains(&format!("{path}: refused")), "{told}");
    }
    for path in ["nowhere", "elsewhere"] {
        assert!(failed.contains(&format!("cannot read {path}")), "{failed}");
    }
}

/// Ten thousand lines, and a mistake in each.
#[test]
fn what_is_told_of_a_long_policy_is_bounded_and_the_first_come_first() {
    let classes: String = (0..10_000).map(|n| format!("- {{nam: c{n}}}\n")).collect();
    let named = |field: &str| {
        let names: String = (0..5_000)
            .map(|n| format!("- {{name: c{n}, {field}: c{n}}}\n"))
            .collect();
        format!("kind: SchedulingPolicy\nnodePools:\n{names}")
    };
    let text = format!("kind: SchedulingPolicy\nclasses:\n{classes}");
    for (text, first) in [(text, 3), (named("class"), 3), (named("classes"), 3)] {
        let output = stowage_reads(&["check", "-"], &text);
        assert_eq!(output.status.code(), Some(1));
        let told = stdout(&output);
        assert!(
            told.contains(&format!(" --> standard input:{first}:")),
            "{told}"
        );
        assert!(told.contains("more like these"), "{told}");
        assert!(
            told.lines().count() < 1_000,
            "{} lines",
            told.lines().count()
        );
    }
}

#[test]
fn each_shipped_policy_passes_the_check_without_findings() {
    let told = stdout(&stowage(&["check", "policies"]));
    let shipped = in_order(&Path::new(env!("CARGO_MANIFEST_DIR")).join("policies"));
    let shipped = shipped.iter().filter(|path| path.is_dir()).count();
    assert_eq!(
        told.lines()
            .filter(|line| line.contains(": sound, digest "))
            .count(),
        shipped,
        "{told}"
    );
    assert_eq!(told.lines().count(), shipped, "{told}");
}

#[test]
fn ci_reads_findings_with_lines_and_columns() {
    let output = stowage(&[
        "check",
        "-o",
        "json",
        "tests/golden/policy/broken/conflict-between-files",
    ]);
    let page: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = &page["policies"][0]["findings"][0];
    assert_eq!(
        (&finding["code"], &finding["severity"]),
        (&"conflict".into(), &"error".into())
    );
    assert_eq!(
        (&finding["line"], &finding["column"]),
        (&4.into(), &8.into())
    );
    assert!(finding["file"].as_str().unwrap().ends_with("20-more.yaml"));
    assert!(
        finding["related"][0]["file"]
            .as_str()
            .unwrap()
            .ends_with("10-base.yaml")
    );
    assert!(
        page["policies"][0].get("digest").is_none(),
        "it would be refused"
    );
}

/// With that on standard input.
fn stowage_reads(arguments: &[&str], text: &str) -> Output {
    use std::io::Write;
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let piped = std::process::Stdio::piped;
    command
        .arg("policy")
        .args(arguments)
        .stdin(piped())
        .stdout(piped())
        .stderr(piped());
    let mut child = command.spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_policy_test_without_cases_fails() {
    let output = stowage(&["test", "policies/default/policy.yaml"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output), "");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("policies/default/policy.yaml: no cases"),
        "{said}"
    );
    assert_eq!(stowage(&["test", "policies"]).status.code(), Some(0));
}

#[test]
fn cli_check_reads_standard_input_and_has_the_same_json_option_as_the_others() {
    let output = stowage_reads(
        &["check", "--json", "-"],
        "mood: shadow\nkind: SchedulingPolicy\n",
    );
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let page: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = &page["policies"][0]["findings"][0];
    assert_eq!(
        (&finding["file"], &finding["line"]),
        (&"standard input".into(), &1.into())
    );
    let sound = stowage_reads(&["check", "-"], "kind: SchedulingPolicy\n");
    assert!(
        stdout(&sound).starts_with("standard input: sound, digest "),
        "{}",
        stdout(&sound)
    );
    assert!(
        stdout(&stowage_reads(
            &["show", "-"],
            "kind: SchedulingPolicy\nmode: shadow\n"
        ))
        .contains("mode: shadow")
    );
    let cases = "kind: PolicyTest\ncases:\n- {name: a, pod: {name: p, vram: 1Gi}, expect: {class: serving}}\n";
    assert_eq!(stowage_reads(&["test", "-"], cases).status.code(), Some(0));
}

#[test]
fn the_printed_schema_is_strict_and_suits_editors() {
    for of in ["policy", "test"] {
        let schema: serde_json::Value =
            serde_json::from_slice(&stowage(&["schema", "--of", of]).stdout).unwrap();
        assert_eq!(
            schema["$schema"],
            "https://json-schema.org/draft/2020-12/schema"
        );
        assert_eq!(schema["additionalProperties"], false);
        assert!(
            !schema.to_string().contains("\"null\""),
            "what may be left out is left out"
        );
    }
}

#[test]
fn a_policy_is_shown_with_where_each_value_came_from() {
    let shown = stdout(&stowage(&["show", "policies/default"]));
    assert!(shown.contains("# policies/default/policy.yaml:"), "{shown}");
    let refused = stowage(&["show", "tests/golden/policy/broken/unknown-field"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("did you mean `classes`?"));
}

#[test]
fn a_closed_pipe_of_standard_error_does_not_change_the_exit_code() {
    let (reader, stderr) = std::io::pipe().unwrap();
    drop(reader);
    let folder = "tests/golden/policy/broken/many-at-once";
    let status = std::process::Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["explain", "x", "--cluster", folder])
        .stderr(stderr)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(2), "a panic is 101");
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let (reader, stdout) = std::io::pipe().unwrap();
    drop(reader);
    let folder = "tests/golden/policy/broken/many-at-once";
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["policy", "check", folder])
        .stdout(stdout)
        .output()
        .unwrap();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).as_ref()
        ),
        (Some(141), "")
    );
}
