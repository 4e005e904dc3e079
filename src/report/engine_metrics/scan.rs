//! A scanner of Prometheus' text format, and of OpenMetrics' additions: one pass, and no allocation.
//!
//! An engine's page is thousands of histogram buckets around a handful of gauges. The caller names the gauges; every other line
//! is skipped to its end. It only knows the format: [`stowage_scheduling::engines`] has the meaning of metrics.

use memchr::{memchr, memchr2};
use std::borrow::Cow;

/// The metrics that a caller wants, each with the caller's own tag.
#[derive(Debug, Clone)]
pub struct WantedMetrics<T> {
    /// The kind of a line, by its first byte.
    line_kinds: [LineKind; 256],
    groups: Vec<NameGroup<T>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineKind {
    /// Between lines, or before one.
    Blank,
    /// A comment, or a metric that is not wanted.
    Skipped,
    /// No valid line begins with it.
    Garbage,
    /// Possibly a wanted metric, of the group of this number.
    Group(u8),
}

/// Wanted names with the same first byte.
#[derive(Debug, Clone)]
struct NameGroup<T> {
    /// Their common prefix.
    common: Vec<u8>,
    /// Whether one of them continues with this byte. Excludes most lines of an engine whose names share a long prefix.
    next: [bool; 256],
    names: Vec<(Vec<u8>, T)>,
}

/// A line of a wanted metric.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetricLine<'p, T> {
    Sample(Sample<'p, T>),
    /// It has the metric's name, and cannot be parsed.
    Garbled(T),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'p, T> {
    /// The caller's tag of its name.
    pub tag: T,
    pub labels: SampleLabels<'p>,
    pub value: f64,
}

impl<T: Copy> WantedMetrics<T> {
    /// Names without a blank or a brace, each once. An empty one matches nothing.
    pub fn new(names: &[(&str, T)]) -> Self {
        let mut wanted = Self {
            line_kinds: std::array::from_fn(|byte| line_kind(byte as u8)),
            groups: Vec::new(),
        };
        for (name, tag) in names {
            wanted.add(name.as_bytes(), *tag);
        }
        wanted
            .groups
            .iter_mut()
            .for_each(NameGroup::compute_common_prefix);
        wanted
    }

    fn add(&mut self, name: &[u8], tag: T) {
        let Some(&first) = name.first() else { return };
        let group = match self.line_kinds[first as usize] {
            LineKind::Group(group) => group,
            _ => {
                let group =
                    u8::try_from(self.groups.len()).expect("names begin with fewer than 256 bytes");
                self.groups.push(NameGroup {
                    common: name.to_vec(),
                    next: [false; 256],
                    names: Vec::new(),
                });
                self.line_kinds[first as usize] = LineKind::Group(group);
                group
            }
        };
        self.groups[group as usize].names.push((name.to_vec(), tag));
    }
}

fn line_kind(byte: u8) -> LineKind {
    match byte {
        b' ' | b'\t' | b'\r' | b'\n' => LineKind::Blank,
        // A brace begins a line whose name is quoted among the labels; no engine writes its own names so.
        b'a'..=b'z' | b'A'..=b'Z' | b'_' | b':' | b'#' | b'{' => LineKind::Skipped,
        _ => LineKind::Garbage,
    }
}

impl<T: Copy> NameGroup<T> {
    fn compute_common_prefix(&mut self) {
        for (name, _) in &self.names {
            let same = self
                .common
                .iter()
                .zip(name)
                .take_while(|(a, b)| a == b)
                .count();
            self.common.truncate(same);
        }
        for (name, _) in &self.names {
            match name.get(self.common.len()) {
                Some(&byte) => self.next[byte as usize] = true,
                None => ENDS_NAME
                    .iter()
                    .for_each(|&byte| self.next[byte as usize] = true),
            }
        }
    }

    /// The wanted name that `text` begins with: its length, and its tag.
    fn find(&self, text: &[u8]) -> Option<(usize, T)> {
        let next = *text.strip_prefix(&self.common[..])?.first()?;
        if !self.next[next as usize] {
            return None;
        }
        let ends = |name: &[u8]| {
            text.get(name.len())
                .is_some_and(|byte| ENDS_NAME.contains(byte))
        };
        let (name, is) = self
            .names
            .iter()
            .find(|(name, _)| text.starts_with(name) && ends(name))?;
        Some((name.len(), *is))
    }
}

/// Characters that may follow a metric's name.
const ENDS_NAME: [u8; 3] = [b'{', b' ', b'\t'];

/// The lines of wanted metrics on a page, in its order.
#[derive(Debug)]
pub struct Scan<'p, 'w, T> {
    remaining: &'p [u8],
    wanted: &'w WantedMetrics<T>,
    malformed_lines: usize,
}

impl<'p, 'w, T: Copy> Scan<'p, 'w, T> {
    pub fn new(metrics_page: &'p [u8], wanted: &'w WantedMetrics<T>) -> Self {
        Self {
            remaining: metrics_page,
            wanted,
            malformed_lines: 0,
        }
    }

    /// Lines so far that are not of this format. Lines of other metrics are not parsed.
    pub fn malformed_lines(&self) -> usize {
        self.malformed_lines
    }

    /// The rest of this line, without its end.
    fn take_line(&mut self) -> &'p [u8] {
        let (line, rest) = match memchr(b'\n', self.remaining) {
            Some(end) => (&self.remaining[..end], &self.remaining[end + 1..]),
            None => (self.remaining, &[][..]),
        };
        self.remaining = rest;
        line
    }
}

impl<'p, T: Copy> Iterator for Scan<'p, '_, T> {
    type Item = MetricLine<'p, T>;

    fn next(&mut self) -> Option<MetricLine<'p, T>> {
        loop {
            let first = *self.remaining.first()?;
            match self.wanted.line_kinds[first as usize] {
                LineKind::Blank => self.remaining = &self.remaining[1..],
                LineKind::Skipped => drop(self.take_line()),
                LineKind::Garbage => {
                    self.malformed_lines += 1;
                    self.take_line();
                }
                LineKind::Group(group) => {
                    let found = self.wanted.groups[group as usize].find(self.remaining);
                    let line = self.take_line();
                    let Some((name, is)) = found else { continue };
                    let Some((labels, value)) = parse_after_name(&line[name..]) else {
                        self.malformed_lines += 1;
                        return Some(MetricLine::Garbled(is));
                    };
                    return Some(MetricLine::Sample(Sample {
                        tag: is,
                        labels,
                        value,
                    }));
                }
            }
        }
    }
}

/// `{labels} value [timestamp] [# exemplar]`.
fn parse_after_name(text: &[u8]) -> Option<(SampleLabels<'_>, f64)> {
    let text = trim(text);
    let (labels, text) = match text.strip_prefix(b"{") {
        Some(inside) => SampleLabels::checked(inside)?,
        None => (SampleLabels::default(), text),
    };
    let (value, text) = word(trim(text));
    let value = number(value)?;
    let (timestamp, after) = word(trim(text));
    let ends = |text: &[u8]| text.is_empty() || text.starts_with(b"#");
    let is_whole = ends(trim(text)) || (number(timestamp).is_some() && ends(trim(after)));
    is_whole.then_some((labels, value))
}

fn trim(text: &[u8]) -> &[u8] {
    let blanks = text.iter().take_while(|byte| is_blank(byte)).count();
    &text[blanks..]
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r')
}

/// Up to the next blank.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    text.split_at(text.iter().position(is_blank).unwrap_or(text.len()))
}

fn number(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// A sample's labels, in their order. They are decoded only when asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampleLabels<'p> {
    /// Known to be well formed, from the opening brace to the closing one at least.
    rest: &'p [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label<'p> {
    pub name: &'p [u8],
    /// The value as it is written, with escapes.
    pub raw: &'p [u8],
}

enum LabelStep<'p> {
    Label(Label<'p>, &'p [u8]),
    End(&'p [u8]),
}

impl<'p> SampleLabels<'p> {
    /// The labels, and what follows the closing brace.
    fn checked(inside: &'p [u8]) -> Option<(Self, &'p [u8])> {
        let mut rest = inside;
        loop {
            match step(rest)? {
                LabelStep::Label(_, after) => rest = after,
                LabelStep::End(after) => return Some((Self { rest: inside }, after)),
            }
        }
    }

    /// The label of this name.
    pub fn get(mut self, name: &str) -> Option<Label<'p>> {
        self.find(|label| label.name == name.as_bytes())
    }
}

impl<'p> Iterator for SampleLabels<'p> {
    type Item = Label<'p>;

    fn next(&mut self) -> Option<Label<'p>> {
        let LabelStep::Label(label, after) = step(self.rest)? else {
            return None;
        };
        self.rest = after;
        Some(label)
    }
}

impl<'p> Label<'p> {
    pub fn value(&self) -> Cow<'p, str> {
        match memchr(b'\\', self.raw) {
            None => String::from_utf8_lossy(self.raw),
            Some(_) => String::from_utf8_lossy(&unescape(self.raw))
                .into_owned()
                .into(),
        }
    }
}

/// `name="value"` with the comma behind it, or the closing brace.
fn step(text: &[u8]) -> Option<LabelStep<'_>> {
    let text = trim(text);
    if let Some(after) = text.strip_prefix(b"}") {
        return Some(LabelStep::End(after));
    }
    let (name, text) = label_name(text)?;
    let text = trim(trim(text).strip_prefix(b"=")?);
    let (raw, text) = quoted(text)?;
    let text = trim(text);
    let after = match text.strip_prefix(b",") {
        Some(after) => after,
        None if text.starts_with(b"}") => text,
        None => return None,
    };
    Some(LabelStep::Label(Label { name, raw }, after))
}

fn label_name(text: &[u8]) -> Option<(&[u8], &[u8])> {
    if text.starts_with(b"\"") {
        return quoted(text);
    }
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':' | b'.');
    let end = text.iter().position(|byte| !is_part(byte))?;
    (end > 0).then(|| text.split_at(end))
}

/// The text between the quotes, as written, and the text that follows them.
fn quoted(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.strip_prefix(b"\"")?;
    let mut at = 0;
    loop {
        at += memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[at] == b'"' {
            return Some((&text[..at], &text[at + 1..]));
        }
        at += 2;
    }
}

/// A backslash before anything but the three escapable characters is kept.
fn unescape(raw: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(raw.len());
    let mut bytes = raw.iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let escaped = match (byte, bytes.peek()) {
            (b'\\', Some(b'n')) => Some(b'\n'),
            (b'\\', Some(&escaped @ (b'\\' | b'"'))) => Some(escaped),
            _ => None,
        };
        if escaped.is_some() {
            bytes.next();
        }
        text.push(escaped.unwrap_or(byte));
    }
    text
}

/// A page up to its last line end: the certainly complete part of a page that may have been cut.
pub fn whole_lines(metrics_page: &[u8]) -> &[u8] {
    &metrics_page[..memchr::memrchr(b'\n', metrics_page).map_or(0, |end| end + 1)]
}
