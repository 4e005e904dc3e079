//! Renders a policy in full, each value with its place: YAML that can be parsed again.

use super::parse::render;
use super::source::PolicySources;
use super::tree::{Atom, MAX_NODES, Scalar, Style, Value, YamlNode, read};
use crate::source::FileId;
use stowage_scheduling::policy::Policy;

/// Column of the comments, if the value is short enough.
const COLUMN: usize = 44;

/// Renders the whole policy as YAML. `merged` is the policy as it was written, for the place of each value.
pub fn show(policy: &Policy, merged: &YamlNode, sources: &PolicySources<'_>) -> String {
    let json =
        serde_json::to_string(&render(policy)).expect("a raw policy has text keys and no floats");
    // JSON is YAML, and its text keeps the order of the fields.
    let (documents, _) = read(json.as_bytes(), FileId::at(0), &mut MAX_NODES.clone());
    let mut listing = PolicyListing {
        sources,
        gate: gate(merged),
        lines: Vec::new(),
    };
    if let Some(root) = documents.first() {
        listing.map(root, Some(merged), 0);
    }
    listing.lines.join("\n") + "\n"
}

/// `startGate.max` of the whole policy, which every class inherits.
fn gate(merged: &YamlNode) -> Option<&YamlNode> {
    merged.get("startGate")?.get("max")
}

struct PolicyListing<'a> {
    sources: &'a PolicySources<'a>,
    gate: Option<&'a YamlNode>,
    lines: Vec<String>,
}

impl PolicyListing<'_> {
    fn map(&mut self, node: &YamlNode, written: Option<&YamlNode>, indent: usize) {
        for (key, value) in node.entries() {
            if is_unset(value) {
                continue;
            }
            let written = written.and_then(|written| written.get(&key.text));
            self.entry(&scalar_text(&key.text), &key.text, value, written, indent);
        }
    }

    fn entry(
        &mut self,
        shown: &str,
        key: &str,
        value: &YamlNode,
        written: Option<&YamlNode>,
        indent: usize,
    ) {
        let pad = " ".repeat(indent);
        match &value.value {
            Value::Map(_) => {
                self.lines.push(format!("{pad}{shown}:"));
                self.map(value, written, indent + 2);
                if key == "startGate" {
                    self.mark_inherited_start_gate(written);
                }
            }
            Value::List(items) if items.iter().any(|item| matches!(item.value, Value::Map(_))) => {
                self.lines.push(format!("{pad}{shown}:"));
                items
                    .iter()
                    .enumerate()
                    .for_each(|(index, item)| self.item(index, item, written, indent));
            }
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(inline).collect();
                self.line(format!("{pad}{shown}: [{}]", items.join(", ")), written);
            }
            _ => self.line(format!("{pad}{shown}: {}", inline(value)), written),
        }
    }

    /// A class, a tenant or a pool, whose place is that of its name; what has no name stands in the order of the file.
    fn item(&mut self, index: usize, item: &YamlNode, written: Option<&YamlNode>, indent: usize) {
        let name = item.get("name").and_then(YamlNode::text);
        let entries = written.map(YamlNode::items).unwrap_or_default();
        let written = match name {
            Some(_) => entries
                .iter()
                .find(|entry| entry.get("name").and_then(YamlNode::text) == name),
            None => entries.get(index),
        };
        let first = self.lines.len();
        self.map(item, written, indent + 2);
        if let Some(line) = self.lines.get_mut(first) {
            line.replace_range(indent..indent + 2, "- ");
        }
    }

    fn line(&mut self, text: String, written: Option<&YamlNode>) {
        let location = written.map_or("default".into(), |node| self.sources.line_of(node.span));
        self.lines.push(format!("{text:<COLUMN$}  # {location}"));
    }

    /// The last line is a class' `max`: if the class has none, it is the policy's.
    fn mark_inherited_start_gate(&mut self, written: Option<&YamlNode>) {
        let own = written.and_then(|written| written.get("max"));
        let (Some(gate), None, Some(line)) = (self.gate, own, self.lines.pop()) else {
            return;
        };
        let text = line
            .split("  #")
            .next()
            .unwrap_or_default()
            .trim_end()
            .to_owned();
        self.line(text, Some(gate));
    }
}

/// Null, or a section in which nothing is set.
fn is_unset(node: &YamlNode) -> bool {
    match &node.value {
        Value::Scalar(scalar) => scalar.atom() == Atom::Null,
        Value::Map(entries) => entries.iter().all(|(_, value)| is_unset(value)),
        _ => false,
    }
}

fn inline(node: &YamlNode) -> String {
    match &node.value {
        Value::Scalar(Scalar {
            text,
            style: Style::Text,
        }) => scalar_text(text),
        Value::Scalar(Scalar {
            text,
            style: Style::Plain,
        }) => text.clone(),
        _ => String::new(),
    }
}

/// Quoted unless it is clearly a text without quotes.
fn scalar_text(text: &str) -> String {
    let plain = Scalar {
        text: text.into(),
        style: Style::Plain,
    };
    let simple = |c: char| c.is_ascii_alphanumeric() || "._/%-".contains(c);
    let begins = text.starts_with(|c: char| c.is_ascii_alphanumeric());
    let is_plain = begins && text.chars().all(simple) && matches!(plain.atom(), Atom::Text(_));
    if is_plain {
        text.to_owned()
    } else {
        serde_json::Value::from(text).to_string()
    }
}
