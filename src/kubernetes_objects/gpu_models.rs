//! The GPU models that a pod may run on, as far as it restricts them by the label that GPU feature discovery puts on nodes.

use super::node_signs::feature_discovery::PRODUCT;
use k8s_openapi::api::core::v1::{NodeSelectorTerm, Pod, PodSpec};
use std::collections::BTreeSet;
use std::sync::Arc;
use stowage_scheduling::ids::GpuModel;

/// More models than a cluster has. Requests are remembered longer than their pods live.
const MAX_MODELS: usize = 64;

/// The models that its node selector or required node affinity names, in order; none if it may run on any, restricts them in
/// another way, or names more than [`MAX_MODELS`].
pub(crate) fn gpu_models(pod: &Pod) -> Arc<[GpuModel]> {
    let spec = pod.spec.as_ref();
    let named = spec
        .and_then(|spec| by_selector(spec).or_else(|| by_affinity(spec)))
        .unwrap_or_default();
    let named = if named.len() > MAX_MODELS {
        BTreeSet::new()
    } else {
        named
    };
    named
        .into_iter()
        .filter_map(|name| GpuModel::parse(name).ok())
        .collect()
}

fn by_selector(spec: &PodSpec) -> Option<BTreeSet<&str>> {
    let name = spec.node_selector.as_ref()?.get(PRODUCT)?;
    Some(BTreeSet::from([&**name]))
}

/// One term is enough for a node to match, so each term must name some.
fn by_affinity(spec: &PodSpec) -> Option<BTreeSet<&str>> {
    let affinity = spec.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    let named: Option<Vec<BTreeSet<&str>>> = required
        .node_selector_terms
        .iter()
        .map(models_of_term)
        .collect();
    named.map(|sets| sets.into_iter().flatten().collect())
}

fn models_of_term(term: &NodeSelectorTerm) -> Option<BTreeSet<&str>> {
    let mut expressions = term.match_expressions.iter().flatten();
    let of_model = expressions.find(|one| one.key == PRODUCT && one.operator == "In")?;
    Some(
        of_model
            .values
            .iter()
            .flatten()
            .map(String::as_str)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn models(spec: Value) -> Vec<String> {
        let pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).unwrap();
        gpu_models(&pod).iter().map(GpuModel::to_string).collect()
    }

    fn affinity(terms: Value) -> Value {
        let required = json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } });
        json!({ "containers": [], "affinity": { "nodeAffinity": required } })
    }

    #[test]
    fn a_pod_names_its_models_by_selector_or_affinity() {
        let selector = json!({ "containers": [], "nodeSelector": { PRODUCT: "H100" } });
        assert_eq!(models(selector), ["H100"]);
        let one = |values: &[&str]| json!({ "matchExpressions": [{ "key": PRODUCT, "operator": "In", "values": values }] });
        assert_eq!(
            models(affinity(json!([one(&["H200", "H100"]), one(&["A100"])]))),
            ["A100", "H100", "H200"]
        );
    }

    #[test]
    fn a_list_longer_than_any_cluster_has_models_is_not_kept() {
        let many: Vec<String> = (0..10_000).map(|n| format!("model-{n}")).collect();
        let one =
            json!({ "matchExpressions": [{ "key": PRODUCT, "operator": "In", "values": many }] });
        assert!(models(affinity(json!([one]))).is_empty());
    }

    #[test]
    fn one_term_without_a_model_allows_every_model() {
        let one = json!({ "matchExpressions": [{ "key": PRODUCT, "operator": "In", "values": ["H100"] }] });
        let other = json!({ "matchExpressions": [{ "key": "zone", "operator": "Exists" }] });
        assert!(models(affinity(json!([one, other]))).is_empty());
        assert!(models(json!({ "containers": [] })).is_empty());
    }
}
