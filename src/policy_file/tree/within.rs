//! YAML in a scalar of YAML: its trees, with every place where it stands in the outer file.

use super::super::diagnostic::Diagnostic;
use super::super::source::{PolicySources, Span};
use super::source_spans::content_map;
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
    let source_map = content_map(sources.slice(outer), text);
    let relocate = |span: &mut Span| {
        *span = match &source_map {
            Some(source_map) => outer.part(source_map.source_range(span.range())),
            None => outer,
        };
    };
    documents
        .iter_mut()
        .for_each(|document| update_spans(document, &relocate));
    for one in &mut diagnostics {
        relocate(&mut one.span);
        one.related.iter_mut().for_each(|(span, _)| relocate(span));
    }
    (documents, diagnostics)
}

/// Applies a function to every span of a tree. Recursive: trees are no deeper than [`super::read::MAX_DEPTH`].
fn update_spans(node: &mut YamlNode, relocate: &impl Fn(&mut Span)) {
    relocate(&mut node.span);
    match &mut node.value {
        Value::List(items) => items
            .iter_mut()
            .for_each(|item| update_spans(item, relocate)),
        Value::Map(entries) => entries.iter_mut().for_each(|(key, value)| {
            relocate(&mut key.span);
            update_spans(value, relocate);
        }),
        Value::Scalar(_) | Value::Broken => {}
    }
}
