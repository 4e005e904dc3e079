//! The texts of a policy, and places in them. A place is a byte range, so it is cheap to carry along; lines and columns are
//! computed when they are displayed.
//!
//! Nothing here knows where the texts come from (a directory, a ConfigMap, a test) or what they mean.

use super::diagnostic::escape_control_characters;
use serde::Serialize;
use std::borrow::Cow;
use std::ops::Range;

/// A larger file is rejected. A ConfigMap, which all policies must fit into to be mounted, is not larger.
pub const MAX_FILE_BYTES: usize = 1 << 20;

/// One file, as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceText {
    /// Its name for people: its path.
    pub name: String,
    pub bytes: Vec<u8>,
}

impl SourceText {
    /// The name is only displayed, so control characters in it are escaped.
    pub fn new(name: impl AsRef<str>, text: impl Into<Vec<u8>>) -> Self {
        Self {
            name: escape_control_characters(name.as_ref()),
            bytes: text.into(),
        }
    }
}

/// A file, by its index among those that are read together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(u16);

impl FileId {
    /// The id of the file at `index`; those beyond 65,535 share the last one, long after reading has been given up.
    pub fn at(index: usize) -> Self {
        Self(u16::try_from(index).unwrap_or(u16::MAX))
    }

    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A byte range in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    pub file: FileId,
    pub start: u32,
    pub end: u32,
}

impl Span {
    /// A span of these bytes. Offsets that do not fit are cut: files are far smaller ([`MAX_FILE_BYTES`]).
    pub fn new(file: FileId, range: Range<usize>) -> Self {
        let cut = |offset: usize| u32::try_from(offset).unwrap_or(u32::MAX);
        Self {
            file,
            start: cut(range.start),
            end: cut(range.end.max(range.start)),
        }
    }

    pub fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    /// A part of this span, `range` counted from its start, never beyond its end.
    pub fn part(self, range: Range<usize>) -> Self {
        let offset = |at: usize| (self.start as usize + at).min(self.end as usize);
        Self::new(self.file, offset(range.start)..offset(range.end))
    }

    /// Whether `other` is within it.
    pub fn contains(self, other: Self) -> bool {
        self.file == other.file && self.start <= other.start && other.end <= self.end
    }

    pub fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

/// Both count from 1; a column is a character, as editors count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Position {
    pub line: usize,
    pub column: usize,
}

/// Files as texts, with their line starts computed once.
#[derive(Debug)]
pub struct PolicySources<'a> {
    files: Vec<Lines<'a>>,
}

#[derive(Debug)]
struct Lines<'a> {
    name: &'a str,
    text: Cow<'a, str>,
    /// Where each line begins.
    starts: Vec<usize>,
}

impl<'a> PolicySources<'a> {
    pub fn new(files: &'a [SourceText]) -> Self {
        Self {
            files: files.iter().map(Lines::new).collect(),
        }
    }

    pub fn name(&self, file: FileId) -> &str {
        self.files.get(file.index()).map_or("", |file| file.name)
    }

    /// The text of a file. Invalid UTF-8 is replaced; a file above [`MAX_FILE_BYTES`] is empty.
    pub fn text(&self, file: FileId) -> &str {
        self.files.get(file.index()).map_or("", |file| &file.text)
    }

    /// The text at `span`; empty for a span of another file set.
    pub fn slice(&self, span: Span) -> &str {
        self.text(span.file).get(span.range()).unwrap_or_default()
    }

    pub fn position(&self, file: FileId, offset: usize) -> Position {
        self.files
            .get(file.index())
            .map_or(Position { line: 1, column: 1 }, |file| {
                file.position(offset)
            })
    }

    /// `policy.yaml:12`, as compilers write it.
    pub fn line_of(&self, span: Span) -> String {
        format!(
            "{}:{}",
            self.name(span.file),
            self.position(span.file, span.start as usize).line
        )
    }

    /// The byte range of the lines that `from` to `to` (counted from 1) take up, as far as there are such lines.
    pub fn lines(&self, file: FileId, from: usize, to: usize) -> Range<usize> {
        let Some(file) = self.files.get(file.index()) else {
            return 0..0;
        };
        let start = |line: usize| file.starts.get(line.saturating_sub(1)).copied();
        start(from).unwrap_or(file.text.len())..start(to + 1).unwrap_or(file.text.len())
    }
}

impl<'a> Lines<'a> {
    fn new(file: &'a SourceText) -> Self {
        let bytes = if file.bytes.len() > MAX_FILE_BYTES {
            &[]
        } else {
            file.bytes.as_slice()
        };
        let text = String::from_utf8_lossy(bytes);
        let starts = std::iter::once(0)
            .chain(text.match_indices('\n').map(|(at, _)| at + 1))
            .collect();
        Self {
            name: &file.name,
            text,
            starts,
        }
    }

    fn position(&self, offset: usize) -> Position {
        let offset = offset.min(self.text.len());
        let line = self.starts.partition_point(|&start| start <= offset).max(1);
        let before = self
            .text
            .get(self.starts[line - 1]..offset)
            .unwrap_or_default();
        Position {
            line,
            column: before.chars().count() + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_name_escapes_control_characters() {
        let text = SourceText::new("a\u{1b}[31m\n.yaml", "");
        assert_eq!(text.name, "a\\u{1b}[31m\\u{a}.yaml");
    }

    #[test]
    fn a_column_is_a_character_and_a_line_begins_after_its_predecessors_end() {
        let files = [SourceText::new("a.yaml", "größe: 1\nb: 2\n")];
        let sources = PolicySources::new(&files);
        let file = FileId::at(0);
        assert_eq!(sources.position(file, 0), Position { line: 1, column: 1 });
        assert_eq!(
            sources.position(file, "größe".len()),
            Position { line: 1, column: 6 }
        );
        assert_eq!(
            sources.position(file, "größe: 1\n".len()),
            Position { line: 2, column: 1 }
        );
        assert_eq!(
            sources.position(file, 9999),
            Position { line: 3, column: 1 }
        );
        assert_eq!(&sources.text(file)[sources.lines(file, 2, 2)], "b: 2\n");
    }

    #[test]
    fn a_part_of_a_span_stays_inside_it() {
        let span = Span::new(FileId::at(0), 10..15);
        assert_eq!(span.part(2..4).range(), 12..14);
        assert_eq!(span.part(3..99).range(), 13..15);
    }
}
