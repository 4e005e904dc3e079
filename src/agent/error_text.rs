//! What to tell a person of an error that others wrap.

use std::error::Error;

/// What lies deepest says most: "connection refused" rather than "service error".
pub fn root_cause(error: &dyn Error) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}
