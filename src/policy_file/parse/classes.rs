//! Parses classes: the owner's own in their order, then the built-in ones, changed if the owner names them.

use super::DraftClass;
use crate::file::{PolicySpec, WrittenClass};
use serde_json::Value as Json;
use stowage_scheduling::policy::{Class, built_in_classes};

/// The last built-in class takes all remaining pods, and stays last.
pub(crate) const SERVING: &str = "serving";

/// Parses a file's classes. Fails only on a value that the check of the file should have rejected.
pub fn parse(file: &PolicySpec) -> Result<Vec<DraftClass>, serde_json::Error> {
    let written: Vec<(usize, &WrittenClass)> = file.classes.iter().flatten().enumerate().collect();
    let gate = file.start_gate.as_ref().and_then(|gate| gate.max);
    let parse = |mut class: Class, entry: Option<(usize, &WrittenClass)>| {
        class.start_gate.max = gate.map_or(class.start_gate.max, |time| time.0);
        let (index, class) = match entry {
            Some((index, written)) => (Some(index), apply_overrides(&class, written)?),
            None => (None, class),
        };
        Ok(DraftClass {
            class,
            written_index: index,
        })
    };
    let is_built_in = |name: &str| built_in_classes().iter().any(|class| class.name == name);
    let custom_classes = written
        .iter()
        .filter(|(_, entry)| !is_built_in(name(entry)));
    let custom_classes =
        custom_classes.map(|&(index, entry)| parse(Class::new(name(entry)), Some((index, entry))));
    let built_in = built_in_classes().into_iter().map(|class| {
        let entry = written
            .iter()
            .copied()
            .find(|(_, entry)| name(entry) == class.name);
        parse(class, entry)
    });
    custom_classes.chain(built_in).collect()
}

fn name(written: &WrittenClass) -> &str {
    written
        .get("name")
        .and_then(Json::as_str)
        .unwrap_or_default()
}

/// The class with what is written in place of its own. Of a section only the written fields change; a written
/// `match` is the whole condition.
fn apply_overrides(class: &Class, written: &WrittenClass) -> Result<Class, serde_json::Error> {
    let mut all = serde_json::to_value(class)?;
    for (field, value) in written {
        match (all.get_mut(field), value) {
            (Some(Json::Object(section)), Json::Object(fields)) if field != "match" => {
                section.extend(fields.clone());
            }
            _ => all[field] = value.clone(),
        }
    }
    serde_json::from_value(all)
}
