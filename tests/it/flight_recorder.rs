//! The flight recorder as its users run it: the demo, and a real control plane's recording, replayed to the byte; what `replay`
//! says of recordings that are not whole, and what would have differed under another policy.

mod bundles;

use crate::client::Client;
use crate::needs::report_skipped;
use crate::process::{RunningServe, eventually, json_dump};
use crate::served::{args, pod};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use stowage_recording::entry::{Entry, NumberedInput};
use stowage_recording::read::{Reader, RecordingPart};
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::Input;
use tempfile::TempDir;

/// What Stowage did beside a real kube-scheduler. The test of the control plane records it again (`STOWAGE_BLESS`).
pub const CONTROL_PLANE_RECORDING: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/fixtures/recordings/control-plane.stowrec"
);

const LISTEN: [&str; 6] = [
    "--listen",
    "127.0.0.1:0",
    "--agents",
    "127.0.0.1:0",
    "--admin",
    "127.0.0.1:0",
];

pub struct StowageOutput {
    pub code: i32,
    pub out: String,
    pub err: String,
}

pub fn stowage(arguments: &[&str]) -> StowageOutput {
    output_of(Command::new(env!("CARGO_BIN_EXE_stowage")).args(arguments))
}

fn output_of(command: &mut Command) -> StowageOutput {
    let ran = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    StowageOutput {
        code: ran.status.code().unwrap(),
        out: text(ran.stdout),
        err: text(ran.stderr),
    }
}

/// The demo's story, recorded once for all tests.
fn recorded_demo() -> &'static Path {
    static RECORDED: OnceLock<TempDir> = OnceLock::new();
    let directory = RECORDED.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let said = stowage(&[
            "demo",
            "--once",
            "--record",
            directory.path().to_str().unwrap(),
        ]);
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
        directory
    });
    directory.path()
}

/// The segments of the recorded demo, as one file.
fn recording_bytes() -> Vec<u8> {
    let mut segments: Vec<PathBuf> = std::fs::read_dir(recorded_demo())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    segments.sort();
    segments
        .iter()
        .flat_map(|segment| std::fs::read(segment).unwrap())
        .collect()
}

/// What `replay` says of these bytes.
fn replay(bytes: &[u8]) -> StowageOutput {
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
    assert!(
        report["divergence"].is_null() && report["error"].is_null(),
        "{}",
        said.out
    );
    assert!(count("inputs") > 500, "the story has so many: {}", said.out);
    assert!(count("answers") > 20, "every verb's: {}", said.out);
    assert!(
        count("checkpoints") >= 1,
        "the state at the end is compared: {}",
        said.out
    );
    assert_eq!(
        (
            count("gaps"),
            count("dropped"),
            count("unasked"),
            count("torn")
        ),
        (0, 0, 0, 0),
        "{}",
        said.out
    );
}

#[test]
fn the_recording_of_a_real_control_plane_replays_to_the_byte() {
    let said = stowage(&["replay", CONTROL_PLANE_RECORDING, "-o", "json"]);
    assert_eq!(
        said.code, 0,
        "record it again: see CONTRIBUTING.md. {}{}",
        said.out, said.err
    );
    let report: Value = serde_json::from_str(&said.out).unwrap();
    assert!(
        report["inputs"].as_u64().unwrap() > 100 && report["answers"].as_u64().unwrap() > 10,
        "{}",
        said.out
    );
    assert!(
        report["checkpoints"].as_u64().unwrap() >= 1 && report["gaps"] == 0,
        "{}",
        said.out
    );
}

#[test]
fn the_chart_shows_both_policies_over_time() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("picture.svg");
    let picture = picture.to_str().unwrap();
    let recording = recorded_demo().to_str().unwrap();
    let said = stowage(&[
        "replay",
        recording,
        "--packing",
        "best-fit",
        "--plot",
        picture,
    ]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let drawn = std::fs::read_to_string(picture).unwrap();
    for what in [
        "packing best-fit",
        "VRAM allocated, %",
        "pods that wait",
        "recorded ",
        "other ",
    ] {
        assert!(drawn.contains(what), "{what}");
    }
    let said = stowage(&["replay", recording, "--plot", picture]);
    assert!(
        said.code == 2 && said.err.contains("--policy or --packing"),
        "{}{}",
        said.out,
        said.err
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
    assert!(
        report["agreement"]["placements"].as_u64().unwrap() > 20,
        "{}",
        said.out
    );
    let said = stowage(&[
        "replay",
        recording,
        "--policy",
        concat!(env!("CARGO_MANIFEST_DIR"), "/policies/default"),
    ]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(
        said.out.contains("RECORDED POLICY  OTHER POLICY") && said.out.contains("VRAM stranded"),
        "{}",
        said.out
    );
    let again = stowage(&[
        "replay",
        recording,
        "--policy",
        concat!(env!("CARGO_MANIFEST_DIR"), "/policies/default"),
    ]);
    assert_eq!(
        said.out, again.out,
        "the same recording and policy give the same table"
    );
}

#[test]
fn another_policy_with_a_mistake_names_its_line_and_standard_input_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.yaml");
    std::fs::write(
        &policy,
        "kind: SchedulingPolicy\npacking:\n  policy: fastest\n",
    )
    .unwrap();
    let recording = recorded_demo().to_str().unwrap();
    let said = stowage(&["replay", recording, "--policy", policy.to_str().unwrap()]);
    assert!(
        said.code == 1 && said.err.contains("policy.yaml:3:"),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
    let said = stowage(&["replay", recording, "--policy", "/nonexistent"]);
    assert!(
        said.code == 2 && said.err.contains("/nonexistent"),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
    let said = stowage(&["replay", "-", "--packing", "best-fit"]);
    assert!(
        said.code == 2 && said.err.contains("write it to a file"),
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
    let whole = recording_bytes();
    let said = replay(&whole[..whole.len() - 10]);
    assert_eq!(said.code, 2, "{}{}", said.out, said.err);
    assert!(
        said.out.contains("is cut at byte ") && said.out.contains("Copy it again"),
        "{}",
        said.out
    );
    assert!(!said.out.starts_with("0 "), "{}", said.out);
}

/// As a full disk leaves it.
#[test]
fn an_empty_segment_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    for segment in std::fs::read_dir(recorded_demo()).unwrap() {
        let segment = segment.unwrap();
        std::fs::copy(segment.path(), folder.path().join(segment.file_name())).unwrap();
    }
    std::fs::write(folder.path().join("999999999999999-000.stowrec"), "").unwrap();
    let said = stowage(&["replay", folder.path().to_str().unwrap()]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
}

#[test]
fn a_wrong_checksum_is_reported_with_its_byte_and_a_remedy() {
    let mut whole = recording_bytes();
    let middle = whole.len() / 2;
    whole[middle] ^= 1;
    let said = replay(&whole);
    assert_eq!(said.code, 2, "{}{}", said.out, said.err);
    let (_, after) = said
        .out
        .split_once("at byte ")
        .unwrap_or_else(|| panic!("{}", said.out));
    let damaged_at: usize = after.split_once(' ').unwrap().0.parse().unwrap();
    assert!(
        damaged_at <= middle && said.out.contains("`stowage bundle --from RECORDING`"),
        "{}",
        said.out
    );
    let folder = tempfile::tempdir().unwrap();
    let [recording, bundle] = ["recording", "bundle"].map(|name| folder.path().join(name));
    let [recording, bundle] = [&recording, &bundle].map(|path| path.to_str().unwrap());
    std::fs::write(recording, &whole).unwrap();
    assert_eq!(
        stowage(&["bundle", "--from", recording, "-f", bundle]).code,
        1
    );
    let said = stowage(&["replay", bundle]);
    assert_eq!(
        said.code, 0,
        "what it leaves replays: {}{}",
        said.out, said.err
    );
}

#[test]
fn a_recording_of_another_version_and_a_file_that_is_none_are_refused() {
    let mut whole = recording_bytes();
    whole[8] += 1;
    let said = replay(&whole);
    assert!(
        said.code == 2 && said.out.contains("byte 0 has format 2"),
        "{}{}",
        said.out,
        said.err
    );
    let said = replay(b"apiVersion: v1");
    assert!(
        said.code == 2 && said.out.contains("no recording of Stowage"),
        "{}{}",
        said.out,
        said.err
    );
    let said = stowage(&["replay", "/nonexistent"]);
    assert!(
        said.code != 0 && said.err.contains("/nonexistent"),
        "{}{}",
        said.out,
        said.err
    );
}

/// Ten gigabytes of nothing, of which no byte is on the disk, and less than half of that for the process.
#[test]
fn a_recording_of_ten_gigabytes_is_refused_at_its_first_invalid_byte() {
    let directory = tempfile::tempdir().unwrap();
    let recording = directory.path().join("recording");
    let whole = recording_bytes();
    std::fs::write(&recording, &whole).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&recording)
        .unwrap()
        .set_len(10 << 30)
        .unwrap();
    let limited = |arguments: &str| {
        let script = format!("ulimit -v 4194304; exec \"$0\" {arguments}");
        let stowage = env!("CARGO_BIN_EXE_stowage");
        output_of(
            Command::new("sh")
                .args(["-c", &script, stowage])
                .arg(&recording)
                .current_dir(&directory),
        )
    };
    let said = limited("explain starcoder --bundle \"$1\"");
    assert!(
        said.code == 2 && said.err.contains(&format!("at byte {}", whole.len())),
        "{}",
        said.err
    );
    for names in ["", "--redact"] {
        let said = limited(&format!("bundle --from \"$1\" -f whole.bundle {names}"));
        assert_eq!(said.code, 1, "{}{}", said.out, said.err);
        assert!(
            said.err
                .contains(&format!("damaged at byte {}", whole.len())),
            "{}",
            said.err
        );
        let bundle = directory.path().join("whole.bundle");
        assert!(std::fs::metadata(bundle).unwrap().len() < 2 * whole.len() as u64);
    }
    let said = limited("replay \"$1\"");
    assert_eq!(said.code, 2, "{}{}", said.out, said.err);
    assert!(
        said.out
            .contains(&format!("at byte {} of the recording", whole.len())),
        "{}",
        said.out
    );
}

#[test]
fn a_pod_is_explained_as_of_a_time_in_the_recording() {
    let recording = recorded_demo().to_str().unwrap();
    let explained = |more: &[&str]| {
        stowage(&[&["explain", "nowhere", "--bundle", recording][..], more].concat())
    };
    let said = explained(&[]);
    assert!(
        said.code == 2 && said.err.contains("no pod default/nowhere at its end"),
        "{}",
        said.err
    );
    let said = explained(&["--at", "2001-01-01T00:00:00Z"]);
    assert!(
        said.code == 2 && said.err.contains("the recording begins at 20"),
        "{}",
        said.err
    );
    let said = explained(&["--at", "2101-01-01T00:00:00Z"]);
    let (warned, refused) = (
        said.err.contains("warning: nothing is recorded from 20"),
        said.err.contains("no pod"),
    );
    assert!(said.code == 2 && warned && refused, "{}", said.err);
    let said = explained(&["--at", "noon"]);
    assert!(
        said.code == 2 && said.err.contains("such as `2026-"),
        "{}",
        said.err
    );
    let said = explained(&[
        "--at",
        "2001-01-01T00:00:00Z",
        "--server",
        "http://127.0.0.1:1",
    ]);
    assert!(
        said.code == 2 && said.err.contains("cannot be used with"),
        "{}",
        said.err
    );
}

/// When kube-scheduler asked to bind the pod, and when it was bound, by the wall clock in milliseconds.
fn bound_between(pod: &str) -> (i64, i64) {
    let bytes = recording_bytes();
    let (mut wall_of, mut now) = ((0, Moment::default()), Moment::default());
    let (mut uid, mut asked) = (None, None);
    for part in Reader::new(&bytes[..]) {
        let wall = |now: Moment| wall_of.0 + now.since(wall_of.1).0 as i64;
        match part.unwrap() {
            RecordingPart::Segment(header) => wall_of = (header.wall_ms, header.began),
            RecordingPart::Entry(Entry::Clock(moment)) => now = moment,
            RecordingPart::Entry(Entry::Input(NumberedInput { input, .. })) => match input {
                Input::BindAsked(bind) if &*bind.key.name == pod && asked.is_none() => {
                    (uid, asked) = (Some(bind.uid.clone()), Some(wall(now)));
                }
                Input::BindingAnswered(bound) if uid.as_ref() == Some(&bound.uid) => {
                    return (asked.unwrap(), wall(now));
                }
                _ => {}
            },
            RecordingPart::Entry(_) => {}
        }
    }
    panic!("the demo binds {pod}");
}

#[test]
fn the_same_pod_is_explained_differently_before_and_after_its_binding() {
    let (asked, bound) = bound_between("starcoder");
    let recording = recorded_demo().to_str().unwrap();
    let verdict = |at: i64| {
        let at = jiff::Timestamp::from_millisecond(at).unwrap().to_string();
        let said = stowage(&[
            "explain",
            "starcoder",
            "--bundle",
            recording,
            "--at",
            &at,
            "-o",
            "json",
        ]);
        let explanation: Option<Value> = serde_json::from_str(&said.out).ok();
        // Before the watch has shown it there is no such pod.
        explanation.map_or("none".to_owned(), |one| {
            one["verdict"].as_str().unwrap().to_owned()
        })
    };
    assert_ne!(verdict(asked - 1), "bound");
    assert_eq!(verdict(bound + 1), "bound");
}

/// A real disk that is full: the service answers as before, and what was written before replays.
#[test]
fn a_full_disk_stops_the_recording_only() {
    let folder = tempfile::tempdir().unwrap();
    let dump = json_dump(&folder);
    let disk = folder.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let record = ["--record", disk.to_str().unwrap()];
    let Some(serve) = RunningServe::with_small_disk(&dump, &disk, 40, &record) else {
        return report_skipped("`unshare --mount` and `mount -t tmpfs`");
    };
    let mut operators = Client::connect(serve.operators);
    let mut scheduler = Client::connect(serve.scheduler);
    let mut metric = |name: &str| {
        let page = operators.get_page("/metrics").text().to_owned();
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name}"))
            .parse::<f64>()
            .unwrap()
    };
    let mut ask = |n: usize| {
        let mut asked = pod(&format!("asked-{n}"), "40Gi");
        asked["metadata"]["uid"] = format!("uid-of-a-pod-that-is-asked-about-{n}").into();
        let answer = scheduler.post(
            "/scheduler/filter",
            args(&asked, &["node-a", "node-b"]).to_string(),
        );
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    eventually("the service has the cluster, and records", || {
        metric("stowage_recorder_recording") == 1.0 && metric("stowage_nodes") == 2.0
    });
    let mut asked = 0;
    eventually("the disk is full", || {
        (0..200).for_each(|n| ask(asked + n));
        asked += 200;
        metric("stowage_recorder_errors_total") > 0.0
    });
    let line = serve.wait_for_line("the flight recorder cannot write");
    assert!(
        line.contains("--record-size") && line.contains(disk.to_str().unwrap()),
        "{line}"
    );
    ask(asked);
    assert_eq!(metric("stowage_recorder_recording"), 0.0);
    assert!(metric("stowage_recorder_dropped_inputs_total") > 0.0);
    let said = stowage(&["replay", serve.seen(&disk).to_str().unwrap(), "-o", "json"]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let report: Value = serde_json::from_str(&said.out).unwrap();
    assert!(
        report["answers"].as_u64().unwrap() > 0,
        "what was written is read: {}",
        said.out
    );
}

#[test]
fn a_directory_that_cannot_be_recorded_into_is_named_before_anything_starts() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let dump = directory.path().join("dump.json");
    std::fs::write(&dump, r#"{"items":[]}"#).unwrap();
    let (dump, file) = (dump.to_str().unwrap(), file.to_str().unwrap());
    let said = stowage(&[&["serve", "--cluster", dump, "--record", file][..], &LISTEN].concat());
    assert!(
        said.code == 1 && said.err.contains(&format!("--record {file}: ")),
        "{}{}",
        said.out,
        said.err
    );
}

/// The demo's recording as two segments in a directory of its own, the first of them this long.
fn two_segments(folder: &Path, of_the_first: impl Fn(usize) -> usize) {
    let mut segments: Vec<PathBuf> = std::fs::read_dir(recorded_demo())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    segments.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "stowrec")
    });
    segments.sort();
    let first = std::fs::read(&segments[0]).unwrap();
    let kept = of_the_first(first.len());
    let [one, two] = ["000000000000001-000.stowrec", "000000000000002-000.stowrec"];
    std::fs::write(folder.join(one), &first[..kept]).unwrap();
    std::fs::write(folder.join(two), &first).unwrap();
}

/// A killed process leaves a segment without an end, and the next process begins with a state of its own.
#[test]
fn a_segment_that_a_killed_process_left_is_followed_by_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    two_segments(folder.path(), |whole| whole - 10);
    let said = stowage(&["replay", folder.path().to_str().unwrap()]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    assert!(
        said.out.contains("1 restart") && said.out.contains("1 segment without an end"),
        "{}",
        said.out
    );
    assert!(!said.out.contains("gap"), "{}", said.out);
}

/// The segment behind says that nothing is missing before it, so no killed process left this.
#[test]
fn a_segment_that_is_cut_in_the_middle_of_a_recording_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let whole = recording_bytes();
    // The demo ends with a segment for its last checkpoint.
    let begins = |from: usize| {
        whole[from..]
            .windows(8)
            .position(|eight| eight == b"STOWREC\n")
            .map(|at| from + at)
    };
    let Some(second) = begins(1) else {
        return report_skipped("a recorded demo of two segments");
    };
    let (first, rest) = whole.split_at(second);
    std::fs::write(
        path("000000000000001-000.stowrec"),
        &first[..first.len() - 10],
    )
    .unwrap();
    std::fs::write(path("000000000000002-000.stowrec"), rest).unwrap();
    let recording = folder.path().to_str().unwrap();
    let named = |text: &str| {
        text.contains("000000000000001-000.stowrec") && text.contains("is cut at byte ")
    };
    let said = stowage(&["replay", recording]);
    assert!(
        said.code == 2 && named(&said.out),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
    assert!(!said.out.contains("without an end"), "{}", said.out);
    for more in [
        &["explain", "starcoder", "--bundle", recording][..],
        &["replay", recording, "--packing", "best-fit"],
    ] {
        let said = stowage(more);
        assert!(
            said.code == 2 && named(&said.err),
            "{} {}{}",
            said.code,
            said.out,
            said.err
        );
    }
}

#[test]
fn a_replay_without_comparisons_does_not_report_success() {
    let whole = recording_bytes();
    // A segment's header and nothing else: its first frame ends with the first checkpoint or before.
    let said = replay(&whole[..12]);
    assert!(
        said.code == 2 && !said.out.contains("Every answer"),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
    let said = stowage(&["replay", recorded_demo().to_str().unwrap()]);
    assert!(
        said.out.contains("Recorded from 20") && said.out.contains("Every answer"),
        "{}",
        said.out
    );
}

/// Somebody tidies up: the recording goes on in a new directory, and it is still one service's.
#[test]
fn a_directory_that_is_removed_while_it_is_recorded_into_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let dump = json_dump(&folder);
    let recorded = folder.path().join("recording");
    let record = ["--record", recorded.to_str().unwrap()];
    let _serve = RunningServe::serve_with(&dump, &record);
    let has = |name: &str| {
        let names = std::fs::read_dir(&recorded).into_iter().flatten();
        names
            .filter(|entry| {
                entry
                    .as_ref()
                    .unwrap()
                    .file_name()
                    .to_string_lossy()
                    .ends_with(name)
            })
            .count()
    };
    eventually("it records", || has(".stowrec") > 0);
    std::fs::remove_dir_all(&recorded).unwrap();
    eventually("it records again", || has(".stowrec") > 0);
    let said = stowage(
        &[
            &["serve", "--cluster", dump.to_str().unwrap()][..],
            &record,
            &LISTEN,
        ]
        .concat(),
    );
    assert!(
        said.code == 1 && said.err.contains("another service records there"),
        "{}{}",
        said.out,
        said.err
    );
}

/// What came before it is not compared with anything.
#[test]
fn a_recording_of_one_checkpoint_has_nothing_to_compare() {
    let whole = recording_bytes();
    let begins = |at: &usize| whole[*at..].starts_with(b"STOWREC\n");
    let last = (0..whole.len()).rev().find(begins).unwrap();
    let said = replay(&whole[last..]);
    assert!(
        said.code == 0 && said.out.contains("There is nothing to compare"),
        "{} {}",
        said.code,
        said.out
    );
}
