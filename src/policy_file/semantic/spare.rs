//! Finds spare GPUs of pools that do not exist, or on which Stowage allocates none.

use super::{WrittenPolicy, key_span, span, windows};
use crate::diagnostic::{Diagnostic, quoted, quoted_list};
use crate::nearest::nearest;
use crate::tree::YamlNode;
use stowage_scheduling::vocabulary::node::NodeKind;
use stowage_scheduling::vocabulary::spare::MAX_SPARE_RULES;

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let list = policy
        .merged
        .get("planning")
        .and_then(|planning| planning.get("spare"));
    let entries = list.map(YamlNode::items).unwrap_or_default();
    if let Some(beyond) = entries.get(MAX_SPARE_RULES) {
        let message = format!(
            "`spare` has {} entries; {MAX_SPARE_RULES} are the most",
            entries.len()
        );
        found.push(
            Diagnostic::error("too-many-entries", beyond.span, message)
                .help("put GPUs that are alike into one"),
        );
    }
    for (entry, rule) in entries.iter().zip(&policy.draft.settings.planning.spare) {
        if let Some(list) = entry.get("when") {
            windows::check_windows(list, &rule.when, found);
        }
        if let Some(name) = &rule.pool {
            pool(policy, name, entry, found);
        }
    }
}

fn pool(policy: WrittenPolicy<'_>, name: &str, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let pools = &policy.draft.pools;
    let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    match pools.iter().position(|pool| pool.name == name) {
        None => {
            let help = match (nearest(name, &names), names.as_slice()) {
                (Some(near), _) => format!("did you mean `{near}`?"),
                (None, []) => "the policy has no `nodePools`: add one, or name a `model`".into(),
                (None, names) => format!("the node pools are {}", quoted_list(names, "and")),
            };
            let message = format!("there is no node pool {}", quoted(name));
            found.push(
                Diagnostic::error("unknown-pool", span(entry, &["pool"]), message).help(help),
            );
        }
        Some(index) if pools[index].allocator == NodeKind::DevicePlugin => {
            let message = format!(
                "a device plugin allocates the GPUs of {}, and Stowage keeps none there",
                quoted(name)
            );
            let diagnostic =
                Diagnostic::error("spare-of-a-plugin", span(entry, &["pool"]), message);
            let allocator_span = policy.entries("nodePools").get(index);
            let allocator_span = allocator_span.map(|pool| key_span(pool, "allocator"));
            let diagnostic = match allocator_span {
                Some(at) => diagnostic.related(at, "said here"),
                None => diagnostic,
            };
            found.push(diagnostic.help("name a pool whose GPUs Stowage allocates"));
        }
        Some(_) => {}
    }
}
