//! What each file may say and what makes no sense all the same: rules that never match, promises that cannot be kept,
//! settings that undo each other.
//!
//! Each room looks at one part of a [`Draft`] and marks the places in the merged tree. Errors are what cannot be meant;
//! warnings what hardly is.

mod classes;
mod overlap;
mod pools;
mod reach;
mod settings;
mod tenants;

use super::diagnostic::{Diagnostic, has_errors};
use super::file;
use super::parse::Draft;
use super::source::Span;
use super::tree::YamlNode;

pub fn check(merged: &YamlNode, file: &file::PolicySpec, draft: &Draft) -> Vec<Diagnostic> {
    let policy = Written { merged, file, draft };
    let mut found = Vec::new();
    settings::check(policy, &mut found);
    classes::check(policy, &mut found);
    // What a class that is wrong by itself takes from others says nothing.
    if !has_errors(&found) {
        reach::check(policy, &mut found);
        overlap::check(policy, &mut found);
    }
    let lists = [("tenants", "tenants"), ("nodePools", "node pools")];
    let crowds: Vec<_> = lists.into_iter().filter_map(|(list, what)| too_many(policy, list, what)).collect();
    if crowds.is_empty() {
        tenants::check(policy, &mut found);
        pools::check(policy, &mut found);
    }
    found.extend(crowds);
    found
}

/// Each is compared with each other; a cluster has a handful.
const MOST_ENTRIES: usize = 1000;

fn too_many(policy: Written<'_>, list: &str, what: &str) -> Option<Diagnostic> {
    let entries = policy.entries(list);
    let message = format!("the policy has {} {what}; {MOST_ENTRIES} are the most", entries.len());
    let beyond = entries.get(MOST_ENTRIES)?;
    Some(
        Diagnostic::error("too-many-entries", head(beyond), message)
            .help(format!("put {what} that are alike into one")),
    )
}

/// A policy as it is written, with places, and as it is meant.
#[derive(Clone, Copy)]
struct Written<'a> {
    merged: &'a YamlNode,
    file: &'a file::PolicySpec,
    draft: &'a Draft,
}

impl<'a> Written<'a> {
    /// The entries of a list, in the order of the raw policy's.
    fn entries(self, list: &str) -> &'a [YamlNode] {
        self.merged.get(list).map(YamlNode::items).unwrap_or_default()
    }

    /// Where a setting stands; the nearest thing around it if it is not said itself.
    fn span(self, path: &[&str]) -> Span {
        span(self.merged, path)
    }
}

/// Where `path` stands in `node`, as far as it is written.
fn span(node: &YamlNode, path: &[&str]) -> Span {
    match path.split_first() {
        None => node.span,
        Some((first, rest)) => match node.get(first) {
            Some(part) => span(part, rest),
            None => head(node),
        },
    }
}

/// The key of `field` in `node`, or what stands for the node.
fn key(node: &YamlNode, field: &str) -> Span {
    node.entry(field).map_or_else(|| head(node), |(key, _)| key.span)
}

/// An entry is best known by its name.
fn head(node: &YamlNode) -> Span {
    node.get("name").map_or(node.span, |name| name.span)
}
