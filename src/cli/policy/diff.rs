//! `stowage policy diff`: how decisions for a cluster's pods differ between two policies.

use super::{print_diagnostics, unreadable};
use crate::cli::output::OutputArgs;
use crate::cli::print_to_stderr;
use crate::cli::standard_input;
use anyhow::Result;
use clap::Args;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use stowage_policy_file::cases::{DecisionChange, PodDecision, PolicyComparison, compare};
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
        let mut policies = Vec::new();
        for path in [&self.old, &self.new] {
            match load_policy_at(path, self.at)? {
                Ok(policy) => policies.push(policy),
                Err(code) => return Ok(code),
            }
        }
        let dump = match Dump::read(&self.cluster) {
            Ok(dump) => dump,
            Err(error) => return Ok(unreadable(&error)),
        };
        let services: Result<Vec<_>, _> = policies
            .into_iter()
            .map(|policy| load_service(&dump, policy))
            .collect();
        let services = match services {
            Ok(services) => services,
            Err(error) => return Ok(unreadable(&error)),
        };
        // Which pods cannot be understood does not depend on the policy.
        if let Some((_, Some(left_out))) = services.first() {
            print_to_stderr(format_args!("warning: {left_out}"));
        }
        let workloads = match dump.workloads() {
            Ok(workloads) => workloads,
            Err(error) => return Ok(unreadable(&error)),
        };
        let services: Vec<_> = services.into_iter().map(|(service, _)| service).collect();
        let comparison = compare(&mut services[0].cluster(), &mut services[1].cluster());
        match self.output.data(&comparison)? {
            Some(data) => std::io::stdout().write_all(data.as_bytes())?,
            None => print(&comparison, &workloads)?,
        }
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
            print_diagnostics(&found, &files, &mut std::io::stderr())?;
            Ok(Err(ExitCode::FAILURE))
        }
    }
}

/// The ledger of the dump under a policy, and the pods of the dump that it lacks, as a warning.
fn load_service(
    dump: &Dump,
    policy: Policy,
) -> Result<(Arc<ServerState>, Option<String>), DumpError> {
    let service = ServerState::new(policy);
    let loaded = DumpControlPlane::load(dump, &service, &mut ClusterIndex::default())?;
    Ok((service, left_out_text(loaded.left_out())))
}

/// The most columns that names take up, of nodes that change alike and within a line; further names are counted.
const NODE_NAMES_WIDTH: usize = 56;
const NAMES_WIDTH: usize = 18;

fn print(comparison: &PolicyComparison, workloads: &BTreeMap<PodKey, String>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut nodes: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for change in &comparison.nodes {
        let names = nodes.entry((&change.old, &change.new)).or_default();
        names.push(change.node.clone());
    }
    for ((old, new), names) in nodes {
        let names = match names.as_slice() {
            [name] => format!("node {name}"),
            names => format!("{} nodes: {}", names.len(), listed(names, NODE_NAMES_WIDTH)),
        };
        writeln!(out, "{names}\n    - {old}\n    + {new}")?;
    }
    let mut pods: BTreeMap<String, Vec<&DecisionChange>> = BTreeMap::new();
    for change in &comparison.changes {
        let title = match (workloads.get(&change.pod), &change.node) {
            (Some(workload), _) => workload.clone(),
            (None, Some(node)) => format!("{} on {node}", change.pod),
            (None, None) => format!("{}, waiting", change.pod),
        };
        pods.entry(title).or_default().push(change);
    }
    for (title, changes) in pods {
        print_pods(
            &mut out,
            &title,
            &changes,
            workloads.contains_key(&changes[0].pod),
        )?;
    }
    let (pods, nodes) = (
        plural(comparison.pods, "pod"),
        plural(comparison.nodes.len(), "node"),
    );
    writeln!(
        out,
        "{} of {pods} change, and {nodes}",
        comparison.changes.len()
    )?;
    Ok(())
}

/// What changes for the pods of a workload, each change once with the number of its pods; or for a pod by itself.
fn print_pods(
    out: &mut impl Write,
    title: &str,
    changes: &[&DecisionChange],
    is_workload: bool,
) -> Result<()> {
    if !is_workload {
        writeln!(out, "{title}")?;
        for line in changes
            .iter()
            .flat_map(|change| lines(change, Names::Shown))
        {
            writeln!(out, "    {line}")?;
        }
        return Ok(());
    }
    writeln!(out, "{title}, {}", plural(changes.len(), "pod"))?;
    let mut counts: Vec<(String, usize)> = Vec::new();
    for line in changes
        .iter()
        .flat_map(|change| lines(change, Names::LeftOut))
    {
        match counts.iter_mut().find(|(other, _)| *other == line) {
            Some((_, count)) => *count += 1,
            None => counts.push((line, 1)),
        }
    }
    for (line, count) in counts {
        writeln!(out, "{count:>5}  {line}")?;
    }
    Ok(())
}

/// Whether nodes and victims are named.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    Shown,
    LeftOut,
}

fn lines(DecisionChange { old, new, .. }: &DecisionChange, names: Names) -> Vec<String> {
    let word = |what: &str, of: &dyn Fn(&PodDecision) -> String| {
        let (old, new) = (of(old), of(new));
        (old != new).then(|| format!("{what} {old} → {new}"))
    };
    let list = |what: &str, noun: &str, of: &dyn Fn(&PodDecision) -> Vec<String>| {
        let (old, new) = (of(old), of(new));
        let named = |names: &[String]| match names.is_empty() {
            true => format!("no {noun}"),
            false => listed(names, NAMES_WIDTH),
        };
        (old != new).then(|| match (names, old.is_empty(), new.is_empty()) {
            (Names::Shown, ..) => format!("{what} {} → {}", named(&old), named(&new)),
            (_, _, true) => format!("{what} no {noun} any more"),
            (_, true, _) => format!("{what} a {noun} now"),
            _ => format!("{what} other {noun}s"),
        })
    };
    let lines = [
        word("class", &|one| one.class.clone()),
        word("tenant", &|one| {
            one.tenant.clone().unwrap_or_else(|| "none".into())
        }),
        word("may be evicted", &|one| {
            if one.preemptible { "yes" } else { "no" }.into()
        }),
        list("could go to", "node", &|one| one.nodes.clone()),
        list("would evict", "pod", &|one| one.victims.clone()),
    ];
    lines.into_iter().flatten().collect()
}

/// As many names as fit, and at least one.
fn listed(names: &[String], width: usize) -> String {
    let mut taken = 0;
    let fits = |name: &&String| {
        taken += name.len() + 2;
        taken <= width
    };
    let shown = names.iter().take_while(fits).count().max(1);
    let named = names[..shown].join(", ");
    match names.len() - shown {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
