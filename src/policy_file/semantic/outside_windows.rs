//! Finds classes whose pods have more rights outside their windows than within: by day they would start as engines that nobody
//! may evict, and still be there at night.

use super::reach::{cells, covers};
use super::windows::cover_the_week;
use super::{WrittenPolicy, key_span};
use crate::diagnostic::{Diagnostic, quoted, quoted_list};
use crate::parse::DraftClass;
use std::collections::BTreeSet;
use stowage_scheduling::policy::{Class, Match, Preemptibility, built_in_classes};

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let (classes, entries) = (&policy.draft.classes, policy.entries("classes"));
    for (index, one) in classes.iter().enumerate() {
        let entry = one.written_index.and_then(|index| entries.get(index));
        let Some(entry) = entry.filter(|_| !one.class.when.is_empty()) else {
            continue;
        };
        let later = &classes[index + 1..];
        let matches = &one.class.matches;
        let cells = cells(later, matches).unwrap_or_else(|| vec![matches.clone()]);
        let (mut names, mut rights) = (BTreeSet::new(), BTreeSet::new());
        for next in cells.iter().filter_map(|cell| follower(one, later, cell)) {
            for right in more_rights(&one.class, next) {
                names.insert(&next.name);
                rights.insert(right);
            }
        }
        if names.is_empty() {
            continue;
        }
        let message = format!(
            "outside its windows, pods of {} are of class {}: {}",
            quoted(&one.class.name),
            quoted_list(&Vec::from_iter(names), "or"),
            Vec::from_iter(rights).join(", ")
        );
        found.push(Diagnostic::warning("outside-windows", key_span(entry, "when"), message).help(
            "add a class behind it with the same `match` and without `when`, for the other hours",
        ));
    }
}

/// The built-in class that takes these pods of `one` while no window is open; `None` if some window always is, or if a class of
/// the owner's own takes them.
fn follower<'a>(one: &DraftClass, later: &'a [DraftClass], pods: &Match) -> Option<&'a Class> {
    let mut windows = one.class.when.clone();
    for next in later.iter().map(|next| &next.class) {
        if !covers(&next.matches, pods) {
            continue;
        }
        if next.when.is_empty() {
            let is_built_in = built_in_classes().iter().any(|one| one.name == next.name);
            return is_built_in.then_some(next);
        }
        windows.extend_from_slice(&next.when);
        if cover_the_week(&windows) {
            return None;
        }
    }
    None
}

/// What pods may do as `outside` that they may not as `within`.
fn more_rights(within: &Class, outside: &Class) -> impl Iterator<Item = &'static str> {
    let is_preemptible = |class: &Class| class.eviction == Preemptibility::ForHigherPriority;
    let rights = [
        (is_preemptible(within) && !is_preemptible(outside)).then_some("never evicted"),
        (outside.engine && !within.engine).then_some("taken for engines"),
        (within.pools.is_some() && outside.pools.is_none()).then_some("in any node pool"),
    ];
    rights.into_iter().flatten()
}
