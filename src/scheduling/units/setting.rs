//! How settings write quantities: `10%`, `1h30m`, `40Gi`, `3GB/s`.
//!
//! A setting's field has the type that the core computes with, and names how it is written:
//!
//! ```ignore
//! #[serde(with = "setting::Duration")]
//! pub drain_time: Millis,
//! ```
//!
//! Parsing, rendering and the JSON Schema follow from that attribute. [`Optional`] does the same for an optional quantity, and
//! [`Switch`] for a section that can be switched off.

use super::text::{self, Malformed};
use super::{Bytes, Millis, Percent};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

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
#[macro_export]
macro_rules! serde_as_text {
    ([$($generics:tt)*] $type:ty, $name:literal, $parse:expr, $render:expr, $schema:tt) => {
        impl<'de, $($generics)*> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::units::setting::parsed(deserializer, $parse)
            }
        }

        impl<$($generics)*> serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(&($render)(self))
            }
        }

        impl<$($generics)*> schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!($schema)
            }
        }
    };
}

pub use serde_as_text;

/// A type of this module, and the quantity that it writes.
pub(crate) trait QuantityText: Copy {
    type Quantity: Copy;
    fn from_quantity(quantity: Self::Quantity) -> Self;
    fn quantity(self) -> Self::Quantity;
}

/// Lets `#[serde(with = "…")]` name the type at a field of the quantity itself.
macro_rules! with_quantity {
    ($([$($generics:tt)*] $type:ty: $quantity:ty;)*) => {
        $(
            impl<$($generics)*> $type {
                pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<$quantity, D::Error> {
                    <Self as Deserialize>::deserialize(deserializer).map(|setting| setting.0)
                }

                pub fn serialize<S: Serializer>(quantity: &$quantity, serializer: S) -> Result<S::Ok, S::Error> {
                    Serialize::serialize(&Self(*quantity), serializer)
                }
            }

            impl<$($generics)*> QuantityText for $type {
                type Quantity = $quantity;
                fn from_quantity(quantity: $quantity) -> Self {
                    Self(quantity)
                }
                fn quantity(self) -> $quantity {
                    self.0
                }
            }
        )*
    };
}

serde_as_text!(
    [const MAX: u8] Percentage<MAX>, "Percentage",
    |text: &str| text::parse_percent(text, MAX).map(Self),
    |percent: &Self| format!("{}%", percent.0.get()),
    {"type": "string", "format": "percent", "formatMaximum": format!("{MAX}%"), "pattern": "^[0-9]{1,3} ?%$"}
);
serde_as_text!(
    [] Duration, "Duration",
    |text: &str| text::parse_duration(text).map(Self),
    |duration: &Self| text::format_duration(duration.0),
    {"type": "string", "format": "duration", "pattern": "^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$|^0$"}
);
serde_as_text!(
    [] MemoryQuantity, "Quantity",
    |text: &str| text::parse_quantity(text).map(Self),
    |quantity: &Self| text::format_quantity(quantity.0),
    {"type": ["string", "integer"], "format": "quantity"}
);
serde_as_text!(
    [] Speed, "Speed",
    |text: &str| text::parse_speed(text).map(Self),
    |speed: &Self| text::format_speed(speed.0),
    {"type": "string", "format": "speed", "pattern": "^[0-9.]+([kMGT]i?)?B/s$"}
);

with_quantity! {
    [const MAX: u8] Percentage<MAX>: Percent;
    [] Duration: Millis;
    [] MemoryQuantity: Bytes;
    [] Speed: Bytes;
}

/// Deserializes a text with `parse`; a [`Malformed`] text becomes a serde error.
pub fn parsed<'de, T, D: Deserializer<'de>>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, Malformed>,
) -> Result<T, D::Error> {
    let text = deserializer.deserialize_any(TextVisitor)?;
    parse(&text).map_err(de::Error::custom)
}

/// A text, or a whole number as one.
struct TextVisitor;

impl<'de> de::Visitor<'de> for TextVisitor {
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

/// Serde adapter of a field with an optional quantity: `#[serde(with = "setting::Optional::<setting::Duration>", default)]`.
pub(crate) struct Optional<T>(PhantomData<T>);

impl<T: QuantityText> Optional<T> {
    pub fn deserialize<'de, D>(deserializer: D) -> Result<Option<T::Quantity>, D::Error>
    where
        D: Deserializer<'de>,
        T: Deserialize<'de>,
    {
        Ok(Option::<T>::deserialize(deserializer)?.map(T::quantity))
    }

    pub fn serialize<S: Serializer>(
        quantity: &Option<T::Quantity>,
        serializer: S,
    ) -> Result<S::Ok, S::Error>
    where
        T: Serialize,
    {
        Serialize::serialize(&quantity.map(T::from_quantity), serializer)
    }
}

impl<T: JsonSchema> JsonSchema for Optional<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

/// A section that can be switched off: the fields of its rules, and `enabled`, which is `DEFAULT` if it is not written. In the
/// core it is an `Option`: `None` if it is switched off.
pub(crate) struct Switch<T, const DEFAULT: bool>(PhantomData<T>);

#[derive(Serialize, Deserialize)]
struct Section<T> {
    enabled: Option<bool>,
    #[serde(flatten)]
    rules: T,
}

impl<T, const DEFAULT: bool> Switch<T, DEFAULT> {
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<T>, D::Error>
    where
        T: Deserialize<'de>,
    {
        let Section { enabled, rules } = Section::deserialize(deserializer)?;
        Ok(enabled.unwrap_or(DEFAULT).then_some(rules))
    }

    pub fn serialize<S: Serializer>(rules: &Option<T>, serializer: S) -> Result<S::Ok, S::Error>
    where
        T: Serialize,
    {
        Section {
            enabled: Some(rules.is_some()),
            rules: rules.as_ref(),
        }
        .serialize(serializer)
    }
}

impl<T: JsonSchema, const DEFAULT: bool> JsonSchema for Switch<T, DEFAULT> {
    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = T::json_schema(generator);
        let default = if DEFAULT {
            "Default: yes."
        } else {
            "Default: no."
        };
        if let Some(fields) = schema
            .pointer_mut("/properties")
            .and_then(serde_json::Value::as_object_mut)
        {
            let enabled = json_schema!({"description": default, "type": "boolean"});
            fields.insert("enabled".into(), enabled.to_value());
        }
        schema.insert("additionalProperties".into(), false.into());
        schema
    }
}
