//! Who on which node keeps whom away: the required anti-affinities of all bound pods.
//!
//! Replicas of one workload repel alike, so each repulsion is kept once, with the nodes it comes from. A repulsion that names
//! one namespace is looked at only for pods of that namespace.

use super::requirements::{AntiAffinity, NamespaceScope, Requirements};
use crate::ids::NodeName;
use std::collections::BTreeMap;
use std::sync::Arc;

/// On how many pods of each node it stands.
type PodsByNode = BTreeMap<NodeName, u32>;

#[derive(Debug, Clone, Default)]
pub(super) struct AntiAffinityIndex {
    by_namespace: BTreeMap<String, BTreeMap<Arc<AntiAffinity>, PodsByNode>>,
    /// Those that name several namespaces or select them.
    wide: BTreeMap<Arc<AntiAffinity>, PodsByNode>,
}

impl AntiAffinityIndex {
    /// Takes in what a pod on `node` repels; the answer is the same, shared with others that repel alike.
    pub fn add(&mut self, node: &NodeName, repels: &[Arc<AntiAffinity>]) -> Arc<[Arc<AntiAffinity>]> {
        repels.iter().map(|repulsion| self.add_one(node, repulsion)).collect()
    }

    pub fn remove(&mut self, node: &NodeName, repels: &[Arc<AntiAffinity>]) {
        for repulsion in repels {
            self.remove_one(node, repulsion);
        }
    }

    /// Those that may keep this pod away, and from which nodes they do.
    pub fn against<'a>(
        &'a self,
        pod: &'a Requirements,
    ) -> impl Iterator<Item = (&'a AntiAffinity, impl Iterator<Item = &'a NodeName>)> {
        let own = self.by_namespace.get(&pod.namespace).into_iter().flatten();
        own.chain(&self.wide)
            .filter(|(repulsion, _)| repulsion.may_take(pod))
            .map(|(repulsion, sources)| (&**repulsion, sources.keys()))
    }

    fn add_one(&mut self, node: &NodeName, repulsion: &Arc<AntiAffinity>) -> Arc<AntiAffinity> {
        let known = match only_namespace(repulsion) {
            Some(namespace) => self.by_namespace.entry(namespace.to_owned()).or_default(),
            None => &mut self.wide,
        };
        let shared = known.get_key_value(repulsion).map_or(repulsion, |(shared, _)| shared).clone();
        *known.entry(shared.clone()).or_default().entry(node.clone()).or_default() += 1;
        shared
    }

    fn remove_one(&mut self, node: &NodeName, repulsion: &Arc<AntiAffinity>) {
        let Some(namespace) = only_namespace(repulsion) else {
            return forget(&mut self.wide, node, repulsion);
        };
        let Some(known) = self.by_namespace.get_mut(namespace) else { return };
        forget(known, node, repulsion);
        if known.is_empty() {
            self.by_namespace.remove(namespace);
        }
    }
}

fn only_namespace(repulsion: &AntiAffinity) -> Option<&str> {
    match &repulsion.scope {
        NamespaceScope::Of(namespaces) if namespaces.len() == 1 => namespaces.first().map(String::as_str),
        _ => None,
    }
}

fn forget(
    known: &mut BTreeMap<Arc<AntiAffinity>, PodsByNode>,
    node: &NodeName,
    repulsion: &Arc<AntiAffinity>,
) {
    let Some(sources) = known.get_mut(repulsion) else { return };
    if let Some(count) = sources.get_mut(node) {
        *count -= 1;
        if *count == 0 {
            sources.remove(node);
        }
    }
    if sources.is_empty() {
        known.remove(repulsion);
    }
}
