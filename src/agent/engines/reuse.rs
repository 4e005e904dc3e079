//! Whether a pod says that its sleeping engine may be taken over by a new pod: its own label, or those that llm-d's dual-pods
//! controller keeps on the pods in which it runs engines for others.
//!
//! A label is a user's word, so it opens the engine to pods of its own namespace only. llm-d binds within one namespace, too.

use crate::ownership::dual_pods::REQUESTER;
use crate::pods::PodOnNode;
use std::sync::Arc;

/// `"true"`: new pods of the same model and namespace may wake its engine.
pub(crate) const REUSABLE: &str = "stowage.dev/reusable";
/// On a server-providing pod of llm-d's fast model actuation: `"true"` while all its engines sleep.
const DUAL_SLEEPING: &str = "dual-pods.llm-d.ai/sleeping";

/// The namespace whose new pods may wake the pod's engine, if any may.
pub fn reusable_in(pod: &PodOnNode) -> Option<Arc<str>> {
    let has_label = |key: &str| pod.labels.get(key).is_some_and(|value| value == "true");
    // The controller calls the annotation the hard state of a binding; the label may be late.
    let is_free_provider = has_label(DUAL_SLEEPING) && !pod.annotations.contains_key(REQUESTER);
    // An engine whose pod is about to end would be gone before the new pod came.
    let is_reusable = !pod.is_terminating && (has_label(REUSABLE) || is_free_provider);
    is_reusable.then(|| pod.key.namespace.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn reusable(labels: Value, annotations: Value, deleted: Option<&str>) -> Option<Arc<str>> {
        let pod = json!({
            "metadata": {
                "name": "launcher", "namespace": "llm-d", "uid": "1", "deletionTimestamp": deleted,
                "labels": labels, "annotations": annotations,
            },
            "spec": { "containers": [{ "name": "inference-server" }] },
        });
        reusable_in(&PodOnNode::from_pod(&serde_json::from_value(pod).unwrap()).unwrap())
    }

    #[test]
    fn an_engine_is_reusable_by_its_own_label_or_as_an_unbound_provider_of_dual_pods() {
        let own = json!({ "stowage.dev/reusable": "true" });
        assert_eq!(
            reusable(own.clone(), json!({}), None).as_deref(),
            Some("llm-d")
        );
        assert_eq!(
            reusable(own, json!({}), Some("2026-11-01T00:00:00Z")),
            None,
            "it ends"
        );
        assert_eq!(
            reusable(json!({ "stowage.dev/reusable": "yes" }), json!({}), None),
            None
        );
        assert_eq!(reusable(json!({}), json!({}), None), None);
        let asleep = json!({ "dual-pods.llm-d.ai/sleeping": "true" });
        assert_eq!(
            reusable(asleep.clone(), json!({}), None).as_deref(),
            Some("llm-d")
        );
        let bound = json!({ "dual-pods.llm-d.ai/requester": "uid-7 requester" });
        assert_eq!(
            reusable(asleep, bound, None),
            None,
            "a requester has it already"
        );
        assert_eq!(
            reusable(
                json!({ "dual-pods.llm-d.ai/sleeping": "false" }),
                json!({}),
                None
            ),
            None
        );
    }
}
