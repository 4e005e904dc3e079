//! `stowage preflight`: what an installation would do to the cluster of a dump: to its pods, which nodes would be Stowage's, and what
//! is missing or no dump shows.

mod facts;
mod nodes;
mod pods;

use super::output::{Columns, OutputArgs};
use super::policy::policy_at;
use super::{NO_ANSWER, exit_without_answer, standard_input};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_scheduling::ids::printable;
use stowage_scheduling::units::plural;
use stowage_server::kubernetes::dump::Dump;
use stowage_server::policy_watch;

const HELP: &str = "Exit codes: 0 if no pod would be refused, 1 if one would, 2 if something cannot be read or the arguments are invalid.";
/// The most names of a list; further ones are only counted.
const MAX_NAMES: usize = 6;

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct PreflightArgs {
    /// What `kubectl get nodes,pods,namespaces,daemonsets,runtimeclasses,resourceslices -A -o json` (or -o yaml) printed, and, in
    /// another file, clusterpolicies; `-` is standard input
    #[arg(long, value_name = "FILE", required = true)]
    cluster: Vec<PathBuf>,

    /// The policy, a file or a directory [default: the built-in policy]
    #[arg(long, value_name = "PATH")]
    policy: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Preflight {
    pods: usize,
    /// Those whose pods would not be created as they are.
    workloads: Vec<Group<pods::Verdict>>,
    nodes: Vec<Group<nodes::Owner>>,
    found: Vec<String>,
    unknown: Vec<Gap>,
    missing: Vec<Gap>,
}

/// What is alike for the same reasons.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Group<V> {
    verdict: V,
    names: Vec<String>,
    count: usize,
    why: Vec<String>,
    remedies: Vec<Gap>,
}

/// Something that is not known or not there, and the command that finds or adds it.
#[derive(Debug, Serialize)]
struct Gap {
    what: String,
    command: String,
}

fn gap(what: impl Into<String>, command: impl Into<String>) -> Gap {
    let (what, command) = (what.into(), command.into());
    Gap { what, command }
}

impl PreflightArgs {
    pub fn run(self) -> Result<ExitCode> {
        self.try_run().or_else(exit_without_answer)
    }

    fn try_run(&self) -> Result<ExitCode> {
        let files = self.cluster.iter().map(|path| ("--cluster", &**path));
        let policy = self.policy.iter().map(|path| ("--policy", &**path));
        standard_input::check_named_once(files.chain(policy))?;
        let policy = match &self.policy {
            None => policy_watch::built_in(),
            Some(path) => match policy_at(path, None)? {
                Ok(policy) => policy,
                // The problems are printed already.
                Err(_) => return Ok(NO_ANSWER.into()),
            },
        };
        let dumps: Result<Vec<Dump>, _> =
            self.cluster.iter().map(|path| Dump::read(path)).collect();
        let dumps = dumps?;
        let facts = facts::Facts::read(&dumps)?;
        let (pods, workloads) = pods::judge(&dumps, &facts, policy.settings.mode)?;
        let nodes = nodes::judge(&facts, policy);
        let answer = Preflight {
            pods,
            found: facts.found().iter().map(|one| printable(one)).collect(),
            unknown: facts.unknown(),
            missing: facts.missing(&workloads, &nodes),
            workloads,
            nodes,
        };
        self.output.print(&answer, text)?;
        let mut verdicts = answer.workloads.iter().map(|one| one.verdict);
        let is_refused = verdicts.any(|one| one == pods::Verdict::Refused);
        Ok(ExitCode::from(u8::from(is_refused)))
    }
}

fn text(answer: &Preflight, columns: Columns) -> String {
    let changed = answer.workloads.iter().map(|one| one.count).sum::<usize>();
    let pods = plural(answer.pods, "pod");
    let mut text = format!("{pods}, of which {changed} would not be created as they are\n");
    for one in &answer.workloads {
        let (name, pods) = (&one.names[0], plural(one.count, "pod"));
        text += &format!("\n{name}, {pods}: {}\n", one.verdict.sentence());
        text += &(list(&one.why) + &gaps(&one.remedies));
    }
    text += "\nNodes\n";
    for one in &answer.nodes {
        let mut names = one.names[..one.count.min(MAX_NAMES)].join(", ");
        if let Some(more @ 1..) = one.count.checked_sub(MAX_NAMES) {
            names += &format!(" and {more} more");
        }
        let (count, why) = (one.count, one.why.join("; "));
        text += &format!("  - {}, {count}: {why} ({names})\n", one.verdict.words());
    }
    for (title, lines) in [
        ("Found", list(&answer.found)),
        ("Unknown", gaps(&answer.unknown)),
        ("Missing", gaps(&answer.missing)),
    ] {
        let nothing = if lines.is_empty() {
            "  - nothing that the dump shows\n"
        } else {
            ""
        };
        text += &format!("\n{title}\n{lines}{nothing}");
    }
    columns.wrap(&text)
}

fn list(all: &[String]) -> String {
    all.iter().map(|one| format!("  - {one}\n")).collect()
}

fn gaps(all: &[Gap]) -> String {
    let gap = |Gap { what, command }: &Gap| format!("  - {what}\n    {command}\n");
    all.iter().map(gap).collect()
}
