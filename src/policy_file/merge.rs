//! Merges several documents into one: a value that is set once counts; a value that is set twice must be equal; classes,
//! tenants and node pools are concatenated in order of file names.
//!
//! The result keeps the place of every value, so that later steps can report where it was set.

use super::diagnostic::{Diagnostic, quoted};
use super::shape::SchemaShape;
use super::source::Span;
use super::tree::{Value, YamlNode};
use std::collections::BTreeMap;

/// Merges all documents into one; also returns a diagnostic for each value that two documents set differently.
pub fn merge(documents: Vec<YamlNode>, shape: &SchemaShape) -> (YamlNode, Vec<Diagnostic>) {
    let mut conflicts = Vec::new();
    let mut documents = documents.into_iter();
    let Some(mut merged) = documents.next() else {
        return (empty(), conflicts);
    };
    for document in documents {
        add(&mut merged, document, shape, "the document", &mut conflicts);
    }
    find_twins(&merged, &mut conflicts);
    (merged, conflicts)
}

/// The empty policy, which is in no file.
fn empty() -> YamlNode {
    YamlNode {
        value: Value::Map(Vec::new()),
        span: Span::new(super::source::FileId::at(0), 0..0),
    }
}

fn add(
    base: &mut YamlNode,
    other: YamlNode,
    shape: &SchemaShape,
    name: &str,
    conflicts: &mut Vec<Diagnostic>,
) {
    match (&mut base.value, other.value, shape) {
        (Value::Map(entries), Value::Map(others), _) => {
            let places = entries
                .iter()
                .enumerate()
                .map(|(place, (key, _))| (key.text.clone(), place));
            let places: BTreeMap<String, usize> = places.collect();
            for (key, node) in others {
                let present = places
                    .get(&key.text)
                    .and_then(|place| entries.get_mut(*place));
                match (present, part(shape, &key.text)) {
                    (Some((_, present)), Some(shape)) => {
                        add(present, node, shape, &key.text, conflicts)
                    }
                    // An unknown field, reported already.
                    (Some(_), None) => {}
                    (None, _) => entries.push((key, node)),
                }
            }
        }
        (Value::List(items), Value::List(others), shape) if holds_named(shape) => {
            items.extend(others)
        }
        (_, value, shape) => {
            let other = YamlNode {
                value,
                span: other.span,
            };
            if comparable(base, &other) && !same(base, &other, shape) {
                conflicts.push(conflict(name, base.span, other.span));
            }
        }
    }
}

fn part<'a>(shape: &'a SchemaShape, key: &str) -> Option<&'a SchemaShape> {
    match shape {
        SchemaShape::Fields(_) => shape.field(key).map(|field| &field.shape),
        SchemaShape::Table { values, .. } => Some(values),
        _ => None,
    }
}

/// Lists whose items have names are merged; other lists are values.
fn holds_named(shape: &SchemaShape) -> bool {
    matches!(shape, SchemaShape::List(item) if item.field("name").is_some())
}

/// A value of the wrong kind was reported when its file was checked.
fn comparable(a: &YamlNode, b: &YamlNode) -> bool {
    let kind = |node: &YamlNode| match node.value {
        Value::Scalar(_) => 0,
        Value::List(_) => 1,
        Value::Map(_) => 2,
        Value::Broken => 3,
    };
    kind(a) == kind(b) && kind(a) != 3
}

fn same(a: &YamlNode, b: &YamlNode, shape: &SchemaShape) -> bool {
    match (&a.value, &b.value, shape) {
        (
            Value::Scalar(a),
            Value::Scalar(b),
            SchemaShape::Text {
                format: Some(format),
                ..
            },
        ) => a.text == b.text || format.same(&a.text, &b.text),
        (Value::Scalar(a), Value::Scalar(b), _) => a.text == b.text || a.atom() == b.atom(),
        (Value::List(a), Value::List(b), SchemaShape::List(items)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b, items))
        }
        _ => false,
    }
}

fn conflict(name: &str, first: Span, second: Span) -> Diagnostic {
    Diagnostic::error(
        "conflict",
        second,
        format!("{} is set twice, to different values", quoted(name)),
    )
    .label("again here")
    .other(first, "first here")
    .help("keep one of them: files of one policy may not contradict each other")
}

/// Entries of one list with the same name.
fn find_twins(merged: &YamlNode, conflicts: &mut Vec<Diagnostic>) {
    for (list, what) in [
        ("classes", "classes"),
        ("tenants", "tenants"),
        ("nodePools", "node pools"),
    ] {
        let mut seen: BTreeMap<&str, Span> = BTreeMap::new();
        let names = merged
            .get(list)
            .map(YamlNode::items)
            .unwrap_or_default()
            .iter()
            .filter_map(|one| one.get("name"));
        for name in names {
            let Some(text) = name.text() else { continue };
            match seen.get(text) {
                Some(first) => conflicts.push(
                    Diagnostic::error(
                        "name-twice",
                        name.span,
                        format!("two {what} are called {}", quoted(text)),
                    )
                    .label("again here")
                    .other(*first, "first here")
                    .help("give one another name, or put both into one entry"),
                ),
                None => {
                    seen.insert(text, name.span);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::SHAPES;
    use crate::source::FileId;
    use crate::tree;

    fn merged(files: &[&str]) -> (YamlNode, Vec<Diagnostic>) {
        let read = |(index, text): (usize, &&str)| {
            tree::read(text.as_bytes(), FileId::at(index), &mut 100).0
        };
        merge(
            files.iter().enumerate().flat_map(read).collect(),
            &SHAPES.policy,
        )
    }

    #[test]
    fn what_is_set_once_holds_and_keeps_its_place() {
        let (policy, conflicts) = merged(&[
            "scoring: {shortlist: 3}\n",
            "mode: shadow\nscoring: {softReservationLifetime: 3s}\n",
        ]);
        assert_eq!(conflicts, []);
        let scoring = policy.get("scoring").unwrap();
        assert_eq!(scoring.get("shortlist").unwrap().span.file, FileId::at(0));
        assert_eq!(
            scoring.get("softReservationLifetime").unwrap().span.file,
            FileId::at(1)
        );
        assert_eq!(policy.get("mode").and_then(YamlNode::text), Some("shadow"));
    }

    #[test]
    fn the_same_value_in_other_words_is_no_conflict() {
        let (_, conflicts) = merged(&[
            "startGate: {max: 10m}\nheadroom: {models: {H100: 8%}}\n",
            "startGate: {max: 600s}\nheadroom: {models: {H100: '8%', A100: 9%}}\n",
        ]);
        assert_eq!(conflicts, []);
    }

    #[test]
    fn different_values_are_a_conflict_that_names_both_places() {
        let (_, conflicts) = merged(&["mode: shadow\n", "a: 1\nmode: enforce\n"]);
        assert_eq!(conflicts.len(), 1);
        let (second, first) = (conflicts[0].span, conflicts[0].others[0].0);
        assert_eq!((second.file, second.range()), (FileId::at(1), 11..18));
        assert_eq!((first.file, first.range()), (FileId::at(0), 6..12));
    }

    #[test]
    fn lists_of_named_things_are_put_together_and_each_name_is_once() {
        let (policy, conflicts) = merged(&[
            "classes: [{name: a}, {name: b}]\n",
            "classes: [{name: c}, {name: a}]\n",
        ]);
        let names: Vec<_> = policy
            .get("classes")
            .unwrap()
            .items()
            .iter()
            .filter_map(|one| one.get("name")?.text())
            .collect();
        assert_eq!(names, ["a", "b", "c", "a"]);
        assert_eq!(
            conflicts.iter().map(|one| one.code).collect::<Vec<_>>(),
            ["name-twice"]
        );
    }

    #[test]
    fn no_file_is_the_empty_policy() {
        assert_eq!(merged(&[]).0.entries().len(), 0);
    }
}
