//! What a block shows and no test runs: commands and flags exist, and so do the files and benches that they name; a policy is
//! sound.

use super::markdown::{Fence, Page};
use super::{pages, root};
use crate::control_plane::servers;
use crate::needs;
use std::collections::BTreeMap;
use std::iter;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What may stand behind an opening fence. Anything else hides a line of the block there, which nobody sees, and nothing leaves
/// it to the reader what the block is.
const INFOS: [&str; 5] = ["sh", "sh runnable", "text", "text output", "yaml"];

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

#[test]
fn every_block_of_commands_is_a_shells() {
    let mut wrong = Vec::new();
    for page in pages() {
        for fence in page.fences() {
            if !fence.info.starts_with("sh") {
                continue;
            }
            let lines: Vec<&str> = fence.lines.iter().map(|(_, line)| *line).collect();
            let mut shell = Command::new("sh");
            // Reads the commands and runs none.
            let read = shell.args(["-n", "-c", &lines.join("\n")]).output();
            let read = read.unwrap();
            if !read.status.success() || !read.stderr.is_empty() {
                let said = String::from_utf8_lossy(&read.stderr);
                wrong.push(format!("{}:{}: {said}", page.file.display(), fence.line));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_editors_line_names_the_schema_that_a_command_beside_it_writes() {
    let page = Page::read(root(), Path::new("docs/use/policies.md"));
    let fences = page.fences();
    let lines = |info: &'static str| {
        let of_kind = fences.iter().filter(move |fence| fence.info == info);
        of_kind.flat_map(|fence| fence.lines.iter().map(|(_, line)| *line))
    };
    let mut named =
        lines("yaml").filter_map(|line| line.strip_prefix("# yaml-language-server: $schema="));
    let schema = named.next().expect("the page has a line for editors");
    let written = format!("stowage schema policy > {schema}");
    assert!(
        lines("sh").any(|line| line.starts_with(&written)),
        "no block has: {written}"
    );
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
            let mut text = lines.join("\n");
            text.push('\n');
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

#[test]
fn the_cases_that_a_page_shows_hold_under_the_defaults() {
    let mut checked = 0;
    for page in pages() {
        for fence in page.fences() {
            let lines: Vec<&str> = fence.lines.iter().map(|(_, line)| *line).collect();
            if !lines.contains(&"kind: PolicyTest") {
                continue;
            }
            checked += 1;
            let folder = tempfile::tempdir().unwrap();
            let defaults = "apiVersion: stowage.dev/v1alpha1\nkind: SchedulingPolicy\n";
            std::fs::write(folder.path().join("policy.yaml"), defaults).unwrap();
            std::fs::write(folder.path().join("cases.yaml"), lines.join("\n")).unwrap();
            let mut stowage = Command::new(env!("CARGO_BIN_EXE_stowage"));
            let output = stowage.args(["policy", "test"]).arg(folder.path());
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
    assert!(checked > 0, "no page shows cases");
}

/// The lines of the page's shell blocks, without what they write to files.
fn shell_lines(page: &Page) -> Vec<(usize, String)> {
    let of = |fence: Fence<'_>| {
        let mut ends: Option<String> = None;
        let mut lines: Vec<(usize, String)> = Vec::new();
        for (line, text) in fence.lines {
            match &ends {
                Some(end) if text == end => ends = None,
                Some(_) => {}
                None => {
                    let here = text
                        .split_once("<<'")
                        .and_then(|(_, end)| end.split_once('\''));
                    ends = here.map(|(end, _)| end.to_owned());
                    match lines.last_mut() {
                        Some((_, before)) if before.ends_with('\\') => {
                            before.pop();
                            before.push_str(text);
                        }
                        _ => lines.push((line, text.to_owned())),
                    }
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
    match (ours, words) {
        (Some(arguments), _) => missing.extend(helps.missing(STOWAGE, arguments)),
        (None, ["kubectl", arguments @ ..]) => missing.extend(helps.missing(KUBECTL, arguments)),
        _ => {}
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

const STOWAGE: &str = "stowage";
const KUBECTL: &str = "kubectl";

/// What each command prints with `--help`.
#[derive(Default)]
struct Helps(BTreeMap<(&'static str, Vec<String>), String>);

impl Helps {
    /// Empty where the program is not on this machine.
    fn help(&mut self, program: &'static str, command: &[&str]) -> &str {
        let words: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
        self.0.entry((program, words)).or_insert_with(|| {
            let Some(file) = file_of(program) else {
                return String::new();
            };
            // `kubectl options` is itself a help.
            let help = (command != ["options"]).then_some("--help");
            let output = Command::new(file).args(command).args(help).output();
            String::from_utf8(output.unwrap().stdout).unwrap()
        })
    }

    /// Which command or flags of these arguments there are not.
    fn missing(&mut self, program: &'static str, mut arguments: &[&str]) -> Vec<String> {
        // Where kubectl takes the namespace, too.
        if let ["-n", _, rest @ ..] = arguments {
            arguments = rest;
        }
        if self.help(program, &[]).is_empty() {
            return Vec::new();
        }
        let mut depth = 0;
        while depth < arguments.len() {
            let known = listed(self.help(program, &arguments[..depth]));
            match arguments[depth] {
                _ if known.is_empty() => break,
                flag if flag.starts_with('-') => break,
                command if known.contains(&command) => depth += 1,
                unknown => return vec![format!("command {unknown}")],
            }
        }
        let mut help = self.help(program, &arguments[..depth]).to_owned();
        if program == KUBECTL {
            // The flags of all its commands.
            help.push_str(self.help(program, &["options"]));
        }
        let words: Vec<&str> = help
            .split(|c: char| !(c == '-' || c.is_ascii_alphanumeric()))
            .collect();
        let flags = arguments[depth..]
            .iter()
            .take_while(|word| **word != "--")
            .filter(|word| word.starts_with('-') && word.len() > 1)
            .map(|flag| flag.split('=').next().unwrap_or_default());
        flags
            .filter(|flag| !words.contains(flag))
            .map(|flag| format!("{flag} of {program} {}", arguments[..depth].join(" ")))
            .collect()
    }
}

/// The commands that a help lists, under one heading or several.
fn listed(help: &str) -> Vec<&str> {
    let mut is_list = false;
    let mut commands = Vec::new();
    for line in help.lines() {
        if !line.starts_with(' ') {
            is_list = line.ends_with(':') && line.contains("Commands");
        } else if is_list {
            commands.extend(line.split_whitespace().next());
        }
    }
    commands
}

/// The program that is told by its help; `None`, with a line that says so, where there is none.
fn file_of(program: &str) -> Option<PathBuf> {
    if program == STOWAGE {
        return Some(env!("CARGO_BIN_EXE_stowage").into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = iter::once(servers::folder()).chain(std::env::split_paths(&path));
    let found = folders
        .map(|folder| folder.join(program))
        .find(|file| file.is_file());
    if found.is_none() {
        needs::report_skipped(format_args!(
            "what pages show of {program}: it is not on the path"
        ));
    }
    found
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
    if file_of(KUBECTL).is_some() {
        assert_eq!(of("kubectl drian NODE"), ["command drian"]);
        assert_eq!(
            of("kubectl -n kube-system rollout status deployment/stowage --no-such -Q"),
            [
                "--no-such of kubectl rollout status",
                "-Q of kubectl rollout status"
            ]
        );
    }
}
