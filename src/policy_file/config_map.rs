//! A ConfigMap as people keep it in their repository: its `data` has the policy's files. Each is read as if it lay in a directory,
//! and every place in it is one of the ConfigMap's file.

use super::diagnostic::Diagnostic;
use super::source::PolicySources;
use super::tree::{Scalar, Value, YamlKey, YamlNode, read_within};

/// The `kind` of a ConfigMap document.
const KIND: &str = "ConfigMap";

/// Whether a document is a ConfigMap.
pub(crate) fn is_config_map(document: &YamlNode) -> bool {
    document.get("kind").and_then(YamlNode::text) == Some(KIND)
}

/// Parses the policy files under a ConfigMap's `data`; returns their documents and problems. Keys that begin with a dot, or end in
/// neither `.yaml` nor `.yml`, are skipped, as they are where the ConfigMap is mounted.
pub fn read_documents(
    config_map: &YamlNode,
    texts: &PolicySources<'_>,
    nodes: &mut usize,
) -> (Vec<YamlNode>, Vec<Diagnostic>) {
    let (mut documents, mut diagnostics) = (Vec::new(), Vec::new());
    let data = config_map.get("data");
    let mut files = data
        .map(YamlNode::entries)
        .unwrap_or_default()
        .iter()
        .filter(|(key, _)| is_policy_file(key))
        .peekable();
    if files.peek().is_none() {
        diagnostics.push(no_policy_files(config_map));
    }
    for (key, node) in files {
        match &node.value {
            Value::Scalar(Scalar { text, .. }) => {
                let (mut read, mut found) = read_within(node.span, text, texts, nodes);
                if read.is_empty() && found.is_empty() {
                    found.push(super::empty_file(key.span));
                }
                documents.append(&mut read);
                diagnostics.append(&mut found);
            }
            Value::Broken => {}
            Value::List(_) | Value::Map(_) => diagnostics.push(value_not_text(key)),
        }
    }
    (documents, diagnostics)
}

fn is_policy_file(key: &YamlKey) -> bool {
    !key.text.starts_with('.') && (key.text.ends_with(".yaml") || key.text.ends_with(".yml"))
}

fn no_policy_files(config_map: &YamlNode) -> Diagnostic {
    let span = config_map
        .entry("data")
        .or(config_map.entry("kind"))
        .map_or(config_map.span, |(key, _)| key.span);
    Diagnostic::error(
        "not-a-policy",
        span,
        "no key under `data` of this ConfigMap ends in .yaml or .yml",
    )
    .help("put the policy's files under `data`: `policy.yaml: |`, and the file indented below it")
}

fn value_not_text(key: &YamlKey) -> Diagnostic {
    let message = "a value under `data` of a ConfigMap is a text";
    Diagnostic::error("wrong-type", key.span, message).help(format!(
        "write `{}: |`, and the file indented below it",
        key.text
    ))
}
