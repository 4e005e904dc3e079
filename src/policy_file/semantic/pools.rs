//! Finds node pools that no node belongs to, that name unknown classes, or whose MIG layout fits no GPU.

use super::classes::unknown_class;
use super::{Written, head, key, span};
use crate::diagnostic::{Diagnostic, listed, quoted};
use crate::file::NodePool;
use crate::format::mig::{FAMILIES, Family};
use crate::tree::YamlNode;
use stowage_scheduling::policy::{Class, Mode, Pool};
use stowage_scheduling::vocabulary::node::NodeKind;

pub fn check(policy: Written<'_>, found: &mut Vec<Diagnostic>) {
    let entries = policy.entries("nodePools");
    let file = policy.file.node_pools.as_deref().unwrap_or_default();
    for (place, ((pool, file), entry)) in
        policy.draft.pools.iter().zip(file).zip(entries).enumerate()
    {
        classes(policy, entry, found);
        shadow(policy, file, entry, found);
        geometry(pool, entry, found);
        reach(policy, place, entry, found);
    }
    nowhere(policy, entries, found);
}

/// A node in no pool admits all classes; if a pool takes every node there is none, and a class that no pool admits can be
/// placed nowhere.
fn nowhere(policy: Written<'_>, entries: &[YamlNode], found: &mut Vec<Diagnostic>) {
    let pools = &policy.draft.pools;
    let Some(last) = pools.iter().position(|pool| pool.selector.is_empty()) else {
        return;
    };
    let admits = |pool: &Pool, class: &Class| {
        pool.classes
            .as_ref()
            .is_none_or(|names| names.contains(&class.name))
            && class.may_be_in(Some(&pool.name))
    };
    let reached = &pools[..=last];
    let classes = policy.draft.classes.iter().map(|one| &one.class);
    let left = classes.filter(|class| !reached.iter().any(|pool| admits(pool, class)));
    let left: Vec<&String> = left.map(|class| &class.name).collect();
    let Some(entry) = entries.get(last).filter(|_| !left.is_empty()) else {
        return;
    };
    let message = format!(
        "no pod of class {} is ever placed: no node pool takes it",
        listed(&left, "or")
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

fn classes(policy: Written<'_>, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
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

fn shadow(policy: Written<'_>, file: &NodePool, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    if policy.draft.settings.mode == Mode::Shadow && file.allocator == Some(NodeKind::Stowage) {
        found.push(
            Diagnostic::error(
                "shadow-without-gpu",
                span(entry, &["allocator"]),
                "in shadow mode Stowage allocates no GPUs, so the pods of this pool would get none",
            )
            .other(policy.span(&["mode"]), "nothing is put into force")
            .help("try shadow mode on `device-plugin` nodes, or use `mode: enforce`"),
        );
    }
}

fn geometry(pool: &Pool, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let profiles: Vec<&str> = pool.mig.iter().flatten().map(String::as_str).collect();
    if FAMILIES
        .iter()
        .any(|family| family.can_be_cut_into(&profiles))
    {
        return;
    }
    let one_gpu = |family: &&Family| {
        profiles
            .iter()
            .all(|profile| family.slot(profile).is_some())
    };
    let homes: Vec<&str> = FAMILIES
        .iter()
        .filter(one_gpu)
        .map(|family| family.gpu)
        .collect();
    let (message, help) = match homes.as_slice() {
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
fn reach(policy: Written<'_>, place: usize, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let pools = &policy.draft.pools;
    let wider = |earlier: &&Pool| {
        earlier
            .selector
            .iter()
            .all(|(label, value)| pools[place].selector.get(label) == Some(value))
    };
    let Some(earlier) = pools[..place].iter().position(|pool| wider(&pool)) else {
        return;
    };
    let message = format!(
        "no node is ever in {}: {} takes them all",
        quoted(&pools[place].name),
        quoted(&pools[earlier].name)
    );
    let taker = policy.entries("nodePools").get(earlier);
    let taken_by = taker.map_or(policy.merged.span, |taker| {
        if taker.get("selector").is_some() {
            key(taker, "selector")
        } else {
            head(taker)
        }
    });
    found.push(
        Diagnostic::error("unreachable-pool", head(entry), message)
            .other(taken_by, "every node it selects is selected here first")
            .help("put the pool with more labels first, or give them different labels"),
    );
}
