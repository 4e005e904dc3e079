//! Diagnostics as text: the message, the lines with the marked place, the fix, and a summary line.
//!
//! No colors unless requested: the same text is used in files, Events and golden tests.

use super::super::source::{FileId, PolicySources, Span};
use super::{Diagnostic, Severity, counted, has_errors};
use annotate_snippets::{Annotation, AnnotationKind, Group, Level, Renderer, Snippet};

/// Whether the reader is a terminal that shows colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colors {
    Off,
    On,
}

/// The width, in columns, that source lines are cut to: it fits beside another window.
const TERMINAL_WIDTH: usize = 120;
/// Maximum number of diagnostics shown: no reader fixes more at once.
const MAX_SHOWN: usize = 50;
/// Related places further away than this in the same file are shown as a separate snippet.
const MAX_SNIPPET_GAP: usize = 12;

/// Renders diagnostics in the given order, then a summary line.
pub fn render(diagnostics: &[Diagnostic], sources: &PolicySources<'_>, colors: Colors) -> String {
    let renderer = match colors {
        Colors::Off => Renderer::plain(),
        // A hyperlink would need the address of the documentation.
        Colors::On => Renderer::styled().hyperlink(false),
    };
    let renderer = renderer.term_width(TERMINAL_WIDTH);
    let mut text = String::new();
    for diagnostic in most_important(diagnostics) {
        text += &renderer.render(&[group(diagnostic, sources)]);
        text += "\n\n";
    }
    let hidden = diagnostics.len().saturating_sub(MAX_SHOWN);
    if hidden > 0 {
        text += &format!("… and {hidden} more like these\n\n");
    }
    text + &summary(diagnostics) + "\n"
}

/// `3 errors, 1 warning in 2 files`.
pub fn summary(diagnostics: &[Diagnostic]) -> String {
    let count = |severity| {
        diagnostics
            .iter()
            .filter(|one| one.severity == severity)
            .count()
    };
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    let mut files: Vec<FileId> = diagnostics.iter().map(|one| one.span.file).collect();
    files.sort_unstable();
    files.dedup();
    let counts: Vec<String> = [(errors, "error"), (warnings, "warning")]
        .into_iter()
        .filter(|&(n, _)| n > 0)
        .map(|(n, what)| counted(n, what))
        .collect();
    match counts.is_empty() {
        true => "no errors, no warnings".into(),
        false => format!("{} in {}", counts.join(", "), counted(files.len(), "file")),
    }
}

/// Errors first if not all can be shown.
fn most_important(diagnostics: &[Diagnostic]) -> Vec<&Diagnostic> {
    let mut all: Vec<&Diagnostic> = diagnostics.iter().collect();
    if all.len() > MAX_SHOWN && has_errors(diagnostics) {
        all.sort_by_key(|one| one.severity);
    }
    all.truncate(MAX_SHOWN);
    all
}

fn group<'a>(diagnostic: &'a Diagnostic, sources: &'a PolicySources<'_>) -> Group<'a> {
    let level = match diagnostic.severity {
        Severity::Error => Level::ERROR,
        Severity::Warning => Level::WARNING,
    };
    let title = level
        .primary_title(diagnostic.message.as_str())
        .id(diagnostic.code);
    let group = title.elements(
        group_marks(diagnostic, sources)
            .into_iter()
            .map(|piece| snippet(piece, sources)),
    );
    match &diagnostic.help {
        Some(help) => group.element(Level::HELP.message(help.as_str())),
        None => group,
    }
}

/// Marks of one file that are close together.
struct NearbyMarks<'a> {
    file: FileId,
    marks: Vec<(AnnotationKind, Span, &'a str)>,
    first_line: usize,
    last_line: usize,
}

fn group_marks<'a>(
    diagnostic: &'a Diagnostic,
    sources: &PolicySources<'_>,
) -> Vec<NearbyMarks<'a>> {
    let primary = (
        AnnotationKind::Primary,
        diagnostic.span,
        diagnostic.label.as_str(),
    );
    let others = diagnostic
        .related
        .iter()
        .map(|(span, label)| (AnnotationKind::Context, *span, label.as_str()));
    let mut pieces: Vec<NearbyMarks<'a>> = Vec::new();
    for mark in std::iter::once(primary).chain(others) {
        let span = mark.1;
        let line = |offset: usize| sources.position(span.file, offset).line;
        let (from, to) = (
            line(span.start as usize),
            line(first_line_end(span, sources)),
        );
        let is_near = |piece: &&mut NearbyMarks<'_>| {
            piece.file == span.file
                && from <= piece.last_line + MAX_SNIPPET_GAP
                && piece.first_line <= to + MAX_SNIPPET_GAP
        };
        match pieces.iter_mut().find(is_near) {
            Some(piece) => {
                (piece.first_line, piece.last_line) =
                    (piece.first_line.min(from), piece.last_line.max(to));
                piece.marks.push(mark);
            }
            None => pieces.push(NearbyMarks {
                file: span.file,
                marks: vec![mark],
                first_line: from,
                last_line: to,
            }),
        }
    }
    pieces
}

/// A mark never spans several lines: its first line identifies the thing.
fn first_line_end(span: Span, sources: &PolicySources<'_>) -> usize {
    let line = sources.slice(span).lines().next().unwrap_or_default();
    span.start as usize + line.trim_end().len()
}

fn snippet<'a>(
    piece: NearbyMarks<'a>,
    sources: &'a PolicySources<'_>,
) -> Snippet<'a, Annotation<'a>> {
    // One line of context on each side.
    let from = piece.first_line.saturating_sub(1).max(1);
    let lines = sources.lines(piece.file, from, piece.last_line + 1);
    let text = sources
        .text(piece.file)
        .get(lines.clone())
        .unwrap_or_default()
        .trim_end_matches(['\r', '\n']);
    let mut snippet = Snippet::source(text)
        .path(sources.name(piece.file))
        .line_start(from);
    for (kind, span, label) in piece.marks {
        let offset = |at: usize| at.saturating_sub(lines.start).min(text.len());
        let range = offset(span.start as usize)..offset(first_line_end(span, sources));
        let label = (!label.is_empty()).then_some(label);
        snippet = snippet.annotation(kind.span(range).label(label));
    }
    snippet
}
