//! `stowage plan capacity`: how many GPUs some pods need. Reads pods and kinds of nodes, asks for the plan and prints it; what is
//! read is in [`gather`](super::gather), what is printed in [`text`](super::text).
//!
//! Exit codes: 0 if every pod has a place, 1 if one has none, 2 if something cannot be read.

use super::gather::{Gathered, kinds_from_objects, pods, policy_for, with_unique_names};
use super::text;
use crate::cli::output::{Columns, OutputArgs};
use crate::cli::{NO_ANSWER, exit_without_answer, print_to_stderr, standard_input};
use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use stowage_scheduling::policy::Policy;
use stowage_server::kubernetes::dump::{Dump, DumpContents};
use stowage_server::kubernetes::manifests::Manifests;
use stowage_sizing::capacity_plan::gpu_types::GpuType;
use stowage_sizing::capacity_plan::plan;
use stowage_sizing::capacity_plan::question::{CapacityQuestion, NodeTemplate};
use stowage_sizing::capacity_plan::report::CapacityPlan;
use stowage_sizing::capacity_plan::shorthand::{NodeShorthand, NodeShorthandError};

const HELP: &str = "Each KEY=VALUE of --nodes is one of gpus (of a node), gpu (its type), vram (of a GPU, where the type is not known), cpu, \
                    memory, label (KEY=VALUE, repeatable), count (the most nodes there can be) and name. CPU or memory that \
                    you leave out is unlimited.\n\n\
                    Exit codes: 0 if every pod has a place, 1 if one has none, 2 if something cannot be read or the arguments are invalid.";

#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CapacityArgs {
    /// Manifests of the pods: Pods, or workloads with their replicas; a file, a directory, or `-` for standard input
    #[arg(long, value_name = "PATH", required_unless_present = "cluster")]
    pods: Vec<PathBuf>,

    /// Also what runs and waits in what `kubectl get nodes,pods -A -o yaml` (or -o json) printed; `-` is standard input
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,

    /// A kind of node, such as gpus=8,gpu=A100-80GB, or a file of Node objects, each a kind of its own. Nodes of a later kind are
    /// added only for pods that the earlier ones cannot hold [default: the kinds of GPU nodes in --cluster]
    #[arg(long, value_name = "NODES", required_unless_present = "cluster")]
    nodes: Vec<String>,

    /// The policy, a file or a directory [default: the built-in policy]
    #[arg(long, value_name = "PATH")]
    policy: Option<PathBuf>,

    /// The time, which decides which windows of the policy are open, such as 2026-11-23T22:00:00+01:00 [default: now]
    #[arg(long, value_name = "TIME", requires = "policy")]
    at: Option<jiff::Timestamp>,

    /// The MIG slices that each GPU is cut into, such as 3g.40gb,3g.40gb [default: whole GPUs, or as device-plugin pods ask]
    #[arg(long, value_name = "PROFILES")]
    mig: Option<String>,

    /// Compare these GPU types in the one kind of node that --nodes describes, such as L40S-48GB,A100-80GB
    #[arg(long, value_name = "TYPES", value_delimiter = ',', requires = "nodes")]
    gpu_types: Vec<String>,

    #[command(flatten)]
    output: OutputArgs,
}

/// What is printed for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityAnswer {
    #[serde(flatten)]
    pub plan: CapacityPlan,
    /// What the plan leaves out, for people.
    pub left_out: Vec<String>,
}

/// One GPU type of several.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TypeAnswer {
    pub gpu_type: &'static str,
    /// None for a type that cannot be cut as asked.
    pub plan: Option<CapacityPlan>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TypesAnswer {
    pub types: Vec<TypeAnswer>,
    /// The one with the least memory that holds every pod.
    pub smallest: Option<&'static str>,
    pub left_out: Vec<String>,
}

/// Its message has its reasons in it, so it is no link of a chain.
fn nodes_error(nodes: &str, error: &NodeShorthandError) -> anyhow::Error {
    anyhow!("--nodes {nodes:?}: {error}")
}

impl CapacityArgs {
    /// Whatever goes wrong before there is a plan is no answer: a script shall not take it for pods without a place.
    pub fn run(self) -> Result<ExitCode> {
        self.try_run().or_else(exit_without_answer)
    }

    fn try_run(&self) -> Result<ExitCode> {
        self.read_standard_input_once()?;
        let dump = self
            .cluster
            .as_deref()
            .map(|path| Dump::read(path)?.contents())
            .transpose()?;
        let namespaces = dump.as_ref().map(|dump| &dump.namespaces);
        let Some(policy) = policy_for(self.policy.as_deref(), self.at, namespaces)? else {
            // The problems are printed already.
            return Ok(NO_ANSWER.into());
        };
        let manifests = self.pods.iter().map(|path| Manifests::read(path));
        let manifests = manifests
            .reduce(|all, more| Ok(all?.merge(more?)))
            .transpose()?
            .unwrap_or_default();
        let found = pods(&manifests, dump.as_ref(), &policy)?;
        match self.gpu_types.is_empty() {
            true => self.plan_one(found, dump.as_ref(), policy),
            false => self.compare_types(&found, policy),
        }
    }

    fn read_standard_input_once(&self) -> Result<()> {
        let nodes = self.nodes.iter().map(|nodes| ("--nodes", Path::new(nodes)));
        let files = [("--cluster", &self.cluster), ("--policy", &self.policy)];
        let files = files
            .into_iter()
            .filter_map(|(flag, path)| Some((flag, path.as_deref()?)));
        standard_input::check_named_once(
            files
                .chain(self.pods.iter().map(|path| ("--pods", &**path)))
                .chain(nodes),
        )
    }

    fn plan_one(
        &self,
        found: Gathered,
        dump: Option<&DumpContents>,
        policy: Policy,
    ) -> Result<ExitCode> {
        let node_kinds = self.node_kinds(&found, dump, &policy)?;
        let question = CapacityQuestion {
            policy: Arc::new(policy),
            pods: found.pods,
            node_kinds,
        };
        let mut plan = plan(&question);
        plan.pods += found.invalid.len();
        plan.not_held.extend(found.invalid);
        let answer = CapacityAnswer {
            plan,
            left_out: found.left_out,
        };
        self.print(&answer, &answer.left_out, text::plan_text)?;
        Ok(if answer.plan.not_held.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn compare_types(&self, found: &Gathered, policy: Policy) -> Result<ExitCode> {
        let [nodes] = &self.nodes[..] else {
            bail!(
                "--gpu-types compares the types in one kind of node: give --nodes once, such as gpus=8"
            );
        };
        let shorthand = NodeShorthand::parse(nodes).map_err(|error| nodes_error(nodes, &error))?;
        if shorthand.names_gpu() {
            bail!(
                "--nodes {nodes:?}: --gpu-types says which GPU the nodes have; leave gpu= and vram= out"
            );
        }
        let policy = Arc::new(policy);
        let mut types = Vec::new();
        for name in &self.gpu_types {
            let gpu = GpuType::find(name.trim()).context("--gpu-types")?;
            let template = shorthand
                .clone()
                .with_gpu(gpu)
                .template(self.mig.as_deref());
            let template = match template {
                Ok(template) => template,
                // Another type may have the profile.
                Err(
                    error @ (NodeShorthandError::Geometry(_)
                    | NodeShorthandError::UnknownSlice { .. }),
                ) => {
                    let refused = Some(error.to_string());
                    types.push((
                        gpu,
                        TypeAnswer {
                            gpu_type: gpu.name,
                            plan: None,
                            refused,
                        },
                    ));
                    continue;
                }
                Err(error) => return Err(nodes_error(nodes, &error)),
            };
            let question = CapacityQuestion {
                policy: policy.clone(),
                pods: found.pods.clone(),
                node_kinds: vec![template],
            };
            let mut plan = plan(&question);
            plan.pods += found.invalid.len();
            plan.not_held.extend(found.invalid.iter().cloned());
            types.push((
                gpu,
                TypeAnswer {
                    gpu_type: gpu.name,
                    plan: Some(plan),
                    refused: None,
                },
            ));
        }
        if let Some(error) = refused_by_all(&types) {
            bail!("--nodes {nodes:?}: {error}");
        }
        let holds = |answer: &TypeAnswer| {
            answer
                .plan
                .as_ref()
                .is_some_and(|plan| plan.not_held.is_empty())
        };
        let holding = types.iter().filter(|(_, answer)| holds(answer));
        let smallest = holding
            .min_by_key(|(gpu, _)| gpu.total())
            .map(|(gpu, _)| gpu.name);
        let types = types.into_iter().map(|(_, answer)| answer).collect();
        let answer = TypesAnswer {
            types,
            smallest,
            left_out: found.left_out.clone(),
        };
        self.print(&answer, &answer.left_out, text::types_text)?;
        Ok(if smallest.is_some() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    /// The kinds of nodes, under names that differ.
    fn node_kinds(
        &self,
        found: &Gathered,
        dump: Option<&DumpContents>,
        policy: &Policy,
    ) -> Result<Vec<NodeTemplate>> {
        let mut kinds: Vec<NodeTemplate> = Vec::new();
        for nodes in &self.nodes {
            match is_shorthand(nodes) {
                true => kinds.push(
                    self.template_from_shorthand(nodes)
                        .map_err(|error| nodes_error(nodes, &error))?,
                ),
                false => {
                    let objects = Manifests::read(Path::new(nodes))
                        .context("--nodes")?
                        .nodes()?;
                    if objects.is_empty() {
                        bail!(
                            "--nodes {nodes} has no Node; write such as gpus=8,gpu=A100-80GB, or name a file of Node objects"
                        );
                    }
                    kinds.extend(kinds_from_objects(&objects, &found.pods, policy)?);
                }
            }
        }
        if let Some(dump) = dump.filter(|_| self.nodes.is_empty()) {
            kinds = kinds_from_objects(&named_nodes(dump), &found.pods, policy).context(
                "--cluster; describe the nodes with --nodes instead, such as gpus=8,gpu=A100-80GB",
            )?;
        }
        if self.mig.is_some() && kinds.iter().any(|kind| kind.geometry.is_none()) {
            bail!(
                "--mig is about nodes that --nodes describes, such as gpus=8,gpu=A100-80GB; Node objects show their own slices"
            );
        }
        Ok(with_unique_names(kinds))
    }

    fn template_from_shorthand(&self, nodes: &str) -> Result<NodeTemplate, NodeShorthandError> {
        let shorthand = NodeShorthand::parse(nodes)?;
        if !shorthand.names_gpu() {
            return Err(NodeShorthandError::NoGpu);
        }
        shorthand.template(self.mig.as_deref())
    }

    fn print<T: Serialize>(
        &self,
        answer: &T,
        left_out: &[String],
        text: impl FnOnce(&T, Columns) -> String,
    ) -> Result<()> {
        if !self.output.is_data() {
            left_out
                .iter()
                .for_each(|what| print_to_stderr(format_args!("warning: {what}")));
        }
        self.output.print(answer, text)
    }
}

/// Why the first type cannot be cut as asked, if none can.
fn refused_by_all(types: &[(&GpuType, TypeAnswer)]) -> Option<String> {
    let all = types.iter().all(|(_, answer)| answer.plan.is_none());
    types
        .first()
        .filter(|_| all)
        .and_then(|(_, answer)| answer.refused.clone())
}

/// Whether a value of `--nodes` is a shorthand, and not the name of a file.
fn is_shorthand(nodes: &str) -> bool {
    nodes != "-" && nodes.contains('=') && !Path::new(nodes).exists()
}

fn named_nodes(dump: &DumpContents) -> Vec<(String, k8s_openapi::api::core::v1::Node)> {
    let name =
        |node: &k8s_openapi::api::core::v1::Node| node.metadata.name.clone().unwrap_or_default();
    dump.nodes
        .iter()
        .map(|node| (format!("Node {}", name(node)), node.clone()))
        .collect()
}
