//! A serializer before another one, through which every text of a recording passes, and is replaced unless it is known to be no
//! name. A field that is new in an input is hidden, until it is listed here.
//!
//! Fields' and variants' names are not texts: they reach a serializer by calls of their own.

use serde::ser::{
    Error, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant,
    SerializeTuple, SerializeTupleStruct, SerializeTupleVariant, Serializer,
};
use serde_json::{Map, Value};
use std::borrow::Cow;
use stowage_scheduling::vocabulary::classification::PodTraits;

/// Treatment of texts that may be names: they are collected, or replaced.
pub trait Names {
    fn name<'t>(&'t self, name: &'t str) -> Cow<'t, str>;

    /// A key of a label, taint or resource.
    fn key<'t>(&'t self, key: &'t str) -> Cow<'t, str>;

    /// Replaces the hash of an image name.
    fn image(&self, image: u64) -> u64;

    /// Sees the traits of a pod that policies may match, before its names are replaced.
    fn pod(&self, traits: PodTraits) -> PodTraits;
}

/// Kind of the texts, or numbers, at one position of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Name,
    /// A key of a label, taint or resource.
    Key,
    /// `namespace/name`.
    NameInNamespace,
    /// Text that is no name, and stays.
    Kept,
    Image,
    /// Traits that have been through [`Names::pod`].
    ReplacedPod,
}

/// Type whose texts are keys. Keys of maps and the fields below are keys, too.
const KEY_TYPE: &str = "PluginResource";
const KEY_FIELDS: [(&str, &str); 7] = [
    ("ResourceList", "others"),
    ("AntiAffinity", "topology"),
    ("NodeLabel", "key"),
    ("PodTraits", "resources"),
    ("Requirement", "key"),
    ("Taint", "key"),
    ("Toleration", "key"),
];
/// Types whose texts are no names.
const KEPT_TYPES: [&str; 4] = ["ClassSet", "GpuModel", "GpuSet", "GpuSelector"];
/// Fields whose texts are no names: codes of this program, and policies, which are redacted on their own.
const KEPT_FIELDS: [(&str, &str); 5] = [
    ("ClusterState", "policy"),
    ("PolicySet", "policy"),
    ("KeptRanking", "refused"),
    ("KeptAnswer", "narrow"),
    ("KeptBind", "why"),
];
/// Fields with `namespace/name` in one text.
const NAMESPACED_NAME_FIELDS: [(&str, &str); 3] = [
    ("StorageObserved", "name"),
    ("StorageDeleted", "name"),
    ("VolumeIndexState", "claims"),
];
const POD_TRAITS_TYPE: &str = "PodTraits";

/// A value whose names are replaced while it is serialized.
pub(crate) struct Redacted<'a, T: ?Sized> {
    value: &'a T,
    names: &'a dyn Names,
    kind: TextKind,
}

impl<'a, T: ?Sized> Redacted<'a, T> {
    pub fn new(value: &'a T, names: &'a dyn Names) -> Self {
        Self {
            value,
            names,
            kind: TextKind::Name,
        }
    }
}

impl<T: Serialize + ?Sized> Serialize for Redacted<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(RedactingSerializer {
            inner: serializer,
            names: self.names,
            kind: self.kind,
        })
    }
}

struct RedactingSerializer<'a, S> {
    inner: S,
    names: &'a dyn Names,
    kind: TextKind,
}

/// Serializer of elements, keys and values, all of the same kind.
struct RedactingParts<'a, C> {
    inner: C,
    names: &'a dyn Names,
    kind: TextKind,
}

struct RedactingFields<'a, C> {
    inner: C,
    names: &'a dyn Names,
    kind: TextKind,
    type_name: &'static str,
}

enum RedactingStruct<'a, S: Serializer> {
    Plain(RedactingFields<'a, S::SerializeStruct>),
    /// A pod's traits, which are looked at as a whole.
    Traits(RedactingSerializer<'a, S>, Map<String, Value>),
}

impl TextKind {
    fn for_type(self, name: &str) -> Self {
        match name {
            "ImageId" => Self::Image,
            KEY_TYPE => Self::Key,
            _ if KEPT_TYPES.contains(&name) => Self::Kept,
            _ if self == Self::Key => Self::Name,
            _ => self,
        }
    }

    fn for_field(self, type_name: &str, field: &str) -> Self {
        match self {
            Self::Kept => Self::Kept,
            _ if KEPT_FIELDS.contains(&(type_name, field)) => Self::Kept,
            _ if NAMESPACED_NAME_FIELDS.contains(&(type_name, field)) => Self::NameInNamespace,
            _ if KEY_FIELDS.contains(&(type_name, field)) => Self::Key,
            _ => Self::Name,
        }
    }

    fn for_map_key(self) -> Self {
        match self {
            Self::Name => Self::Key,
            other => other,
        }
    }
}

impl<'a, S> RedactingSerializer<'a, S> {
    fn redacted<'v, T: ?Sized>(&self, value: &'v T, kind: TextKind) -> Redacted<'v, T>
    where
        'a: 'v,
    {
        Redacted {
            value,
            names: self.names,
            kind,
        }
    }

    fn parts<C, E>(
        self,
        begin: impl FnOnce(S) -> Result<C, E>,
    ) -> Result<RedactingParts<'a, C>, E> {
        Ok(RedactingParts {
            inner: begin(self.inner)?,
            names: self.names,
            kind: self.kind,
        })
    }
}

macro_rules! as_it_is {
    ($($method:ident($($argument:ident: $type:ty),*)),+ $(,)?) => {
        $(fn $method(self, $($argument: $type),*) -> Result<S::Ok, S::Error> {
            self.inner.$method($($argument),*)
        })+
    };
}

impl<'a, S: Serializer> Serializer for RedactingSerializer<'a, S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = RedactingParts<'a, S::SerializeSeq>;
    type SerializeTuple = RedactingParts<'a, S::SerializeTuple>;
    type SerializeTupleStruct = RedactingParts<'a, S::SerializeTupleStruct>;
    type SerializeTupleVariant = RedactingParts<'a, S::SerializeTupleVariant>;
    type SerializeMap = RedactingParts<'a, S::SerializeMap>;
    type SerializeStruct = RedactingStruct<'a, S>;
    type SerializeStructVariant = RedactingFields<'a, S::SerializeStructVariant>;

    as_it_is!(
        serialize_bool(value: bool),
        serialize_i8(value: i8),
        serialize_i16(value: i16),
        serialize_i32(value: i32),
        serialize_i64(value: i64),
        serialize_u8(value: u8),
        serialize_u16(value: u16),
        serialize_u32(value: u32),
        serialize_f32(value: f32),
        serialize_f64(value: f64),
        serialize_char(value: char),
        serialize_bytes(value: &[u8]),
        serialize_none(),
        serialize_unit(),
        serialize_unit_struct(name: &'static str),
        serialize_unit_variant(name: &'static str, index: u32, variant: &'static str),
    );

    fn serialize_u64(self, value: u64) -> Result<S::Ok, S::Error> {
        let value = if self.kind == TextKind::Image {
            self.names.image(value)
        } else {
            value
        };
        self.inner.serialize_u64(value)
    }

    fn serialize_str(self, text: &str) -> Result<S::Ok, S::Error> {
        match (self.kind, text.split_once('/')) {
            (TextKind::Kept, _) => self.inner.serialize_str(text),
            (TextKind::NameInNamespace, Some((namespace, name))) => {
                let [namespace, name] = [namespace, name].map(|part| self.names.name(part));
                self.inner.serialize_str(&format!("{namespace}/{name}"))
            }
            (TextKind::Key, _) => self.inner.serialize_str(&self.names.key(text)),
            _ => self.inner.serialize_str(&self.names.name(text)),
        }
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        let redacted = self.redacted(value, self.kind);
        self.inner.serialize_some(&redacted)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let redacted = self.redacted(value, self.kind.for_type(name));
        self.inner.serialize_newtype_struct(name, &redacted)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let redacted = self.redacted(value, self.kind.for_field(name, variant));
        self.inner
            .serialize_newtype_variant(name, index, variant, &redacted)
    }

    fn serialize_seq(self, length: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        self.parts(|inner| inner.serialize_seq(length))
    }

    fn serialize_tuple(self, length: usize) -> Result<Self::SerializeTuple, S::Error> {
        self.parts(|inner| inner.serialize_tuple(length))
    }

    fn serialize_tuple_struct(
        self,
        name: &'static str,
        length: usize,
    ) -> Result<Self::SerializeTupleStruct, S::Error> {
        self.parts(|inner| inner.serialize_tuple_struct(name, length))
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        index: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        self.parts(|inner| inner.serialize_tuple_variant(name, index, variant, length))
    }

    fn serialize_map(self, length: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        self.parts(|inner| inner.serialize_map(length))
    }

    fn serialize_struct(
        self,
        of: &'static str,
        length: usize,
    ) -> Result<Self::SerializeStruct, S::Error> {
        if of == POD_TRAITS_TYPE && self.kind != TextKind::ReplacedPod {
            return Ok(RedactingStruct::Traits(self, Map::new()));
        }
        let Self { inner, names, kind } = self;
        let inner = inner.serialize_struct(of, length)?;
        Ok(RedactingStruct::Plain(RedactingFields {
            inner,
            names,
            kind,
            type_name: of,
        }))
    }

    fn serialize_struct_variant(
        self,
        of: &'static str,
        index: u32,
        variant: &'static str,
        length: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        let Self { inner, names, kind } = self;
        let inner = inner.serialize_struct_variant(of, index, variant, length)?;
        Ok(RedactingFields {
            inner,
            names,
            kind,
            type_name: of,
        })
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

macro_rules! parts {
    ($($trait:ident: $method:ident;)+) => {
        $(impl<C: $trait> $trait for RedactingParts<'_, C> {
            type Ok = C::Ok;
            type Error = C::Error;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), C::Error> {
                self.inner.$method(&Redacted { value, names: self.names, kind: self.kind })
            }

            fn end(self) -> Result<C::Ok, C::Error> {
                self.inner.end()
            }
        })+
    };
}

parts! {
    SerializeSeq: serialize_element;
    SerializeTuple: serialize_element;
    SerializeTupleStruct: serialize_field;
    SerializeTupleVariant: serialize_field;
}

impl<C: SerializeMap> SerializeMap for RedactingParts<'_, C> {
    type Ok = C::Ok;
    type Error = C::Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), C::Error> {
        let kind = self.kind.for_map_key();
        self.inner.serialize_key(&Redacted {
            value: key,
            names: self.names,
            kind,
        })
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), C::Error> {
        self.inner.serialize_value(&Redacted {
            value,
            names: self.names,
            kind: self.kind,
        })
    }

    fn end(self) -> Result<C::Ok, C::Error> {
        self.inner.end()
    }
}

impl<C: SerializeStructVariant> SerializeStructVariant for RedactingFields<'_, C> {
    type Ok = C::Ok;
    type Error = C::Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        field: &'static str,
        value: &T,
    ) -> Result<(), C::Error> {
        let kind = self.kind.for_field(self.type_name, field);
        self.inner.serialize_field(
            field,
            &Redacted {
                value,
                names: self.names,
                kind,
            },
        )
    }

    fn end(self) -> Result<C::Ok, C::Error> {
        self.inner.end()
    }
}

impl<S: Serializer> SerializeStruct for RedactingStruct<'_, S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        field: &'static str,
        value: &T,
    ) -> Result<(), S::Error> {
        match self {
            Self::Plain(fields) => {
                let kind = fields.kind.for_field(fields.type_name, field);
                fields.inner.serialize_field(
                    field,
                    &Redacted {
                        value,
                        names: fields.names,
                        kind,
                    },
                )
            }
            Self::Traits(_, fields) => {
                let value = serde_json::to_value(value).map_err(S::Error::custom)?;
                fields.insert(field.into(), value);
                Ok(())
            }
        }
    }

    fn skip_field(&mut self, field: &'static str) -> Result<(), S::Error> {
        match self {
            Self::Plain(fields) => fields.inner.skip_field(field),
            Self::Traits(..) => Ok(()),
        }
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        match self {
            Self::Plain(fields) => fields.inner.end(),
            Self::Traits(serializer, fields) => {
                let traits: PodTraits =
                    serde_json::from_value(Value::Object(fields)).map_err(S::Error::custom)?;
                serializer.names.pod(traits).serialize(RedactingSerializer {
                    kind: TextKind::ReplacedPod,
                    ..serializer
                })
            }
        }
    }
}
