//! YAML as a tree in which each value has its place. All later steps use the tree, so that any problem, however late it is
//! found, can be shown where it was written.
//!
//! The parser is the one that serde-saphyr has. Its deserializer would end at the first problem, and `policy check` shows all.
//!
//! Nothing here knows what a policy is. [`mod@read`] builds the tree, within limits that no input can exceed.

mod build;
mod read;
mod source_spans;
mod syntax;
mod within;

pub(crate) use read::MAX_NODES;
pub use read::read;
pub use source_spans::source_range;
pub(crate) use within::read_within;

use super::source::Span;
use serde_json::Value as Json;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct YamlNode {
    pub value: Value,
    pub span: Span,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    Scalar(Scalar),
    List(Vec<YamlNode>),
    Map(Vec<(YamlKey, YamlNode)>),
    /// A placeholder for something that has been reported already.
    Broken,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct YamlKey {
    pub text: String,
    pub span: Span,
}

/// A value without parts. `text` is its content without quotes and escapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scalar {
    pub text: String,
    pub style: Style,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// Without quotes: it may be a number, a boolean or null.
    Plain,
    /// In quotes or a block: a text, whatever it looks like.
    Text,
}

/// The type of a scalar, by the core schema of YAML 1.2. Octal and hexadecimal numbers are texts here: they are never intended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Atom<'a> {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(&'a str),
}

impl Scalar {
    pub(crate) fn atom(&self) -> Atom<'_> {
        let text = self.text.as_str();
        match (self.style, text) {
            (Style::Text, _) => Atom::Text(text),
            (_, "" | "~" | "null" | "Null" | "NULL") => Atom::Null,
            (_, "true" | "True" | "TRUE") => Atom::Bool(true),
            (_, "false" | "False" | "FALSE") => Atom::Bool(false),
            _ => number(text).unwrap_or(Atom::Text(text)),
        }
    }
}

fn number(text: &str) -> Option<Atom<'_>> {
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let whole = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    match whole {
        // A number of forty digits is out of every range, and so is the largest that fits.
        true if digits == "0" || !digits.starts_with('0') => Some(Atom::Int(
            text.parse().unwrap_or(if text.starts_with('-') {
                i128::MIN
            } else {
                i128::MAX
            }),
        )),
        true => None,
        false => float(text, digits),
    }
}

/// `inf` and `nan`, which Rust would parse as numbers too, are words.
fn float<'a>(text: &'a str, digits: &str) -> Option<Atom<'a>> {
    let begins = digits
        .strip_prefix('.')
        .unwrap_or(digits)
        .starts_with(|c: char| c.is_ascii_digit());
    begins.then(|| text.parse().ok())?.map(Atom::Float)
}

impl YamlNode {
    pub fn entries(&self) -> &[(YamlKey, YamlNode)] {
        match &self.value {
            Value::Map(entries) => entries,
            _ => &[],
        }
    }

    pub fn items(&self) -> &[YamlNode] {
        match &self.value {
            Value::List(items) => items,
            _ => &[],
        }
    }

    pub fn entry(&self, key: &str) -> Option<&(YamlKey, YamlNode)> {
        self.entries().iter().find(|(one, _)| one.text == key)
    }

    pub fn get(&self, key: &str) -> Option<&YamlNode> {
        self.entry(key).map(|(_, node)| node)
    }

    /// The text of a scalar, whatever type it has.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(scalar) => Some(&scalar.text),
            _ => None,
        }
    }

    /// For serde. Broken values are left out; numbers too large for JSON are texts.
    pub fn to_json(&self) -> Json {
        match &self.value {
            Value::Scalar(scalar) => scalar.to_json(),
            Value::List(items) => items.iter().map(Self::to_json).collect(),
            Value::Map(entries) => entries
                .iter()
                .map(|(key, node)| (key.text.clone(), node.to_json()))
                .collect(),
            Value::Broken => Json::Null,
        }
    }
}

impl Scalar {
    fn to_json(&self) -> Json {
        match self.atom() {
            Atom::Null => Json::Null,
            Atom::Bool(truth) => truth.into(),
            Atom::Int(n) => i64::try_from(n).map_or_else(|_| self.text.as_str().into(), Json::from),
            Atom::Float(n) => n.into(),
            Atom::Text(text) => text.into(),
        }
    }
}

#[cfg(test)]
mod tests;
