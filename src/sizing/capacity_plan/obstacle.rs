//! Why a pod has no place on a kind of node, and what would have to change: in words for people.

use super::question::{NodeTemplate, PodToPlace};
use super::trial::Obstacle;
use stowage_scheduling::kube_filters::filters::FilterReason;
use stowage_scheduling::kube_filters::requirements::UnsupportedRule;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::reasons::Misfit;
use stowage_scheduling::units::{Bytes, plural};

impl Obstacle {
    /// Whether more nodes of the kind would not help.
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Filter(reason) => !reason.entry(),
            Self::Rule(rule) => !is_repulsion(*rule),
            Self::Gpus(misfit) => !misfit.entry().more_nodes_help,
        }
    }

    pub fn code(&self) -> &'static str {
        match self {
            Self::Filter(reason) => reason.code(),
            Self::Rule(rule) => rule.code(),
            Self::Gpus(misfit) => misfit.code(),
        }
    }

    pub fn describe(&self) -> String {
        match self {
            Self::Filter(reason) => reason.to_string(),
            Self::Rule(rule) => rule.to_string(),
            Self::Gpus(misfit) => misfit.to_string(),
        }
    }

    /// What to change in the pod, or on nodes of this kind.
    pub fn remedy(&self, pod: &PodToPlace, kind: &NodeTemplate, policy: &Policy) -> String {
        match self {
            Self::Filter(reason) => filter_remedy(reason, pod, kind),
            Self::Rule(rule) if is_repulsion(*rule) => {
                "a required anti-affinity keeps such pods on nodes of their own: it needs more nodes".into()
            }
            Self::Rule(_) => "write the quantity or rule so that Kubernetes reads it".into(),
            Self::Gpus(misfit) => misfit_remedy(misfit, pod, kind, policy),
        }
    }
}

fn is_repulsion(rule: UnsupportedRule) -> bool {
    matches!(
        rule,
        UnsupportedRule::AntiAffinityOfAnotherPod | UnsupportedRule::InterPodAffinity
    )
}

fn filter_remedy(reason: &FilterReason, pod: &PodToPlace, kind: &NodeTemplate) -> String {
    match reason {
        FilterReason::NotSelected => {
            let lacks = |(key, value): &(&String, &String)| kind.labels.get(*key) != Some(*value);
            let missing = pod.requirements.node_selector.iter().filter(lacks);
            let labels: Vec<String> = missing
                .map(|(key, value)| format!("label={key}={value}"))
                .collect();
            match labels.is_empty() {
                true => {
                    "give the nodes the labels that its required node affinity asks for, as label=KEY=VALUE"
                        .into()
                }
                false => format!("add {} to --nodes, or take the selector out of the pod", labels.join(",")),
            }
        }
        FilterReason::Tainted { key, .. } => {
            format!("tolerate the taint {key} in the pod, or take it from the node")
        }
        FilterReason::InsufficientAllocatable { resource, .. }
        | FilterReason::InsufficientFree { resource, .. } => {
            format!("ask for less {resource}, or give nodes with more")
        }
        FilterReason::TooManyPods { .. } | FilterReason::HostPortInUse { .. } => {
            "give more nodes".into()
        }
        FilterReason::UnknownNode | FilterReason::VolumeElsewhere => "give other nodes".into(),
        FilterReason::NoClaim { claim } => format!("create the claim {claim}"),
    }
}

fn misfit_remedy(
    misfit: &Misfit,
    pod: &PodToPlace,
    kind: &NodeTemplate,
    policy: &Policy,
) -> String {
    match misfit {
        Misfit::TooLarge { largest, .. } if *largest == Bytes::ZERO => {
            "the memory of these GPUs is not known: give it as vram=80Gi, or label the node with nvidia.com/gpu.memory".into()
        }
        Misfit::TooLarge { largest, .. } => split_over_more(pod, *largest, kind),
        Misfit::TooFewGpus { .. } if kind.geometry.is_some() && pod.demand.gpus > 1 => {
            "a pod over several GPUs gets whole ones, no slices: leave --mig out, or ask for one GPU".into()
        }
        Misfit::TooFewGpus { asked, .. } => format!("give nodes with gpus={asked} or more, or ask for fewer"),
        Misfit::ClassNotAdmitted | Misfit::ClassKeptInPools | Misfit::MigLayoutMismatch => pool_labels_remedy(pod, policy),
        other => other.entry().plan.into(),
    }
}

/// Remedy for a part that is too large for one GPU: a smaller request, or a split over more GPUs of one node.
fn split_over_more(pod: &PodToPlace, largest: Bytes, kind: &NodeTemplate) -> String {
    let gpus = pod.demand.vram().0.div_ceil(largest.0.max(1));
    let smaller = format!("ask for at most {largest} on each GPU");
    match gpus <= u64::from(kind.gpus) && kind.geometry.is_none() {
        true => format!(
            "{smaller}; or split it over {} with the annotation stowage.dev/gpus: \"{gpus}\"; or give larger GPUs",
            plural(gpus, "GPU")
        ),
        false => format!("{smaller}, or give larger GPUs"),
    }
}

/// Remedy that names the labels of the pools that take the pod's class.
fn pool_labels_remedy(pod: &PodToPlace, policy: &Policy) -> String {
    let class = policy.class(pod.demand.class);
    let takes = |names: &Option<Vec<String>>| {
        names
            .as_ref()
            .is_none_or(|names| names.contains(&class.name))
    };
    let pools = policy
        .pools()
        .iter()
        .filter(|pool| takes(&pool.classes) && class.may_be_placed_in(Some(&pool.name)));
    let labels = |selector: &std::collections::BTreeMap<String, String>| {
        selector
            .iter()
            .map(|(key, value)| format!("label={key}={value}"))
            .collect::<Vec<_>>()
            .join(",")
    };
    let choices: Vec<String> = pools
        .filter(|pool| !pool.selector.is_empty())
        .map(|pool| format!("{} (pool {})", labels(&pool.selector), pool.name))
        .collect();
    match choices.is_empty() {
        true => format!(
            "class {}: no node pool of the policy takes it with these nodes' labels",
            class.name
        ),
        false => format!(
            "the pod is of class {}: add {} to --nodes",
            class.name,
            choices.join(" or ")
        ),
    }
}
