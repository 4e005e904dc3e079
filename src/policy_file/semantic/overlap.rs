//! Finds pods that were meant for a class that is never evicted, and that an earlier, preemptible class takes: a service whose
//! owner learns of it when it is evicted.
//!
//! Only conditions on priority are compared. That a namespace and a label may overlap is true of nearly all pairs of classes
//! and says nothing.

use super::label_sets::AllowedLabels;
use super::reach::covers_namespaces;
use super::{WrittenPolicy, span};
use crate::diagnostic::{Diagnostic, quoted, quoted_list};
use crate::parse::DraftClass;
use crate::tree::YamlNode;
use std::ops::RangeInclusive;
use stowage_scheduling::policy::selection::patterns_overlap;
use stowage_scheduling::policy::{Match, Preemptibility};

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let classes = &policy.draft.classes;
    for (index, safe) in classes.iter().enumerate() {
        let Some(entry) = entry(policy, safe).filter(|_| is_protected_engine(safe)) else {
            continue;
        };
        for taker in classes[..index]
            .iter()
            .filter(|one| one.class.eviction == Preemptibility::ForHigherPriority)
        {
            if let Some(taker_entry) =
                self::entry(policy, taker).filter(|_| may_both_match(taker, safe))
            {
                found.extend(by_priority_class(taker, taker_entry, safe, entry));
                found.extend(by_priority_range(taker, taker_entry, safe, entry));
            }
        }
    }
}

fn entry<'a>(policy: WrittenPolicy<'a>, one: &DraftClass) -> Option<&'a YamlNode> {
    policy.entries("classes").get(one.written_index?)
}

fn is_protected_engine(one: &DraftClass) -> bool {
    one.class.eviction == Preemptibility::Never && one.class.engine
}

/// Whether some pod may have the namespace, labels and sharing of both.
fn may_both_match(a: &DraftClass, b: &DraftClass) -> bool {
    let (a, b) = (&a.class.matches, &b.class.matches);
    let sharing = a.sharing.is_none() || b.sharing.is_none() || a.sharing == b.sharing;
    let namespaces = match (&a.namespace_selector, &b.namespace_selector) {
        (Some(a), Some(b)) => {
            AllowedLabels::for_namespaces(a).overlaps(&AllowedLabels::for_namespaces(b))
        }
        _ => true,
    };
    let named = |one: &String| {
        b.namespaces
            .iter()
            .any(|other| patterns_overlap(one, other))
    };
    sharing
        && namespaces
        && AllowedLabels::for_pods(a).overlaps(&AllowedLabels::for_pods(b))
        && (a.namespaces.is_empty() || b.namespaces.is_empty() || a.namespaces.iter().any(named))
}

fn common_names<'a>(a: &'a [String], b: &[String]) -> Vec<&'a String> {
    a.iter().filter(|name| b.contains(name)).collect()
}

/// An earlier class that takes a PriorityClass with no narrower condition than the later one: the later one never gets its
/// pods. One with windows leaves them to it at other hours, and is there for that.
fn by_priority_class(
    taker: &DraftClass,
    taker_entry: &YamlNode,
    safe: &DraftClass,
    entry: &YamlNode,
) -> Option<Diagnostic> {
    let names = common_names(
        &safe.class.matches.priority_classes,
        &taker.class.matches.priority_classes,
    );
    if names.is_empty()
        || !taker.class.when.is_empty()
        || !is_wider(&taker.class.matches, &safe.class.matches)
    {
        return None;
    }
    let both = quoted_list(&names, "and");
    let (safe, taker) = (&safe.class.name, &taker.class.name);
    let message = format!(
        "pods of PriorityClass {both} are meant for {} and taken by {}, which may be evicted",
        quoted(safe),
        quoted(taker)
    );
    Some(
        Diagnostic::error(
            "serving-could-be-victim",
            span(entry, &["match", "priorityClasses"]),
            message,
        )
        .related(
            span(taker_entry, &["match", "priorityClasses"]),
            format!("`{taker}` is tried first"),
        )
        .help(format!(
            "put `{safe}` before `{taker}`, or name each PriorityClass in one of them only"
        )),
    )
}

/// Whether every condition of `wide`, except the PriorityClass, is a condition of `narrow` too.
fn is_wider(wide: &Match, narrow: &Match) -> bool {
    (wide.sharing.is_none() || wide.sharing == narrow.sharing)
        && covers_namespaces(wide, narrow)
        && AllowedLabels::for_pods(wide).is_superset(&AllowedLabels::for_pods(narrow))
        && (wide.resources.is_empty() || wide.resources == narrow.resources)
        && (wide.expression.is_none() || wide.expression == narrow.expression)
        && wide.priority.is_none()
}

fn by_priority_range(
    taker: &DraftClass,
    taker_entry: &YamlNode,
    safe: &DraftClass,
    entry: &YamlNode,
) -> Option<Diagnostic> {
    let both = range_intersection(
        taker.class.matches.priority.as_ref()?,
        safe.class.matches.priority.as_ref()?,
    )?;
    // Different PriorityClasses make them disjoint.
    let (a, b) = (
        &taker.class.matches.priority_classes,
        &safe.class.matches.priority_classes,
    );
    if !a.is_empty() && !b.is_empty() && common_names(a, b).is_empty() {
        return None;
    }
    let (safe, taker) = (&safe.class.name, &taker.class.name);
    let message = format!(
        "pods with {} may be taken by {}, which is tried before {} and may be evicted",
        priority_text(&both),
        quoted(taker),
        quoted(safe)
    );
    Some(
        Diagnostic::warning("serving-could-be-victim", span(entry, &["match", "priority"]), message)
            .related(span(taker_entry, &["match", "priority"]), format!("`{taker}` reaches into it"))
            .help(
                "let the ranges end where the other begins, or put the class that is not preemptible first",
            ),
    )
}

fn range_intersection(
    a: &RangeInclusive<i32>,
    b: &RangeInclusive<i32>,
) -> Option<RangeInclusive<i32>> {
    let both = *a.start().max(b.start())..=*a.end().min(b.end());
    (!both.is_empty()).then_some(both)
}

fn priority_text(range: &RangeInclusive<i32>) -> String {
    match (*range.start(), *range.end()) {
        (i32::MIN, i32::MAX) => "any priority".into(),
        (i32::MIN, most) => format!("priority {most} and below"),
        (least, i32::MAX) => format!("priority {least} and above"),
        (least, most) if least == most => format!("priority {least}"),
        (least, most) => format!("priorities {least} to {most}"),
    }
}
