//! Text values with a grammar. Each is parsed by its function in [`format`](crate::policy_file::format), which the check of a
//! file uses too.

use crate::policy_file::format::{self, Malformed, TextFormat};
use crate::units::{Bytes, Millis, Percent};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;

/// Whole per cent, at most `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Percentage<const MAX: u8>(pub Percent);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duration(pub Millis);

/// Memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryQuantity(pub Bytes);

/// Bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Speed(pub Bytes);

/// Implements serde and the schema for a type that is parsed from a text and rendered as one.
macro_rules! in_files {
    ([$($generics:tt)*] $type:ty, $name:literal, $read:expr, $write:expr, $schema:tt) => {
        impl<'de, $($generics)*> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(Text).and_then(|text| ($read)(&*text).map_err(refused))
            }
        }

        impl<$($generics)*> Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(&($write)(self))
            }
        }

        impl<$($generics)*> JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    };
}

in_files!(
    [const MAX: u8] Percentage<MAX>, "Percentage",
    |text: &str| format::percent(text, MAX).map(Self),
    |percent: &Self| format!("{}%", percent.0.get()),
    {"type": "string", "format": "percent", "formatMaximum": format!("{MAX}%"), "pattern": "^[0-9]{1,3} ?%$"}
);
in_files!(
    [] Duration, "Duration",
    |text: &str| format::duration(text).map(Self),
    |duration: &Self| format::duration_text(duration.0),
    {"type": "string", "format": "duration", "pattern": "^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$|^0$"}
);
in_files!(
    [] MemoryQuantity, "Quantity",
    |text: &str| format::quantity(text).map(Self),
    |quantity: &Self| format::quantity_text(quantity.0),
    {"type": ["string", "integer"], "format": "quantity"}
);
in_files!(
    [] Speed, "Speed",
    |text: &str| format::speed(text).map(Self),
    |speed: &Self| format::speed_text(speed.0),
    {"type": "string", "format": "speed", "pattern": "^[0-9.]+([kMGT]i?)?B/s$"}
);

/// A text that is not parsed further; only its allowed characters are known.
macro_rules! words {
    ($($(#[$doc:meta])* $type:ident: $format:expr, $name:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
            pub struct $type(pub String);

            in_files!(
                [] $type, $name,
                |text: &str| $format.check(text).map(|()| Self(text.to_owned())),
                |word: &Self| word.0.clone(),
                {"type": "string", "format": $name}
            );
        )*
    };
}

words! {
    /// A DNS label: the name of a class, a tenant or a namespace.
    Name: TextFormat::Name, "name";
    /// A DNS subdomain: the name of a PriorityClass or a node.
    Subdomain: TextFormat::Subdomain, "subdomain";
    /// A label's key, or a resource.
    QualifiedName: TextFormat::QualifiedName, "qualified-name";
    LabelValue: TextFormat::LabelValue, "label-value";
    MigProfile: TextFormat::MigProfile, "mig-profile";
    /// A condition on a pod.
    Cel: TextFormat::Cel, "cel";
}

fn refused<E: de::Error>(malformed: Malformed) -> E {
    E::custom(format_args!("{}: {}", malformed.is, malformed.help))
}

/// A text, or a whole number as one.
struct Text;

impl<'de> de::Visitor<'de> for Text {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.to_owned()))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Cow::Owned(number.to_string()))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Cow::Owned(number.to_string()))
    }
}
