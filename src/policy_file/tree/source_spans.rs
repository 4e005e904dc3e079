//! Maps a part of a scalar's content to its place in the file, across quotes, escapes and folded lines: for mistakes inside a
//! text with a grammar of its own.

use std::ops::Range;

/// The bytes of `source`, a scalar as it is written, that `range` of `text`, the scalar as it was read, comes from.
/// `None` where the two cannot be laid side by side.
pub fn source_range(source: &str, text: &str, range: Range<usize>) -> Option<Range<usize>> {
    let mut reader = QuoteReader::new(source);
    let (mut start, mut end) = (None, None);
    for (at, c) in text.char_indices() {
        let span = reader.next_place(c)?;
        if at >= range.start && start.is_none() {
            start = Some(span.start);
        }
        if at < range.end {
            end = Some(span.end);
        }
    }
    let start = start.or(end)?;
    Some(start..end.unwrap_or(start).max(start))
}

/// Where each character of a scalar's content comes from.
pub struct ContentMap {
    /// For each byte of the content, and its end: where the character begins, and where the one before it ends.
    bounds: Vec<(u32, u32)>,
}

/// Maps the whole content of a scalar to its source, for many parts of it; [`source_range`] maps one.
pub fn content_map(source: &str, text: &str) -> Option<ContentMap> {
    let mut reader = QuoteReader::new(source);
    let offset = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
    let mut bounds = Vec::with_capacity(text.len() + 1);
    let mut end = offset(reader.at);
    for c in text.chars() {
        let span = reader.next_place(c)?;
        bounds.extend(std::iter::repeat_n((offset(span.start), end), c.len_utf8()));
        end = offset(span.end);
    }
    bounds.push((end, end));
    Some(ContentMap { bounds })
}

impl ContentMap {
    /// The bytes of the source that a range of the content comes from.
    pub fn source_range(&self, range: Range<usize>) -> Range<usize> {
        let last = self.bounds.len() - 1;
        let (start, end) = (
            self.bounds[range.start.min(last)].0,
            self.bounds[range.end.min(last)].1,
        );
        start as usize..end.max(start) as usize
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    None,
    Single,
    Double,
}

struct QuoteReader<'a> {
    source: &'a str,
    at: usize,
    quotes: Quotes,
}

impl<'a> QuoteReader<'a> {
    fn new(source: &'a str) -> Self {
        let (at, quotes) = match source.as_bytes().first() {
            Some(b'\'') => (1, Quotes::Single),
            Some(b'"') => (1, Quotes::Double),
            // The first line of a block only says how to parse it.
            Some(b'|' | b'>') => (
                source.find('\n').map_or(source.len(), |end| end + 1),
                Quotes::None,
            ),
            _ => (0, Quotes::None),
        };
        Self { source, at, quotes }
    }

    /// The next place whose content is `wanted`.
    fn next_place(&mut self, wanted: char) -> Option<Range<usize>> {
        loop {
            let start = self.at;
            let c = self.source[start..].chars().next()?;
            self.at += c.len_utf8();
            if c == '\\' && self.quotes == Quotes::Double {
                if self.escape()? {
                    return Some(start..self.at);
                }
            } else if c == wanted {
                if c == '\'' && self.quotes == Quotes::Single {
                    // Two mean one; a single one ends the text.
                    self.source[self.at..].strip_prefix('\'')?;
                    self.at += 1;
                }
                return Some(start..self.at);
            } else if c == '\n' && wanted == ' ' {
                return Some(start..self.at);
            } else if !c.is_whitespace() {
                return None;
            }
        }
    }

    /// Skips an escape; whether it is a character, which one at the end of a line is not.
    fn escape(&mut self) -> Option<bool> {
        let kind = self.source[self.at..].chars().next()?;
        let digits = match kind {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        let end = self.at + kind.len_utf8() + digits;
        self.at = self.source.is_char_boundary(end).then_some(end)?;
        Some(!matches!(kind, '\n' | '\r'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source_of_part<'a>(source: &'a str, text: &str, part: &str) -> Option<&'a str> {
        let start = text.find(part).unwrap();
        source_range(source, text, start..start + part.len()).map(|range| &source[range])
    }

    #[test]
    fn a_part_is_found_however_the_text_is_written() {
        assert_eq!(source_of_part("a == bad", "a == bad", "bad"), Some("bad"));
        assert_eq!(
            source_of_part("\"a == bad\"", "a == bad", "bad"),
            Some("bad")
        );
        assert_eq!(
            source_of_part("'x[''t''] == bad'", "x['t'] == bad", "bad"),
            Some("bad")
        );
        assert_eq!(
            source_of_part("\"x[\\\"t\\\"] \\u003d= bad\"", "x[\"t\"] == bad", "bad"),
            Some("bad")
        );
        assert_eq!(
            source_of_part("|\n    a &&\n    bad\n", "a &&\nbad\n", "bad"),
            Some("bad")
        );
        assert_eq!(
            source_of_part(">-\n    a &&\n    bad\n", "a && bad", "bad"),
            Some("bad")
        );
        assert_eq!(
            source_of_part("a &&\n  bad", "a && bad", "bad"),
            Some("bad")
        );
        assert_eq!(
            source_range("''", "''", 0..0),
            None,
            "a quote that ends the text stands for no character"
        );
        assert_eq!(source_of_part("something else", "a && bad", "bad"), None);
    }

    proptest! {
        #[test]
        fn no_pair_of_texts_makes_it_panic(
            source in "\\PC{0,20}|['\"|>]?[\\\\xuU0a \n']{0,20}",
            text in "\\PC{0,8}|[a ']{0,8}",
            start in 0usize..9,
            len in 0usize..9,
        ) {
            let range = start..start + len;
            if let Some(range) = source_range(&source, &text, range.clone()) {
                prop_assert!(source.get(range).is_some());
            }
            if let Some(places) = content_map(&source, &text).filter(|_| text.get(range.clone()).is_some()) {
                prop_assert!(source.get(places.source_range(range)).is_some());
            }
        }
    }
}
