//! The YAML parser's errors, in words for people who do not know the parser.

use super::super::diagnostic::Diagnostic;
use super::super::source::{FileId, Span};
use super::build::too_deep;
use granit_parser::{ErrorKind, ScanError};

/// The parser's complaint, marked at the character where it gave up.
pub fn diagnostic(error: &ScanError, text: &str, file: FileId) -> Diagnostic {
    let at = error
        .marker()
        .byte_offset()
        .unwrap_or_default()
        .min(text.len());
    let at = (0..=at)
        .rev()
        .find(|&at| text.is_char_boundary(at))
        .unwrap_or_default();
    // The parser gives up at the value before the line that the tab begins.
    let at = if is_of_tab(error.kind()) {
        tab_at_or_after(at, text).unwrap_or(at)
    } else {
        at
    };
    let end = text[at..]
        .chars()
        .next()
        .filter(|&c| c != '\n')
        .map_or(at, |c| at + c.len_utf8());
    let span = Span::new(file, at..end);
    if *error.kind() == ErrorKind::RecursionLimitExceeded {
        return too_deep(span);
    }
    let (message, help) = explain(error.kind());
    let diagnostic = Diagnostic::error("yaml", span, message).label("reading stopped here");
    match help {
        "" => diagnostic,
        help => diagnostic.help(help),
    }
}

fn is_of_tab(kind: &ErrorKind) -> bool {
    use ErrorKind as Kind;
    matches!(
        kind,
        Kind::TabNotAllowed
            | Kind::TabInBlockIndentation
            | Kind::TabInIndentation
            | Kind::TabAtBlockScalarStart
            | Kind::TabInPlainScalar
    )
}

/// The first tab in the indentation of a line, from the line on in which `at` is.
fn tab_at_or_after(at: usize, text: &str) -> Option<usize> {
    let mut line_at = text[..at].rfind('\n').map_or(0, |end| end + 1);
    for line in text[line_at..].split_inclusive('\n') {
        let indentation = line.len() - line.trim_start_matches([' ', '\t']).len();
        if let Some(tab) = line[..indentation].find('\t') {
            return Some(line_at + tab);
        }
        line_at += line.len();
    }
    None
}

fn explain(kind: &ErrorKind) -> (String, &'static str) {
    use ErrorKind as Kind;
    let (message, help) = match kind {
        tab if is_of_tab(tab) => (
            "a tab where only spaces may stand",
            "put two spaces for each tab; YAML has no tabs in indentation",
        ),
        Kind::MappingValueNotAllowed | Kind::InvalidColonPlacement | Kind::MappingKeyNotAllowed => {
            (
                "a `:` where no value may begin",
                "look at this line and the one before: a `:`, a bracket or a quote is missing, or one is indented too far; a text \
             with `: ` in it needs quotes",
            )
        }
        Kind::SimpleKeyExpected | Kind::InvalidSimpleKey => (
            "this line is neither `name: value` nor `- item`",
            "is a `:` missing, or the space behind it?",
        ),
        Kind::InvalidIndentation
        | Kind::ExpectedBlockMappingKey
        | Kind::ExpectedBlockSequenceEntry => (
            "this line does not stand where the lines before it lead",
            "settings that belong together begin in the same column; items of a list begin with `- `",
        ),
        Kind::UnclosedQuotedScalar
        | Kind::DocumentIndicatorInQuotedScalar
        | Kind::InvalidQuotedScalarIndent => (
            "a quote is opened and not closed",
            "close it with the same quote; a text of several lines is indented more than its key",
        ),
        Kind::UnclosedFlowCollection { .. }
        | Kind::UnexpectedEofFlowSequence
        | Kind::UnexpectedEofFlowMapping
        | Kind::UnexpectedEofImplicitFlowMapping => (
            "a bracket is opened and never closed",
            "close it with `]` or `}`",
        ),
        Kind::MisplacedFlowCollectionEnd => (
            "a bracket is closed that was never opened",
            "take it away, or open it",
        ),
        Kind::ExpectedFlowMappingSeparator | Kind::ExpectedFlowSequenceSeparator => (
            "a `,` or the closing bracket is missing",
            "between brackets, entries are parted by `, `",
        ),
        Kind::MismatchedFlowCollectionEnd { open, close } => {
            return (
                format!("`{open}` is closed by `{close}`"),
                "close each bracket with its own",
            );
        }
        Kind::UnexpectedCharacter { character } => {
            let shown = character.escape_debug();
            return (
                format!("no value begins with `{shown}`"),
                "put the text in quotes",
            );
        }
        Kind::UnknownQuotedScalarEscape | Kind::InvalidQuotedScalarHexEscape => (
            "an escape that YAML does not know",
            "in double quotes write `\\\\` for a backslash, or use single quotes, which know no escapes",
        ),
        Kind::InvalidTrailingSingleQuotedScalar | Kind::InvalidTrailingDoubleQuotedScalar => (
            "something stands behind the closing quote",
            "put quotes around the whole text",
        ),
        other => return (format!("this is not YAML: {other}"), ""),
    };
    (message.to_owned(), help)
}
