//! `stowage top` and the plugin of kubectl, as a user runs them.

use crate::needs::skip_not_installed;
use crate::running_demo::RunningDemo;
use crate::served::{ServedCluster, bound_on, pod};
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn run(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .env("KUBECONFIG", "/nonexistent")
        .output()
        .unwrap()
}

fn stowage(arguments: &[&str]) -> Output {
    run(Path::new(env!("CARGO_BIN_EXE_stowage")), arguments)
}

fn served() -> crate::served::Served {
    let two = [
        bound_on(pod("running", "40Gi"), "node-a", &[0], 40 << 30),
        pod("waiting", "30Gi"),
    ];
    ServedCluster::with_gpus(&[("node-a", 2), ("node-b", 1)])
        .with(two)
        .serve()
}

#[test]
fn a_table_is_printed_once_and_the_figures_as_json_or_yaml() {
    let served = served();
    let server = format!("http://{}", served.operators);
    let once = stowage(&["top", "--once", "--server", &server]);
    let table = text(&once.stdout);
    assert!(once.status.success(), "{}", text(&once.stderr));
    assert!(
        table.starts_with("2 nodes, 3 GPUs, 40.0 GiB of 216.0 GiB allocated"),
        "{table}"
    );
    assert!(
        table.contains("node-a") && table.contains("40/144 GiB"),
        "{table}"
    );
    let gpus = text(&stowage(&["top", "--once", "--view", "gpus", "--server", &server]).stdout);
    assert!(gpus.contains("40.0/72.0 GiB"), "{gpus}");
    let pending =
        text(&stowage(&["top", "--once", "--view", "pending", "--server", &server]).stdout);
    assert!(pending.contains("default/waiting"), "{pending}");
    let json = text(&stowage(&["top", "-o", "json", "--server", &server]).stdout);
    let yaml = text(&stowage(&["top", "-o", "yaml", "--server", &server]).stdout);
    let json: Value = serde_json::from_str(&json).unwrap();
    let yaml: Value = serde_saphyr::from_str(&yaml).unwrap();
    assert_eq!(json["nodes"][0]["pods"][0]["pod"]["name"], "running");
    assert_eq!(json["nodes"], yaml["nodes"]);
}

#[test]
fn without_an_answer_or_a_terminal_it_says_so() {
    let gone = stowage(&["top", "--once", "--server", "http://127.0.0.1:1"]);
    assert_eq!(gone.status.code(), Some(2));
    assert!(
        text(&gone.stderr).contains("no answer from http://127.0.0.1:1"),
        "{}",
        text(&gone.stderr)
    );
    let no_terminal = stowage(&["top", "--server", "http://127.0.0.1:1"]);
    assert_eq!(no_terminal.status.code(), Some(2));
    let said = text(&no_terminal.stderr);
    assert!(
        said.contains("--once") && !said.contains('\u{1b}'),
        "{said}"
    );
    let interval = stowage(&["top", "--interval", "1ms"]);
    assert!(interval.status.code() == Some(2) && text(&interval.stderr).contains("500ms"));
}

/// A tmux server of its own, which ends with the test.
struct Tmux {
    folder: tempfile::TempDir,
}

impl Tmux {
    /// `None`, with a line that says so, where there is no tmux.
    fn start(command: &str) -> Option<Self> {
        let found = Command::new("tmux")
            .arg("-V")
            .stdout(Stdio::null())
            .status();
        if !found.is_ok_and(|status| status.success()) {
            skip_not_installed("tmux", "tmux");
            return None;
        }
        let tmux = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let started = tmux.run(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "110",
            "-y",
            "24",
            command,
        ]);
        assert!(started.status.success(), "{}", text(&started.stderr));
        Some(tmux)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let socket = self.folder.path().join("tmux");
        Command::new("tmux")
            .arg("-S")
            .arg(socket)
            .args(arguments)
            .output()
            .unwrap()
    }

    fn keys(&self, keys: &[&str]) {
        self.run(&[&["send-keys"], keys].concat());
    }

    fn screen(&self) -> String {
        text(&self.run(&["capture-pane", "-p"]).stdout)
    }

    /// The first screen for which it holds.
    fn until(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let mut screen = String::new();
        let began = Instant::now();
        while began.elapsed() < crate::client::TEST_TIMEOUT {
            screen = self.screen();
            if holds(&screen) {
                return screen;
            }
            std::thread::park_timeout(Duration::from_millis(50));
        }
        panic!("it never came that {what}:\n{screen}");
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
    }
}

#[test]
fn every_view_is_reachable_and_the_terminal_is_restored() {
    let served = served();
    let server = format!("http://{}", served.operators);
    let top = format!(
        "{} top --server {server} --interval 500ms",
        env!("CARGO_BIN_EXE_stowage")
    );
    let Some(tmux) = Tmux::start("env PS1='prompt> ' sh") else {
        return;
    };
    tmux.keys(&[
        &format!("echo before; {top}; echo after: $?; stty -a | grep -o ' -\\?icanon'"),
        "Enter",
    ]);
    tmux.until("it shows nodes", |screen| {
        screen.starts_with("2 nodes, 3 GPUs") && screen.contains("node-b")
    });
    tmux.keys(&["2"]);
    tmux.until("it shows GPUs", |screen| screen.contains("40.0/72.0 GiB"));
    tmux.keys(&["/", "node-b", "Enter"]);
    tmux.until("it filters", |screen| {
        screen.contains("1/1") && !screen.contains("40.0/72.0")
    });
    tmux.keys(&["?"]);
    tmux.until("it helps", |screen| screen.contains("Any key closes this."));
    tmux.keys(&["x"]);
    tmux.run(&["resize-window", "-x", "60", "-y", "10"]);
    tmux.until("it follows the size", |screen| {
        screen.contains("node-b") && screen.lines().count() <= 10
    });
    // The server goes; the figures stay.
    drop(served);
    tmux.until("they are marked", |screen| {
        screen.starts_with("OLD, ") && screen.contains("node-b")
    });
    tmux.keys(&["q"]);
    let end = tmux.until("the prompt is back", |screen| {
        screen.contains("after: 0") && screen.contains("icanon")
    });
    assert!(end.contains("before"), "the screen is as it was: {end}");
    assert!(!end.contains("-icanon"), "lines are edited again: {end}");
}

/// A connection that is lost, or a terminal that is closed.
#[test]
fn top_exits_when_its_terminal_closes() {
    let served = served();
    let server = format!("http://{}", served.operators);
    let command = format!(
        "exec {} top --server {server} --interval 500ms",
        env!("CARGO_BIN_EXE_stowage")
    );
    let Some(tmux) = Tmux::start(&command) else {
        return;
    };
    tmux.until("it shows nodes", |screen| screen.contains("node-b"));
    let process = format!(
        "/proc/{}",
        text(&tmux.run(&["display-message", "-p", "#{pane_pid}"]).stdout).trim()
    );
    assert!(Path::new(&process).exists());
    tmux.run(&["kill-server"]);
    let began = Instant::now();
    while Path::new(&process).exists() {
        assert!(
            began.elapsed() < crate::client::TEST_TIMEOUT,
            "it runs on without a terminal"
        );
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

#[test]
fn top_shows_the_running_demo() {
    let Some(tmux) = Tmux::start("sh") else {
        return;
    };
    let demo = RunningDemo::start();
    let address = &demo.operators;
    let top = format!(
        "exec {} top --view pods --server {address}",
        env!("CARGO_BIN_EXE_stowage")
    );
    tmux.keys(&[&top, "Enter"]);
    let first = tmux.until("it shows the demo", |screen| {
        screen.contains("5 nodes, 13 GPUs") && screen.contains("node-a")
    });
    let began = Instant::now();
    let mut screens = std::collections::BTreeSet::from([first]);
    while began.elapsed() < Duration::from_secs(5) || screens.len() < 2 {
        assert!(began.elapsed() < crate::client::TEST_TIMEOUT, "{screens:?}");
        screens.insert(tmux.screen());
        std::thread::park_timeout(Duration::from_millis(200));
    }
    let shows = |part: &str| screens.iter().any(|screen| screen.contains(part));
    assert!(
        shows("running") || shows("starting") || shows("binding"),
        "{screens:?}"
    );
}

#[test]
fn kubectl_finds_it_as_a_plugin_that_has_the_commands_for_users() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["kubectl-stowage", "kubectl_stowage"] {
        symlink(env!("CARGO_BIN_EXE_stowage"), folder.path().join(name)).unwrap();
    }
    let plugin = folder.path().join("kubectl-stowage");
    let help = run(&plugin, &["--help"]);
    let help = text(&help.stdout);
    assert!(help.contains("Usage: kubectl stowage <COMMAND>"), "{help}");
    for (command, is_there) in [
        ("estimate", true),
        ("explain", true),
        ("top", true),
        ("models", true),
        ("policy", true),
        ("bundle", true),
        ("replay", true),
        ("ui", true),
        ("serve", false),
        ("agent", false),
        ("uninstall", false),
    ] {
        assert_eq!(
            help.contains(&format!("\n  {command} ")),
            is_there,
            "{command}: {help}"
        );
    }
    for usage in [&["explain", "--help"][..], &["policy", "check", "--help"]] {
        let said = text(&run(&plugin, usage).stdout);
        let named = usage[..usage.len() - 1].join(" ");
        assert!(
            said.contains(&format!("Usage: kubectl stowage {named}")),
            "{said}"
        );
    }
    let served = served();
    let server = format!("http://{}", served.operators);
    for name in ["kubectl-stowage", "kubectl_stowage"] {
        let said = run(
            &folder.path().join(name),
            &["explain", "waiting", "--server", &server],
        );
        assert!(
            said.status.success() && text(&said.stdout).starts_with("default/waiting fits"),
            "{name}"
        );
    }
    let serve = run(&plugin, &["serve"]);
    assert_eq!(serve.status.code(), Some(2));
    assert!(
        text(&serve.stderr).contains("no command of the plugin"),
        "{}",
        text(&serve.stderr)
    );
    let slip = run(&plugin, &["explian", "x"]);
    assert!(slip.status.code() == Some(2) && text(&slip.stderr).contains("'explain'"));
}
