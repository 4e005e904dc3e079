//! Finds node pools that no node belongs to, that name unknown classes, or whose MIG layout fits no GPU.

use super::classes::unknown_class;
use super::{WrittenPolicy, key_span, name_span, span};
use crate::diagnostic::{Diagnostic, quoted, quoted_list};
use crate::file::NodePool;
use crate::format::mig::{FAMILIES, Family};
use crate::tree::YamlNode;
use stowage_scheduling::policy::{Class, Mode, Pool};
use stowage_scheduling::vocabulary::node::NodeKind;

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let entries = policy.entries("nodePools");
    let file = policy.file.node_pools.as_deref().unwrap_or_default();
    for (index, ((pool, file), entry)) in
        policy.draft.pools.iter().zip(file).zip(entries).enumerate()
    {
        classes(policy, entry, found);
        shadow_mode(policy, file, entry, found);
        mig_geometry(pool, entry, found);
        unreachable_pool(policy, index, entry, found);
    }
    unadmitted_classes(policy, entries, found);
}

/// A node in no pool admits all classes; if a pool takes every node there is none, and a class that no pool admits can be
/// placed nowhere.
fn unadmitted_classes(
    policy: WrittenPolicy<'_>,
    entries: &[YamlNode],
    found: &mut Vec<Diagnostic>,
) {
    let pools = &policy.draft.pools;
    let Some(last) = pools.iter().position(|pool| pool.selector.is_empty()) else {
        return;
    };
    let admits = |pool: &Pool, class: &Class| {
        pool.classes
            .as_ref()
            .is_none_or(|names| names.contains(&class.name))
            && class.may_be_placed_in(Some(&pool.name))
    };
    let reached = &pools[..=last];
    let classes = policy.draft.classes.iter().map(|one| &one.class);
    let unadmitted = classes.filter(|class| !reached.iter().any(|pool| admits(pool, class)));
    let unadmitted: Vec<&String> = unadmitted.map(|class| &class.name).collect();
    let Some(entry) = entries.get(last).filter(|_| !unadmitted.is_empty()) else {
        return;
    };
    let message = format!(
        "no pod of class {} is ever placed: no node pool takes it",
        quoted_list(&unadmitted, "or")
    );
    found.push(
        Diagnostic::warning("class-nowhere", span(entry, &["classes"]), message)
            .label("every other node is in this pool")
            .help(
                "name the class under `classes` of a pool, or give this pool a `selector`: \
                 a node in no pool takes every class",
            ),
    );
}

fn classes(policy: WrittenPolicy<'_>, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let names = entry
        .get("classes")
        .map(YamlNode::items)
        .unwrap_or_default();
    for (name, text) in names.iter().filter_map(|name| Some((name, name.text()?))) {
        if policy
            .draft
            .classes
            .iter()
            .all(|one| one.class.name != text)
        {
            found.push(unknown_class(policy, text, name.span));
        }
    }
}

fn shadow_mode(
    policy: WrittenPolicy<'_>,
    file: &NodePool,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    if policy.draft.settings.mode == Mode::Shadow && file.allocator == Some(NodeKind::Stowage) {
        found.push(
            Diagnostic::error(
                "shadow-without-gpu",
                span(entry, &["allocator"]),
                "in shadow mode Stowage allocates no GPUs, so the pods of this pool would get none",
            )
            .related(policy.span(&["mode"]), "nothing is put into force")
            .help("try shadow mode on `device-plugin` nodes, or use `mode: enforce`"),
        );
    }
}

fn mig_geometry(pool: &Pool, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let profiles: Vec<&str> = pool.mig.iter().flatten().map(String::as_str).collect();
    if FAMILIES
        .iter()
        .any(|family| family.can_be_partitioned_into(&profiles))
    {
        return;
    }
    let has_all_profiles = |family: &&Family| {
        profiles
            .iter()
            .all(|profile| family.slot(profile).is_some())
    };
    let matching_gpus: Vec<&str> = FAMILIES
        .iter()
        .filter(has_all_profiles)
        .map(|family| family.gpu)
        .collect();
    let (message, help) = match matching_gpus.as_slice() {
        [] => (
            "no GPU has all of these MIG profiles".to_owned(),
            "`mig` is what each GPU of the pool is cut into: make a pool for each kind of GPU".to_owned(),
        ),
        homes => (
            format!("{} cannot be cut into all of these at once", homes.join(" or ")),
            "`mig` is what one GPU is cut into, and its slices lie side by side in its memory; `nvidia-smi mig -lgipp` \
             lists where each can lie"
                .to_owned(),
        ),
    };
    found.push(Diagnostic::error("impossible-geometry", span(entry, &["mig"]), message).help(help));
}

/// A node belongs to the first pool that selects it, so a wider selector before a narrower one leaves the latter no nodes.
fn unreachable_pool(
    policy: WrittenPolicy<'_>,
    index: usize,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    let pools = &policy.draft.pools;
    let wider = |earlier: &&Pool| {
        earlier
            .selector
            .iter()
            .all(|(label, value)| pools[index].selector.get(label) == Some(value))
    };
    let Some(earlier) = pools[..index].iter().position(|pool| wider(&pool)) else {
        return;
    };
    let message = format!(
        "no node is ever in {}: {} takes them all",
        quoted(&pools[index].name),
        quoted(&pools[earlier].name)
    );
    let taker = policy.entries("nodePools").get(earlier);
    let taken_by = taker.map_or(policy.merged.span, |taker| {
        if taker.get("selector").is_some() {
            key_span(taker, "selector")
        } else {
            name_span(taker)
        }
    });
    found.push(
        Diagnostic::error("unreachable-pool", name_span(entry), message)
            .related(taken_by, "every node it selects is selected here first")
            .help("put the pool with more labels first, or give them different labels"),
    );
}
