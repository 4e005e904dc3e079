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
    let mut clashes = Vec::new();
    let mut documents = documents.into_iter();
    let Some(mut merged) = documents.next() else {
        return (empty_document(), clashes);
    };
    for document in documents {
        merge_into(&mut merged, document, shape, "the document", &mut clashes);
    }
    find_duplicate_names(&merged, &mut clashes);
    (merged, clashes)
}

/// The empty policy, which is in no file.
fn empty_document() -> YamlNode {
    YamlNode {
        value: Value::Map(Vec::new()),
        span: Span::new(super::source::FileId::at(0), 0..0),
    }
}

fn merge_into(
    base: &mut YamlNode,
    other: YamlNode,
    shape: &SchemaShape,
    name: &str,
    clashes: &mut Vec<Diagnostic>,
) {
    match (&mut base.value, other.value, shape) {
        (Value::Map(entries), Value::Map(others), _) => {
            let index_by_key = entries
                .iter()
                .enumerate()
                .map(|(index, (key, _))| (key.text.clone(), index));
            let index_by_key: BTreeMap<String, usize> = index_by_key.collect();
            for (key, node) in others {
                let present = index_by_key
                    .get(&key.text)
                    .and_then(|index| entries.get_mut(*index));
                match (present, shape_of_key(shape, &key.text)) {
                    (Some((_, present)), Some(shape)) => {
                        merge_into(present, node, shape, &key.text, clashes)
                    }
                    // An unknown field, reported already.
                    (Some(_), None) => {}
                    (None, _) => entries.push((key, node)),
                }
            }
        }
        (Value::List(items), Value::List(others), shape) if has_named_items(shape) => {
            items.extend(others)
        }
        (_, value, shape) => {
            let other = YamlNode {
                value,
                span: other.span,
            };
            if are_same_kind(base, &other) && !are_equal(base, &other, shape) {
                clashes.push(clash(name, base.span, other.span));
            }
        }
    }
}

fn shape_of_key<'a>(shape: &'a SchemaShape, key: &str) -> Option<&'a SchemaShape> {
    match shape {
        SchemaShape::Fields(_) => shape.field(key).map(|field| &field.shape),
        SchemaShape::Table { values, .. } => Some(values),
        _ => None,
    }
}

/// Lists whose items have names are merged; other lists are values.
fn has_named_items(shape: &SchemaShape) -> bool {
    matches!(shape, SchemaShape::List(item) if item.field("name").is_some())
}

/// A value of the wrong kind was reported when its file was checked.
fn are_same_kind(a: &YamlNode, b: &YamlNode) -> bool {
    let kind = |node: &YamlNode| match node.value {
        Value::Scalar(_) => 0,
        Value::List(_) => 1,
        Value::Map(_) => 2,
        Value::Broken => 3,
    };
    kind(a) == kind(b) && kind(a) != 3
}

fn are_equal(a: &YamlNode, b: &YamlNode, shape: &SchemaShape) -> bool {
    match (&a.value, &b.value, shape) {
        (
            Value::Scalar(a),
            Value::Scalar(b),
            SchemaShape::Text {
                format: Some(format),
                ..
            },
        ) => a.text == b.text || format.are_equal(&a.text, &b.text),
        (Value::Scalar(a), Value::Scalar(b), _) => a.text == b.text || a.atom() == b.atom(),
        (Value::List(a), Value::List(b), SchemaShape::List(items)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| are_equal(a, b, items))
        }
        _ => false,
    }
}

fn clash(name: &str, first: Span, second: Span) -> Diagnostic {
    Diagnostic::error(
        "conflict",
        second,
        format!("{} is set twice, to different values", quoted(name)),
    )
    .label("again here")
    .related(first, "first here")
    .help("keep one of them: files of one policy may not contradict each other")
}

/// Entries of one list with the same name.
fn find_duplicate_names(merged: &YamlNode, clashes: &mut Vec<Diagnostic>) {
    for (list, what) in [
        ("classes", "classes"),
        ("tenants", "tenants"),
        ("nodePools", "node pools"),
    ] {
        let mut first_spans: BTreeMap<&str, Span> = BTreeMap::new();
        let names = merged
            .get(list)
            .map(YamlNode::items)
            .unwrap_or_default()
            .iter()
            .filter_map(|one| one.get("name"));
        for name in names {
            let Some(text) = name.text() else { continue };
            match first_spans.get(text) {
                Some(first) => clashes.push(
                    Diagnostic::error(
                        "name-twice",
                        name.span,
                        format!("two {what} are called {}", quoted(text)),
                    )
                    .label("again here")
                    .related(*first, "first here")
                    .help("give one another name, or put both into one entry"),
                ),
                None => {
                    first_spans.insert(text, name.span);
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
    fn a_value_set_once_is_kept_with_its_span() {
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
    fn equal_values_in_different_notation_do_not_clash() {
        let (_, conflicts) = merged(&[
            "startGate: {max: 10m}\nheadroom: {models: {H100: 8%}}\n",
            "startGate: {max: 600s}\nheadroom: {models: {H100: '8%', A100: 9%}}\n",
        ]);
        assert_eq!(conflicts, []);
    }

    #[test]
    fn different_values_clash_and_both_spans_are_shown() {
        let (_, conflicts) = merged(&["mode: shadow\n", "a: 1\nmode: enforce\n"]);
        assert_eq!(conflicts.len(), 1);
        let (second, first) = (conflicts[0].span, conflicts[0].related[0].0);
        assert_eq!((second.file, second.range()), (FileId::at(1), 11..18));
        assert_eq!((first.file, first.range()), (FileId::at(0), 6..12));
    }

    #[test]
    fn named_lists_are_concatenated_and_duplicate_names_reported() {
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
