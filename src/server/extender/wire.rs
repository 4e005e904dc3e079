//! kube-scheduler's JSON, as measured: Go field names in requests, and the shapes that its Go client decodes.
//!
//! Requests borrow from the body. Whole nodes (`nodeCacheCapable: false`) stay raw text: only their names are parsed, and nodes
//! that pass are sent back byte for byte.

use super::request::with_path;
use k8s_openapi::api::core::v1::Pod;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use stowage_kubernetes_objects::pruning;
use stowage_scheduling::verbs::preempt::OfferedNode;

/// The request of `filter` and `prioritize`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<'a> {
    #[serde(deserialize_with = "used_of_pod")]
    pub pod: Pod,
    #[serde(borrow)]
    pub nodes: Option<NodeList<'a>>,
    #[serde(borrow)]
    pub node_names: Option<Vec<WireName<'a>>>,
}

/// The size up to which a pod is decoded whole, which takes less time than pruning: so few bytes exceed no bound.
const SMALL_POD_BYTES: usize = 2 << 10;

/// Decodes the fields of a pod that a verb reads. A tenant's pod may have megabytes of others.
fn used_of_pod<'a, D: Deserializer<'a>>(whole: D) -> Result<Pod, D::Error> {
    let whole = <&RawValue>::deserialize(whole)?.get();
    let used = match whole.len() <= SMALL_POD_BYTES {
        true => Cow::Borrowed(whole.as_bytes()),
        false => Cow::Owned(pruning::prune_pod(whole)),
    };
    serde_json::from_slice(&used).map_err(|error| D::Error::custom(with_path::<Pod>(&used, &error)))
}

#[derive(Debug, Deserialize)]
pub struct NodeList<'a> {
    #[serde(borrow, default)]
    pub items: Option<Vec<&'a RawValue>>,
}

/// A string that is copied only if it has escapes in it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct WireName<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl WireName<'_> {
    /// Writes it as JSON. What needed no escapes when it came needs none when it goes back.
    fn write(&self, out: &mut Vec<u8>) {
        match &self.0 {
            Cow::Borrowed(name) => {
                out.push(b'"');
                out.extend_from_slice(name.as_bytes());
                out.push(b'"');
            }
            Cow::Owned(name) => write_json(out, name),
        }
    }
}

/// The nodes of a request, as names or as whole objects.
pub enum RequestNodes<'a> {
    Names(&'a [WireName<'a>]),
    Whole(Vec<(WireName<'a>, &'a RawValue)>),
}

impl<'a> ExtenderArgs<'a> {
    /// `None` if the request has no nodes in either form.
    pub fn request_nodes(&'a self) -> Option<Result<RequestNodes<'a>, serde_json::Error>> {
        match (&self.node_names, &self.nodes) {
            (Some(names), _) => Some(Ok(RequestNodes::Names(names))),
            (None, Some(nodes)) => Some(parse_names(nodes.items.as_deref().unwrap_or_default())),
            (None, None) => None,
        }
    }
}

impl RequestNodes<'_> {
    pub fn len(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Whole(nodes) => nodes.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn name(&self, index: usize) -> &str {
        &self.wire_name(index).0
    }

    pub(crate) fn wire_name(&self, index: usize) -> &WireName<'_> {
        match self {
            Self::Names(names) => &names[index],
            Self::Whole(nodes) => &nodes[index].0,
        }
    }

    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|index| self.name(index))
    }
}

fn parse_names<'a>(items: &[&'a RawValue]) -> Result<RequestNodes<'a>, serde_json::Error> {
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
    let named = |raw: &&'a RawValue| {
        Ok((
            serde_json::from_str::<Node<'a>>(raw.get())?.metadata.name,
            *raw,
        ))
    };
    items
        .iter()
        .map(named)
        .collect::<Result<_, _>>()
        .map(RequestNodes::Whole)
}

/// `filter`'s answer. Nodes that are neither passed nor rejected are dropped without a reason, which kube-scheduler accepts as
/// long as any node passes.
#[derive(Debug, Default)]
pub struct FilterResult<'a> {
    pub nodes: Option<RawNodeList<'a>>,
    pub node_names: Option<Vec<&'a str>>,
    /// Never `FailedNodes`: from there kube-scheduler's dry run would re-admit every victim, fail, and come back at once.
    pub failed_and_unresolvable_nodes: Vec<(&'a WireName<'a>, &'static str)>,
}

impl FilterResult<'_> {
    /// The answer's JSON. Tens of thousands of nodes may be refused, nearly all for the same reason.
    pub fn to_json(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(
            64 + self.failed_and_unresolvable_nodes.len() * TYPICAL_REFUSAL_BYTES,
        );
        out.push(b'{');
        if let Some(nodes) = &self.nodes {
            out.extend_from_slice(b"\"Nodes\":");
            write_json(&mut out, nodes);
            out.push(b',');
        }
        if let Some(names) = &self.node_names {
            out.extend_from_slice(b"\"NodeNames\":");
            write_json(&mut out, names);
            out.push(b',');
        }
        out.extend_from_slice(b"\"FailedAndUnresolvableNodes\":{");
        let (mut latest, mut phrase_json) = ("", Vec::new());
        for (index, (name, phrase)) in self.failed_and_unresolvable_nodes.iter().enumerate() {
            if index == 0 || !std::ptr::eq(latest, *phrase) {
                phrase_json.clear();
                write_json(&mut phrase_json, phrase);
                latest = phrase;
            }
            if index > 0 {
                out.push(b',');
            }
            name.write(&mut out);
            out.push(b':');
            out.extend_from_slice(&phrase_json);
        }
        out.extend_from_slice(b"}}");
        out
    }
}

/// Bytes of a name and a phrase.
const TYPICAL_REFUSAL_BYTES: usize = 64;

fn write_json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("answers are plain data");
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
    #[serde(deserialize_with = "used_of_pod")]
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
            return Some(
                nodes
                    .iter()
                    .map(|(node, victims)| offer_from_meta_victims(&node.0, victims.as_ref()))
                    .collect(),
            );
        }
        let nodes = self.node_name_to_victims.as_ref()?;
        Some(
            nodes
                .iter()
                .map(|(node, victims)| offer_from_victims(&node.0, victims.as_ref()))
                .collect(),
        )
    }
}

fn offer_from_meta_victims(node: &str, victims: Option<&MetaVictims<'_>>) -> OfferedNode {
    let pods = victims.and_then(|v| v.pods.as_deref()).unwrap_or_default();
    OfferedNode {
        node: node.to_owned(),
        victims: pods.iter().map(|pod| pod.uid.0.to_string()).collect(),
        pdb_violations: victims.map_or(0, |v| v.num_pdb_violations),
    }
}

fn offer_from_victims(node: &str, victims: Option<&Victims<'_>>) -> OfferedNode {
    let pods = victims.and_then(|v| v.pods.as_deref()).unwrap_or_default();
    OfferedNode {
        node: node.to_owned(),
        victims: pods
            .iter()
            .map(|pod| pod.metadata.uid.0.to_string())
            .collect(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use stowage_kubernetes_objects as objects;
    use stowage_scheduling::policy::Policy;
    use stowage_scheduling::vocabulary::demand::RequestError;

    fn answer(names: &[String], phrases: &[&'static str]) -> Value {
        let body = json!(names).to_string();
        let names: Vec<WireName<'_>> = serde_json::from_str(&body).unwrap();
        let refused = names.iter().zip(phrases.iter().copied()).collect();
        let answer = FilterResult {
            node_names: Some(
                names
                    .iter()
                    .skip(phrases.len())
                    .map(|name| &*name.0)
                    .collect(),
            ),
            failed_and_unresolvable_nodes: refused,
            ..FilterResult::default()
        };
        serde_json::from_slice(&answer.to_json()).unwrap()
    }

    proptest! {
        #[test]
        fn whatever_names_come_the_answer_names_them(
            names in prop::collection::btree_set(any::<String>(), 0..9),
            phrases in prop::collection::vec(prop::sample::select(vec!["a", "b \"c\""]), 0..9),
        ) {
            let names: Vec<String> = names.into_iter().collect();
            let phrases = &phrases[..phrases.len().min(names.len())];
            let refused: BTreeMap<&String, &&str> = names.iter().zip(phrases).collect();
            let expected = json!({"NodeNames": names[phrases.len()..], "FailedAndUnresolvableNodes": refused});
            prop_assert_eq!(answer(&names, phrases), expected);
        }
    }

    /// What a tenant may write reaches kube-scheduler, and from there every verb.
    #[test]
    fn only_the_used_fields_of_a_requests_pod_are_decoded() {
        let env: Vec<Value> = (0..20_000)
            .map(|n| json!({ "name": format!("E{n}"), "value": "v" }))
            .collect();
        let annotations = json!({ "stowage.dev/gpus": "2", "x.example/y": "z".repeat(255 << 10) });
        let container = json!({ "name": "c", "env": env, "resources": { "limits": { "stowage.dev/vram": "1Gi" } } });
        let pod = json!({
            "metadata": { "name": "a", "namespace": "b", "uid": "c", "annotations": annotations },
            "spec": { "containers": [container] },
        });
        let filter = json!({ "Pod": pod, "NodeNames": ["n"] }).to_string();
        let preempt = json!({ "Pod": pod, "NodeNameToMetaVictims": {} }).to_string();
        let filter: ExtenderArgs<'_> = serde_json::from_str(&filter).unwrap();
        let preempt: PreemptionArgs<'_> = serde_json::from_str(&preempt).unwrap();
        for pod in [filter.pod, preempt.pod] {
            assert_eq!(pod.spec.as_ref().unwrap().containers[0].env, None);
            let refused = objects::demand(&pod, &Policy::default());
            assert!(
                matches!(refused, Err(RequestError::Annotations { .. })),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn a_requests_pod_beyond_its_bound_is_refused_with_the_way_out() {
        let ports: Vec<Value> = (0..20_000)
            .map(|port| json!({ "containerPort": port }))
            .collect();
        let containers = json!([{ "name": "c", "ports": ports, "resources": { "limits": { "stowage.dev/vram": "1Gi" } } }]);
        let selector: serde_json::Map<String, Value> =
            (0..9000).map(|n| (format!("{n:060}"), json!(""))).collect();
        let asking = json!([{ "name": "c", "resources": { "limits": { "nvidia.com/gpu": "1" } } }]);
        for spec in [
            json!({ "containers": containers }),
            json!({ "containers": asking, "nodeSelector": selector }),
        ] {
            let pod =
                json!({ "metadata": { "name": "a", "namespace": "b", "uid": "c" }, "spec": spec });
            let body = json!({ "Pod": pod, "NodeNames": ["n"] }).to_string();
            let args: ExtenderArgs<'_> = serde_json::from_str(&body).unwrap();
            assert!(objects::identity(&args.pod).is_ok() && objects::asks_for_gpu(&args.pod));
            let refused = objects::demand(&args.pod, &Policy::default()).unwrap_err();
            assert_eq!(refused.code(), "too-large", "{refused}");
        }
    }

    #[test]
    fn an_answer_with_whole_nodes_has_them_as_they_came() {
        let raw: &RawValue = serde_json::from_str(r#"{"metadata":  {"name": "a"}}"#).unwrap();
        let nodes = Some(RawNodeList {
            api_version: "v1",
            kind: "NodeList",
            items: vec![raw],
        });
        let text = String::from_utf8(
            FilterResult {
                nodes,
                ..FilterResult::default()
            }
            .to_json(),
        )
        .unwrap();
        assert_eq!(
            text,
            r#"{"Nodes":{"apiVersion":"v1","kind":"NodeList","items":[{"metadata":  {"name": "a"}}]},"FailedAndUnresolvableNodes":{}}"#
        );
    }
}
