//! The log is written in words: no value in it is printed as Rust prints it for debugging.

use crate::client::Client;
use crate::process::json_dump;
use crate::served::{args, bind_args, pod};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use syn::visit::{self, Visit};

/// How Rust's own types begin when they are printed for debugging.
const RUST: [&str; 8] = [
    "Some(", "None", "Ok(", "Err(", "Uuid(", "Name(", "Uid(", " { ",
];

fn assert_no_debug_output(log: &str) {
    let rust: Vec<&str> = log
        .lines()
        .filter(|line| RUST.iter().any(|part| line.contains(part)))
        .collect();
    assert!(rust.is_empty(), "{}", rust.join("\n"));
}

#[test]
fn the_demos_log_has_no_debug_output() {
    let demo = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args(["demo", "--json"])
        .env("RUST_LOG", "stowage=debug")
        .output()
        .unwrap();
    let log = String::from_utf8(demo.stderr).unwrap();
    assert!(demo.status.success(), "{log}");
    assert!(
        log.contains(" bound") && log.contains("place planned"),
        "the log is there: {log}"
    );
    assert_no_debug_output(&log);
}

#[test]
fn the_log_of_calls_and_refusals_has_no_debug_output_as_text_and_json() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--agents",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ])
        .args(["--log-format", "json", "--cluster"])
        .arg(json_dump(&folder))
        .env("RUST_LOG", "stowage=debug")
        .stderr(std::fs::File::create(&log).unwrap())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let text = || std::fs::read_to_string(&log).unwrap();
    let address = || {
        let (_, after) = text()
            .split_once("the scheduler: http://")
            .map(|(a, b)| (a.to_owned(), b.to_owned()))?;
        after.split('"').next()?.parse().ok()
    };
    crate::process::eventually("it listens", || address().is_some());
    let scheduler = address().unwrap();
    let llm = pod("llm", "40Gi");
    for (verb, body) in [
        ("filter", args(&llm, &["node-a", "node-b"])),
        ("filter", args(&pod("large", "400Gi"), &["node-a"])),
        ("filter", args(&pod("fraction", "1.5"), &["node-a"])),
        ("bind", bind_args(&pod("absent", "1Gi"), "node-a")),
        ("bind", bind_args(&llm, "node-b")),
    ] {
        let mut client = Client::connect(scheduler);
        assert_eq!(
            client
                .post(&format!("/scheduler/{verb}"), body.to_string())
                .status,
            200,
            "{verb}"
        );
    }
    crate::process::eventually("the binding is logged", || {
        text().contains(r#""message":"bound""#)
    });
    let _ = serve.kill();
    let _ = serve.wait();
    for line in text().lines() {
        let event: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(
            event["message"].is_string() && event["level"].is_string(),
            "{line}"
        );
        for (field, value) in event.as_object().unwrap() {
            assert_no_debug_output(&format!("{field}: {}", value.as_str().unwrap_or_default()));
        }
    }
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn serve_keeps_running_when_its_log_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_stowage"))
        .args([
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--agents",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--cluster",
        ])
        .arg(json_dump(&folder))
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut serve = KillOnDrop(child);
    let mut lines = BufReader::new(serve.0.stderr.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let scheduler = lines.find_map(|line| {
        Some(
            line.split_once("the scheduler: http://")?
                .1
                .parse()
                .unwrap(),
        )
    });
    assert!(
        lines.any(|line| line.contains("operators: http")),
        "it serves"
    );
    drop(lines);
    let mut client = Client::connect(scheduler.expect("it says where it listens"));
    let llm = pod("llm", "40Gi");
    assert_eq!(
        client
            .post("/scheduler/filter", args(&llm, &["node-b"]).to_string())
            .status,
        200
    );
    let bound = client.post("/scheduler/bind", bind_args(&llm, "node-b").to_string());
    assert_eq!(bound.json()["Error"], "", "{}", bound.text());
    drop(client);
    let sent = Command::new("sh")
        .args(["-c", &format!("kill -TERM {}", serve.0.id())])
        .status()
        .unwrap();
    assert!(sent.success());
    let mut ended = None;
    crate::process::eventually("it ends", || {
        ended = serve.0.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().code(), Some(0));
}

/// Calls of tracing's macros that print a value for debugging.
#[derive(Default)]
struct DebugFields {
    found: Vec<String>,
    macros: usize,
}

impl<'ast> Visit<'ast> for DebugFields {
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let name = call
            .path
            .segments
            .last()
            .map(|last| last.ident.to_string())
            .unwrap_or_default();
        if matches!(
            &*name,
            "trace" | "debug" | "info" | "warn" | "error" | "info_span" | "debug_span"
        ) {
            self.macros += 1;
            let tokens = call.tokens.to_string();
            if [", ?", "= ?", ":?}"]
                .iter()
                .any(|part| tokens.contains(part))
                || tokens.starts_with('?')
            {
                self.found.push(tokens);
            }
        }
        visit::visit_macro(self, call);
    }
}

fn source_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let each = entries.flat_map(|path| {
        if path.is_dir() {
            source_files(&path)
        } else {
            vec![path]
        }
    });
    each.filter(|path| path.extension().is_some_and(|ending| ending == "rs"))
        .collect()
}

#[test]
fn no_call_of_the_logger_prints_a_value_for_debugging() {
    let mut seen = DebugFields::default();
    for path in source_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let before = seen.found.len();
        seen.visit_file(&syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap());
        let name = path.display().to_string();
        seen.found[before..]
            .iter_mut()
            .for_each(|found| *found = format!("{name}: {found}"));
    }
    assert!(seen.macros > 80, "only {} calls were found", seen.macros);
    assert!(
        seen.found.is_empty(),
        "write it in words:\n{}",
        seen.found.join("\n")
    );
}
