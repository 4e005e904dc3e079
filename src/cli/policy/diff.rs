//! `stowage policy diff`: how decisions for a cluster's pods differ between two policies.

use super::{print_diagnostics, unreadable};
use crate::cli::output::OutputArgs;
use crate::cli::print_to_stderr;
use crate::cli::standard_input;
use anyhow::Result;
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use stowage_policy_file::cases::{DecisionChange, PodDecision, PolicyComparison, compare};
use stowage_policy_file::load;
use stowage_policy_file::windows as policy_windows;
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
        let services: Vec<_> = services.into_iter().map(|(service, _)| service).collect();
        let comparison = compare(&mut services[0].cluster(), &mut services[1].cluster());
        self.output.print(&comparison, |compared, columns| {
            columns.wrap(&text(compared))
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
    let service = ServerState::new(policy);
    let loaded = DumpControlPlane::load(dump, &service, &mut ClusterIndex::default())?;
    Ok((service, left_out_text(loaded.left_out())))
}

fn text(comparison: &PolicyComparison) -> String {
    let PolicyComparison {
        pods,
        changes,
        nodes,
    } = comparison;
    let mut text = String::new();
    for change in nodes {
        text += &format!(
            "node {}\n    - {}\n    + {}\n",
            change.node, change.old, change.new
        );
    }
    text.extend(changes.iter().map(change_text));
    let (pods, nodes) = (plural(*pods, "pod"), plural(nodes.len(), "node"));
    text + &format!("{} of {pods} change, and {nodes}\n", changes.len())
}

fn change_text(change: &DecisionChange) -> String {
    let DecisionChange {
        pod,
        node,
        old,
        new,
    } = change;
    let mut text = match node {
        Some(node) => format!("{pod} on {node}\n"),
        None => format!("{pod}, waiting\n"),
    };
    let mut line = |what: &str, of: &dyn Fn(&PodDecision) -> String| {
        let (old, new) = (of(old), of(new));
        if old != new {
            text += &format!("    {what:<16} {old} → {new}\n");
        }
    };
    line("class", &|verdict| verdict.class.clone());
    line("tenant", &|verdict| {
        verdict.tenant.clone().unwrap_or_else(|| "none".into())
    });
    line("may be evicted", &|verdict| {
        if verdict.preemptible { "yes" } else { "no" }.into()
    });
    line("could go to", &|verdict| listed(&verdict.nodes, "no node"));
    line("would evict", &|verdict| listed(&verdict.victims, "none"));
    text
}

/// The most names that are shown; further ones are counted, because a pod may fit thousands of nodes.
const MAX_NAMES_SHOWN: usize = 5;

fn listed(names: &[String], none: &str) -> String {
    match names.len() {
        0 => none.into(),
        n if n <= MAX_NAMES_SHOWN => names.join(", "),
        n => format!(
            "{} and {} more",
            names[..MAX_NAMES_SHOWN].join(", "),
            n - MAX_NAMES_SHOWN
        ),
    }
}
