//! Checks a tree against its [`SchemaShape`]: every field known, every value of its kind, all problems at once.

use super::{Field, Requirement, SchemaShape};
use crate::diagnostic::{Diagnostic, quoted, quoted_list};
use crate::format::{Malformed, TextFormat};
use crate::nearest::nearest;
use crate::source::{PolicySources, Span};
use crate::tree::{Atom, Scalar, Style, Value, YamlKey, YamlNode, source_range};
use std::ops::Range;

/// Maximum problems of one document: a document with more is something else than a policy.
const MAX_PROBLEMS: usize = 200;

/// Everything in `document`, named `name`, that violates the shape.
pub fn check(
    document: &YamlNode,
    shape: &SchemaShape,
    name: &str,
    sources: &PolicySources<'_>,
) -> Vec<Diagnostic> {
    let mut check = ShapeCheck {
        root: shape,
        sources,
        found: Vec::new(),
    };
    check.node(document, shape, name);
    check.found
}

struct ShapeCheck<'a> {
    /// To report where a misplaced field belongs.
    root: &'a SchemaShape,
    sources: &'a PolicySources<'a>,
    found: Vec<Diagnostic>,
}

impl ShapeCheck<'_> {
    fn node(&mut self, node: &YamlNode, shape: &SchemaShape, name: &str) {
        match (&node.value, shape) {
            _ if self.found.len() >= MAX_PROBLEMS => {}
            (Value::Broken, _) => {}
            (Value::Scalar(scalar), _) if scalar.atom() == Atom::Null => {
                self.missing_value(node, shape, name)
            }
            (Value::Map(entries), SchemaShape::Fields(fields)) => {
                self.fields(node, entries, fields, name)
            }
            (Value::Map(entries), SchemaShape::Table { keys, values }) => {
                self.table(entries, *keys, values)
            }
            (Value::List(items), SchemaShape::List(shape)) => {
                let each = if matches!(**shape, SchemaShape::Fields(_)) {
                    "an entry of"
                } else {
                    "each of"
                };
                items
                    .iter()
                    .for_each(|item| self.node(item, shape, &format!("{each} {name}")))
            }
            (Value::Scalar(scalar), SchemaShape::Enum(words)) => {
                self.enumeration(node.span, scalar, words, name)
            }
            (
                Value::Scalar(scalar),
                SchemaShape::Text {
                    format,
                    max_length: longest,
                },
            ) => self.text(node.span, scalar, *format, *longest, name),
            (Value::Scalar(scalar), SchemaShape::Integer { at_least, at_most }) => {
                self.integer(node.span, scalar, *at_least, *at_most, name)
            }
            (Value::Scalar(scalar), SchemaShape::Boolean) => self.boolean(node.span, scalar, name),
            _ => self.wrong_kind(node, shape, name),
        }
    }

    fn missing_value(&mut self, node: &YamlNode, shape: &SchemaShape, name: &str) {
        let help = match shape {
            SchemaShape::List(_) => {
                "take the line away for the default, or write `[]` for an empty list"
            }
            SchemaShape::Fields(_) | SchemaShape::Table { .. } => {
                "take the line away for the defaults; what belongs to it is indented more than it"
            }
            _ => "take the line away for the default, or write a value",
        };
        self.found.push(
            Diagnostic::error("no-value", node.span, format!("{} has no value", name)).help(help),
        );
    }

    fn fields(
        &mut self,
        node: &YamlNode,
        entries: &[(YamlKey, YamlNode)],
        fields: &[Field],
        name: &str,
    ) {
        for (key, value) in entries {
            match fields.iter().find(|field| field.name == key.text) {
                Some(field) => self.node(value, &field.shape, &quoted(&key.text)),
                // Reported when the tree was parsed.
                None if key.text == "<<" || key.text.is_empty() => {}
                None => self.unknown(key, fields, name),
            }
        }
        let missing = |field: &&Field| {
            field.requirement == Requirement::Always && node.entry(&field.name).is_none()
        };
        for field in fields.iter().filter(missing) {
            let message = format!("{} is missing", quoted(&field.name));
            let value = match &field.shape {
                SchemaShape::Enum(words) if words.len() == 1 => &words[0],
                _ => "…",
            };
            let help = format!("add `{}: {value}`", field.name);
            self.found.push(
                Diagnostic::error("missing-field", node.span, message)
                    .label("here")
                    .help(help),
            );
        }
    }

    fn unknown(&mut self, key: &YamlKey, fields: &[Field], parent: &str) {
        if self.found.len() >= MAX_PROBLEMS {
            return;
        }
        let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
        let help = match nearest(&key.text, &names) {
            Some(near) => format!("did you mean `{near}`?"),
            None => match self.location_of_field(&key.text) {
                Some(home) => format!("it belongs {home}; check the indentation"),
                None => format!("its fields are {}", quoted_list(&names, "and")),
            },
        };
        let message = format!("{parent} has no field {}", quoted(&key.text));
        self.found.push(
            Diagnostic::error("unknown-field", key.span, message)
                .label("unknown")
                .help(help),
        );
    }

    /// Where a field of that name is allowed, as text.
    fn location_of_field(&self, name: &str) -> Option<String> {
        let mut homes = Vec::new();
        collect_locations(name, self.root, &mut Vec::new(), &mut homes);
        homes.dedup();
        match homes.as_slice() {
            [] => None,
            [home] => Some(home.clone()),
            [first, .., last] if homes.len() == 2 => Some(format!("{first} or {last}")),
            _ => None,
        }
    }

    fn table(
        &mut self,
        entries: &[(YamlKey, YamlNode)],
        keys: Option<TextFormat>,
        values: &SchemaShape,
    ) {
        for (key, value) in entries {
            if let Some(Err(malformed)) = keys.map(|format| format.check(&key.text)) {
                let message = format!("{} is {}", quoted(&key.text), malformed.is);
                self.found
                    .push(Diagnostic::error("malformed", key.span, message).help(malformed.help));
            }
            self.node(value, values, &quoted(&key.text));
        }
    }

    fn enumeration(&mut self, span: Span, scalar: &Scalar, words: &[String], name: &str) {
        if words.contains(&scalar.text) {
            return;
        }
        let all = format!("it can be {}", quoted_list(words, "or"));
        let help = match nearest(&scalar.text, words) {
            Some(near) if words.len() > 1 => format!("did you mean `{near}`? {all}"),
            Some(near) => format!("did you mean `{near}`?"),
            None => all,
        };
        let message = format!("{} cannot be {}", name, quoted(&scalar.text));
        self.found
            .push(Diagnostic::error("unknown-word", span, message).help(help));
    }

    fn text(
        &mut self,
        span: Span,
        scalar: &Scalar,
        format: Option<TextFormat>,
        max_length: Option<usize>,
        name: &str,
    ) {
        let number = matches!(scalar.atom(), Atom::Int(_));
        let takes = format.is_some_and(TextFormat::accepts_numbers);
        match (scalar.atom(), format) {
            (Atom::Text(_), _) => {}
            (Atom::Int(_), Some(_)) if takes => {}
            // A number without its unit: the format knows which one is missing.
            (
                Atom::Int(_) | Atom::Float(_),
                Some(
                    TextFormat::Percent { .. }
                    | TextFormat::Duration
                    | TextFormat::Speed
                    | TextFormat::Quantity,
                ),
            ) => {}
            _ => return self.needs_quotes(span, scalar, format, number, name),
        }
        if max_length.is_some_and(|longest| scalar.text.len() > longest) {
            let longest = max_length.unwrap_or_default();
            let message = format!("{} is longer than {longest} bytes", name);
            let help = "say the simple conditions by `namespaces`, `labels` and the like, or make two classes of it";
            self.found
                .push(Diagnostic::error("too-long", span, message).help(help));
            return;
        }
        if let Some((format, Err(malformed))) =
            format.map(|format| (format, format.check(&scalar.text)))
        {
            self.found
                .push(self.malformed(span, scalar, format, malformed, name));
        }
    }

    fn malformed(
        &self,
        span: Span,
        scalar: &Scalar,
        format: TextFormat,
        malformed_value: Malformed,
        name: &str,
    ) -> Diagnostic {
        if format == TextFormat::Cel {
            let at = malformed_value
                .span
                .map(|at| include_field_name(&scalar.text, at));
            let part = at.and_then(|at| source_range(self.sources.slice(span), &scalar.text, at));
            let span = part.map_or(span, |part| span.part(part));
            return Diagnostic::error("expression", span, malformed_value.is)
                .help(malformed_value.help);
        }
        Diagnostic::error(
            "malformed",
            span,
            format!("{} is {}", quoted(&scalar.text), malformed_value.is),
        )
        .label(format!("{name} is {}", format.description()))
        .help(malformed_value.help)
    }

    fn needs_quotes(
        &mut self,
        span: Span,
        scalar: &Scalar,
        format: Option<TextFormat>,
        number: bool,
        name: &str,
    ) {
        let what = if number || matches!(scalar.atom(), Atom::Float(_)) {
            "a number"
        } else {
            "a truth value"
        };
        let message = format!(
            "{} is {}, and {} is {what}",
            name,
            format.map_or("a text", TextFormat::description),
            quoted(&scalar.text)
        );
        let help = format!("put it in quotes: `\"{}\"`", scalar.text);
        self.found
            .push(Diagnostic::error("wrong-type", span, message).help(help));
    }

    fn integer(&mut self, span: Span, scalar: &Scalar, at_least: i128, at_most: i128, name: &str) {
        let Atom::Int(number) = scalar.atom() else {
            let quoted_number = Scalar {
                text: scalar.text.clone(),
                style: Style::Plain,
            };
            let help = match (scalar.style, quoted_number.atom()) {
                (Style::Text, Atom::Int(_)) => format!("take the quotes away: `{}`", scalar.text),
                _ => format!("write a number from {at_least} to {at_most}, without a unit"),
            };
            let message = format!(
                "{} is a whole number, and {} is not",
                name,
                quoted(&scalar.text)
            );
            self.found
                .push(Diagnostic::error("wrong-type", span, message).help(help));
            return;
        };
        if !(at_least..=at_most).contains(&number) {
            let message = format!("{} cannot be {}", name, scalar.text);
            let help = format!("write a number from {at_least} to {at_most}");
            self.found
                .push(Diagnostic::error("out-of-range", span, message).help(help));
        }
    }

    fn boolean(&mut self, span: Span, scalar: &Scalar, name: &str) {
        if matches!(scalar.atom(), Atom::Bool(_)) {
            return;
        }
        let help = match scalar.text.to_ascii_lowercase().as_str() {
            "yes" | "on" | "y" | "1" | "true" | "allowed" => "write `true`",
            "no" | "off" | "n" | "0" | "false" | "never" => "write `false`",
            _ => "write `true` or `false`",
        };
        let message = format!(
            "{} is true or false, and {} is neither",
            name,
            quoted(&scalar.text)
        );
        self.found
            .push(Diagnostic::error("wrong-type", span, message).help(help));
    }

    fn wrong_kind(&mut self, node: &YamlNode, shape: &SchemaShape, name: &str) {
        let message = format!(
            "{} is {}, and this is {}",
            name,
            shape_description(shape),
            node_description(node)
        );
        let help = match (shape, node.text()) {
            (SchemaShape::List(_), Some(text)) => {
                format!("write `{}: [{text}]`", name.trim_matches('`'))
            }
            (SchemaShape::List(_), None) => "begin each entry with `- `".into(),
            (SchemaShape::Fields(fields), _) => {
                let names: Vec<&str> = fields.iter().map(|field| field.name.as_str()).collect();
                format!("its fields are {}", quoted_list(&names, "and"))
            }
            (SchemaShape::Table { .. }, _) => "write `name: value`, one in a line".into(),
            _ => format!("write {}", shape_description(shape)),
        };
        self.found
            .push(Diagnostic::error("wrong-type", node.span, message).help(help));
    }
}

/// The compiler marks the dot before an unknown field: the name after it is meant.
fn include_field_name(text: &str, at: Range<usize>) -> Range<usize> {
    match text.get(at.clone()) {
        Some(".") => {
            let name = |c: char| c.is_alphanumeric() || c == '_';
            let behind = &text[at.end..];
            at.end..at.end + behind.find(|c| !name(c)).unwrap_or(behind.len())
        }
        _ => at,
    }
}

fn shape_description(shape: &SchemaShape) -> &'static str {
    match shape {
        SchemaShape::Fields(_) => "a map of fields",
        SchemaShape::Table { .. } => "a map",
        SchemaShape::List(_) => "a list",
        SchemaShape::Enum(_) => "one word",
        SchemaShape::Text { format, .. } => format.map_or("a text", TextFormat::description),
        SchemaShape::Integer { .. } => "a whole number",
        SchemaShape::Boolean => "`true` or `false`",
    }
}

fn node_description(node: &YamlNode) -> &'static str {
    match &node.value {
        Value::Map(_) => "a map",
        Value::List(_) => "a list",
        Value::Scalar(scalar) => match scalar.atom() {
            Atom::Int(_) | Atom::Float(_) => "a number",
            Atom::Bool(_) => "a truth value",
            _ => "a text",
        },
        Value::Broken => "broken",
    }
}

fn collect_locations(
    name: &str,
    shape: &SchemaShape,
    path: &mut Vec<String>,
    homes: &mut Vec<String>,
) {
    match shape {
        SchemaShape::Fields(fields) => {
            for field in fields {
                if field.name == name {
                    homes.push(match path.as_slice() {
                        [] => "at the top, without indentation".into(),
                        path => format!("under `{}`", path.join(".")),
                    });
                }
                path.push(field.name.clone());
                collect_locations(name, &field.shape, path, homes);
                path.pop();
            }
        }
        SchemaShape::List(items) => {
            if let Some(last) = path.last_mut() {
                last.push_str("[]");
            }
            collect_locations(name, items, path, homes);
        }
        _ => {}
    }
}
