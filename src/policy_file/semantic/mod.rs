//! Checks settings that are valid each by itself but make no sense together: rules that never match, guarantees that cannot be
//! kept, settings that contradict each other.
//!
//! Each module checks one part of a [`Draft`] and marks the places in the merged tree. Errors are settings that cannot be
//! intended; warnings are settings that hardly are.

mod classes;
mod label_sets;
mod outside_windows;
mod overlap;
mod pools;
mod reach;
mod selectors;
mod settings;
mod spare;
mod tenants;
mod windows;

use super::diagnostic::{Diagnostic, Severity};
use super::file;
use super::parse::Draft;
use super::source::Span;
use super::tree::YamlNode;
use stowage_scheduling::vocabulary::classification::MAX_CLASSES;

/// Checks a policy that lacks its `broken` parts, and says nothing of these.
pub fn check(
    merged: &YamlNode,
    file: &file::PolicySpec,
    draft: &Draft,
    broken: &[Span],
) -> Vec<Diagnostic> {
    let policy = WrittenPolicy {
        merged,
        file,
        draft,
    };
    let mut found = Vec::new();
    settings::check(policy, &mut found);
    spare::check(policy, &mut found);
    classes::check(policy, &mut found);
    windows::check(policy, &mut found);
    if draft.classes.len() <= MAX_CLASSES {
        // What an invalid class takes from other classes says nothing.
        let marked: Vec<Span> = found
            .iter()
            .filter(|one| one.severity == Severity::Error)
            .flat_map(Diagnostic::spans)
            .chain(broken.iter().copied())
            .collect();
        let entries = policy.entries("classes");
        let mut sound = draft.clone();
        sound.classes.retain(|one| {
            let entry = one.written_index.and_then(|index| entries.get(index));
            !entry.is_some_and(|entry| marked.iter().any(|span| entry.span.contains(*span)))
        });
        let are_all_sound = sound.classes.len() == draft.classes.len();
        let sound = WrittenPolicy {
            draft: &sound,
            ..policy
        };
        reach::check(sound, &mut found);
        overlap::check(sound, &mut found);
        // A class that takes the pods at other hours may be among the invalid ones.
        if are_all_sound {
            outside_windows::check(sound, &mut found);
        }
    }
    let lists = [("tenants", "tenants"), ("nodePools", "node pools")];
    let oversized_lists: Vec<_> = lists
        .into_iter()
        .filter_map(|(list, what)| too_many(policy, list, what))
        .collect();
    if oversized_lists.is_empty() {
        tenants::check(policy, &mut found);
        pools::check(policy, &mut found);
    }
    found.extend(oversized_lists);
    let is_broken = |span| broken.iter().any(|part| part.contains(span));
    found.retain(|one| !one.spans().any(is_broken));
    found
}

/// The most tenants or node pools of a policy: each is compared with each other, and a cluster has a handful.
const MAX_ENTRIES: usize = 1000;

fn too_many(policy: WrittenPolicy<'_>, list: &str, what: &str) -> Option<Diagnostic> {
    let entries = policy.entries(list);
    let message = format!(
        "the policy has {} {what}; {MAX_ENTRIES} are the most",
        entries.len()
    );
    let beyond = entries.get(MAX_ENTRIES)?;
    Some(
        Diagnostic::error("too-many-entries", name_span(beyond), message)
            .help(format!("put {what} that are alike into one")),
    )
}

/// A policy as it is written, with places, and as it is parsed.
#[derive(Clone, Copy)]
struct WrittenPolicy<'a> {
    merged: &'a YamlNode,
    file: &'a file::PolicySpec,
    draft: &'a Draft,
}

impl<'a> WrittenPolicy<'a> {
    /// The entries of a list, in the order of the raw policy's.
    fn entries(self, list: &str) -> &'a [YamlNode] {
        self.merged
            .get(list)
            .map(YamlNode::items)
            .unwrap_or_default()
    }

    /// The place of a setting; if it is missing, of the nearest thing around it.
    fn span(self, path: &[&str]) -> Span {
        span(self.merged, path)
    }
}

/// The place of `path` in `node`, as far as it is written.
fn span(node: &YamlNode, path: &[&str]) -> Span {
    match path.split_first() {
        None => node.span,
        Some((first, rest)) => match node.get(first) {
            Some(part) => span(part, rest),
            None => name_span(node),
        },
    }
}

/// The place of the key of `field` in `node`, or of the node itself.
fn key_span(node: &YamlNode, field: &str) -> Span {
    node.entry(field)
        .map_or_else(|| name_span(node), |(key, _)| key.span)
}

/// The span of an entry's name, or of the whole entry if it has none.
fn name_span(node: &YamlNode) -> Span {
    node.get("name").map_or(node.span, |name| name.span)
}
