//! Where two states differ first.

use serde_json::Value;
use stowage_scheduling::verbs::ClusterState;

/// Maximum length of a value's text in a message, in bytes: enough to recognize it.
const MAX_SHOWN_BYTES: usize = 400;

/// First difference: a JSON pointer, and the value that each state has there.
pub(crate) fn first_difference(
    one: &ClusterState,
    other: &ClusterState,
) -> Option<(String, String, String)> {
    // As values, because maps without an order are stored, too.
    let value = |state: &ClusterState| serde_json::to_value(state).unwrap_or_default();
    difference(&value(one), &value(other), &mut String::new())
}

fn difference(
    one: &Value,
    other: &Value,
    pointer: &mut String,
) -> Option<(String, String, String)> {
    let inner = |key: &str, one: Option<&Value>, other: Option<&Value>, pointer: &mut String| {
        let length = pointer.len();
        pointer.push('/');
        pointer.push_str(key);
        let found = difference(
            one.unwrap_or(&Value::Null),
            other.unwrap_or(&Value::Null),
            pointer,
        );
        pointer.truncate(length);
        found
    };
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let keys = one
                .keys()
                .chain(other.keys().filter(|key| !one.contains_key(*key)));
            keys.into_iter()
                .find_map(|key| inner(key, one.get(key), other.get(key), pointer))
        }
        (Value::Array(one), Value::Array(other)) => {
            (0..one.len().max(other.len())).find_map(|index| {
                inner(
                    &index.to_string(),
                    one.get(index),
                    other.get(index),
                    pointer,
                )
            })
        }
        _ if one == other => None,
        _ => Some((pointer.clone(), excerpt(one), excerpt(other))),
    }
}

fn excerpt(value: &Value) -> String {
    let mut text = value.to_string();
    if text.len() > MAX_SHOWN_BYTES {
        text.truncate(text.floor_char_boundary(MAX_SHOWN_BYTES));
        text.push('…');
    }
    text
}
