//! What a plan of capacity is asked, read from files: the policy, the pods of manifests and of a dump, and kinds of nodes from
//! Node objects. Nothing is decided here; what cannot be part of a plan is named.

use super::objects::{DroppedRule, NodeTemplateError, PlannedPod, node_template, pod_to_place};
use crate::cli::policy::policy_at;
use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::{Node, Pod};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use stowage_scheduling::ids::PodKey;
use stowage_scheduling::kube_filters::ResourceList;
use stowage_scheduling::policy::{Mode, NamespaceLabels, Policy};
use stowage_scheduling::units::{Bytes, MilliCpu, plural};
use stowage_server::kubernetes::dump::DumpContents;
use stowage_server::kubernetes::manifests::Manifests;
use stowage_server::policy_watch;
use stowage_sizing::capacity_plan::question::{HOSTNAME, NodeTemplate, PodToPlace, TemplateHost};
use stowage_sizing::capacity_plan::report::{NotHeldReason, PodNotHeld};

/// The most kinds of nodes of a plan: more than a cluster has. For each of them all pods are placed a few times.
const MAX_KINDS: usize = 256;

/// Pods, as far as a plan can be made for them.
#[derive(Debug, Default)]
pub struct Gathered {
    pub pods: Vec<PodToPlace>,
    /// Pods whose request is invalid: they have no place anywhere.
    pub invalid: Vec<PodNotHeld>,
    /// What is left out, for people.
    pub left_out: Vec<String>,
}

/// What is counted while pods are read.
#[derive(Default)]
struct PodCounts {
    irrelevant: usize,
    by_claims: usize,
    /// By the rule that no plan knows, its pods.
    dropped: BTreeMap<DroppedRule, usize>,
}

/// The policy in force, with what its selectors say of these namespaces; `None` for one with problems, which are printed.
pub fn policy_for(
    path: Option<&Path>,
    at: Option<jiff::Timestamp>,
    namespaces: Option<&NamespaceLabels>,
) -> Result<Option<Policy>> {
    let policy = match path {
        None => policy_watch::built_in(),
        Some(path) => match policy_at(path, at)? {
            Ok(policy) => policy,
            Err(_) => return Ok(None),
        },
    };
    let mut policy = match namespaces {
        Some(namespaces) => policy.with_namespace_labels(namespaces),
        None => policy,
    };
    // A plan is of what the policy says, whether or not it is enforced yet.
    policy.settings.mode = Mode::Enforce;
    Ok(Some(policy))
}

/// The pods of manifests and of a dump.
pub fn pods(
    manifests: &Manifests,
    dump: Option<&DumpContents>,
    policy: &Policy,
) -> Result<Gathered> {
    let (mut found, mut counted) = (Gathered::default(), PodCounts::default());
    let made = manifests.pods()?;
    found.left_out.extend(made.warnings);
    let mut workloads = 0;
    for pod in &made.pods {
        workloads = workloads.max(pod.workload + 1);
        found.add(
            &pod.pod,
            pod.workload,
            pod.source.clone(),
            policy,
            &mut counted,
        );
    }
    for (index, pod) in dump.iter().flat_map(|dump| &dump.pods).enumerate() {
        let source = format!("dump: Pod {}", pod_name(pod)).into();
        found.add(pod, workloads + index, source, policy, &mut counted);
    }
    found.left_out.extend(counted.texts());
    if found.pods.is_empty() && found.invalid.is_empty() {
        let why = found
            .left_out
            .iter()
            .map(|text| format!("\n  {text}"))
            .collect::<String>();
        bail!(
            "there is no pod that requests a GPU; --pods takes Pods, Deployments, StatefulSets, Jobs, LeaderWorkerSets and the like whose \
             containers have stowage.dev/vram or nvidia.com/* in resources.limits{why}"
        );
    }
    Ok(found)
}

/// The kinds of nodes that these are, each once, in the order in which they come first. Nodes without a GPU are passed over if
/// there are others.
pub fn kinds_from_objects(
    nodes: &[(String, Node)],
    pods: &[PodToPlace],
    policy: &Policy,
) -> Result<Vec<NodeTemplate>> {
    let mut kinds = fleet_from_objects(nodes, pods, policy)?;
    kinds.iter_mut().for_each(|kind| kind.max_nodes = None);
    Ok(kinds)
}

/// The same kinds, with as many nodes at most as there are, under names that differ.
pub fn fleet_from_objects(
    nodes: &[(String, Node)],
    pods: &[PodToPlace],
    policy: &Policy,
) -> Result<Vec<NodeTemplate>> {
    let labels = selected_labels(pods, policy);
    let mut kinds: Vec<AlikeNodes> = Vec::new();
    let mut refused: Option<(&str, NodeTemplateError)> = None;
    for (source, node) in nodes {
        match node_template(node, &labels, &policy.nodes) {
            Ok(kind) => {
                if !kinds
                    .iter_mut()
                    .any(|alike_nodes| alike_nodes.absorb(&kind))
                {
                    kinds.push(AlikeNodes::new(kind));
                }
            }
            Err(error) => refused = refused.or(Some((source, error))),
        }
    }
    match (kinds.len(), refused) {
        (0, Some((source, error))) => bail!("{source}: {error}"),
        (0, None) => bail!("there is no Node with GPUs"),
        (count, _) if count > MAX_KINDS => bail!(
            "these are {count} kinds of GPU nodes, and {MAX_KINDS} are the most: nodes differ by their GPUs, CPU and memory of more than {ALIKE_PERCENT} %, taints, and the labels \
             that pods or the policy select by; name one node of each kind that you want"
        ),
        _ => {
            let kinds = kinds.into_iter().map(|kind| NodeTemplate {
                max_nodes: Some(kind.count),
                ..kind.least
            });
            Ok(with_unique_names(kinds.collect()))
        }
    }
}

/// Names of nodes begin with that of their kind.
pub fn with_unique_names(mut kinds: Vec<NodeTemplate>) -> Vec<NodeTemplate> {
    let mut taken: Vec<String> = Vec::new();
    for kind in &mut kinds {
        let plain = kind.name.clone();
        let mut number = 2;
        while taken.contains(&kind.name) {
            kind.name = format!("{plain}-kind-{number}");
            number += 1;
        }
        taken.push(kind.name.clone());
    }
    kinds
}

/// Nodes of one kind: machines of one model differ by what their firmware and kernel keep for themselves.
struct AlikeNodes {
    /// The template, with the least CPU, memory and disk of all these nodes.
    least: NodeTemplate,
    /// The most CPU, memory and disk of all these nodes.
    most: ResourceList,
    count: u32,
}

/// How much the CPU or memory of nodes of one kind may differ, in percent of the larger one.
const ALIKE_PERCENT: u64 = 2;

impl AlikeNodes {
    fn new(kind: NodeTemplate) -> Self {
        let most = kind.host.allocatable().cloned().unwrap_or_default();
        Self {
            least: kind,
            most,
            count: 1,
        }
    }

    /// Takes another node in, if it is of the same kind.
    fn absorb(&mut self, other: &NodeTemplate) -> bool {
        let of = |kind: &NodeTemplate| Some(kind.host.allocatable()?.clone());
        let (Some(mine), Some(its)) = (of(&self.least), of(other)) else {
            let is_same = self.least == *other;
            self.count += u32::from(is_same);
            return is_same;
        };
        let least = combine_amounts(&mine, &its, Ord::min);
        let most = combine_amounts(&self.most, &its, Ord::max);
        let with_least_host = NodeTemplate {
            host: self.least.host.clone(),
            ..other.clone()
        };
        let allows = |kind: &NodeTemplate| kind.host.pods();
        if with_least_host != self.least
            || allows(other) != allows(&self.least)
            || mine.others != its.others
        {
            return false;
        }
        let is_alike = |least: u64, most: u64| {
            (most - least).saturating_mul(100) <= most.saturating_mul(ALIKE_PERCENT)
        };
        let pairs = [
            (least.cpu.0, most.cpu.0),
            (least.memory.0, most.memory.0),
            (least.ephemeral_storage.0, most.ephemeral_storage.0),
        ];
        if !pairs.into_iter().all(|(least, most)| is_alike(least, most)) {
            return false;
        }
        self.most = most;
        self.count += 1;
        if let TemplateHost::Observed { allocatable, .. } = &mut self.least.host {
            *allocatable = least;
        }
        true
    }
}

/// Each of CPU, memory and disk by itself.
fn combine_amounts(
    one: &ResourceList,
    other: &ResourceList,
    pick: fn(u64, u64) -> u64,
) -> ResourceList {
    ResourceList {
        cpu: MilliCpu(pick(one.cpu.0, other.cpu.0)),
        memory: Bytes(pick(one.memory.0, other.memory.0)),
        ephemeral_storage: Bytes(pick(one.ephemeral_storage.0, other.ephemeral_storage.0)),
        others: one.others.clone(),
    }
}

/// Keys of labels by which pods select nodes, or the policy does.
fn selected_labels<'a>(pods: &'a [PodToPlace], policy: &'a Policy) -> BTreeSet<&'a str> {
    let selected = pods
        .iter()
        .flat_map(|pod| pod.requirements.node_selector.keys());
    let terms = pods
        .iter()
        .flat_map(|pod| pod.requirements.node_affinity.iter().flatten());
    let required = terms.flat_map(|term| term.labels.iter().map(|requirement| &requirement.key));
    let topologies = pods.iter().flat_map(|pod| {
        pod.requirements
            .repels
            .iter()
            .map(|repels| &repels.topology)
    });
    let pools = policy.pools().iter().flat_map(|pool| pool.selector.keys());
    let keys = selected
        .chain(required)
        .chain(topologies)
        .chain(pools)
        .map(String::as_str);
    // Every node has its own, and those of a plan are given theirs.
    keys.filter(|key| *key != HOSTNAME).collect()
}

impl Gathered {
    fn add(
        &mut self,
        pod: &Pod,
        workload: usize,
        source: Arc<str>,
        policy: &Policy,
        counted: &mut PodCounts,
    ) {
        match pod_to_place(pod, workload, source.clone(), policy) {
            PlannedPod::ToPlace { pod, dropped } => {
                for rule in dropped {
                    *counted.dropped.entry(rule).or_default() += 1;
                }
                self.pods.push(*pod);
            }
            PlannedPod::Irrelevant => counted.irrelevant += 1,
            PlannedPod::UsesClaims => counted.by_claims += 1,
            PlannedPod::Unidentified(error) => {
                let remedy = "give it a name and a namespace that Kubernetes takes";
                self.invalid.push(not_held(
                    pod,
                    &source,
                    "unidentified",
                    &error.to_string(),
                    remedy,
                ));
            }
            PlannedPod::Invalid(error) => {
                let remedy = "write the request as the pod contract has it";
                self.invalid.push(not_held(
                    pod,
                    &source,
                    error.code(),
                    &error.to_string(),
                    remedy,
                ));
            }
        }
    }
}

impl PodCounts {
    fn texts(self) -> Vec<String> {
        let pods = |count: usize, what: &str| {
            (count > 0).then(|| format!("{} {what}", plural(count, "pod")))
        };
        let irrelevant = pods(
            self.irrelevant,
            "left out: no GPU is requested, or the pod has ended or is being deleted",
        );
        let by_claims = pods(
            self.by_claims,
            "left out: kube-scheduler allocates devices to ResourceClaims",
        );
        let dropped = self.dropped.into_iter().map(|(rule, count)| {
            format!(
                "{}: {rule}; the plan does not take that into account",
                plural(count, "pod")
            )
        });
        irrelevant
            .into_iter()
            .chain(by_claims)
            .chain(dropped)
            .collect()
    }
}

fn not_held(pod: &Pod, source: &str, code: &str, why: &str, remedy: &str) -> PodNotHeld {
    let unnamed = || PodKey {
        namespace: "?".into(),
        name: "?".into(),
    };
    let (namespace, name) = (
        pod.metadata.namespace.as_deref(),
        pod.metadata.name.as_deref(),
    );
    let key = PodKey::parse(namespace.unwrap_or("default"), name.unwrap_or("?"))
        .unwrap_or_else(|_| unnamed());
    PodNotHeld {
        pod: key,
        source: source.into(),
        requests: "cannot be understood".into(),
        reasons: vec![NotHeldReason {
            nodes: None,
            code: code.into(),
            text: why.into(),
            remedy: remedy.into(),
        }],
    }
}

fn pod_name(pod: &Pod) -> String {
    let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
    format!(
        "{}/{}",
        namespace.as_deref().unwrap_or("default"),
        name.as_deref().unwrap_or("?")
    )
}
