//! The text of an error that other errors wrap.

use std::error::Error;

/// The innermost error says most: "connection refused" rather than "service error".
pub(crate) fn root_cause(error: &dyn Error) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}
