//! Diagnostics as JSON for CI: flat objects with lines and columns.

use super::super::source::{PolicySources, Position, Span};
use super::{Diagnostic, Severity};
use serde::Serialize;

/// One diagnostic. Lines and columns count from 1; the end is behind the last character.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JsonDiagnostic<'a> {
    pub file: &'a str,
    #[serde(flatten)]
    pub start: Position,
    pub end: Position,
    pub code: &'a str,
    pub severity: Severity,
    pub message: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub label: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub related: Vec<Related<'a>>,
}

/// A related place of a diagnostic.
#[derive(Debug, Serialize)]
pub struct Related<'a> {
    pub file: &'a str,
    #[serde(flatten)]
    pub start: Position,
    pub message: &'a str,
}

pub fn json_diagnostics<'a>(
    diagnostics: &'a [Diagnostic],
    sources: &'a PolicySources<'_>,
) -> Vec<JsonDiagnostic<'a>> {
    diagnostics
        .iter()
        .map(|one| json_diagnostic(one, sources))
        .collect()
}

fn json_diagnostic<'a>(
    diagnostic: &'a Diagnostic,
    sources: &'a PolicySources<'_>,
) -> JsonDiagnostic<'a> {
    let start = |span: Span| sources.position(span.file, span.start as usize);
    let related = diagnostic.related.iter().map(|(span, message)| Related {
        file: sources.name(span.file),
        start: start(*span),
        message,
    });
    let span = diagnostic.span;
    JsonDiagnostic {
        file: sources.name(span.file),
        start: start(span),
        end: sources.position(span.file, span.end as usize),
        code: diagnostic.code,
        severity: diagnostic.severity,
        message: &diagnostic.message,
        label: &diagnostic.label,
        help: diagnostic.help.as_deref(),
        related: related.collect(),
    }
}
