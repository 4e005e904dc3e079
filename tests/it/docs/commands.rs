//! Every line of a block marked `sh runnable` runs as it is written and succeeds, and a block `text output` behind it shows what
//! it prints.
//!
//! Where a reader's `cargo run --` builds the binary first, the one that this test was built with runs. A line that is
//! neither this nor `stowage` is not runnable: it might not end, or need what not every machine has.

use super::markdown::{Fence, Page};
use super::{pages, root};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use tempfile::TempDir;

const RUNNABLE: &str = "sh runnable";
const OUTPUT: &str = "text output";
/// With any profile: the lines say the same.
const BUILD_AND_RUN: [&str; 2] = ["cargo run -- ", "cargo run --release -- "];

/// Folders that the commands read.
const READ: [&str; 3] = ["policies", "manifests", "tests"];

#[test]
fn every_runnable_line_succeeds_and_prints_what_the_page_shows() {
    let clone = RepositoryClone::new();
    let pages = pages();
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let each: Vec<_> = pages
            .iter()
            .map(|page| scope.spawn(|| run_all(&clone, page)))
            .collect();
        each.into_iter()
            .flat_map(|page| page.join().unwrap())
            .collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let lines = |page: &Page| runnable(page).map(|fence| fence.lines.len()).sum::<usize>();
    let count: usize = pages.iter().map(lines).sum();
    assert!(count > 15, "only {count} lines are marked {RUNNABLE}");
}

fn runnable(page: &Page) -> impl Iterator<Item = Fence<'_>> {
    page.fences()
        .into_iter()
        .filter(|fence| fence.info == RUNNABLE)
}

/// What went wrong, with its place.
fn run_all(clone: &RepositoryClone, page: &Page) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut printed: Option<String> = None;
    for fence in page.fences() {
        let at = |line: usize| format!("{}:{line}", page.file.display());
        if fence.info == RUNNABLE {
            printed = Some(String::new());
            for (line, text) in fence
                .lines
                .iter()
                .filter(|(_, text)| !text.trim().is_empty())
            {
                match clone.run(text) {
                    Ok(output) => printed.as_mut().unwrap().push_str(&output),
                    Err(why) => wrong.push(format!("{}: {text}: {why}", at(*line))),
                }
            }
        } else if fence.info == OUTPUT {
            let Some(printed) = printed.as_deref() else {
                wrong.push(format!("{}: no runnable block prints this", at(fence.line)));
                continue;
            };
            let missing = not_printed(printed, &fence);
            wrong.extend(missing.map(|(line, text)| format!("{}: not printed: {text}", at(line))));
        }
    }
    wrong
}

/// The first line of the block that the output does not have after the lines before it. The page may leave lines out, and how
/// long something took is as it was.
fn not_printed<'a>(printed: &str, shown: &Fence<'a>) -> Option<(usize, &'a str)> {
    let mut printed = printed.lines().map(untimed);
    let mut shown = shown
        .lines
        .iter()
        .filter(|(_, text)| !text.trim().is_empty());
    shown
        .find(|(_, text)| !printed.any(|line| line.trim_end() == untimed(text).trim_end()))
        .copied()
}

/// The line with `N` for a number of milliseconds, and for the number of a replica and of a GPU of a node: of equal ones, any may
/// be concerned.
fn untimed(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    let is_count = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let is_time = |at: usize| {
        is_count(words[at]) && words.get(at + 1).is_some_and(|unit| unit.starts_with("ms"))
    };
    let without_number = |word: &str| match word.rsplit_once('-') {
        Some((name, number)) if is_count(number) => format!("{name}-N"),
        _ => word.to_owned(),
    };
    let is_gpu =
        |at: usize| at > 0 && words[at - 1] == "GPU" && is_count(words[at].trim_end_matches(','));
    let kept: Vec<String> = (0..words.len())
        .map(|at| {
            if is_time(at) || is_gpu(at) {
                "N".to_owned()
            } else {
                without_number(words[at])
            }
        })
        .collect();
    kept.join(" ")
}

#[test]
fn a_line_that_is_not_printed_in_order_is_found() {
    let fence = |lines: &[&'static str]| Fence {
        line: 1,
        info: OUTPUT,
        lines: lines
            .iter()
            .enumerate()
            .map(|(before, line)| (before + 2, *line))
            .collect(),
    };
    let printed = "a\nafter 12 ms  x\nb\n";
    assert_eq!(
        not_printed(printed, &fence(&["a", "after 7 ms  x", "", "b"])),
        None
    );
    assert_eq!(not_printed(printed, &fence(&["b", "a"])), Some((3, "a")));
    assert_eq!(
        not_printed("pod-2 leaves\n", &fence(&["pod-6 leaves"])),
        None
    );
    assert_eq!(
        not_printed("x → node-a GPU 2\n", &fence(&["x → node-a GPU 3"])),
        None
    );
    assert_eq!(
        not_printed("x → node-a GPU 2\n", &fence(&["x → node-b GPU 2"])),
        Some((2, "x → node-b GPU 2"))
    );
    assert_eq!(
        not_printed(printed, &fence(&["after 12 ms  y"])),
        Some((2, "after 12 ms  y"))
    );
}

/// What a command prints, or why it does not succeed.
type Printed = Result<String, String>;

/// A folder as a fresh clone is, with `stowage` on the path: what a command writes stays out of the repository.
struct RepositoryClone {
    folder: TempDir,
    /// By command: pages may show the same one.
    ran: Mutex<BTreeMap<String, Arc<OnceLock<Printed>>>>,
}

impl RepositoryClone {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in READ {
            std::os::unix::fs::symlink(root().join(name), folder.path().join(name)).unwrap();
        }
        Self {
            folder,
            ran: Mutex::default(),
        }
    }

    /// What the line prints, or why it does not succeed.
    fn run(&self, line: &str) -> Result<String, String> {
        // Without the comment behind it.
        let line = line.split(" #").next().unwrap().trim();
        let ran = self.ran.lock().entry(line.to_owned()).or_default().clone();
        ran.get_or_init(|| self.run_once(line)).clone()
    }

    fn run_once(&self, line: &str) -> Result<String, String> {
        let command = match BUILD_AND_RUN
            .iter()
            .find_map(|prefix| line.strip_prefix(prefix))
        {
            Some(arguments) => format!("stowage {arguments}"),
            None if line.starts_with("stowage ") => line.to_owned(),
            None => {
                return Err(format!(
                    "a runnable line begins with `{}` or `stowage`",
                    BUILD_AND_RUN[0].trim()
                ));
            }
        };
        let mut shell = Command::new("sh");
        shell
            .args(["-e", "-c", &command])
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        let output = shell
            .env("PATH", path())
            .output()
            .map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        Err(format!(
            "{}\n{}{}",
            output.status,
            text(&output.stdout),
            text(&output.stderr)
        ))
    }
}

/// The path of programs with the folder of the binary first.
fn path() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let folder = Path::new(env!("CARGO_BIN_EXE_stowage")).parent().unwrap();
        format!(
            "{}:{}",
            folder.display(),
            std::env::var("PATH").unwrap_or_default()
        )
    })
}
