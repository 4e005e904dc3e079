//! Policy files: the YAML that a cluster's owner writes into the [`Policy`](crate::scheduling::policy::Policy) that the
//! core decides by, or a list of everything that is wrong with it. Pure: texts come in, nobody here opens a file.

pub mod diagnostic;
pub mod format;
mod nearest;
pub mod raw;
pub mod source;
pub mod tree;

pub use source::{SourceText, Sources};
