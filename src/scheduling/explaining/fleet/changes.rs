//! What differs between two views of the cluster, so that a client that has the first gets the second without all of it being
//! sent again.
//!
//! Most changes are figures of a few GPUs: of a GPU, only the fields that differ are listed, by its place on its node. A pod that
//! differs is listed whole, because that is rare. The pages' client applies these; what it has then is equal to the second view.

use super::{Fleet, FleetClass, FleetGpu, FleetNode, FleetPendingPod, FleetPod, FleetTenant};
use crate::ids::{NodeName, PodUid};
use crate::units::Moment;
use serde::Serialize;
use serde_json::{Map, Value};
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Names of fields and their new values; `null` for a field that is gone.
pub type Fields = Map<String, Value>;

/// From one [`Fleet`] to a later one. What is left out has not changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetChanges {
    pub now: Moment,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<FleetClass>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<FleetTenant>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<Vec<FleetPendingPod>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending_count: Option<u64>,
    /// Nodes that are new, or have other GPUs than before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<FleetNode>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<NodeChanges>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gone: Vec<NodeName>,
}

/// What differs on a node that has the same GPUs as before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeChanges {
    pub name: NodeName,
    /// Fields of the node itself.
    #[serde(skip_serializing_if = "Fields::is_empty")]
    pub node: Fields,
    /// Changed fields of GPUs, by the GPU's index on the node.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub gpus: BTreeMap<usize, Fields>,
    /// Pods that are new or differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<FleetPod>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<PodUid>,
}

impl FleetChanges {
    pub fn between(before: &Fleet, after: &Fleet) -> Self {
        let mut changes = Self {
            now: after.now,
            classes: if_changed(&before.classes, &after.classes),
            tenants: if_changed(&before.tenants, &after.tenants),
            pending: if_changed(&before.pending, &after.pending),
            pending_count: if_changed(&before.pending_count, &after.pending_count),
            ..Self::default()
        };
        merge_join(
            &before.nodes,
            &after.nodes,
            |node| &node.name,
            |step| match step {
                MergeStep::Gone(node) => changes.gone.push(node.name.clone()),
                MergeStep::New(node) => changes.nodes.push(node.clone()),
                MergeStep::Both(before, after) if before == after => {}
                MergeStep::Both(before, after) => match NodeChanges::between(before, after) {
                    Some(node) => changes.changed.push(node),
                    None => changes.nodes.push(after.clone()),
                },
            },
        );
        changes
    }

    /// Whether nothing differs but the time.
    pub fn is_empty(&self) -> bool {
        *self
            == Self {
                now: self.now,
                ..Self::default()
            }
    }
}

impl NodeChanges {
    /// `None` if the node has other GPUs now.
    fn between(before: &FleetNode, after: &FleetNode) -> Option<Self> {
        let uuids =
            |node: &FleetNode| -> Vec<_> { node.gpus.iter().map(|gpu| gpu.uuid.clone()).collect() };
        if uuids(before) != uuids(after) {
            return None;
        }
        let without_lists = |node: &FleetNode| FleetNode {
            gpus: Vec::new(),
            pods: Vec::new(),
            ..node.clone()
        };
        let gpus = before.gpus.iter().zip(&after.gpus).enumerate();
        let gpus = gpus.filter(|(_, (before, after))| before != after);
        let mut changes = Self {
            name: after.name.clone(),
            node: changed_fields(&without_lists(before), &without_lists(after)),
            gpus: gpus
                .map(|(gpu_index, (before, after))| {
                    (gpu_index, changed_fields::<FleetGpu>(before, after))
                })
                .collect(),
            pods: Vec::new(),
            left: Vec::new(),
        };
        merge_join(
            &before.pods,
            &after.pods,
            |pod| &pod.uid,
            |step| match step {
                MergeStep::Gone(pod) => changes.left.push(pod.uid.clone()),
                MergeStep::Both(before, after) if before == after => {}
                MergeStep::New(pod) | MergeStep::Both(_, pod) => changes.pods.push(pod.clone()),
            },
        );
        Some(changes)
    }
}

fn if_changed<T: PartialEq + Clone>(before: &T, after: &T) -> Option<T> {
    (before != after).then(|| after.clone())
}

/// The fields of `after` that differ.
fn changed_fields<T: Serialize>(before: &T, after: &T) -> Fields {
    let fields_of = |of: &T| match serde_json::to_value(of) {
        Ok(Value::Object(map)) => map,
        _ => Fields::new(),
    };
    let (mut before, mut after) = (fields_of(before), fields_of(after));
    after.retain(|name, value| before.remove(name).as_ref() != Some(value));
    // What is left of it is in one of them only, or was compared above.
    after.extend(before.into_iter().map(|(name, _)| (name, Value::Null)));
    after
}

enum MergeStep<'a, T> {
    Gone(&'a T),
    New(&'a T),
    Both(&'a T, &'a T),
}

/// Goes through two lists in order of their keys.
fn merge_join<'a, T, K: Ord + 'a>(
    before: &'a [T],
    after: &'a [T],
    key: impl Fn(&'a T) -> &'a K,
    mut step: impl FnMut(MergeStep<'a, T>),
) {
    let (mut before, mut after) = (before.iter().peekable(), after.iter().peekable());
    loop {
        let order = match (before.peek(), after.peek()) {
            (None, None) => return,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(before), Some(after)) => key(before).cmp(key(after)),
        };
        match (
            order,
            before.next_if(|_| order.is_le()),
            after.next_if(|_| order.is_ge()),
        ) {
            (_, Some(before), Some(after)) => step(MergeStep::Both(before, after)),
            (_, Some(before), None) => step(MergeStep::Gone(before)),
            (_, None, Some(after)) => step(MergeStep::New(after)),
            (_, None, None) => return,
        }
    }
}

#[cfg(test)]
mod tests;
