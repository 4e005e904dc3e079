//! What a block shows and no test runs: commands and flags exist, and so do the files and benches that they name; a policy is
//! sound.

use super::markdown::{Fence, Page};
use super::{pages, root};
use std::collections::BTreeMap;
use std::process::Command;

/// What may stand behind an opening fence. Anything else hides a line of the block there, which nobody sees.
const INFOS: [&str; 7] = [
    "",
    "sh",
    "sh runnable",
    "text",
    "text output",
    "yaml",
    "json",
];

#[test]
fn a_fence_opens_with_the_kind_of_its_block_alone() {
    let pages = pages();
    let wrong: Vec<String> = pages
        .iter()
        .flat_map(|page| {
            let fences = page.fences().into_iter();
            let unknown = fences.filter(|fence| !INFOS.contains(&fence.info));
            unknown.map(|fence| format!("{}:{}: {}", page.file.display(), fence.line, fence.info))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_command_flag_and_file_that_a_page_shows_exists() {
    let mut helps = Helps::default();
    let mut checked = 0;
    let mut wrong = Vec::new();
    for page in pages() {
        for (line, text) in shell_lines(&page) {
            for command in commands(&text) {
                checked += 1;
                let place = format!("{}:{line}", page.file.display());
                wrong.extend(
                    missing(&command, &mut helps)
                        .map(|what| format!("{place}: there is no {what}")),
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 100, "only {checked} commands were found");
}

/// With which a part of a policy may begin, as pages show it.
const SECTIONS: [&str; 8] = [
    "autoscaling:",
    "classes:",
    "conflicts:",
    "mode:",
    "nodePools:",
    "planning:",
    "scoring:",
    "tenants:",
];

#[test]
fn every_policy_that_a_page_shows_is_sound() {
    let mut checked = 0;
    for page in pages() {
        let fences = page.fences().into_iter();
        for fence in fences.filter(|fence| fence.info == "yaml") {
            let lines: Vec<&str> = fence.lines.iter().map(|(_, line)| *line).collect();
            let first = lines.first().copied().unwrap_or_default();
            let text = lines.join("\n");
            let policy = if text.contains("\nkind: SchedulingPolicy\n") {
                text
            } else if SECTIONS.iter().any(|section| first.starts_with(section)) {
                format!("apiVersion: stowage.dev/v1alpha1\nkind: SchedulingPolicy\n{text}")
            } else {
                continue;
            };
            checked += 1;
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("policy.yaml");
            std::fs::write(&file, policy).unwrap();
            let mut stowage = Command::new(env!("CARGO_BIN_EXE_stowage"));
            let output = stowage.args(["policy", "check"]).arg(&file);
            let output = output.output().unwrap();
            assert!(
                output.status.success(),
                "{}:{}: {}",
                page.file.display(),
                fence.line,
                String::from_utf8_lossy(&output.stdout)
            );
        }
    }
    assert!(checked > 8, "only {checked} policies were found");
}

/// The lines of the page's shell blocks, without what they write to files.
fn shell_lines(page: &Page) -> Vec<(usize, String)> {
    let of = |fence: Fence<'_>| {
        let mut ends: Option<String> = None;
        let mut lines = Vec::new();
        for (line, text) in fence.lines {
            match &ends {
                Some(end) if text == end => ends = None,
                Some(_) => {}
                None => {
                    let here = text
                        .split_once("<<'")
                        .and_then(|(_, end)| end.split_once('\''));
                    ends = here.map(|(end, _)| end.to_owned());
                    lines.push((line, text.to_owned()));
                }
            }
        }
        lines
    };
    let fences = page.fences().into_iter();
    let shell = fences.filter(|fence| fence.info.starts_with("sh"));
    shell.flat_map(of).collect()
}

/// The commands of a line, each in words: without comments, variables before it and where its output goes.
fn commands(line: &str) -> Vec<Vec<&str>> {
    let line = line.split(" #").next().unwrap_or_default();
    let commands = line.split(['|', ';', '&', '>']).map(|command| {
        let words = command.split_whitespace();
        let is_variable = |word: &&str| {
            let name = word.split('=').next().unwrap_or_default();
            name.len() < word.len() && name.bytes().all(|c| c == b'_' || c.is_ascii_uppercase())
        };
        words.skip_while(is_variable).collect()
    });
    commands
        .filter(|words: &Vec<&str>| !words.is_empty() && words[0] != "#")
        .collect()
}

/// What the command names that does not exist.
fn missing(words: &[&str], helps: &mut Helps) -> impl Iterator<Item = String> + use<> {
    let mut missing: Vec<String> = Vec::new();
    let ours = match words {
        ["stowage", arguments @ ..]
        | ["kubectl", "stowage", arguments @ ..]
        | ["cargo", "run", "--", arguments @ ..]
        | ["cargo", "run", "--release", "--", arguments @ ..] => Some(arguments),
        _ => None,
    };
    if let Some(arguments) = ours {
        missing.extend(helps.missing(arguments));
    }
    for pair in words.windows(2).filter(|pair| pair[0] == "--bench") {
        let bench = root().join("benches").join(pair[1]);
        if !bench.exists() && !bench.with_extension("rs").exists() {
            missing.push(format!("bench {}", pair[1]));
        }
    }
    let names_a_file = |word: &&&str| {
        ["manifests/", "policies/", "tests/", "src/", ".ci/"]
            .iter()
            .any(|folder| word.starts_with(folder))
    };
    for file in words.iter().filter(names_a_file) {
        if !root().join(file).exists() {
            missing.push((*file).to_owned());
        }
    }
    missing.into_iter()
}

/// What each command prints with `--help`.
#[derive(Default)]
struct Helps(BTreeMap<Vec<String>, String>);

impl Helps {
    fn help(&mut self, command: &[&str]) -> &str {
        let key: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
        self.0.entry(key).or_insert_with(|| {
            let mut stowage = Command::new(env!("CARGO_BIN_EXE_stowage"));
            let output = stowage.args(command).arg("--help").output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        })
    }

    /// Which command or flags of these arguments there are not.
    fn missing(&mut self, arguments: &[&str]) -> Vec<String> {
        let mut depth = 0;
        while depth < arguments.len() {
            let help = self.help(&arguments[..depth]);
            let Some((_, list)) = help.split_once("\nCommands:\n") else {
                break;
            };
            let list = list.split("\n\n").next().unwrap_or_default();
            let is_listed = |line: &str| line.split_whitespace().next() == Some(arguments[depth]);
            match arguments[depth] {
                flag if flag.starts_with('-') => break,
                _ if list.lines().any(is_listed) => depth += 1,
                unknown => return vec![format!("command {unknown}")],
            }
        }
        let help = self.help(&arguments[..depth]);
        let words: Vec<&str> = help
            .split(|c: char| !(c == '-' || c.is_ascii_alphanumeric()))
            .collect();
        let flags = arguments[depth..]
            .iter()
            .take_while(|word| **word != "--")
            .filter(|word| word.starts_with("--"))
            .map(|flag| flag.split('=').next().unwrap_or_default());
        flags
            .filter(|flag| !words.contains(flag))
            .map(|flag| format!("{flag} of stowage {}", arguments[..depth].join(" ")))
            .collect()
    }
}

#[test]
fn a_command_or_flag_that_does_not_exist_is_found() {
    let mut helps = Helps::default();
    let mut of = |line: &str| -> Vec<String> {
        commands(line)
            .iter()
            .flat_map(|command| missing(command, &mut helps))
            .collect()
    };
    assert_eq!(
        of("X=1 stowage policy check --no-such policies/  # --not-this"),
        ["--no-such of stowage policy check"]
    );
    assert_eq!(
        of("kubectl get pods -o json | stowage explain llama --cluster -"),
        Vec::<String>::new()
    );
    assert_eq!(of("cargo run -- polcy check"), ["command polcy"]);
    assert_eq!(
        of("cargo bench --bench no-such -- 1; kubectl apply -k manifests/no-such"),
        ["bench no-such", "manifests/no-such"]
    );
}
