//! Names, parsed once at the edge and trusted from then on.
//!
//! Every name is an `Arc<str>`: cloning one into a ledger entry or a decision costs a counter, not a copy.
//! Nothing here knows what a name refers to.

mod model_id;

pub use model_id::ModelId;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

/// The longest name Kubernetes gives to an object (a DNS subdomain), and more than any other name read here.
const MAX_LENGTH: usize = 253;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidName {
    #[error("the {what} is empty")]
    Empty { what: &'static str },
    #[error("the {what} is {length} bytes long; at most {MAX_LENGTH} are allowed")]
    TooLong { what: &'static str, length: usize },
    #[error("the {what} {text:?} contains a control character or a space")]
    Unprintable { what: &'static str, text: String },
}

/// Several names in a sentence or a log line: `GPU-a, GPU-b`.
pub fn comma_separated<N: fmt::Display>(names: impl IntoIterator<Item = N>) -> String {
    names
        .into_iter()
        .map(|name| name.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// Whether a terminal may get the character: control characters would command it, and marks of direction would show one name as
/// another.
pub fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// Text with a mark in place of each character that is not printable.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if is_printable(c) { c } else { '\u{fffd}' })
        .collect()
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[derive(schemars::JsonSchema)]
        #[expect(clippy::derived_hash_with_manual_eq, reason = "names are equal if their texts are")]
        #[schemars(with = "String")]
        pub struct $type(Arc<str>);

        /// Equal names mostly share their text, which is not read then.
        impl PartialEq for $type {
            fn eq(&self, other: &Self) -> bool {
                Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
            }
        }

        impl $type {
            pub fn parse(text: &str) -> Result<Self, InvalidName> {
                validate_name($what, text).map(|()| Self(text.into()))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_str(NameVisitor($what)).map(Self)
            }
        }

        impl Borrow<str> for $type {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name!(
    /// A node's `metadata.name`.
    NodeName, "node name");
name!(
    /// A pod's `metadata.uid`: it distinguishes a pod from its successor of the same name.
    PodUid, "pod UID");
name!(
    /// The `metadata.uid` of a pod's controller.
    OwnerUid, "owner UID");
name!(
    /// NVML's identifier of a GPU or MIG slice (`GPU-…`, `MIG-…`), or [`GpuUuid::from_index`] where only
    /// labels are known.
    GpuUuid, "GPU UUID");
name!(
    /// A GPU's product name, such as `NVIDIA-H100-80GB-HBM3`.
    GpuModel, "GPU model");
name!(
    /// One term of one leader: `LEASE-UID/TRANSITIONS/NONCE`. No two terms share it, and a process that restarts begins another.
    LeaderEpoch, "leader epoch");

impl LeaderEpoch {
    /// The term in which the process of this nonce acts under a Lease, which counts how often it has changed hands.
    pub fn new(lease_uid: &str, transitions: i32, nonce: &str) -> Self {
        Self(format!("{lease_uid}/{transitions}/{nonce}").into())
    }
}

/// How NVML's UUIDs of MIG slices begin.
const SLICE_PREFIX: &str = "MIG-";

/// What [`GpuUuid::from_index`] puts before the index. No UUID of NVML begins so.
const INDEX_PREFIX: &str = "index-";

impl GpuUuid {
    /// The name of a GPU of which only the index on its node is known, because no agent has reported yet.
    pub fn from_index(index: u32) -> Self {
        Self(format!("{INDEX_PREFIX}{index}").into())
    }

    /// Whether it names a MIG slice, whatever is known of its card.
    pub fn is_slice(&self) -> bool {
        self.0.starts_with(SLICE_PREFIX)
    }

    /// The index, if this name was made by [`GpuUuid::from_index`].
    pub fn index(&self) -> Option<u32> {
        self.0.strip_prefix(INDEX_PREFIX)?.parse().ok()
    }
}

/// `namespace/name` of a pod: what a person calls it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl PodKey {
    pub fn parse(namespace: &str, name: &str) -> Result<Self, InvalidName> {
        validate_name("pod namespace", namespace)?;
        validate_name("pod name", name)?;
        Ok(Self {
            namespace: namespace.into(),
            name: name.into(),
        })
    }

    /// The name of this pod in an Event or condition on the pod `reader`. The reader's owner may not be allowed to read other
    /// namespaces, so a name of one would tell what they hold; kube-scheduler does not name preemptors either.
    pub fn name_shown_to(&self, reader: &Self) -> String {
        if self.namespace == reader.namespace {
            format!("pod {self}")
        } else {
            "a pod of another namespace".into()
        }
    }
}

impl fmt::Display for PodKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Reads a name of this kind. Straight from the text: an agent's report has a hundred names, and five thousand come a second.
struct NameVisitor(&'static str);

impl Visitor<'_> for NameVisitor {
    type Value = Arc<str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Arc<str>, E> {
        validate_name(self.0, text).map_err(E::custom)?;
        Ok(text.into())
    }
}

fn validate_name(what: &'static str, text: &str) -> Result<(), InvalidName> {
    match text {
        "" => Err(InvalidName::Empty { what }),
        _ if text.len() > MAX_LENGTH => Err(InvalidName::TooLong {
            what,
            length: text.len(),
        }),
        // Nearly all.
        _ if text.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(()),
        _ if text.chars().any(|c| c.is_control() || c.is_whitespace()) => {
            Err(InvalidName::Unprintable {
                what,
                text: text.into(),
            })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_could_break_a_log_line_is_refused() {
        assert!(NodeName::parse("node-a").is_ok());
        assert_eq!(
            NodeName::parse(""),
            Err(InvalidName::Empty { what: "node name" })
        );
        assert!(matches!(
            NodeName::parse("a\nb"),
            Err(InvalidName::Unprintable { .. })
        ));
        assert!(matches!(
            PodUid::parse(&"x".repeat(254)),
            Err(InvalidName::TooLong { length: 254, .. })
        ));
    }

    #[test]
    fn a_gpu_known_by_index_only_gives_its_index_back() {
        assert_eq!(GpuUuid::from_index(3).index(), Some(3));
        assert_eq!(GpuUuid::parse("GPU-3").unwrap().index(), None);
        assert!(
            GpuUuid::parse("MIG-3").unwrap().is_slice()
                && !GpuUuid::parse("GPU-3").unwrap().is_slice()
        );
    }
}
