//! Policy files: turns the YAML that a cluster's owner writes into the [`Policy`] that the
//! core uses, or into all its problems, each with its place and the fix. Pure: texts come in, no file is opened here.
//!
//! The steps: [`tree`] parses YAML and keeps every place; [`config_map`] takes the files out of a ConfigMap; [`shape`] checks it
//! against the JSON Schema of the [`mod@file`] types; [`merge`] makes one document of all files; [`parse`] fills in defaults;
//! [`semantic`] checks whether the parts make sense together. Every problem is a [`diagnostic::Diagnostic`]. [`show`] renders the
//! result.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod cases;
mod config_map;
pub mod diagnostic;
pub mod file;
pub mod format;
mod merge;
pub mod nearest;
mod parse;
pub mod render;
mod semantic;
pub mod shape;
pub mod show;
mod sound_parts;
mod source;
mod tree;
pub mod windows;

pub(crate) use source::FileId;
pub use source::{MAX_FILE_BYTES, PolicySources, Position, SourceText, Span};

use diagnostic::{Diagnostic, has_errors, sort};
use parse::Draft;
use sha2::{Digest as _, Sha256};
use shape::SHAPES;
use stowage_scheduling::policy::{Digest, Policy};
use tree::YamlNode;

/// A policy without errors.
#[derive(Debug, Clone)]
pub struct LoadedPolicy {
    /// The policy with its digest; the version is left to whoever puts it into force.
    pub policy: Policy,
    /// Warnings, sorted by file and position.
    pub warnings: Vec<Diagnostic>,
    /// Test cases next to the policy, in order of files.
    pub tests: Vec<TestDocument>,
    merged: YamlNode,
}

/// A `PolicyTest` document.
#[derive(Debug, Clone)]
pub struct TestDocument {
    /// The file that the document is in.
    pub file: FileId,
    pub test: file::PolicyTest,
}

/// Parses a policy from all its files. Returns it, or all its problems, errors and warnings, by file and place.
pub fn load(sources: &[SourceText]) -> Result<LoadedPolicy, Vec<Diagnostic>> {
    let texts = PolicySources::new(sources);
    let Documents {
        policies,
        tests,
        mut diagnostics,
        mut of_tests,
    } = read_documents(sources, &texts);
    let (merged, mut clashes) = merge::merge(policies, &SHAPES.policy);
    diagnostics.append(&mut clashes);
    let policy = match has_errors(&diagnostics) {
        true => sound_parts::sound_parts(merged.clone(), &diagnostics)
            .and_then(|(sound, broken)| build_policy(&sound, &broken, &mut diagnostics)),
        false => build_policy(&merged, &[], &mut diagnostics),
    };
    diagnostics.append(&mut of_tests);
    let tests: Vec<TestDocument> = tests
        .iter()
        .filter_map(|node| parse_test(node, &mut diagnostics))
        .collect();
    sort(&mut diagnostics);
    match policy.filter(|_| !has_errors(&diagnostics)) {
        Some(policy) => Ok(LoadedPolicy {
            policy,
            warnings: diagnostics,
            tests,
            merged,
        }),
        None => Err(diagnostics),
    }
}

/// The documents in the files, by kind, and the problems of each document by itself.
struct Documents {
    policies: Vec<YamlNode>,
    tests: Vec<YamlNode>,
    diagnostics: Vec<Diagnostic>,
    /// Those of `tests`.
    of_tests: Vec<Diagnostic>,
}

fn read_documents(sources: &[SourceText], texts: &PolicySources<'_>) -> Documents {
    let mut found = Documents {
        policies: Vec::new(),
        tests: Vec::new(),
        diagnostics: Vec::new(),
        of_tests: Vec::new(),
    };
    let mut nodes = tree::MAX_NODES;
    for (index, source) in sources.iter().enumerate() {
        let (documents, mut diagnostics) = tree::read(&source.bytes, FileId::at(index), &mut nodes);
        if documents.is_empty() && diagnostics.is_empty() {
            found
                .diagnostics
                .push(empty_file(Span::new(FileId::at(index), 0..0)));
        }
        found.diagnostics.append(&mut diagnostics);
        for document in documents {
            if !config_map::is_config_map(&document) {
                found.add_document(document, texts);
                continue;
            }
            let (inner, mut diagnostics) = config_map::read_documents(&document, texts, &mut nodes);
            found.diagnostics.append(&mut diagnostics);
            inner
                .into_iter()
                .for_each(|document| found.add_document(document, texts));
        }
    }
    found
}

/// A file without content, comments or not, is probably an accident: every guarantee would be gone.
fn empty_file(span: Span) -> Diagnostic {
    Diagnostic::error("empty-file", span, "the file has no content")
        .help("write `kind: SchedulingPolicy` for a policy that is all defaults, or delete the file; was it cut off?")
}

impl Documents {
    fn add_document(&mut self, document: YamlNode, texts: &PolicySources<'_>) {
        // A document of another kind is not Stowage's, whatever else is wrong with it.
        if let Some(diagnostic) = shape::foreign_document(&document) {
            return self.diagnostics.push(diagnostic);
        }
        let (shape, name, list, found) = match shape::is_test(&document) {
            true => (
                &SHAPES.test,
                "a PolicyTest",
                &mut self.tests,
                &mut self.of_tests,
            ),
            false => (
                &SHAPES.policy,
                "a policy",
                &mut self.policies,
                &mut self.diagnostics,
            ),
        };
        found.extend(shape::check(&document, shape, name, texts));
        list.push(document);
    }
}

/// The policy; `None` if it has errors. Without its `broken` parts, what the others get wrong together is reported all the same.
fn build_policy(
    merged: &YamlNode,
    broken: &[Span],
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Policy> {
    let spec: file::PolicySpec = deserialize(merged, diagnostics)?;
    let draft = readable(Draft::new(&spec), merged, diagnostics)?;
    diagnostics.extend(semantic::check(merged, &spec, &draft, broken));
    if has_errors(diagnostics) {
        return None;
    }
    match draft.finish() {
        Ok(mut policy) => {
            policy.digest = digest(&policy);
            Some(policy)
        }
        Err(error) => {
            diagnostics.push(Diagnostic::error("policy", merged.span, error.to_string()));
            None
        }
    }
}

fn parse_test(node: &YamlNode, diagnostics: &mut Vec<Diagnostic>) -> Option<TestDocument> {
    if has_errors(diagnostics) {
        return None;
    }
    deserialize(node, diagnostics).map(|test| TestDocument {
        file: node.span.file,
        test,
    })
}

fn deserialize<T: serde::de::DeserializeOwned>(
    node: &YamlNode,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<T> {
    readable(serde_json::from_value(node.to_json()), node, diagnostics)
}

/// A document that passed the check can be parsed; if not, that is reported like any mistake.
fn readable<T>(
    parsed: Result<T, serde_json::Error>,
    node: &YamlNode,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<T> {
    match parsed {
        Ok(parsed) => return Some(parsed),
        Err(_) if has_errors(diagnostics) => {}
        Err(error) => diagnostics.push(Diagnostic::error(
            "unreadable",
            node.span,
            error.to_string(),
        )),
    }
    None
}

/// The policy with the digest of what it says, for one that was not read from files.
pub fn with_digest(mut policy: Policy) -> Policy {
    policy.digest = digest(&policy);
    policy
}

/// Digest of the policy with all defaults, so that comments, order of keys and files do not matter.
fn digest(policy: &Policy) -> Digest {
    let written = serde_json::to_vec(&parse::render(policy))
        .expect("a raw policy has text keys and no floats");
    let hash = Sha256::digest(written);
    Digest(
        hash.iter()
            .take(8)
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
    )
}

impl LoadedPolicy {
    /// The whole policy as YAML, each value with its place.
    pub fn show(&self, sources: &[SourceText]) -> String {
        show::show(&self.policy, &self.merged, &PolicySources::new(sources))
    }

    /// The whole policy as data, without settings that have no value.
    pub fn to_json(&self) -> serde_json::Value {
        let mut policy = serde_json::to_value(parse::render(&self.policy))
            .expect("a raw policy has text keys and no floats");
        drop_nulls(&mut policy);
        policy
    }
}

fn drop_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(drop_nulls);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod config_map_tests;
#[cfg(test)]
mod matching_tests;
#[cfg(test)]
mod round_trip_tests;
#[cfg(test)]
mod tests;
