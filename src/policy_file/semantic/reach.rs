//! Finds classes that no pod ever reaches, because earlier ones take all its pods.
//!
//! The answer "never" is certain, the answer "perhaps" is not: a class' pods are divided into cells (one namespace or pattern, one
//! PriorityClass, one resource, one range of priorities, one kind of sharing), and a class is unreachable if each cell is in an
//! earlier class. Expressions are compared as texts. A class with windows leaves its pods to later ones at other hours.

use super::label_sets::AllowedLabels;
use super::{WrittenPolicy, name_span};
use crate::diagnostic::{Diagnostic, quoted_list};
use crate::parse::{DraftClass, SERVING};
use crate::source::Span;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use stowage_scheduling::policy::selection::pattern_matches;
use stowage_scheduling::policy::{Match, Preemptibility};
use stowage_scheduling::vocabulary::demand::Sharing;

/// A class with more cells than this counts as reachable; no hand-written policy needs more.
const MAX_CELLS: usize = 4096;

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let classes = &policy.draft.classes;
    let mut built_in: BTreeMap<BTreeSet<usize>, Vec<usize>> = BTreeMap::new();
    for index in 1..classes.len() {
        let Some(takers) = takers(&classes[..index], &classes[index].class.matches) else {
            continue;
        };
        match classes[index].written_index {
            Some(entry) => found.push(unreachable(policy, entry, index, &takers)),
            None => built_in.entry(takers).or_default().push(index),
        }
    }
    for (takers, taken) in built_in {
        found.extend(built_in_replaced(policy, &takers, &taken));
    }
}

/// The classes that together take all pods of `matches`; `None` if some pod may be left. A class that takes all by itself is
/// the only one returned.
fn takers(earlier: &[DraftClass], matches: &Match) -> Option<BTreeSet<usize>> {
    if is_empty(matches) {
        return None;
    }
    let takes = |one: &DraftClass, pods: &Match| {
        one.class.when.is_empty() && covers(&one.class.matches, pods)
    };
    if let Some(one) = earlier.iter().position(|one| takes(one, matches)) {
        return Some([one].into());
    }
    let cells = cells(earlier, matches)?;
    cells
        .iter()
        .map(|cell| earlier.iter().position(|one| takes(one, cell)))
        .collect()
}

/// Whether no priority meets the condition; that is reported elsewhere.
fn is_empty(matches: &Match) -> bool {
    matches
        .priority
        .as_ref()
        .is_some_and(RangeInclusive::is_empty)
}

/// Whether every pod of `inner` is one of `outer`.
pub(super) fn covers(outer: &Match, inner: &Match) -> bool {
    let whole = i32::MIN..=i32::MAX;
    let (wide, narrow) = (
        outer.priority.as_ref().unwrap_or(&whole),
        inner.priority.as_ref().unwrap_or(&whole),
    );
    (outer.sharing.is_none() || outer.sharing == inner.sharing)
        && (wide.start() <= narrow.start() && wide.end() >= narrow.end())
        && covers_names(&outer.priority_classes, &inner.priority_classes)
        && covers_namespaces(outer, inner)
        && covers_names(&outer.resources, &inner.resources)
        && AllowedLabels::for_pods(outer).is_superset(&AllowedLabels::for_pods(inner))
        && (outer.expression.is_none() || outer.expression == inner.expression)
}

/// Whether "any of `inner`" implies "any of `outer`"; an empty list is any at all.
fn covers_names(outer: &[String], inner: &[String]) -> bool {
    outer.is_empty() || (!inner.is_empty() && inner.iter().all(|name| outer.contains(name)))
}

/// Whether every namespace that `inner` takes is one that `outer` takes, by name and by labels.
pub(crate) fn covers_namespaces(outer: &Match, inner: &Match) -> bool {
    let taken = |name: &String| {
        outer
            .namespaces
            .iter()
            .any(|one| pattern_matches(one, name))
    };
    let named = outer.namespaces.is_empty()
        || (!inner.namespaces.is_empty() && inner.namespaces.iter().all(taken))
        // Any text is any namespace.
        || outer.namespaces.iter().any(|one| one.bytes().all(|c| c == b'*'));
    let selected = match (&outer.namespace_selector, &inner.namespace_selector) {
        (None, _) => true,
        // A selector takes nothing while labels are unknown, so none takes what is not selected at all.
        (Some(_), None) => false,
        (Some(outer), Some(inner)) => {
            AllowedLabels::for_namespaces(outer).is_superset(&AllowedLabels::for_namespaces(inner))
        }
    };
    named && selected
}

/// `matches` divided so that each cell is in an earlier class or outside it, except where texts cannot tell.
pub(super) fn cells(earlier: &[DraftClass], matches: &Match) -> Option<Vec<Match>> {
    let priority_ranges = priority_ranges(earlier, matches);
    let sharing = match matches.sharing {
        Some(sharing) => vec![sharing],
        None => vec![Sharing::Exclusive, Sharing::Shared],
    };
    let (namespaces, priority_classes) = (
        one_each(&matches.namespaces),
        one_each(&matches.priority_classes),
    );
    let resources = one_each(&matches.resources);
    let count = [
        priority_ranges.len(),
        sharing.len(),
        namespaces.len(),
        priority_classes.len(),
        resources.len(),
    ];
    if count.into_iter().try_fold(1usize, usize::checked_mul)? > MAX_CELLS {
        return None;
    }
    let mut cells = vec![matches.clone()];
    cells = split(cells, &priority_ranges, |cell, one| {
        cell.priority = Some(one.clone())
    });
    cells = split(cells, &sharing, |cell, one| cell.sharing = Some(*one));
    cells = split(cells, &namespaces, |cell, one| {
        cell.namespaces.clone_from(one)
    });
    cells = split(cells, &priority_classes, |cell, one| {
        cell.priority_classes.clone_from(one)
    });
    Some(split(cells, &resources, |cell, one| {
        cell.resources.clone_from(one)
    }))
}

fn split<T>(cells: Vec<Match>, choices: &[T], set: impl Fn(&mut Match, &T)) -> Vec<Match> {
    let narrowed = |cell: &Match, choice: &T| {
        let mut cell = cell.clone();
        set(&mut cell, choice);
        cell
    };
    cells
        .iter()
        .flat_map(|cell| {
            choices
                .iter()
                .map(|choice| narrowed(cell, choice))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Each name by itself; one empty list if any name matches.
fn one_each(names: &[String]) -> Vec<Vec<String>> {
    match names {
        [] => vec![Vec::new()],
        names => names.iter().map(|name| vec![name.clone()]).collect(),
    }
}

/// The priorities of `matches`, cut where an earlier class begins or ends.
fn priority_ranges(earlier: &[DraftClass], matches: &Match) -> Vec<RangeInclusive<i32>> {
    let whole = matches.priority.clone().unwrap_or(i32::MIN..=i32::MAX);
    let ranges = earlier
        .iter()
        .filter_map(|one| one.class.matches.priority.as_ref());
    let begins = ranges
        .flat_map(|range| [Some(*range.start()), range.end().checked_add(1)])
        .flatten();
    let mut begins: BTreeSet<i32> = begins.filter(|at| whole.contains(at)).collect();
    begins.insert(*whole.start());
    let begins: Vec<i32> = begins.into_iter().collect();
    let ends = begins
        .iter()
        .skip(1)
        .map(|next| next - 1)
        .chain([*whole.end()]);
    begins
        .iter()
        .zip(ends)
        .map(|(begin, end)| *begin..=end)
        .collect()
}

fn unreachable(
    policy: WrittenPolicy<'_>,
    entry: usize,
    class_index: usize,
    takers: &BTreeSet<usize>,
) -> Diagnostic {
    let span = policy
        .entries("classes")
        .get(entry)
        .map_or(policy.merged.span, name_span);
    let (name, by) = (
        &policy.draft.classes[class_index].class.name,
        names_with_verb(policy, takers),
    );
    let message = format!("no pod is ever of class `{name}`: {by} them all before");
    let diagnostic = Diagnostic::error("unreachable-class", span, message).label("never reached");
    let diagnostic = spans(policy, takers)
        .into_iter()
        .fold(diagnostic, |diagnostic, span| {
            diagnostic.related(span, "tried before")
        });
    diagnostic.help("put the narrower class first, or give the one before a narrower `match`")
}

/// Replacing a built-in class by one's own is fine, unless it takes all remaining pods or makes pods preemptible that were
/// protected.
fn built_in_replaced(
    policy: WrittenPolicy<'_>,
    takers: &BTreeSet<usize>,
    taken: &[usize],
) -> Option<Diagnostic> {
    let classes = &policy.draft.classes;
    let is_preemptible = |class_index: &usize| {
        classes[*class_index].class.eviction == Preemptibility::ForHigherPriority
    };
    // A preemptible built-in class takes what it always took.
    let is_custom = |class_index: &&usize| classes[**class_index].written_index.is_some();
    let victims =
        takers.iter().filter(is_custom).any(is_preemptible) && !taken.iter().all(is_preemptible);
    let catches_all = taken
        .iter()
        .any(|class_index| classes[*class_index].class.name == SERVING);
    if !victims && !catches_all {
        return None;
    }
    let which: Vec<&str> = taken
        .iter()
        .map(|class_index| classes[*class_index].class.name.as_str())
        .collect();
    let (by, which) = (names_with_verb(policy, takers), quoted_list(&which, "and"));
    let end = if victims { ", and may be evicted" } else { "" };
    let message = format!("{by} every pod that would be of a built-in class ({which}){end}");
    let mut spans = spans(policy, takers).into_iter();
    let diagnostic = Diagnostic::warning("built-in-unreachable", spans.next()?, message);
    let diagnostic = spans.fold(diagnostic, |diagnostic, span| {
        diagnostic.related(span, "and this")
    });
    Some(
        diagnostic.help(
            "give it a narrower `match`, or change the built-in class itself: an entry with its name does",
        ),
    )
}

/// `a` takes, `a` and `b` take.
fn names_with_verb(policy: WrittenPolicy<'_>, takers: &BTreeSet<usize>) -> String {
    let names: Vec<&str> = takers
        .iter()
        .map(|taker| policy.draft.classes[*taker].class.name.as_str())
        .collect();
    format!(
        "{} {}",
        quoted_list(&names, "and"),
        if names.len() == 1 { "takes" } else { "take" }
    )
}

fn spans(policy: WrittenPolicy<'_>, class_indexes: &BTreeSet<usize>) -> Vec<Span> {
    let entries = policy.entries("classes");
    let entry =
        |class_index: &usize| entries.get(policy.draft.classes[*class_index].written_index?);
    class_indexes
        .iter()
        .filter_map(entry)
        .map(name_span)
        .collect()
}

#[cfg(test)]
mod tests;
