//! Which nodes would be Stowage's, by the ledger.

use super::Group;
use super::facts::{Facts, has_agent_label};
use k8s_openapi::api::core::v1::Node;
use serde::Serialize;
use std::collections::BTreeMap;
use stowage_kubernetes_objects::{devices_from_labels, node_signs, resources};
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::plural;
use stowage_scheduling::vocabulary::device_plugin::PluginResource;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::node_signs::NodeWarning;
use stowage_server::kubernetes::dump::load_nodes;
use stowage_server::service::ServerState;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Owner {
    Stowage,
    Other,
    Unclear,
    NoGpus,
}

impl Owner {
    pub fn words(self) -> &'static str {
        match self {
            Self::Stowage => "Stowage's",
            Self::Other => "another's",
            Self::Unclear => "unclear",
            Self::NoGpus => "without GPUs",
        }
    }
}

pub fn judge(facts: &Facts, policy: Policy) -> Vec<Group<Owner>> {
    let state = ServerState::new(policy);
    load_nodes(&facts.nodes, &facts.slices, &state);
    let mut found = BTreeMap::<_, Vec<String>>::new();
    for node in &facts.nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        found.entry(owner(node, &state)).or_default().push(name);
    }
    let group = |((verdict, why), names): (_, Vec<String>)| Group {
        verdict,
        count: names.len(),
        names,
        why: vec![why],
        remedies: Vec::new(),
    };
    found.into_iter().map(group).collect()
}

fn owner(object: &Node, state: &ServerState) -> (Owner, String) {
    let name = NodeName::parse(object.metadata.name.as_deref().unwrap_or_default());
    let cluster = state.cluster();
    let Some(node) = name.ok().and_then(|name| cluster.ledger().node(&name)) else {
        return (Owner::Unclear, "its name cannot be read".into());
    };
    // The ledger has no use for the allocator of GPUs that it does not know.
    let signs = node_signs(object, &devices_from_labels(object));
    let rules = &cluster.ledger().policy().settings.nodes;
    let warning = node
        .warnings
        .first()
        .cloned()
        .or_else(|| rules.other_allocator(&signs));
    let plugin = resources(object).find(|name| PluginResource::is_plugin_resource(name));
    match (plugin, node.kind, warning, node.devices.first()) {
        (Some(resource), ..) => (
            Owner::Other,
            format!("a device plugin hands out {resource}"),
        ),
        (_, NodeKind::Dra, ..) => (Owner::Other, "a DRA driver publishes its GPUs".into()),
        (_, _, Some(warning), _) => match warning {
            NodeWarning::OtherAllocator { .. } => (Owner::Other, warning.to_string()),
            _ => (Owner::Unclear, warning.to_string()),
        },
        (.., Some(gpu)) => {
            let gpus = plural(node.devices.len(), "GPU");
            let why = format!("{gpus} {}, which nothing else hands out", gpu.model);
            (Owner::Stowage, why)
        }
        _ if has_agent_label(object) => (
            Owner::Unclear,
            "no label says which GPUs it has; an agent will".into(),
        ),
        _ => (Owner::NoGpus, "no label says that it has GPUs".into()),
    }
}
