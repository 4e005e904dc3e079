//! `stowage policy test`: runs the test cases next to policies, each through the core that decides in production.

use super::{print_diagnostics, unreadable};
use crate::cli::output::OutputArgs;
use crate::cli::print_to_stderr;
use crate::cli::standard_input;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use stowage_policy_file::cases as policy_cases;
use stowage_policy_file::cases::{CaseOutcome, Difference};
use stowage_policy_file::{LoadedPolicy, SourceText, load};
use stowage_scheduling::units::plural;
use stowage_server::policy_watch::read;

const EXIT_CODES: &str = "Exit codes: 0 if every case holds, 1 if one does not, a policy would be refused or a path has no case, 2 if something cannot be read or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct TestArgs {
    /// Policies with their cases: directories of YAML files, or single files. Directories right below one are policies of their
    /// own; `-` is standard input
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

/// The cases of one document.
#[derive(Serialize)]
struct TestedDocument {
    file: String,
    cases: Vec<CaseOutcome>,
}

impl TestArgs {
    /// 0 if every case passes; 1 if one fails, a policy would be rejected, or a path has no case at all; 2 if something cannot be
    /// read.
    pub fn run(self) -> Result<ExitCode> {
        standard_input::check_named_once(self.paths.iter().map(|path| ("PATH", &**path)))?;
        let (mut tried, mut refused, mut without_cases) = (Vec::new(), 0, 0);
        for path in &self.paths {
            let before = tried.len();
            let policies = match read::read_policies(path) {
                Ok(policies) => policies,
                Err(error) => return Ok(unreadable(&error)),
            };
            for (path, files) in &policies {
                match test_policy(path, files)? {
                    Some(mut documents) => tried.append(&mut documents),
                    None => refused += 1,
                }
            }
            let has_cases = tried[before..]
                .iter()
                .any(|one: &TestedDocument| !one.cases.is_empty());
            without_cases += usize::from(!has_cases);
        }
        self.output.print(&tried, |tried, columns| {
            // What holds nothing is not said to hold.
            match tried.iter().all(|one| one.cases.is_empty()) {
                true => String::new(),
                false => columns.wrap(&text(tried)),
            }
        })?;
        let holds = tried
            .iter()
            .flat_map(|one| &one.cases)
            .all(|case| case.differences.is_empty());
        Ok(if holds && refused == 0 && without_cases == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

/// `None` for a policy that would be rejected, or a cluster that is invalid: its problems have been printed.
fn test_policy(path: &Path, files: &[SourceText]) -> Result<Option<Vec<TestedDocument>>> {
    let LoadedPolicy { policy, tests, .. } = match load(files) {
        Ok(loaded) => loaded,
        Err(found) => {
            print_diagnostics(&found, files);
            print_to_stderr(format_args!(
                "{}: refused; its cases were not tried",
                path.display()
            ));
            return Ok(None);
        }
    };
    let mut tried = Vec::new();
    for test in &tests {
        let file = files
            .get(test.file.index())
            .map_or_else(String::new, |file| file.name.clone());
        match policy_cases::run(&policy, &test.test) {
            Ok(cases) => tried.push(TestedDocument { file, cases }),
            Err(error) => {
                print_to_stderr(format_args!("{file}: {error}"));
                return Ok(None);
            }
        }
    }
    if tried.iter().all(|one| one.cases.is_empty()) {
        print_to_stderr(format_args!(
            "{}: no cases; put a file with `kind: PolicyTest` beside the policy, and name the directory of both",
            path.display()
        ));
    }
    Ok(Some(tried))
}

fn text(tried: &[TestedDocument]) -> String {
    let (mut text, mut held, mut failed) = (String::new(), 0, 0);
    for TestedDocument { file, cases } in tried {
        for case in cases {
            if case.differences.is_empty() {
                held += 1;
                continue;
            }
            failed += 1;
            text += &format!("{file}: {}\n", case.case);
            text.extend(case.differences.iter().map(difference_text));
        }
    }
    let all = plural(held + failed, "case");
    text + &match failed {
        0 => format!("{}\n", held_text(held)),
        1 => format!("1 of {all} does not hold\n"),
        _ => format!("{failed} of {all} do not hold\n"),
    }
}

fn held_text(held: usize) -> String {
    match held {
        1 => "1 case holds".into(),
        _ => format!("{held} cases hold"),
    }
}

fn difference_text(difference: &Difference) -> String {
    let Difference {
        what,
        expected,
        found,
        because,
    } = difference;
    let mut text = format!("    {what:<8} expected  {expected}\n             found     {found}\n");
    for reason in because {
        text += &format!("             because   {reason}\n");
    }
    text
}
