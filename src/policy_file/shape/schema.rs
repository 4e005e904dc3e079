//! The JSON Schemas for editors, generated from the file types, with the core's defaults.

use crate::file;
use crate::parse::render;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value as Json};
use stowage_scheduling::policy::{self, Policy};

pub fn policy_schema() -> Json {
    let settings = settings().with_transform(RecursiveTransform(without_default));
    let mut schema =
        schema::<file::PolicySpec<policy::Class>>("Stowage scheduling policy", settings);
    let defaults =
        serde_json::to_value(defaults()).expect("a raw policy has text keys and no floats");
    if let Json::Object(defaults) = defaults {
        add_defaults(&mut schema, "", &defaults);
    }
    schema
}

pub fn test_schema() -> Json {
    schema::<file::PolicyTest>("Cases of a Stowage policy", settings())
}

fn settings() -> SchemaSettings {
    SchemaSettings::draft2020_12().with_transform(RecursiveTransform(without_null))
}

fn schema<T: JsonSchema>(title: &str, settings: SchemaSettings) -> Json {
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), title.into());
    schema.to_value()
}

/// Sections have no default, only the settings in them: see [`add_defaults`].
fn without_default(schema: &mut Schema) {
    schema.remove("default");
}

/// An optional field is left out, not set to null: an empty line after `classes:` is probably a mistake.
fn without_null(schema: &mut Schema) {
    if let Some(Json::Array(types)) = schema.get_mut("type") {
        types.retain(|one| one != "null");
        if let [one] = types.as_slice() {
            let one = one.clone();
            schema.insert("type".into(), one);
        }
    }
    let Some(Json::Array(choices)) = schema.get("anyOf") else {
        return;
    };
    let non_null: Vec<&Json> = choices
        .iter()
        .filter(|one| one.get("type") != Some(&"null".into()))
        .collect();
    if let [Json::Object(only)] = non_null.as_slice() {
        let only = only.clone();
        schema.remove("anyOf");
        for (keyword, value) in only {
            schema.insert(keyword, value);
        }
    }
}

/// Settings of the whole policy. Lists have no defaults; a class' defaults depend on which class it is.
fn defaults() -> file::PolicySpec<policy::Class> {
    let max = policy::StartGate::default().max;
    file::PolicySpec {
        start_gate: Some(file::StartGateSpec {
            max: Some(file::Duration(max)),
        }),
        classes: None,
        tenants: None,
        node_pools: None,
        ..render(&Policy::default())
    }
}

/// Writes each default at its field. `at` points to the map of fields; each type of settings is used at one place only.
fn add_defaults(schema: &mut Json, at: &str, defaults: &Map<String, Json>) {
    for (field, default) in defaults.iter().filter(|(_, default)| !default.is_null()) {
        let pointer = format!("{at}/properties/{field}");
        let reference = schema
            .pointer(&format!("{pointer}/$ref"))
            .and_then(Json::as_str);
        match (
            default,
            reference
                .and_then(|text| text.strip_prefix('#'))
                .map(str::to_owned),
        ) {
            (Json::Object(defaults), Some(fields)) => add_defaults(schema, &fields, defaults),
            _ => {
                if let Some(Json::Object(field)) = schema.pointer_mut(&pointer) {
                    field.insert("default".into(), default.clone());
                }
            }
        }
    }
}
