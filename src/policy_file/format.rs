//! The grammar of single values: quantities ([`text`](crate::units::text)), names, MIG profiles, CEL. One function parses each,
//! for the check of a file and for the conversion, so a value that passes the check cannot fail afterwards.
//!
//! Nothing here knows where a value is or what it is for.

pub mod mig;
mod names;

pub use crate::units::text::{
    Malformed, duration, duration_text, percent, quantity, quantity_text, speed, speed_text,
};

use crate::scheduling::policy::{Expression, ExpressionError};

/// The kind of a text. The name is the `format` keyword of the JSON Schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextFormat {
    Percent {
        at_most: u8,
    },
    Duration,
    Quantity,
    Speed,
    /// A DNS label: a class, a tenant, a namespace.
    Name,
    /// A namespace, or a pattern of several: `team-*`.
    NamePattern,
    /// A DNS subdomain: a PriorityClass, a node.
    Subdomain,
    /// A label's key, or an extended resource.
    QualifiedName,
    LabelValue,
    MigProfile,
    Cel,
}

impl From<ExpressionError> for Malformed {
    fn from(error: ExpressionError) -> Self {
        // The parser's list of expected tokens is long and not helpful.
        let is = error.message.split(" expecting ").next().unwrap_or_default().to_owned();
        let words = ["'and'", "'or'", "'not'"];
        let help = match words.iter().any(|word| is.contains(word)) {
            true => "CEL writes `&&` for and, `||` for or, `!` for not".into(),
            false => error.help,
        };
        Self { at: Some(error.at), is, help }
    }
}

impl TextFormat {
    /// By the `format` keyword; `percent` to 100.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "percent" => Self::Percent { at_most: 100 },
            "duration" => Self::Duration,
            "quantity" => Self::Quantity,
            "speed" => Self::Speed,
            "name" => Self::Name,
            "name-pattern" => Self::NamePattern,
            "subdomain" => Self::Subdomain,
            "qualified-name" => Self::QualifiedName,
            "label-value" => Self::LabelValue,
            "mig-profile" => Self::MigProfile,
            "cel" => Self::Cel,
            _ => return None,
        })
    }

    /// Its name for people, with an example.
    pub fn called(self) -> &'static str {
        match self {
            Self::Percent { .. } => "a percentage such as `10%`",
            Self::Duration => "a duration such as `30s`",
            Self::Quantity => "an amount of memory such as `40Gi`",
            Self::Speed => "a speed such as `3GB/s`",
            Self::NamePattern => "a name, or a pattern such as `team-*`",
            Self::Name | Self::Subdomain | Self::QualifiedName => "a name",
            Self::LabelValue => "a label's value",
            Self::MigProfile => "a MIG profile such as `3g.40gb`",
            Self::Cel => "a CEL expression",
        }
    }

    /// Kubernetes writes an amount without a unit as a bare number.
    pub fn takes_numbers(self) -> bool {
        self == Self::Quantity
    }

    pub fn check(self, text: &str) -> Result<(), Malformed> {
        match self {
            Self::Percent { at_most } => percent(text, at_most).map(drop),
            Self::Duration => duration(text).map(drop),
            Self::Quantity => quantity(text).map(drop),
            Self::Speed => speed(text).map(drop),
            Self::Name => names::label(text),
            Self::NamePattern => names::pattern(text),
            Self::Subdomain => names::subdomain(text),
            Self::QualifiedName => names::qualified(text),
            Self::LabelValue => names::label_value(text),
            Self::MigProfile => mig::profile(text),
            Self::Cel => Expression::compile(text).map(drop).map_err(Malformed::from),
        }
    }

    /// Whether two texts mean the same: `10m` and `600s` do.
    pub fn same(self, a: &str, b: &str) -> bool {
        match self {
            Self::Percent { at_most } => {
                percent(a, at_most).is_ok() && percent(a, at_most) == percent(b, at_most)
            }
            Self::Duration => duration(a).is_ok() && duration(a) == duration(b),
            Self::Quantity => quantity(a).is_ok() && quantity(a) == quantity(b),
            Self::Speed => speed(a).is_ok() && speed(a) == speed(b),
            _ => a == b,
        }
    }
}
