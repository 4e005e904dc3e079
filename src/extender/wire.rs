//! kube-scheduler's JSON, as measured: Go field names in requests, and the shapes that its Go client decodes.
//!
//! Requests borrow from the body. Whole nodes (`nodeCacheCapable: false`) stay raw text: only their names are parsed, and nodes
//! that pass are sent back byte for byte.

use crate::scheduling::verbs::preempt::OfferedNode;
use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The request of `filter` and `prioritize`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<'a> {
    pub pod: Pod,
    #[serde(borrow)]
    pub nodes: Option<NodeList<'a>>,
    #[serde(borrow)]
    pub node_names: Option<Vec<WireName<'a>>>,
}

#[derive(Debug, Deserialize)]
pub struct NodeList<'a> {
    #[serde(borrow, default)]
    pub items: Option<Vec<&'a RawValue>>,
}

/// A string that is copied only if it has escapes in it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct WireName<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// The nodes of a request, in either form.
pub enum AskedNodes<'a> {
    Names(&'a [WireName<'a>]),
    Whole(Vec<(WireName<'a>, &'a RawValue)>),
}

impl<'a> ExtenderArgs<'a> {
    /// `None` if the request has no nodes in either form.
    pub fn asked_nodes(&'a self) -> Option<Result<AskedNodes<'a>, serde_json::Error>> {
        match (&self.node_names, &self.nodes) {
            (Some(names), _) => Some(Ok(AskedNodes::Names(names))),
            (None, Some(nodes)) => Some(with_names(nodes.items.as_deref().unwrap_or_default())),
            (None, None) => None,
        }
    }
}

impl AskedNodes<'_> {
    pub fn len(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Whole(nodes) => nodes.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn name(&self, place: usize) -> &str {
        match self {
            Self::Names(names) => &names[place].0,
            Self::Whole(nodes) => &nodes[place].0.0,
        }
    }

    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|place| self.name(place))
    }
}

fn with_names<'a>(items: &[&'a RawValue]) -> Result<AskedNodes<'a>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Node<'a> {
        #[serde(borrow)]
        metadata: Metadata<'a>,
    }
    #[derive(Deserialize)]
    struct Metadata<'a> {
        #[serde(borrow)]
        name: WireName<'a>,
    }
    let named = |raw: &&'a RawValue| Ok((serde_json::from_str::<Node<'a>>(raw.get())?.metadata.name, *raw));
    items.iter().map(named).collect::<Result<_, _>>().map(AskedNodes::Whole)
}

/// `filter`'s answer. Nodes that are neither passed nor rejected are dropped without a reason, which kube-scheduler accepts as
/// long as any node passes.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct FilterResult<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<RawNodeList<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_names: Option<Vec<&'a str>>,
    /// Never `FailedNodes`: from there kube-scheduler's dry run would re-admit every victim, fail, and come back at once.
    #[serde(serialize_with = "as_map")]
    pub failed_and_unresolvable_nodes: Vec<(&'a str, &'static str)>,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub error: &'a str,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RawNodeList<'a> {
    pub api_version: &'static str,
    pub kind: &'static str,
    pub items: Vec<&'a RawValue>,
}

/// One entry of `prioritize`'s answer, which is a bare array.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority<'a> {
    pub host: &'a str,
    /// An integer: a single float makes kube-scheduler ignore the whole answer.
    pub score: u8,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptionArgs<'a> {
    pub pod: Pod,
    #[serde(borrow)]
    pub node_name_to_victims: Option<BTreeMap<WireName<'a>, Option<Victims<'a>>>>,
    #[serde(borrow)]
    pub node_name_to_meta_victims: Option<BTreeMap<WireName<'a>, Option<MetaVictims<'a>>>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Victims<'a> {
    #[serde(borrow)]
    pods: Option<Vec<VictimPod<'a>>>,
    #[serde(default, rename = "NumPDBViolations")]
    num_pdb_violations: i64,
}

#[derive(Debug, Deserialize)]
struct VictimPod<'a> {
    #[serde(borrow)]
    metadata: VictimMetadata<'a>,
}

#[derive(Debug, Deserialize)]
struct VictimMetadata<'a> {
    #[serde(borrow)]
    uid: WireName<'a>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct MetaVictims<'a> {
    #[serde(borrow)]
    pods: Option<Vec<MetaPod<'a>>>,
    #[serde(default, rename = "NumPDBViolations")]
    num_pdb_violations: i64,
}

#[derive(Debug, Deserialize)]
struct MetaPod<'a> {
    #[serde(borrow, rename = "UID")]
    uid: WireName<'a>,
}

impl PreemptionArgs<'_> {
    /// The candidates, in order of name; `None` if the request has neither form.
    pub fn offered(&self) -> Option<Vec<OfferedNode>> {
        if let Some(nodes) = &self.node_name_to_meta_victims {
            return Some(nodes.iter().map(|(node, victims)| meta_offer(&node.0, victims.as_ref())).collect());
        }
        let nodes = self.node_name_to_victims.as_ref()?;
        Some(nodes.iter().map(|(node, victims)| whole_offer(&node.0, victims.as_ref())).collect())
    }
}

fn meta_offer(node: &str, victims: Option<&MetaVictims<'_>>) -> OfferedNode {
    let pods = victims.and_then(|v| v.pods.as_deref()).unwrap_or_default();
    OfferedNode {
        node: node.to_owned(),
        victims: pods.iter().map(|pod| pod.uid.0.to_string()).collect(),
        pdb_violations: victims.map_or(0, |v| v.num_pdb_violations),
    }
}

fn whole_offer(node: &str, victims: Option<&Victims<'_>>) -> OfferedNode {
    let pods = victims.and_then(|v| v.pods.as_deref()).unwrap_or_default();
    OfferedNode {
        node: node.to_owned(),
        victims: pods.iter().map(|pod| pod.metadata.uid.0.to_string()).collect(),
        pdb_violations: victims.map_or(0, |v| v.num_pdb_violations),
    }
}

/// `preempt`'s answer: at most one node, but in shadow mode all that were offered.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct PreemptionResult {
    pub node_name_to_meta_victims: BTreeMap<String, AnsweredVictims>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct AnsweredVictims {
    pub pods: Vec<AnsweredVictim>,
    #[serde(rename = "NumPDBViolations")]
    pub num_pdb_violations: i64,
}

#[derive(Debug, Serialize)]
pub struct AnsweredVictim {
    #[serde(rename = "UID")]
    pub uid: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingArgs {
    pub pod_name: String,
    pub pod_namespace: String,
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    pub node: String,
}

/// `bind`'s answer. An empty error means that the pod is bound.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindingResult {
    pub error: &'static str,
}

fn as_map<S: serde::Serializer>(pairs: &[(&str, &'static str)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().copied())
}
