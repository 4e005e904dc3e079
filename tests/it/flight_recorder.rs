//! The flight recorder as its users run it: the demo recorded and replayed to the byte, what `replay` says of recordings that are
//! not whole, and what would have differed under another policy.

use crate::process::{RunningServe, eventually, json_dump};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

struct Said {
    code: i32,
    out: String,
    err: String,
}

fn stowage(arguments: &[&str]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    let ran = command.args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Said { code: ran.status.code().unwrap(), out: text(ran.stdout), err: text(ran.stderr) }
}

/// The demo's story, recorded once for all tests.
fn recorded_demo() -> &'static Path {
    static RECORDED: OnceLock<TempDir> = OnceLock::new();
    let directory = RECORDED.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let said = stowage(&["demo", "--once", "--record", directory.path().to_str().unwrap()]);
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
        directory
    });
    directory.path()
}

/// The segments of the recorded demo, as one file.
fn whole() -> Vec<u8> {
    let mut segments: Vec<PathBuf> =
        std::fs::read_dir(recorded_demo()).unwrap().map(|entry| entry.unwrap().path()).collect();
    segments.sort();
    segments.iter().flat_map(|segment| std::fs::read(segment).unwrap()).collect()
}

/// What `replay` says of these bytes.
fn replay(bytes: &[u8]) -> Said {
    let directory = tempfile::tempdir().unwrap();
    let recording = directory.path().join("recording");
    std::fs::write(&recording, bytes).unwrap();
    stowage(&["replay", recording.to_str().unwrap()])
}

#[test]
fn the_recorded_demo_replays_to_the_byte() {
    let said = stowage(&["replay", recorded_demo().to_str().unwrap(), "-o", "json"]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let count = |what: &str| report[what].as_u64().unwrap();
    assert_eq!(report["recordedBy"], report["replayedBy"]);
    assert!(report["divergence"].is_null() && report["error"].is_null(), "{}", said.out);
    assert!(count("inputs") > 500, "the story has so many: {}", said.out);
    assert!(count("answers") > 20, "every verb's: {}", said.out);
    assert!(count("checkpoints") >= 1, "the state at the end is compared: {}", said.out);
    assert_eq!(
        (count("gaps"), count("dropped"), count("unasked"), count("torn")),
        (0, 0, 0, 0),
        "{}",
        said.out
    );
}

#[test]
fn the_recorded_demand_is_played_under_another_policy_beside_the_recorded_one() {
    let recording = recorded_demo().to_str().unwrap();
    let said = stowage(&["replay", recording, "--packing", "best-fit", "-o", "json"]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    let (old, new) = (&report["recorded"], &report["other"]);
    assert_eq!(old["pods"], new["pods"], "the same demand: {}", said.out);
    assert_ne!(old["policy"], new["policy"]);
    assert!(old["placed"].as_u64().unwrap() > 20, "{}", said.out);
    assert!(report["agreement"]["placements"].as_u64().unwrap() > 20, "{}", said.out);
    let said =
        stowage(&["replay", recording, "--policy", concat!(env!("CARGO_MANIFEST_DIR"), "/policies/default")]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(
        said.out.contains("RECORDED POLICY  OTHER POLICY") && said.out.contains("VRAM stranded"),
        "{}",
        said.out
    );
    let again =
        stowage(&["replay", recording, "--policy", concat!(env!("CARGO_MANIFEST_DIR"), "/policies/default")]);
    assert_eq!(said.out, again.out, "the same recording and policy give the same table");
}

#[test]
fn another_policy_with_a_mistake_names_its_line_and_standard_input_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.yaml");
    std::fs::write(&policy, "packing:\n  policy: fastest\n").unwrap();
    let recording = recorded_demo().to_str().unwrap();
    let said = stowage(&["replay", recording, "--policy", policy.to_str().unwrap()]);
    assert!(said.code == 1 && said.err.contains("policy.yaml:2:"), "{} {}{}", said.code, said.out, said.err);
    let said = stowage(&["replay", recording, "--policy", "/nonexistent"]);
    assert!(said.code == 2 && said.err.contains("/nonexistent"), "{} {}{}", said.code, said.out, said.err);
    let said = stowage(&["replay", "-", "--packing", "best-fit"]);
    assert!(
        said.code == 1 && said.err.contains("write it to a file"),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
    let said = stowage(&["replay", policy.to_str().unwrap(), "--packing", "best-fit"]);
    assert!(
        said.code == 2 && said.err.contains("no recording of Stowage"),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
}

#[test]
fn a_recording_that_is_cut_is_replayed_up_to_there() {
    let whole = whole();
    let said = replay(&whole[..whole.len() - 10]);
    assert_eq!(said.code, 2, "{}{}", said.out, said.err);
    assert!(said.out.contains("is cut at byte ") && said.out.contains("Copy it again"), "{}", said.out);
    assert!(!said.out.starts_with("0 "), "{}", said.out);
}

#[test]
fn a_recording_with_a_lying_checksum_names_the_byte_and_the_way_out() {
    let mut whole = whole();
    let middle = whole.len() / 2;
    whole[middle] ^= 1;
    let said = replay(&whole);
    assert_eq!(said.code, 2, "{}{}", said.out, said.err);
    let (_, after) = said.out.split_once("`head -c ").unwrap_or_else(|| panic!("{}", said.out));
    let kept: usize = after.split_once(' ').unwrap().0.parse().unwrap();
    assert!(kept < middle);
    let said = replay(&whole[..kept]);
    assert_eq!(said.code, 0, "what it says to keep replays: {}{}", said.out, said.err);
}

#[test]
fn a_recording_of_another_version_and_a_file_that_is_none_are_refused() {
    let mut whole = whole();
    whole[8] += 1;
    let said = replay(&whole);
    assert!(said.code == 2 && said.out.contains("byte 0 has format 2"), "{}{}", said.out, said.err);
    let said = replay(b"apiVersion: v1");
    assert!(said.code == 2 && said.out.contains("no recording of Stowage"), "{}{}", said.out, said.err);
    let said = stowage(&["replay", "/nonexistent"]);
    assert!(said.code != 0 && said.err.contains("/nonexistent"), "{}{}", said.out, said.err);
}

/// Ten gigabytes of nothing, of which no byte is on the disk: the memory of a replay does not grow with its recording.
#[test]
fn a_recording_of_ten_gigabytes_is_refused_where_it_stops_being_one() {
    let directory = tempfile::tempdir().unwrap();
    let recording = directory.path().join("recording");
    let whole = whole();
    std::fs::write(&recording, &whole).unwrap();
    std::fs::OpenOptions::new().write(true).open(&recording).unwrap().set_len(10 << 30).unwrap();
    let said = stowage(&["replay", recording.to_str().unwrap()]);
    assert_eq!(said.code, 2, "{}{}", said.out, said.err);
    assert!(said.out.contains(&format!("at byte {} of the recording", whole.len())), "{}", said.out);
}

#[test]
fn a_pod_is_explained_as_of_a_time_in_the_recording() {
    let recording = recorded_demo().to_str().unwrap();
    let explained =
        |more: &[&str]| stowage(&[&["explain", "nowhere", "--bundle", recording][..], more].concat());
    let said = explained(&[]);
    assert!(said.code == 2 && said.err.contains("no pod default/nowhere at its end"), "{}", said.err);
    let said = explained(&["--at", "2001-01-01T00:00:00Z"]);
    assert!(said.code == 2 && said.err.contains("the recording begins at 20"), "{}", said.err);
    let said = explained(&["--at", "noon"]);
    assert!(said.code == 2 && said.err.contains("such as `2026-"), "{}", said.err);
    let said = explained(&["--at", "2001-01-01T00:00:00Z", "--server", "http://127.0.0.1:1"]);
    assert!(said.code == 2 && said.err.contains("cannot be used with"), "{}", said.err);
}

#[test]
fn a_running_service_hands_out_a_bundle_that_replays_and_one_that_does_not_record_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let dump = json_dump(&folder);
    let recorded = folder.path().join("recording");
    let serve = RunningServe::serve_with(&dump, &["--record", recorded.to_str().unwrap()]);
    let bundle = folder.path().join("stowage.bundle");
    let bundle = bundle.to_str().unwrap();
    let server = format!("http://{}", serve.operators);
    eventually("the state is on the disk", || {
        stowage(&["bundle", "--server", &server, "-f", bundle]).code == 0
    });
    let said = stowage(&["replay", bundle]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(said.out.starts_with("1 segment, "), "{}", said.out);
    // The dump is loaded within moments; the bundle may be of before.
    eventually("the pod of the dump is in the bundle", || {
        stowage(&["bundle", "--server", &server, "-f", bundle]);
        stowage(&["explain", "llm", "--bundle", bundle]).out.starts_with("default/llm fits")
    });
    let without = RunningServe::serve_with(&dump, &[]);
    let said = stowage(&["bundle", "--server", &format!("http://{}", without.operators), "-f", bundle]);
    assert!(said.code == 1 && said.err.contains("`stowage serve --record DIR`"), "{}{}", said.out, said.err);
}

#[test]
fn a_directory_that_cannot_be_recorded_into_is_named_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let dump = directory.path().join("dump.json");
    std::fs::write(&dump, r#"{"items":[]}"#).unwrap();
    let (dump, file) = (dump.to_str().unwrap(), file.to_str().unwrap());
    let listen = ["--listen", "127.0.0.1:0", "--agents", "127.0.0.1:0", "--admin", "127.0.0.1:0"];
    let said = stowage(&[&["serve", "--cluster", dump, "--record", file][..], &listen].concat());
    assert!(said.code == 1 && said.err.contains(&format!("--record {file}: ")), "{}{}", said.out, said.err);
}
