//! The JSON Schemas that editors read, made from the raw types.

use super::raw;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde_json::Value as Json;

pub fn policy_schema() -> Json {
    schema::<raw::Policy>("Stowage scheduling policy")
}

pub fn test_schema() -> Json {
    schema::<raw::PolicyTest>("Cases of a Stowage policy")
}

fn schema<T: JsonSchema>(title: &str) -> Json {
    let settings = SchemaSettings::draft2020_12().with_transform(RecursiveTransform(without_null));
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), title.into());
    schema.to_value()
}

/// What may be left out is left out, not set to nothing: an empty line after `classes:` is rather a mistake.
fn without_null(schema: &mut Schema) {
    if let Some(Json::Array(types)) = schema.get_mut("type") {
        types.retain(|one| one != "null");
        if let [one] = types.as_slice() {
            let one = one.clone();
            schema.insert("type".into(), one);
        }
    }
    let Some(Json::Array(choices)) = schema.get("anyOf") else { return };
    let something: Vec<&Json> =
        choices.iter().filter(|one| one.get("type") != Some(&"null".into())).collect();
    if let [Json::Object(only)] = something.as_slice() {
        let only = only.clone();
        schema.remove("anyOf");
        for (keyword, value) in only {
            schema.insert(keyword, value);
        }
    }
}
