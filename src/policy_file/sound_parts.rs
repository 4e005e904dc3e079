//! The parts of a policy without errors: what they say together is checked although other parts are broken.

use super::diagnostic::{Diagnostic, Severity};
use super::shape::SHAPES;
use super::source::Span;
use super::tree::{Value, YamlKey, YamlNode};

/// Lists each of whose entries is a part.
const LISTS: [&str; 3] = ["classes", "tenants", "nodePools"];
/// Those who have more errors to mend do not miss the rest.
const MAX_ERRORS: usize = 200;

/// A policy without its broken parts, and the places of these. Of an entry the name stays, because others refer to it. `None`
/// where nobody can tell what an error hides: a misspelled section may have the class that another part names.
pub fn sound_parts(
    mut merged: YamlNode,
    diagnostics: &[Diagnostic],
) -> Option<(YamlNode, Vec<Span>)> {
    let is_error = |one: &&Diagnostic| one.severity == Severity::Error;
    let mut broken: Vec<Span> = Vec::new();
    for (count, error) in diagnostics.iter().filter(is_error).enumerate() {
        // A document that lacks its kind may be right otherwise.
        let mut is_found =
            error.code == "missing-field" && !error.spans().any(|span| is_in_list(&merged, span));
        for span in error.spans() {
            broken.extend(take_part(&mut merged, span));
            is_found |= broken.iter().any(|part| part.contains(span));
        }
        if !is_found || count >= MAX_ERRORS {
            return None;
        }
    }
    Some((merged, broken))
}

/// Takes away the part that `span` is in: an entry of a list, a section within a section, otherwise the section.
fn take_part(merged: &mut YamlNode, span: Span) -> Option<Span> {
    let Value::Map(sections) = &mut merged.value else {
        return None;
    };
    for (_, section) in sections.iter_mut().filter(|(key, _)| is_list(key)) {
        if let Value::List(entries) = &mut section.value
            && let Some(entry) = entries.iter_mut().find(|entry| entry.span.contains(span))
        {
            if let Value::Map(fields) = &mut entry.value {
                // Without its name others that refer to it would seem wrong.
                let mut names = fields.iter().filter(|(key, _)| key.text == "name");
                if names.next().is_none_or(|name| whole(name).contains(span))
                    || names.next().is_some()
                {
                    return None;
                }
                fields.retain(|(key, _)| key.text == "name");
            }
            return Some(entry.span);
        }
    }
    let at = sections.iter().position(|one| whole(one).contains(span))?;
    let (key, section) = &mut sections[at];
    // Classes are checked against the start gate of all.
    if is_list(key) || key.text == "startGate" || SHAPES.policy.field(&key.text).is_none() {
        return None;
    }
    if let Value::Map(parts) = &mut section.value {
        let is_it = |one: &(YamlKey, YamlNode)| {
            !matches!(one.1.value, Value::Scalar(_)) && whole(one).contains(span)
        };
        if let Some(at) = parts.iter().position(is_it) {
            return Some(whole(&parts.remove(at)));
        }
    }
    Some(whole(&sections.remove(at)))
}

fn is_in_list(merged: &YamlNode, span: Span) -> bool {
    let mut lists = merged.entries().iter().filter(|(key, _)| is_list(key));
    lists.any(|(_, list)| list.span.contains(span))
}

fn is_list(key: &YamlKey) -> bool {
    LISTS.contains(&key.text.as_str())
}

/// From the key to the end of its value.
fn whole((key, value): &(YamlKey, YamlNode)) -> Span {
    let end = value.span.end.max(key.span.end);
    Span { end, ..key.span }
}
