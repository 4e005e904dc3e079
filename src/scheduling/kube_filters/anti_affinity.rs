//! The index of the required pod anti-affinities of all bound pods, by node.
//!
//! Replicas of one workload have the same anti-affinity, so each is stored once, with its nodes. An anti-affinity that names one
//! namespace is compared only with pods of that namespace.

use super::requirements::{AntiAffinity, NamespaceScope, Requirements};
use crate::ids::NodeName;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The number of pods with the anti-affinity, by node.
type PodsByNode = BTreeMap<NodeName, u32>;

#[derive(Debug, Clone, Default)]
pub(super) struct AntiAffinityIndex {
    by_namespace: BTreeMap<String, BTreeMap<Arc<AntiAffinity>, PodsByNode>>,
    /// Anti-affinities that name several namespaces or select them.
    across_namespaces: BTreeMap<Arc<AntiAffinity>, PodsByNode>,
}

impl AntiAffinityIndex {
    /// Adds the anti-affinities of a pod on `node`; returns the same, shared with pods that have equal ones.
    pub fn add(
        &mut self,
        node: &NodeName,
        repels: &[Arc<AntiAffinity>],
    ) -> Arc<[Arc<AntiAffinity>]> {
        repels
            .iter()
            .map(|repulsion| self.add_one(node, repulsion))
            .collect()
    }

    pub fn remove(&mut self, node: &NodeName, anti_affinities: &[Arc<AntiAffinity>]) {
        for repulsion in anti_affinities {
            self.remove_one(node, repulsion);
        }
    }

    /// The anti-affinities that may exclude this pod, and the nodes they come from.
    pub fn that_may_exclude<'a>(
        &'a self,
        pod: &'a Requirements,
    ) -> impl Iterator<Item = (&'a AntiAffinity, impl Iterator<Item = &'a NodeName>)> {
        let of_namespace = self.by_namespace.get(&pod.namespace).into_iter().flatten();
        of_namespace
            .chain(&self.across_namespaces)
            .filter(|(repulsion, _)| repulsion.may_exclude(pod))
            .map(|(repulsion, sources)| (&**repulsion, sources.keys()))
    }

    fn add_one(&mut self, node: &NodeName, repulsion: &Arc<AntiAffinity>) -> Arc<AntiAffinity> {
        let repulsions = match single_namespace(repulsion) {
            Some(namespace) => self.by_namespace.entry(namespace.to_owned()).or_default(),
            None => &mut self.across_namespaces,
        };
        let shared = repulsions
            .get_key_value(repulsion)
            .map_or(repulsion, |(shared, _)| shared)
            .clone();
        *repulsions
            .entry(shared.clone())
            .or_default()
            .entry(node.clone())
            .or_default() += 1;
        shared
    }

    fn remove_one(&mut self, node: &NodeName, repulsion: &Arc<AntiAffinity>) {
        let Some(namespace) = single_namespace(repulsion) else {
            return decrement(&mut self.across_namespaces, node, repulsion);
        };
        let Some(repulsions) = self.by_namespace.get_mut(namespace) else {
            return;
        };
        decrement(repulsions, node, repulsion);
        if repulsions.is_empty() {
            self.by_namespace.remove(namespace);
        }
    }
}

fn single_namespace(repulsion: &AntiAffinity) -> Option<&str> {
    match &repulsion.scope {
        NamespaceScope::Of(namespaces) if namespaces.len() == 1 => {
            namespaces.first().map(String::as_str)
        }
        _ => None,
    }
}

fn decrement(
    repulsions: &mut BTreeMap<Arc<AntiAffinity>, PodsByNode>,
    node: &NodeName,
    repulsion: &Arc<AntiAffinity>,
) {
    let Some(sources) = repulsions.get_mut(repulsion) else {
        return;
    };
    if let Some(count) = sources.get_mut(node) {
        *count -= 1;
        if *count == 0 {
            sources.remove(node);
        }
    }
    if sources.is_empty() {
        repulsions.remove(repulsion);
    }
}
