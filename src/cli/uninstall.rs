//! `stowage uninstall`: takes back what Stowage wrote on nodes and pods, and says what still runs.
//!
//! Exit codes: 0 if nothing is left to be taken off (with `--dry-run`: even if there is), 1 otherwise.

use crate::cli::output::{Columns, OutputArgs, print};
use crate::cli::print_to_stderr;
use anyhow::Result;
use clap::Args;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::plural;
use stowage_server::kubernetes;
use stowage_server::kubernetes::uninstall::{self, Leftovers, WriteFailure};

const EXIT_CODES: &str = "Exit codes: 0 if nothing is left (with --dry-run: even if something is), 1 if something is, 2 for invalid \
                          arguments.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub struct UninstallArgs {
    /// Kubeconfig of the cluster [default: KUBECONFIG, ~/.kube/config, then the pod's service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Show what would be taken off, and change nothing
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    output: OutputArgs,
}

/// The command that deletes objects of every kind that [`Leftovers::objects`] may have.
const DELETE_OBJECTS: &str = "kubectl -n kube-system delete configmaps,poddisruptionbudgets,validatingadmissionpolicies,\
                              validatingadmissionpolicybindings,mutatingadmissionpolicies,mutatingadmissionpolicybindings \
                              -l app.kubernetes.io/part-of=stowage";

/// The most failures that are printed.
const MAX_FAILURES_SHOWN: usize = 10;

impl UninstallArgs {
    pub async fn run(self) -> Result<ExitCode> {
        let client = kubernetes::connect(self.kubeconfig.as_deref(), WriteTimes::default()).await?;
        let found = uninstall::find(&client).await?;
        if !self.output.is_data() {
            print(&Columns::for_stdout().wrap(&removal_text(&found, self.dry_run)))?;
        }
        let failures = if self.dry_run {
            Vec::new()
        } else {
            uninstall::remove(&client, &found).await
        };
        let answer = json!({
            "dryRun": self.dry_run,
            "nodes": found.nodes.iter().map(NodeName::as_str).collect::<Vec<_>>(),
            "markedPods": found.marked_pods(),
            "gatedPods": found.gated_pods(),
            "leases": found.leases.iter().map(|lease| lease.name).collect::<Vec<_>>(),
            "running": found.running,
            "pending": found.pending,
            "objects": found.objects,
            "failures": failures
                .iter()
                .map(|failure| format!("{}: {}", failure.object, failure.error))
                .collect::<Vec<_>>(),
        });
        self.output
            .print(&answer, |_, columns| remaining_text(&found, columns))?;
        for WriteFailure { object, error } in failures.iter().take(MAX_FAILURES_SHOWN) {
            print_to_stderr(format_args!("error: {object}: {error}"));
        }
        if self.dry_run || found.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        // A write that met another one, and what came meanwhile.
        if failures.is_empty() && uninstall::find(&client).await?.is_empty() {
            return Ok(ExitCode::SUCCESS);
        }
        print_to_stderr(format_args!(
            "error: something is left. It is found again: repeat the command."
        ));
        Ok(ExitCode::FAILURE)
    }
}

fn removal_text(found: &Leftovers, dry_run: bool) -> String {
    if found.is_empty() {
        return "Nothing of Stowage is left on nodes and pods.\n".into();
    }
    let verb = if dry_run { "Would remove" } else { "Removing" };
    let mut lines = vec![format!("{verb}:")];
    let mut line = |count: usize, of: &str, what: &str| {
        if count > 0 {
            lines.push(format!("  {what} of {}", plural(count, of)));
        }
    };
    line(found.nodes.len(), "node", "stowage.dev/vram");
    line(
        found.marked_pods(),
        "pod",
        "conditions stowage.dev/* and nominations",
    );
    line(
        found.gated_pods(),
        "pod",
        "the scheduling gate stowage.dev/plan",
    );
    lines.extend(
        found
            .leases
            .iter()
            .map(|lease| format!("  the Lease kube-system/{}", lease.name)),
    );
    lines.join("\n") + "\n"
}

fn remaining_text(found: &Leftovers, columns: Columns) -> String {
    let mut lines = Vec::new();
    if !found.running.is_empty() {
        lines.push(format!(
            "Running on GPUs that Stowage chose: {}.",
            by_namespace(&found.running)
        ));
        lines.push("  They keep their GPUs and their annotations until they end.".into());
    }
    if !found.pending.is_empty() {
        lines.push(format!(
            "Pending, and no scheduler will place them: {}.",
            by_namespace(&found.pending)
        ));
        lines.push(
            "  Give their owners another schedulerName and nvidia.com/gpu in place of stowage.dev/vram."
                .into(),
        );
    }
    if !found.objects.is_empty() {
        lines.push(format!(
            "Of manifests that were applied: {}.",
            found.objects.join(", ")
        ));
    }
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    // A command is copied, and stays whole.
    let command = match found.objects.is_empty() {
        true => String::new(),
        false => format!("  {DELETE_OBJECTS}\n"),
    };
    columns.wrap(&text) + &command
}

/// `3 pods (team-a: 2, team-b: 1)`.
fn by_namespace(counts: &BTreeMap<String, usize>) -> String {
    let each: Vec<String> = counts
        .iter()
        .map(|(namespace, count)| format!("{namespace}: {count}"))
        .collect();
    format!(
        "{} ({})",
        plural(counts.values().sum::<usize>(), "pod"),
        each.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stowage_server::kubernetes::uninstall::FoundLease;

    #[test]
    fn an_empty_cluster_needs_one_line() {
        let found = Leftovers::default();
        assert_eq!(
            removal_text(&found, false),
            "Nothing of Stowage is left on nodes and pods.\n"
        );
        assert_eq!(remaining_text(&found, Columns(None)), "");
    }

    #[test]
    fn what_goes_and_what_stays_is_said_with_its_numbers() {
        let mut found = Leftovers::default();
        found.nodes = vec![NodeName::parse("node-a").unwrap()];
        found.leases = vec![FoundLease {
            name: "stowage-scheduler",
            uid: None,
            version: None,
        }];
        found.running = [("team-a".to_owned(), 2), ("team-b".to_owned(), 1)].into();
        found.pending = [("team-b".to_owned(), 1)].into();
        assert_eq!(
            removal_text(&found, true),
            "Would remove:\n  stowage.dev/vram of 1 node\n  the Lease kube-system/stowage-scheduler\n"
        );
        let stays = remaining_text(&found, Columns(None));
        assert!(stays.contains("3 pods (team-a: 2, team-b: 1)"), "{stays}");
        assert!(
            stays.contains("no scheduler will place them: 1 pod (team-b: 1)"),
            "{stays}"
        );
    }

    #[test]
    fn what_a_change_of_overlay_left_is_named_with_the_command_that_deletes_it() {
        let mut found = Leftovers::default();
        found.objects = vec![
            "poddisruptionbudgets/stowage".into(),
            "configmaps/stowage-policy".into(),
        ];
        let stays = remaining_text(&found, Columns(None));
        assert!(
            stays.contains(": poddisruptionbudgets/stowage, configmaps/stowage-policy."),
            "{stays}"
        );
        assert!(
            stays.contains("kubectl -n kube-system delete configmaps,poddisruptionbudgets,"),
            "{stays}"
        );
    }
}
