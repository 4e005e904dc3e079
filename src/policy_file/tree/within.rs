//! YAML in a scalar of YAML: its trees, with every place where it stands in the outer file.

use super::super::diagnostic::Diagnostic;
use super::super::source::{PolicySources, Span};
use super::source_spans::places;
use super::{Value, YamlNode, read};

/// Parses YAML in the text of the scalar at `outer`, as [`read`](super::read()) parses a file. Where the text cannot be laid beside
/// its source, every span is that of the whole scalar.
pub(crate) fn read_within(
    outer: Span,
    text: &str,
    sources: &PolicySources<'_>,
    nodes: &mut usize,
) -> (Vec<YamlNode>, Vec<Diagnostic>) {
    let (mut documents, mut diagnostics) = read(text.as_bytes(), outer.file, nodes);
    let places = places(sources.slice(outer), text);
    let moved = |span: &mut Span| {
        *span = match &places {
            Some(places) => outer.part(places.of(span.range())),
            None => outer,
        };
    };
    documents
        .iter_mut()
        .for_each(|document| each_span(document, &moved));
    for one in &mut diagnostics {
        moved(&mut one.span);
        one.others.iter_mut().for_each(|(span, _)| moved(span));
    }
    (documents, diagnostics)
}

/// Applies a function to every span of a tree. Recursive: trees are no deeper than [`super::read::MAX_DEPTH`].
fn each_span(node: &mut YamlNode, moved: &impl Fn(&mut Span)) {
    moved(&mut node.span);
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| each_span(item, moved)),
        Value::Map(entries) => entries.iter_mut().for_each(|(key, value)| {
            moved(&mut key.span);
            each_span(value, moved);
        }),
        Value::Scalar(_) | Value::Broken => {}
    }
}
