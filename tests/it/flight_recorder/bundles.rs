//! `stowage bundle` as its users run it: what is in a bundle, with names and without, what it leaves out, and what it leaves behind.

use super::{CONTROL_PLANE_RECORDING, output_of, recorded_demo, recording_bytes, stowage};
use crate::process::{RunningServe, eventually, json_dump};
use std::path::Path;
use std::process::{Command, Stdio};
use stowage_recording::entry::Entry;
use stowage_recording::read::{Reader, RecordingPart};

/// Everything that a recording says.
fn text_of(recording: &Path) -> String {
    let parts =
        Reader::new(std::fs::File::open(recording).unwrap()).map(|part| match part.unwrap() {
            RecordingPart::Segment(header) => serde_json::to_string(&header).unwrap(),
            RecordingPart::Entry(Entry::Checkpoint(checkpoint)) => {
                serde_json::to_string(&checkpoint).unwrap()
            }
            RecordingPart::Entry(Entry::Clock(now)) => now.0.to_string(),
            RecordingPart::Entry(Entry::Input(input)) => serde_json::to_string(&input).unwrap(),
            RecordingPart::Entry(Entry::Answer(answer)) => serde_json::to_string(&answer).unwrap(),
        });
    parts.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_redacted_bundle_has_no_name_and_replays_as_the_one_with_names() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("redacted.bundle");
    let demo = recorded_demo().to_str().unwrap();
    const NAMESPACE: &str = r#""namespace":"default""#;
    let of_demo = [
        "node-a",
        "GPU-",
        "llama",
        "qwen",
        "batch-eval",
        "opportunistic",
        "urgent",
        NAMESPACE,
    ];
    let of_control_plane = [
        "h100-a",
        "l40s-a",
        "GPU-",
        "filler",
        "chat",
        "behind-a-gate",
        "kube-system",
        NAMESPACE,
    ];
    for (recording, names) in [
        (demo, &of_demo[..]),
        (CONTROL_PLANE_RECORDING, &of_control_plane),
    ] {
        let said = stowage(&[
            "bundle",
            "--from",
            recording,
            "--redact",
            "-f",
            bundle.to_str().unwrap(),
        ]);
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
        let text = text_of(&bundle);
        let left: Vec<_> = names.iter().filter(|name| text.contains(**name)).collect();
        assert!(left.is_empty(), "{left:?}");
        assert!(text.contains("NVIDIA-"), "models of GPUs stay");
        let progress = |recording: &str| {
            let said = stowage(&["replay", recording, "-o", "json"]);
            assert_eq!(said.code, 0, "{}{}", said.out, said.err);
            said.out
        };
        assert_eq!(progress(bundle.to_str().unwrap()), progress(recording));
        let said = stowage(&["replay", bundle.to_str().unwrap(), "--packing", "best-fit"]);
        assert_eq!(
            said.code, 0,
            "another packing needs no names: {}{}",
            said.out, said.err
        );
    }
    let said = stowage(&[
        "bundle",
        "--from",
        "/nonexistent",
        "-f",
        bundle.to_str().unwrap(),
    ]);
    assert!(
        said.code == 1 && said.err.contains("/nonexistent"),
        "{}{}",
        said.out,
        said.err
    );
}

#[test]
fn a_bundle_of_a_recording_that_is_cut_or_damaged_says_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (recording, bundle) = (path("recording"), path("bundle"));
    let whole = recording_bytes();
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    for (recorded, is_whole) in [
        (&whole[..], true),
        (&whole[..whole.len() - 10], false),
        (&damaged, false),
    ] {
        std::fs::write(&recording, recorded).unwrap();
        for redaction in [&[][..], &["--redact"]] {
            let said = stowage(
                &[
                    &["bundle", "--from", &recording, "-f", &bundle][..],
                    redaction,
                ]
                .concat(),
            );
            assert_eq!(
                said.code,
                if is_whole { 0 } else { 1 },
                "{}{}",
                said.out,
                said.err
            );
            assert_eq!(said.err.is_empty(), is_whole, "{}", said.err);
            assert!(
                is_whole
                    || said
                        .err
                        .contains(&format!("warning: {recording} is cut or damaged at byte "))
            );
            assert_eq!(stowage(&["replay", &bundle]).code, 0, "what it has replays");
        }
    }
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
    let redacted = folder.path().join("redacted.bundle");
    let redacted = redacted.to_str().unwrap();
    let said = stowage(&["bundle", "--server", &server, "--redact", "-f", redacted]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    let said = stowage(&["replay", redacted]);
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    // The dump is loaded within moments; the bundle may be of before.
    eventually("the pod of the dump is in the bundle", || {
        stowage(&["bundle", "--server", &server, "-f", bundle]);
        stowage(&["explain", "llm", "--bundle", bundle])
            .out
            .starts_with("default/llm fits")
    });
    stowage(&["bundle", "--server", &server, "--redact", "-f", redacted]);
    let said = stowage(&["explain", "llm", "--bundle", redacted]);
    assert!(
        said.code == 2 && said.err.contains("no pod default/llm"),
        "{}{}",
        said.out,
        said.err
    );
    let without = RunningServe::serve_with(&dump, &[]);
    let said = stowage(&[
        "bundle",
        "--server",
        &format!("http://{}", without.operators),
        "-f",
        bundle,
    ]);
    assert!(
        said.code == 1 && said.err.contains("`stowage serve --record DIR`"),
        "{}{}",
        said.out,
        said.err
    );
}

#[test]
fn a_missing_bundle_is_an_error_for_every_output() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::write(&empty, "").unwrap();
    let file = folder.path().join("bundle");
    for to in ["-", "/dev/null", file.to_str().unwrap()] {
        let said = stowage(&["bundle", "--from", empty.to_str().unwrap(), "-f", to]);
        assert!(
            said.code == 1 && said.out.is_empty() && said.err.contains("has no recording"),
            "{to}: {}{}",
            said.out,
            said.err
        );
    }
    assert!(!file.exists());
}

#[test]
fn a_bundle_of_another_version_says_what_it_lacks_and_a_pipe_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (recording, bundle) = (path("recording"), path("bundle"));
    let mut other = recording_bytes();
    other[8] += 1;
    std::fs::write(&recording, &other).unwrap();
    let said = stowage(&["bundle", "--from", &recording, "-f", &bundle]);
    assert!(
        said.code == 1 && said.err.contains("has format 2 at byte 0"),
        "{} {}{}",
        said.code,
        said.out,
        said.err
    );
    std::fs::write(&recording, recording_bytes()).unwrap();
    let piped = |arguments: &str| {
        let script = format!(
            "cat {recording} | {} {arguments}",
            env!("CARGO_BIN_EXE_stowage")
        );
        output_of(Command::new("sh").args(["-c", &script]))
    };
    for from in ["-", "/dev/stdin"] {
        let said = piped(&format!("bundle --from {from} -f {bundle}"));
        assert_eq!(said.code, 0, "{from}: {}{}", said.out, said.err);
        assert_eq!(std::fs::read(&bundle).unwrap(), recording_bytes());
        let said = piped(&format!("bundle --from {from} -f {bundle} --redact"));
        assert!(
            said.code == 1 && said.err.contains("write it to a file first"),
            "{from}: {}",
            said.err
        );
        let said = piped(&format!("replay {from} --packing best-fit"));
        assert!(
            said.code == 2 && said.err.contains("write it to a file first"),
            "{from}: {} {}",
            said.code,
            said.err
        );
    }
}

/// A server that begins an answer and, once it is told to, ends the connection.
fn stalled_server(answer: &'static [u8]) -> (String, std::sync::mpsc::Sender<()>) {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (ends, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        let _ = connection.read(&mut [0; 4096]);
        connection.write_all(answer).unwrap();
        let _ = ended.recv();
    });
    (address, ends)
}

const HALF: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nSTOWREC\n\x01\0\0\0";

#[test]
fn a_truncated_or_invalid_download_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = folder.path().join("bundle");
    let fetch = |answer| {
        let (server, ends) = stalled_server(answer);
        drop(ends);
        let said = stowage(&[
            "bundle",
            "--server",
            &server,
            "-f",
            bundle.to_str().unwrap(),
        ]);
        assert!(
            said.code == 1 && said.out.is_empty(),
            "{} {}{}",
            said.code,
            said.out,
            said.err
        );
        assert_eq!(
            std::fs::read_dir(&folder).unwrap().count(),
            0,
            "nothing is left"
        );
        said.err
    };
    let said = fetch(HALF);
    assert!(said.contains("broke off after 12 bytes"), "{said}");
    let said = fetch(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello");
    assert!(said.contains("no bundle of Stowage"), "{said}");
}

#[test]
fn a_server_in_plain_http_is_not_asked_with_tls() {
    let (server, ends) = stalled_server(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    drop(ends);
    let said = stowage(&[
        "bundle",
        "--server",
        &server.replace("http:", "https:"),
        "-f",
        "-",
    ]);
    assert!(
        said.code == 1 && said.err.contains(&format!("write --server {server}")),
        "{}",
        said.err
    );
}

#[test]
fn an_interrupted_bundle_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    for (signal, code) in [("HUP", 129), ("INT", 130), ("TERM", 143)] {
        let (server, _ends) = stalled_server(HALF);
        let bundle = folder.path().join("bundle");
        let mut running = Command::new(env!("CARGO_BIN_EXE_stowage"))
            .args([
                "bundle",
                "--server",
                &server,
                "-f",
                bundle.to_str().unwrap(),
            ])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        eventually("it has begun to write", || {
            std::fs::read_dir(&folder).unwrap().count() == 1
        });
        let sent = Command::new("kill")
            .args(["-s", signal, &running.id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
        assert_eq!(running.wait().unwrap().code(), Some(code));
        assert_eq!(
            std::fs::read_dir(&folder).unwrap().count(),
            0,
            "after SIG{signal}"
        );
    }
}

#[test]
fn a_bundle_to_a_closed_pipe_exits_as_after_sigpipe() {
    let script = "\"$0\" bundle --from \"$1\" -f - | head -c 1 > /dev/null; exit ${PIPESTATUS[0]}";
    let mut shell = Command::new("bash");
    let demo = shell
        .args(["-c", script, env!("CARGO_BIN_EXE_stowage")])
        .arg(recorded_demo());
    let said = output_of(demo);
    assert!(
        said.code == 141 && said.err.is_empty(),
        "{} {}",
        said.code,
        said.err
    );
}
