//! Texts of the file format that name something. Each is checked by its [`TextFormat`], which the check of a file uses too.

use crate::format::TextFormat;
use stowage_scheduling::units::setting::serde_as_text;
pub use stowage_scheduling::units::setting::{Duration, MemoryQuantity, Percentage};

/// A text that is not parsed further; only its allowed characters are known.
macro_rules! words {
    ($($(#[$doc:meta])* $type:ident: $format:expr, $name:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
            pub struct $type(pub String);

            serde_as_text!(
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
    /// A namespace, or a pattern of several.
    NamePattern: TextFormat::NamePattern, "name-pattern";
    /// A DNS subdomain: the name of a PriorityClass or a node.
    Subdomain: TextFormat::Subdomain, "subdomain";
    /// A label's key, or a resource.
    QualifiedName: TextFormat::QualifiedName, "qualified-name";
    LabelValue: TextFormat::LabelValue, "label-value";
    MigProfile: TextFormat::MigProfile, "mig-profile";
    /// A condition on a pod.
    Cel: TextFormat::Cel, "cel";
    /// A moment with its offset from UTC.
    Timestamp: TextFormat::Timestamp, "timestamp";
}
