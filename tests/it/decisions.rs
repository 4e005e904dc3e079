//! `stowage simulate decisions`: what it prints, and what it says of a mistake. The simulation has tests of its own beside it.

use std::process::{Command, Output};

fn decisions(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stowage"));
    command
        .args(["simulate", "decisions"])
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn what_was_decided_is_counted_for_programs() {
    let ran = decisions(&["--seeds", "0..9", "--jobs", "2", "-o", "json"]);
    assert!(
        ran.status.success(),
        "{}",
        String::from_utf8_lossy(&ran.stdout)
    );
    let page: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(page["counts"]["sequences"], 10);
    let verbs = ["filter", "prioritize", "preempt", "bind", "plan"];
    let sum: u64 = verbs
        .iter()
        .map(|verb| page["counts"][verb].as_u64().unwrap())
        .sum();
    assert!(sum > 0 && page["decisions"] == sum, "{page}");
    assert!(page.get("failed").is_none(), "{page}");
}

#[test]
fn a_sequence_is_printed_step_by_step_and_twice_the_same() {
    let history = || decisions(&["--seeds", "3", "--steps", "40", "--history"]).stdout;
    let text = String::from_utf8(history()).unwrap();
    assert!(
        text.lines().count() > 40 && text.contains("filter for pod"),
        "{text}"
    );
    assert_eq!(text.into_bytes(), history());
}

#[test]
fn a_mistake_on_the_command_line_says_what_to_write() {
    for (arguments, says) in [
        (&["--seeds", "9..3"][..], "9 is larger than 3; write 3..9"),
        (&["--minutes", "0"], "write 1 or more"),
        (
            &["--without", "plans"],
            "there is no kind of step \"plans\"; write one of schedule,",
        ),
        (&["--nodes", "33"], "33 is not in 1..=32"),
        (&["--seeds", "0..3", "--history"], "write --seeds 0"),
    ] {
        let ran = decisions(arguments);
        let error = String::from_utf8_lossy(&ran.stderr);
        assert!(
            !ran.status.success() && error.contains(says),
            "{arguments:?}: {error}"
        );
    }
}
