//! Diagnostics: a problem in a policy with its place, the related places, and the fix.
//!
//! Data only. [`text`] formats it for terminals, [`json`] for CI. Nothing here knows what a policy is.

pub mod json;
pub mod text;

use super::source::Span;
use serde::Serialize;
use stowage_scheduling::ids::is_printable;

/// Whether a policy with this diagnostic is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Error,
    Warning,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Identifies the kind of mistake for filters and documentation, and never changes: `unknown-field`.
    pub code: &'static str,
    pub severity: Severity,
    /// One sentence without a full stop.
    pub message: String,
    pub span: Span,
    /// The text under the marked place; may be empty.
    pub label: String,
    /// Related places, in other files too, each with a note.
    pub related: Vec<(Span, String)>,
    /// The fix.
    pub help: Option<String>,
}

impl Diagnostic {
    pub fn error(code: &'static str, span: Span, message: impl Into<String>) -> Self {
        let (message, label) = (message.into(), String::new());
        Self {
            code,
            severity: Severity::Error,
            message,
            span,
            label,
            related: Vec::new(),
            help: None,
        }
    }

    pub fn warning(code: &'static str, span: Span, message: impl Into<String>) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::error(code, span, message)
        }
    }

    pub fn label(self, label: impl Into<String>) -> Self {
        Self {
            label: label.into(),
            ..self
        }
    }

    pub fn related(mut self, span: Span, label: impl Into<String>) -> Self {
        self.related.push((span, label.into()));
        self
    }

    /// The marked place and the related ones.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        std::iter::once(self.span).chain(self.related.iter().map(|(span, _)| *span))
    }

    pub fn help(self, help: impl Into<String>) -> Self {
        Self {
            help: Some(help.into()),
            ..self
        }
    }
}

/// Sorts by file and position, so that a reader goes through each file once, and removes duplicates.
pub fn sort(diagnostics: &mut Vec<Diagnostic>) {
    diagnostics.sort_by(|a, b| {
        let key = |d: &Diagnostic| (d.span, d.severity, d.code);
        key(a).cmp(&key(b)).then_with(|| a.message.cmp(&b.message))
    });
    diagnostics.dedup();
}

pub fn has_errors(diagnostics: &[Diagnostic]) -> bool {
    diagnostics
        .iter()
        .any(|one| one.severity == Severity::Error)
}

/// The longest quoted text, in characters: more than a name needs, and short enough for one line.
const MAX_QUOTE_CHARS: usize = 60;

/// A part of a user's text inside a message: in backquotes, cut when long, without control characters for a terminal.
pub fn quoted(text: &str) -> String {
    let cut: String = text
        .chars()
        .take(MAX_QUOTE_CHARS)
        .flat_map(escape_unprintable)
        .collect();
    let dots = if text.chars().nth(MAX_QUOTE_CHARS).is_some() {
        "…"
    } else {
        ""
    };
    format!("`{cut}{dots}`")
}

/// A whole text, such as a file's name, with control characters escaped so that no terminal obeys them.
pub fn escape_control_characters(text: &str) -> String {
    text.chars().flat_map(escape_unprintable).collect()
}

fn escape_unprintable(c: char) -> impl Iterator<Item = char> {
    let (plain, escaped) = if is_printable(c) {
        (Some(c), None)
    } else {
        (None, Some(c.escape_unicode()))
    };
    plain.into_iter().chain(escaped.into_iter().flatten())
}

/// `a`, `b` and `c`.
pub fn quoted_list<S: AsRef<str>>(names: &[S], last: &str) -> String {
    let quotes: Vec<String> = names.iter().map(|name| quoted(name.as_ref())).collect();
    match quotes.as_slice() {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., end] => format!("{} {last} {end}", first.join(", ")),
    }
}

/// `1 error`, `2 errors`.
pub fn counted(n: usize, what: &str) -> String {
    if n == 1 {
        format!("1 {what}")
    } else {
        format!("{n} {what}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_text_escapes_control_characters() {
        assert_eq!(quoted("a\u{1b}[31mb"), "`a\\u{1b}[31mb`");
        assert_eq!(quoted("a\u{202e}b"), "`a\\u{202e}b`");
        assert_eq!(
            quoted(&"x".repeat(100)).chars().count(),
            MAX_QUOTE_CHARS + 3
        );
    }

    #[test]
    fn a_list_reads_as_a_sentence_does() {
        assert_eq!(quoted_list(&["a"], "or"), "`a`");
        assert_eq!(quoted_list(&["a", "b", "c"], "or"), "`a`, `b` or `c`");
    }
}
