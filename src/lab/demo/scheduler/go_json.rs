//! Parses an extender's answer as Go's `encoding/json` would, errors included.
//!
//! Keys match in any case, unknown ones are skipped, null leaves a field unset, and anything after the first value is ignored.
//! If two keys differ only in case, an exact match wins here, the later one in Go.

use serde_json::Value;

/// Go's name for the mismatch, approximately: it appears in a pod's condition, where only people read it.
fn mismatch(value: &Value, target: &str, wanted: &str) -> String {
    let found = match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    format!("json: cannot unmarshal {found} into {target} of type {wanted}")
}

/// The first JSON value of a body.
pub(crate) fn first_value(body: &[u8]) -> Result<Value, String> {
    match serde_json::Deserializer::from_slice(body)
        .into_iter::<Value>()
        .next()
    {
        None => Err("EOF".to_owned()),
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) if error.is_eof() => Err("unexpected EOF".to_owned()),
        Some(Err(error)) => Err(format!("invalid character: {error}")),
    }
}

/// A struct: an object, or null for one with nothing set.
pub(crate) fn structure<'a>(value: &'a Value, name: &str) -> Result<&'a Value, String> {
    match value {
        Value::Object(_) | Value::Null => Ok(value),
        other => Err(mismatch(other, "Go value", name)),
    }
}

/// A field by its Go name; null when it is not there.
pub fn field<'a>(structure: &'a Value, name: &str) -> &'a Value {
    let Some(fields) = structure.as_object() else {
        return &Value::Null;
    };
    let any_case = || {
        fields
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    };
    fields.get(name).or_else(any_case).unwrap_or(&Value::Null)
}

pub fn string(value: &Value, name: &str) -> Result<String, String> {
    match value {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        other => Err(mismatch(
            other,
            &format!("Go struct field {name}"),
            "string",
        )),
    }
}

pub fn integer(value: &Value, name: &str) -> Result<i64, String> {
    match value {
        Value::Null => Ok(0),
        Value::Number(number) if number.is_i64() => Ok(number.as_i64().unwrap_or_default()),
        other => Err(mismatch(other, &format!("Go struct field {name}"), "int64")),
    }
}

/// A slice, or nothing where Go would have nil.
pub fn slice<'a>(value: &'a Value, name: &str) -> Result<Option<&'a [Value]>, String> {
    match value {
        Value::Null => Ok(None),
        Value::Array(elements) => Ok(Some(elements)),
        other => Err(mismatch(other, &format!("Go struct field {name}"), "slice")),
    }
}

/// A map's entries, none for nil.
pub fn entries<'a>(value: &'a Value, name: &str) -> Result<Vec<(&'a String, &'a Value)>, String> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(entries) => Ok(entries.iter().collect()),
        other => Err(mismatch(other, &format!("Go struct field {name}"), "map")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_end_as_in_go() {
        assert_eq!(first_value(b""), Err("EOF".into()));
        assert_eq!(
            first_value(b"{\"NodeNames\": ["),
            Err("unexpected EOF".into())
        );
        assert_eq!(first_value(b"{} garbage"), Ok(serde_json::json!({})));
    }

    #[test]
    fn keys_match_in_any_case_and_floats_are_no_integers() {
        let value = serde_json::json!({"nodenames": ["a"], "score": 9.5});
        assert_eq!(
            slice(field(&value, "NodeNames"), "")
                .unwrap()
                .map(<[Value]>::len),
            Some(1)
        );
        assert!(integer(field(&value, "Score"), "Score").is_err());
    }
}
