//! `stowage policy diff`: how decisions for a cluster's pods differ between two policies.

use super::{print_diagnostics, unreadable};
use crate::cli::output::OutputArgs;
use crate::cli::print_to_stderr;
use crate::cli::standard_input;
use anyhow::Result;
use clap::Args;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use stowage_policy_file::cases::{DecisionChange, PolicyComparison, compare};
use stowage_policy_file::load;
use stowage_policy_file::windows as policy_windows;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::plural;
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane, DumpError, left_out_text};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::policy_watch::read;
use stowage_server::service::ServerState;

const EXIT_CODES: &str = "Exit codes: 0 whether anything changes or not, 1 if a policy would be refused, 2 if something cannot be read or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct DiffArgs {
    /// The current policy
    old: PathBuf,

    /// The new policy
    new: PathBuf,

    /// What `kubectl get nodes,pods -A -o yaml` (or -o json) printed; `-` is standard input
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,

    /// The time, which decides which windows of the policies are open, such as 2026-11-23T22:00:00+01:00 [default: now]
    #[arg(long, value_name = "TIME")]
    at: Option<jiff::Timestamp>,

    #[command(flatten)]
    output: OutputArgs,
}

impl DiffArgs {
    /// 0 whether anything changes or not; 1 if a policy would be rejected, 2 if something cannot be read.
    pub fn run(self) -> Result<ExitCode> {
        standard_input::check_named_once([
            ("OLD", &*self.old),
            ("NEW", &*self.new),
            ("--cluster", &*self.cluster),
        ])?;
        let [old, new] = [&self.old, &self.new].map(|path| load_policy_at(path, self.at));
        let policies = match (old?, new?) {
            (Ok(old), Ok(new)) => [old, new],
            (Err(code), _) | (_, Err(code)) => return Ok(code),
        };
        let read = Dump::read(&self.cluster).and_then(|dump| {
            let [old, new] = policies.map(|policy| load_service(&dump, policy));
            Ok((dump.workloads()?, old?, new?))
        });
        let (workloads, (old, left_out), (new, _)) = match read {
            Ok(read) => read,
            Err(error) => return Ok(unreadable(&error)),
        };
        // Which pods cannot be understood does not depend on the policy.
        if let Some(left_out) = left_out {
            print_to_stderr(format_args!("warning: {left_out}"));
        }
        let comparison = compare(&mut old.cluster(), &mut new.cluster());
        self.output.print(&comparison, |compared, columns| {
            columns.wrap(&text(compared, &workloads))
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// A policy without errors, as it is at a time, by default now; or, once its problems are printed, the exit code.
pub fn load_policy_at(
    path: &Path,
    at: Option<jiff::Timestamp>,
) -> Result<Result<Policy, ExitCode>> {
    let files = match read::read_argument(path) {
        Ok(files) => files,
        Err(error) => return Ok(Err(unreadable(&error))),
    };
    match load(&files) {
        Ok(loaded) => Ok(Ok(policy_windows::policy_at(
            loaded.policy,
            at.unwrap_or_else(jiff::Timestamp::now),
        ))),
        Err(found) => {
            print_diagnostics(&found, &files);
            Ok(Err(ExitCode::FAILURE))
        }
    }
}

/// The ledger of the dump under a policy, and the pods of the dump that it lacks, as a warning.
fn load_service(
    dump: &Dump,
    policy: Policy,
) -> Result<(Arc<ServerState>, Option<String>), DumpError> {
    let state = ServerState::new(policy);
    let loaded = DumpControlPlane::load(dump, &state, &mut ClusterIndex::default())?;
    Ok((state, left_out_text(loaded.left_out())))
}

/// The most columns that names take up, of nodes that change alike and within a line; further names are counted.
const NODE_NAMES_WIDTH: usize = 56;
const NAMES_WIDTH: usize = 18;

fn text(comparison: &PolicyComparison, workloads: &BTreeMap<PodKey, String>) -> String {
    let mut text = String::new();
    let mut nodes: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for change in &comparison.nodes {
        let names = nodes.entry((&change.old, &change.new)).or_default();
        names.push(change.node.clone());
    }
    for ((old, new), names) in nodes {
        let count = plural(names.len(), "node");
        let names = listed(&names, NODE_NAMES_WIDTH);
        text += &format!("{count}: {names}\n    - {old}\n    + {new}\n");
    }
    let mut pods: BTreeMap<(String, Names), Vec<&DecisionChange>> = BTreeMap::new();
    for change in &comparison.changes {
        let title = match (workloads.get(&change.pod), &change.node) {
            (Some(workload), _) => (workload.clone(), Names::LeftOut),
            (None, Some(node)) => (format!("{} on {node}", change.pod), Names::Shown),
            (None, None) => (format!("{}, waiting", change.pod), Names::Shown),
        };
        pods.entry(title).or_default().push(change);
    }
    for ((title, names), changes) in pods {
        text += &pods_text(&title, names, &changes);
    }
    let nodes = plural(comparison.nodes.len(), "node");
    let (changed, pods) = (comparison.changes.len(), plural(comparison.pods, "pod"));
    text + &format!("{changed} of {pods} change, and {nodes}\n")
}

/// Whether nodes and victims are named: of a pod by itself they are, and of a workload the pods that change alike are counted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Names {
    Shown,
    LeftOut,
}

fn pods_text(title: &str, names: Names, changes: &[&DecisionChange]) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for line in changes.iter().flat_map(|change| lines(change, names)) {
        match counts.iter_mut().find(|(other, _)| *other == line) {
            Some((_, count)) => *count += 1,
            None => counts.push((line, 1)),
        }
    }
    let mut text = match names {
        Names::Shown => format!("{title}\n"),
        Names::LeftOut => format!("{title}, {}\n", plural(changes.len(), "pod")),
    };
    text.extend(counts.into_iter().map(|(line, count)| match names {
        Names::Shown => format!("    {line}\n"),
        Names::LeftOut => format!("{count:>5}  {line}\n"),
    }));
    text
}

fn lines(DecisionChange { old, new, .. }: &DecisionChange, names: Names) -> Vec<String> {
    let [(tenant, evicted), (new_tenant, new_evicted)] = [old, new].map(|one| {
        let tenant = one.tenant.as_deref().unwrap_or("none");
        (tenant, if one.preemptible { "yes" } else { "no" })
    });
    let words = [
        ("class", &*old.class, &*new.class),
        ("tenant", tenant, new_tenant),
        ("may be evicted", evicted, new_evicted),
    ];
    let words = words.into_iter().filter(|(_, old, new)| old != new);
    let words = words.map(|(what, old, new)| format!("{what} {old} → {new}"));
    let lists = [
        ("could go to", "node", &old.nodes, &new.nodes),
        ("would evict", "pod", &old.victims, &new.victims),
    ];
    let lists = lists.into_iter().filter(|(_, _, old, new)| old != new);
    let lists = lists.map(|(what, noun, old, new)| match names {
        Names::Shown => format!(
            "{what} {} → {}",
            listed(old, NAMES_WIDTH),
            listed(new, NAMES_WIDTH)
        ),
        Names::LeftOut if new.is_empty() => format!("{what} no {noun} any more"),
        Names::LeftOut if old.is_empty() => format!("{what} a {noun} now"),
        Names::LeftOut => format!("{what} other {noun}s"),
    });
    words.chain(lists).collect()
}

/// As many names as fit, and at least one.
fn listed(names: &[String], width: usize) -> String {
    let mut taken = 0;
    let fits = |name: &&String| {
        taken += name.len() + 2;
        taken <= width
    };
    let shown = names.iter().take_while(fits).count().max(1);
    match names {
        [] => "none".into(),
        names if names.len() <= shown => names.join(", "),
        names => format!(
            "{} and {} more",
            names[..shown].join(", "),
            names.len() - shown
        ),
    }
}
