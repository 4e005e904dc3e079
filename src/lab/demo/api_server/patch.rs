//! The three kinds of patch, as pure functions of a document and a patch.
//!
//! Strategic merge knows the list keys of the fields that the clients here patch (conditions by `type`, gates and containers by
//! `name`); every other list is replaced. The caller decides what a patch may change.

use super::defaults::fields_of;
use super::error::ApiError;
use serde_json::Value;

/// The kind of a patch body, from its content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatchKind {
    Json,
    Merge,
    Strategic,
    /// Server-side apply, simplified: a strategic merge that creates missing objects. No field owners.
    Apply,
}

impl PatchKind {
    pub(crate) fn from_content_type(content_type: &str) -> Result<Self, ApiError> {
        match content_type.split(';').next().unwrap_or_default().trim() {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            other => Err(ApiError::unsupported_patch(other)),
        }
    }

    pub fn apply(self, document: &mut Value, patch: &Value) -> Result<(), ApiError> {
        match self {
            Self::Json => json_patch(document, patch),
            Self::Merge => {
                json_merge(document, patch);
                Ok(())
            }
            Self::Strategic | Self::Apply => {
                strategic_merge(document, patch);
                Ok(())
            }
        }
    }
}

/// RFC 7386: objects merge, null removes, anything else replaces.
fn json_merge(document: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *document = patch.clone();
        return;
    };
    let fields = fields_of(document);
    for (key, change) in changes {
        if change.is_null() {
            fields.remove(key);
        } else {
            json_merge(fields.entry(key.clone()).or_insert(Value::Null), change);
        }
    }
}

fn strategic_merge(document: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *document = patch.clone();
        return;
    };
    let fields = fields_of(document);
    if changes
        .get("$patch")
        .is_some_and(|directive| directive == "replace")
    {
        fields.clear();
    }
    for (key, change) in changes.iter().filter(|(key, _)| !key.starts_with('$')) {
        match (change, list_key(key)) {
            (Value::Null, _) => {
                fields.remove(key);
            }
            (Value::Array(elements), Some(list_key)) => {
                strategic_merge_list(
                    fields.entry(key.clone()).or_insert(Value::Null),
                    elements,
                    list_key,
                );
            }
            _ => strategic_merge(fields.entry(key.clone()).or_insert(Value::Null), change),
        }
    }
}

/// The merge key of a list's elements, for the lists that merge.
fn list_key(field: &str) -> Option<&'static str> {
    match field {
        "conditions" | "addresses" => Some("type"),
        "containers" | "initContainers" | "containerStatuses" | "volumes" | "env"
        | "schedulingGates" => Some("name"),
        "ownerReferences" => Some("uid"),
        _ => None,
    }
}

fn strategic_merge_list(list: &mut Value, changes: &[Value], key: &str) {
    if !list.is_array() {
        *list = Value::Array(Vec::new());
    }
    let elements = list.as_array_mut().expect("made an array above");
    if changes.iter().any(|change| change["$patch"] == "replace") {
        elements.clear();
    }
    for change in changes {
        let index = elements
            .iter()
            .position(|element| element[key] == change[key]);
        match (change["$patch"].as_str(), index) {
            (Some("replace"), _) => {}
            (Some("delete"), Some(index)) => {
                elements.remove(index);
            }
            (Some("delete"), None) => {}
            (_, Some(index)) => strategic_merge(&mut elements[index], change),
            (_, None) => elements.push(change.clone()),
        }
    }
}

/// RFC 6902, without `move` and `copy`, which no client here sends.
fn json_patch(document: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let operations = patch
        .as_array()
        .ok_or_else(|| ApiError::bad_request("a JSON patch is an array"))?;
    operations
        .iter()
        .try_for_each(|operation| json_operation(document, operation))
}

fn json_operation(document: &mut Value, operation: &Value) -> Result<(), ApiError> {
    let path = operation["path"]
        .as_str()
        .ok_or_else(|| ApiError::bad_request("an operation has no path"))?;
    match operation["op"].as_str().unwrap_or_default() {
        "test" if document.pointer(path) == Some(&operation["value"]) => Ok(()),
        "test" => Err(unprocessable(format!("testing value {path} failed"))),
        "replace" => {
            *document
                .pointer_mut(path)
                .ok_or_else(|| missing_path(path))? = operation["value"].clone();
            Ok(())
        }
        "add" => add(document, path, operation["value"].clone()),
        "remove" => remove(document, path),
        other => Err(ApiError::bad_request(format!(
            "unsupported operation {other:?}"
        ))),
    }
}

fn add(document: &mut Value, path: &str, value: Value) -> Result<(), ApiError> {
    let (parent, last) = parent_and_key(document, path)?;
    match parent {
        Value::Object(fields) => {
            fields.insert(last, value);
        }
        Value::Array(elements) if last == "-" => elements.push(value),
        Value::Array(elements) => match last.parse::<usize>() {
            Ok(index) if index <= elements.len() => elements.insert(index, value),
            _ => return Err(missing_path(path)),
        },
        _ => return Err(missing_path(path)),
    }
    Ok(())
}

fn remove(document: &mut Value, path: &str) -> Result<(), ApiError> {
    let (parent, last) = parent_and_key(document, path)?;
    let removed = match parent {
        Value::Object(fields) => fields.remove(&last).is_some(),
        Value::Array(elements) => match last.parse::<usize>() {
            Ok(index) if index < elements.len() => {
                elements.remove(index);
                true
            }
            _ => false,
        },
        _ => false,
    };
    if removed {
        Ok(())
    } else {
        Err(missing_path(path))
    }
}

/// The container a pointer ends in, and the last step, unescaped.
fn parent_and_key<'a>(
    document: &'a mut Value,
    path: &str,
) -> Result<(&'a mut Value, String), ApiError> {
    let (parent, last) = path.rsplit_once('/').ok_or_else(|| missing_path(path))?;
    let parent = document
        .pointer_mut(parent)
        .ok_or_else(|| missing_path(path))?;
    Ok((parent, last.replace("~1", "/").replace("~0", "~")))
}

fn missing_path(path: &str) -> ApiError {
    unprocessable(format!("the path {path} does not exist"))
}

fn unprocessable(why: String) -> ApiError {
    let message = format!("the server rejected our request due to an error in our request: {why}");
    ApiError::new(422, "Invalid", message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patched(kind: PatchKind, mut document: Value, patch: Value) -> Value {
        kind.apply(&mut document, &patch).unwrap();
        document
    }

    #[test]
    fn strategic_merge_keeps_conditions_of_other_types() {
        let before = json!({"conditions": [{"type": "Ready", "status": "True"}, {"type": "Hold", "status": "True"}]});
        let patch = json!({"conditions": [{"type": "Hold", "status": "False", "message": "m"}]});
        let after = patched(PatchKind::Strategic, before, patch);
        assert_eq!(
            after["conditions"],
            json!([{"type": "Ready", "status": "True"}, {"type": "Hold", "status": "False", "message": "m"}])
        );
    }

    #[test]
    fn strategic_merge_deletes_a_keyed_element() {
        let before = json!({"schedulingGates": [{"name": "a"}, {"name": "b"}]});
        let patch = json!({"schedulingGates": [{"$patch": "delete", "name": "a"}]});
        assert_eq!(
            patched(PatchKind::Strategic, before, patch),
            json!({"schedulingGates": [{"name": "b"}]})
        );
    }

    #[test]
    fn merge_patch_replaces_lists_and_removes_nulls() {
        let before = json!({"a": {"x": 1, "y": 2}, "l": [1, 2]});
        let after = patched(
            PatchKind::Merge,
            before,
            json!({"a": {"x": null}, "l": [3]}),
        );
        assert_eq!(after, json!({"a": {"y": 2}, "l": [3]}));
    }

    #[test]
    fn a_failing_test_stops_a_json_patch() {
        let mut document = json!({"a": [1, 2], "b/c": 1});
        let fails =
            json!([{"op": "test", "path": "/a/0", "value": 9}, {"op": "remove", "path": "/a"}]);
        assert_eq!(
            PatchKind::Json
                .apply(&mut document, &fails)
                .unwrap_err()
                .code,
            422
        );
        let works = json!([
            {"op": "test", "path": "/a/0", "value": 1},
            {"op": "add", "path": "/a/-", "value": 3},
            {"op": "remove", "path": "/b~1c"},
        ]);
        assert_eq!(
            patched(PatchKind::Json, document, works),
            json!({"a": [1, 2, 3]})
        );
    }
}
