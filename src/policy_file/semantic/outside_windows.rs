//! Finds classes whose pods have more rights outside their windows than within: by day they would start as engines that nobody
//! may evict, and still be there at night.

use super::WrittenPolicy;
use super::reach::{cells, covers};
use super::windows::cover_the_week;
use crate::diagnostic::{Diagnostic, quoted, quoted_list};
use crate::parse::DraftClass;
use std::collections::BTreeSet;
use stowage_scheduling::policy::{Class, Match, Preemptibility, built_in_classes};

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let classes = &policy.draft.classes;
    for (index, one) in classes.iter().enumerate() {
        let entry = one
            .written_index
            .and_then(|index| policy.entries("classes").get(index));
        let Some((when, _)) = entry.and_then(|entry| entry.entry("when")) else {
            continue;
        };
        let later = &classes[index + 1..];
        let cells = cells(later, &one.class.matches).unwrap_or_default();
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
        found.push(Diagnostic::warning("outside-windows", when.span, message).help(
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
            return built_in_classes()
                .iter()
                .any(|one| one.name == next.name)
                .then_some(next);
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
    [
        (within.eviction != outside.eviction && outside.eviction == Preemptibility::Never)
            .then_some("never evicted"),
        (outside.engine && !within.engine).then_some("taken for engines"),
        (within.pools.is_some() && outside.pools.is_none()).then_some("in any node pool"),
    ]
    .into_iter()
    .flatten()
}
