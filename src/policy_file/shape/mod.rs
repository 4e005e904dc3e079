//! The shape of a policy file, from the JSON Schema of the [file types](super::file): the types are the single source, and an
//! editor accepts what `policy check` accepts.
//!
//! JSON Schema has much that these types never need. Only what schemars generates for them is supported here; a test reads
//! every schema.

mod check;
mod schema;

pub use check::check;
pub use schema::{policy_schema, test_schema};

use super::diagnostic::{Diagnostic, quoted};
use super::format::TextFormat;
use super::nearest::nearest;
use super::tree::YamlNode;
use serde_json::Value as Json;
use std::sync::LazyLock;

/// The values that the schema allows at one path of a document.
#[derive(Debug, Clone)]
pub enum SchemaShape {
    Fields(Vec<Field>),
    /// A map whose keys are names that the user chooses.
    Table {
        keys: Option<TextFormat>,
        values: Box<SchemaShape>,
    },
    List(Box<SchemaShape>),
    /// A text that is one of these words.
    Enum(Vec<String>),
    Text {
        format: Option<TextFormat>,
        max_length: Option<usize>,
    },
    Integer {
        at_least: i128,
        at_most: i128,
    },
    Boolean,
}

#[derive(Debug, Clone)]
pub struct Field {
    pub name: String,
    pub shape: SchemaShape,
    pub requirement: Requirement,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    Always,
    Optional,
}

/// The possible shapes of a document, by its `kind`.
pub struct Shapes {
    pub policy: SchemaShape,
    pub test: SchemaShape,
}

pub static SHAPES: LazyLock<Shapes> = LazyLock::new(|| {
    let read = |schema: Json| SchemaShape::read(&schema, &schema);
    let invariant = "schemas of our own types have only what is read here: a test reads them";
    Shapes {
        policy: read(policy_schema()).expect(invariant),
        test: read(test_schema()).expect(invariant),
    }
});

/// The names that `kind` can have.
pub const KINDS: [&str; 2] = ["SchedulingPolicy", "PolicyTest"];

impl SchemaShape {
    /// `None` if the schema has something unsupported.
    fn read(schema: &Json, root: &Json) -> Option<Self> {
        if let Some(reference) = schema.get("$ref") {
            return Self::read(root.pointer(reference.as_str()?.strip_prefix('#')?)?, root);
        }
        if let Some(words) = enum_values(schema) {
            return Some(Self::Enum(words));
        }
        let format = schema.get("format").and_then(Json::as_str);
        match schema.get("type")?.as_str().unwrap_or("string") {
            "object" => Self::object(schema, root),
            "array" => Some(Self::List(Box::new(Self::read(
                schema.get("items")?,
                root,
            )?))),
            "string" => {
                let longest = schema
                    .get("maxLength")
                    .and_then(Json::as_u64)
                    .map(|n| n as usize);
                let format = match format {
                    Some(name) => Some(text_format(name, schema)?),
                    None => None,
                };
                Some(Self::Text {
                    format,
                    max_length: longest,
                })
            }
            "integer" => integer(schema, format?),
            "boolean" => Some(Self::Boolean),
            _ => None,
        }
    }

    fn object(schema: &Json, root: &Json) -> Option<Self> {
        let Some(properties) = schema.get("properties") else {
            let keys = schema
                .pointer("/propertyNames/format")
                .and_then(Json::as_str);
            let keys = keys
                .map(|name| TextFormat::from_keyword(name).ok_or(()))
                .transpose()
                .ok()?;
            let values = Box::new(Self::read(schema.get("additionalProperties")?, root)?);
            return Some(Self::Table { keys, values });
        };
        let required = schema.get("required").and_then(Json::as_array);
        let field = |(name, schema): (&String, &Json)| {
            let always = required.is_some_and(|names| names.iter().any(|one| one == name));
            let needed = if always {
                Requirement::Always
            } else {
                Requirement::Optional
            };
            Some(Field {
                name: name.clone(),
                shape: Self::read(schema, root)?,
                requirement: needed,
            })
        };
        properties
            .as_object()?
            .iter()
            .map(field)
            .collect::<Option<_>>()
            .map(Self::Fields)
    }

    pub fn field(&self, name: &str) -> Option<&Field> {
        match self {
            Self::Fields(fields) => fields.iter().find(|field| field.name == name),
            _ => None,
        }
    }
}

/// The words of an enumeration, with or without a comment on each.
fn enum_values(schema: &Json) -> Option<Vec<String>> {
    let text = |word: &Json| word.as_str().map(str::to_owned);
    if let Some(words) = schema.get("enum") {
        return words.as_array()?.iter().map(text).collect();
    }
    if let Some(word) = schema.get("const") {
        return Some(vec![text(word)?]);
    }
    let parts: Option<Vec<Vec<String>>> = schema
        .get("oneOf")?
        .as_array()?
        .iter()
        .map(enum_values)
        .collect();
    Some(parts?.concat())
}

fn text_format(name: &str, schema: &Json) -> Option<TextFormat> {
    let format = TextFormat::from_keyword(name)?;
    let most = schema
        .get("formatMaximum")
        .and_then(Json::as_str)
        .and_then(|most| most.strip_suffix('%'));
    Some(match (format, most) {
        (TextFormat::Percent { .. }, Some(most)) => TextFormat::Percent {
            at_most: most.parse().ok()?,
        },
        _ => format,
    })
}

fn integer(schema: &Json, format: &str) -> Option<SchemaShape> {
    let (least, most): (i128, i128) = match format {
        "int32" => (i32::MIN.into(), i32::MAX.into()),
        "uint16" => (0, u16::MAX.into()),
        "uint32" => (0, u32::MAX.into()),
        _ => return None,
    };
    let bound = |keyword: &str| schema.get(keyword).and_then(Json::as_i64).map(i128::from);
    Some(SchemaShape::Integer {
        at_least: bound("minimum").unwrap_or(least),
        at_most: bound("maximum").unwrap_or(most),
    })
}

/// Whether a document has test cases. One without a kind is taken for what it looks like.
pub fn is_test(document: &YamlNode) -> bool {
    match document.get("kind") {
        Some(kind) => kind.text() == Some(KINDS[1]),
        None => document.get("cases").is_some(),
    }
}

/// The diagnostic for a document whose `kind` is neither a policy's nor a test's; `None` for one without a kind or with a known one.
pub fn foreign_document(document: &YamlNode) -> Option<Diagnostic> {
    let kind = document.get("kind")?;
    let text = kind.text().filter(|text| !KINDS.contains(text))?;
    let help = match (nearest(text, &KINDS), text) {
        (Some(near), _) => format!("did you mean `{near}`?"),
        (None, "ConfigMap") => {
            "a file in a ConfigMap is a policy or its cases, not another ConfigMap".into()
        }
        _ => "policies are `kind: SchedulingPolicy`, their cases `kind: PolicyTest`".into(),
    };
    let message = format!("a document of kind {} is no policy", quoted(text));
    Some(Diagnostic::error("not-a-policy", kind.span, message).help(help))
}

#[cfg(test)]
mod tests;
