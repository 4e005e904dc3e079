//! `stowage explain`: asks a running service, or a dump of a cluster, why a pod is where it is, and prints the answer.
//!
//! [`source`] gets the explanation, from a recording [`recorded`] does, and [`render`] formats it. Exit codes: 0 if the pod fits
//! or is placed, 1 if it does not fit, 2 if the pod is unknown or the service cannot be reached. Nothing is decided here.

mod recorded;
mod render;
mod source;

use super::access::ContextAccessArgs;
use super::output::OutputArgs;
use super::pod_argument::PodArgument;
use super::policy::policy_at;
use super::{NO_ANSWER, exit_without_answer, standard_input};
use anyhow::{Context, Result, bail};
use clap::{ArgGroup, Args};
use render::Paint;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use stowage_scheduling::explaining::explanation::PodVerdict;
use stowage_scheduling::explaining::{Explanation, ShownNodes};
use stowage_scheduling::ids::NodeName;
use stowage_server::policy_watch;
use stowage_telemetry::wants_no_color;

const EXIT_CODES: &str = "Exit codes: 0 if the pod is placed or fits, 1 if it does not fit or its victims have not left, 2 if the \
                          pod is unknown, nothing answers, or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES, group = ArgGroup::new("offline").args(["cluster", "bundle"]))]
pub struct ExplainArgs {
    #[command(flatten)]
    pod: PodArgument,

    #[command(flatten)]
    access: ContextAccessArgs,

    /// Explain on what `kubectl get nodes,pods -A -o yaml` printed, without a service; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["AccessArgs", "context"])]
    cluster: Option<PathBuf>,

    /// Explain on a recording, as it was then: the directory of `serve --record`, a segment, or a bundle
    #[arg(long, value_name = "RECORDING", conflicts_with_all = ["AccessArgs", "context"])]
    bundle: Option<PathBuf>,

    /// The time: of --bundle [default: its end], or for the windows of --policy with --cluster [default: now], such as
    /// 2026-07-01T12:00:00Z
    #[arg(long, value_name = "TIME", requires = "offline", conflicts_with = "server", value_parser = recorded::time)]
    at: Option<jiff::Timestamp>,

    /// The policy for --cluster, a file or a directory; without it the default policy
    #[arg(long, value_name = "PATH", requires = "cluster", conflicts_with_all = ["bundle", "server"])]
    policy: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,

    /// Show every node in detail
    #[arg(long, conflicts_with = "node")]
    all: bool,

    /// Show this node only
    #[arg(long, value_name = "NAME")]
    node: Option<String>,
}

const DOES_NOT_FIT: u8 = 1;

impl ExplainArgs {
    /// Whatever goes wrong before there is an answer is no answer: a script shall not take it for a pod that does not fit.
    pub async fn run(self) -> Result<ExitCode> {
        self.try_run().await.or_else(exit_without_answer)
    }

    async fn try_run(self) -> Result<ExitCode> {
        let files = [("--cluster", &self.cluster), ("--policy", &self.policy)];
        standard_input::check_named_once(
            files
                .into_iter()
                .filter_map(|(flag, path)| Some((flag, path.as_deref()?))),
        )?;
        if self.at.is_some() && self.bundle.is_none() && self.policy.is_none() {
            bail!("--at is the time for the windows of --policy: name one, or leave --at out");
        }
        let (pod, options) = (self.pod.key()?, self.shown_nodes()?);
        if let Some(recording) = &self.bundle {
            return self.print(&recorded::explain_recording(
                recording, self.at, &pod, &options,
            )?);
        }
        let answer = match &self.cluster {
            Some(dump) => match self
                .policy
                .as_deref()
                .map_or(Ok(Ok(policy_watch::built_in())), |path| {
                    policy_at(path, self.at)
                })? {
                Ok(policy) => source::from_dump(dump, policy, &pod, &options),
                // The error is printed already.
                Err(_) => return Ok(NO_ANSWER.into()),
            },
            None => {
                let access = self.access.read().await?;
                source::from_server(&access, &pod, &options).await
            }
        };
        self.print(&answer?)
    }

    fn shown_nodes(&self) -> Result<ShownNodes> {
        Ok(match (&self.node, self.all) {
            (Some(node), _) => ShownNodes::Node(NodeName::parse(node).context("--node")?),
            (None, true) => ShownNodes::All,
            (None, false) => ShownNodes::default(),
        })
    }

    fn print(&self, explanation: &Explanation) -> Result<ExitCode> {
        let paint = if std::io::stdout().is_terminal() && !wants_no_color() {
            Paint::Colored
        } else {
            Paint::Plain
        };
        self.output.print(explanation, |explanation, columns| {
            render::text(explanation, columns, paint)
        })?;
        Ok(exit_code(explanation.verdict))
    }
}

fn exit_code(verdict: PodVerdict) -> ExitCode {
    match verdict {
        PodVerdict::Bound | PodVerdict::Assumed | PodVerdict::Fits => ExitCode::SUCCESS,
        PodVerdict::Reserved | PodVerdict::DoesNotFit => DOES_NOT_FIT.into(),
    }
}

#[cfg(test)]
mod tests;
