//! What every command prints, found from the command line itself, so that a new command cannot forget it: it ends when its reader
//! goes, keeps to the screen's width, and has the formats for programs.

use crate::agent::world::kubeconfig;
use crate::process::json_dump;
use crate::served::{Served, ServedCluster, pod};
use clap::CommandFactory;
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use stowage::cli::Cli;
use stowage_lab::demo::api_server::ApiServer;
use tempfile::TempDir;

/// Commands that print no answer: they serve, wait or write files.
const WITHOUT_AN_ANSWER: [&str; 5] = ["serve", "ui", "bundle", "wait-turn", "man"];

/// What the commands ask: a service, an API server and files.
struct World {
    served: Served,
    api: ApiServer,
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        let served = ServedCluster::with_gpus(&[("node-a", 1), ("node-b", 8)])
            .with([pod("llm", "40Gi"), pod("large", "100Gi")])
            .serve();
        let api = served.run(ApiServer::start()).unwrap();
        Self {
            served,
            api,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    /// The command with arguments that it answers.
    fn command(&self, name: &str) -> Command {
        let server = format!("--server=http://{}", self.served.operators);
        let dump = format!("--cluster={}", json_dump(&self.folder).display());
        let config = self.folder.path().join("kubeconfig");
        std::fs::write(&config, kubeconfig(&self.api.uri().to_string())).unwrap();
        let config = format!("--kubeconfig={}", config.display());
        let policy = "policies/three-teams";
        let arguments: &[&str] = match name {
            "agent" => &["--once", "--node=node-a"],
            "demo" => &["--once"],
            "policy check" | "policy test" | "policy show" => &[policy],
            "policy diff" => &[policy, "policies/night-pool", &dump],
            "policy schema" | "version" => &[],
            "explain" => &["large", &server],
            "estimate" => &["--model=llama-3.1-8b"],
            "plan capacity" => &[
                "--pods=manifests/base/priority-classes.yaml",
                "--pods=manifests/examples/three-models.yaml",
                "--nodes=gpus=4,gpu=A100-80GB",
            ],
            "preflight" => &[&dump],
            "assess" => &[
                "--cluster=tests/fixtures/assess/device-plugin.json",
                "--metrics=tests/fixtures/assess/week.json",
            ],
            "models" => &[&server],
            "top" => &["--once", &server],
            "replay" => &["tests/fixtures/recordings/control-plane.stowrec"],
            "simulate packing" => &["--seeds=42", "--policy=packing"],
            "simulate faults" => &["--seeds=0", "--steps=20"],
            "simulate mixed-models" => &["--seeds=42", "--short"],
            "uninstall" => &["--dry-run", &config],
            "completion" => &["bash"],
            "schema" => &["report"],
            _ => panic!("say here with which arguments `stowage {name}` answers"),
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
        command
            .args(name.split(' '))
            .args(arguments)
            .stdin(Stdio::null())
            .env_remove("COLUMNS")
            .env("KUBECONFIG", "/nonexistent");
        command
    }
}

/// Every command that has no commands below it.
fn leaves() -> Vec<(String, clap::Command)> {
    fn below(prefix: &str, command: &clap::Command, found: &mut Vec<(String, clap::Command)>) {
        for one in command.get_subcommands() {
            let name = format!("{prefix}{}", one.get_name());
            match one.has_subcommands() {
                true => below(&format!("{name} "), one, found),
                false => found.push((name, one.clone())),
            }
        }
    }
    let mut found = Vec::new();
    below("", &Cli::command(), &mut found);
    found
}

/// Every command that prints an answer.
fn answering() -> impl Iterator<Item = (String, clap::Command)> {
    let answers = |(name, _): &(String, _)| !WITHOUT_AN_ANSWER.contains(&&**name);
    leaves().into_iter().filter(answers)
}

/// Those that are run. Scenarios print alike, and take long: one stands for all.
fn run_here() -> impl Iterator<Item = String> {
    let is_run = |name: &String| match name.strip_prefix("simulate ") {
        Some(what) => ["packing", "faults", "mixed-models"].contains(&what),
        None => true,
    };
    answering().map(|(name, _)| name).filter(is_run)
}

#[test]
fn a_command_whose_reader_has_gone_ends_quietly() {
    let world = World::new();
    for name in run_here() {
        let (reader, stdout) = std::io::pipe().unwrap();
        drop(reader);
        let ended = world.command(&name).stdout(stdout).output().unwrap();
        let err = String::from_utf8(ended.stderr).unwrap();
        assert_eq!((ended.status.code(), &*err), (Some(141), ""), "{name}");
    }
}

#[test]
fn a_demo_whose_reader_goes_after_a_chapter_ends_with_that_chapter() {
    let world = World::new();
    for stopped_at in ["1. ", "3. "] {
        let mut demo = world.command("demo");
        let mut demo = demo.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().starts_with(stopped_at)));
        drop(lines);
        assert_eq!(demo.wait().unwrap().code(), Some(141), "{stopped_at}");
    }
}

/// Commands whose text is made for a program, or is drawn: a script, a schema, a policy file and the demo's pictures of GPUs.
const WITHOUT_PARAGRAPHS: [&str; 5] = [
    "completion",
    "schema",
    "policy schema",
    "policy show",
    "demo",
];

fn printed(command: &mut Command) -> String {
    let ran = command.output().unwrap();
    let err = String::from_utf8(ran.stderr).unwrap();
    assert!(!ran.stdout.is_empty(), "{command:?}: {err}");
    String::from_utf8(ran.stdout).unwrap()
}

/// Without figures, which may have changed meanwhile.
fn words(text: &str) -> BTreeSet<String> {
    let word = |word: &str| word.replace(|c: char| c.is_ascii_digit(), "");
    text.split_whitespace().map(word).collect()
}

#[test]
fn what_is_printed_is_as_wide_as_the_screen_at_most_and_no_word_is_broken() {
    let world = World::new();
    for name in run_here() {
        if WITHOUT_PARAGRAPHS.contains(&&*name) {
            continue;
        }
        let whole = words(&printed(&mut world.command(&name)));
        let text = printed(world.command(&name).env("COLUMNS", "80"));
        let lines = text.lines();
        let wide: Vec<&str> = lines.filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{name}: {wide:#?}\n{text}");
        let broken: Vec<String> = words(&text).difference(&whole).cloned().collect();
        assert!(broken.is_empty(), "{name}: {broken:?}\n{text}");
    }
}

/// Commands whose answer has a form of its own already.
const WITHOUT_FORMATS: [&str; 3] = ["completion", "schema", "policy schema"];

/// Figures are left out: they may have changed from one question to the next.
fn without_figures(value: Value) -> Value {
    match value {
        Value::Number(_) => Value::from(0),
        Value::String(text) => Value::from(text.replace(|c: char| c.is_ascii_hexdigit(), "")),
        Value::Array(items) => items.into_iter().map(without_figures).collect(),
        Value::Object(fields) => {
            let fields = fields.into_iter();
            Value::Object(fields.map(|(k, v)| (k, without_figures(v))).collect())
        }
        other => other,
    }
}

#[test]
fn every_command_with_an_answer_prints_it_as_json_and_as_the_same_yaml() {
    for (name, command) in answering() {
        if WITHOUT_FORMATS.contains(&&*name) {
            continue;
        }
        let formats = command
            .get_arguments()
            .find(|argument| argument.get_id() == "output")
            .unwrap_or_else(|| panic!("`stowage {name}` has no -o"))
            .get_possible_values();
        let formats: Vec<&str> = formats.iter().map(|format| format.get_name()).collect();
        assert_eq!(formats, ["text", "json", "yaml"], "{name}");
    }
    let world = World::new();
    for name in run_here() {
        if WITHOUT_FORMATS.contains(&&*name) {
            continue;
        }
        let [json, yaml] =
            ["json", "yaml"].map(|format| printed(world.command(&name).args(["-o", format])));
        let json: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{name}: {json}"));
        let read: Value =
            serde_saphyr::from_str(&yaml).unwrap_or_else(|error| panic!("{name}: {error}: {yaml}"));
        assert_eq!(without_figures(read), without_figures(json), "{name}");
    }
}

#[test]
fn ui_prints_an_address_only_if_a_stowage_answers_behind_it() {
    let world = World::new();
    let page = TcpListener::bind("127.0.0.1:0").unwrap();
    let of_page = page.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in page.incoming().map_while(Result::ok) {
            let login = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nlogin";
            let asked = BufReader::new(&stream).lines().map_while(Result::ok);
            asked.take_while(|line| !line.is_empty()).for_each(drop);
            let _ = { &stream }.write_all(login.as_bytes());
        }
    });
    for (server, said) in [
        (
            world.served.scheduler.to_string(),
            "the scheduler's address",
        ),
        (of_page.to_string(), "is no fleet"),
        ("127.0.0.1:1".to_owned(), "Is `stowage serve` running"),
    ] {
        let mut ui = Command::new(env!("CARGO_BIN_EXE_stowage"))
            .args(["ui", "--server", &format!("http://{server}")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut printed = String::new();
        BufReader::new(ui.stdout.take().unwrap())
            .read_line(&mut printed)
            .unwrap();
        let _ = ui.kill();
        let err = String::from_utf8(ui.wait_with_output().unwrap().stderr).unwrap();
        assert!(printed.is_empty(), "{server}: {printed}");
        assert!(err.contains(said), "{server}: {err}");
    }
}
