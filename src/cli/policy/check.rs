//! `stowage policy check`: all problems of a policy, for people or for CI.

use super::{diagnostics_text, unreadable};
use crate::cli::output::OutputArgs;
use crate::cli::standard_input;
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_policy_file::diagnostic::json::{JsonDiagnostic, json_diagnostics};
use stowage_policy_file::diagnostic::{Diagnostic, has_errors};
use stowage_policy_file::{PolicySources, SourceText, load};
use stowage_server::policy_watch::read;

const EXIT_CODES: &str = "Exit codes: 0 if every policy is sound, 1 if one would be refused, 2 if one cannot be read (the others are checked) or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct CheckArgs {
    /// Policies: directories of YAML files, or single files, such as a ConfigMap. Directories right below one are policies of
    /// their own; `-` is standard input
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

struct CheckedPolicy {
    path: PathBuf,
    files: Vec<SourceText>,
    /// For a policy without errors.
    digest: Option<String>,
    found: Vec<Diagnostic>,
}

#[derive(Serialize)]
struct CheckOutput<'a> {
    policies: Vec<PolicyLine<'a>>,
}

#[derive(Serialize)]
struct PolicyLine<'a> {
    path: String,
    /// Absent if it would be rejected.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<&'a str>,
    findings: Vec<JsonDiagnostic<'a>>,
}

impl CheckArgs {
    pub fn run(self) -> Result<ExitCode> {
        standard_input::check_named_once(self.paths.iter().map(|path| ("PATH", &**path)))?;
        let (mut checked, mut unread) = (Vec::new(), None);
        for path in &self.paths {
            match read::read_policies(path) {
                Ok(policies) => checked.extend(policies.into_iter().map(check)),
                Err(error) => unread = Some(unreadable(&error)),
            }
        }
        let sources: Vec<PolicySources<'_>> = checked
            .iter()
            .map(|one| PolicySources::new(&one.files))
            .collect();
        let lines = checked
            .iter()
            .zip(&sources)
            .map(|(one, sources)| PolicyLine {
                path: one.name(),
                digest: one.digest.as_deref(),
                findings: json_diagnostics(&one.found, sources),
            });
        let output = CheckOutput {
            policies: lines.collect(),
        };
        self.output
            .print(&output, |_, _| checked.iter().map(text).collect())?;
        let refused = checked.iter().any(|one| has_errors(&one.found));
        Ok(unread.unwrap_or(ExitCode::from(u8::from(refused))))
    }
}

fn check((path, files): (PathBuf, Vec<SourceText>)) -> CheckedPolicy {
    let (digest, found) = match load(&files) {
        Ok(loaded) => (Some(loaded.policy.digest.to_string()), loaded.warnings),
        Err(found) => (None, found),
    };
    CheckedPolicy {
        path,
        files,
        digest,
        found,
    }
}

impl CheckedPolicy {
    /// Its path, for people.
    fn name(&self) -> String {
        match self.files.first() {
            Some(file) if self.path.as_os_str() == "-" => file.name.clone(),
            _ => self.path.display().to_string(),
        }
    }
}

fn text(checked: &CheckedPolicy) -> String {
    let found = match checked.found.is_empty() {
        true => String::new(),
        false => diagnostics_text(&checked.found, &checked.files, &std::io::stdout()),
    };
    let path = checked.name();
    match &checked.digest {
        Some(digest) => format!("{found}{path}: sound, digest {digest}\n"),
        None => format!("{found}{path}: refused\n"),
    }
}
