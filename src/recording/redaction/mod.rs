//! A copy of a recording in which names are replaced by pseudonyms, and which replays as the original does: nothing in it is
//! decided again.
//!
//! It is read twice. [`NameCollector`] collects every text that may be a name ([`serializer`]); [`Pseudonyms`] gives each of them
//! one of its own, in the same order ([`order`]), and writes the copy. Policies are rewritten ([`mod@policy`]): their patterns and
//! expressions cannot be evaluated for pseudonyms.
//!
//! What stays: times, amounts, counts, priorities, settings of the policy, models of GPUs, the words for which [`order::is_kept`]
//! holds, and keys of labels, taints and resources that Kubernetes and its known extensions define ([`order::is_known_key`]).

mod order;
mod policy;
mod serializer;

use super::entry::{NumberedInput, SegmentHeader};
use super::read::{RawPart, ReadError, Reader};
use super::repeats::Line;
use super::write::SegmentWriter;
use policy::{HOLDS, PolicyNames, redacted};
use rustc_hash::FxHashMap;
use serializer::{Names, Redacted};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use stowage_scheduling::policy::selection::pattern_matches;
use stowage_scheduling::policy::{Expression, ExpressionPod, PolicyError};
use stowage_scheduling::verbs::Input;
use stowage_scheduling::vocabulary::classification::PodTraits;

/// Pending text, in bytes, at which a frame is written.
const FLUSH_BYTES: usize = 256 << 10;
/// Prefix of the label that marks pods for which an expression holds; the number of the expression follows.
const EXPRESSION_LABEL_PREFIX: &str = "stowage.dev/expression-";
/// Pseudonym of a name that the first pass did not find: the recording was changed meanwhile.
const UNKNOWN_NAME: &str = "unseen";

/// Collector of the names of a recording. Read all parts with it before the first is written.
#[derive(Debug, Default)]
pub struct NameCollector(RefCell<CollectedNames>);

#[derive(Debug, Default)]
struct CollectedNames {
    texts: BTreeSet<Box<str>>,
    /// Keys of labels, taints and resources that stay as they are.
    keys: BTreeSet<Box<str>>,
    /// All keys, including those that are replaced.
    all_keys: BTreeSet<Box<str>>,
    images: BTreeSet<u64>,
    /// Namespaces of pods.
    namespaces: BTreeSet<String>,
    /// CEL expressions of policies, by their texts.
    expressions: BTreeMap<String, Expression>,
}

/// Pseudonym of each name.
#[derive(Debug)]
pub struct Pseudonyms {
    names: FxHashMap<Box<str>, Box<str>>,
    keys: BTreeSet<Box<str>>,
    all_keys: BTreeSet<Box<str>>,
    images: FxHashMap<u64, u64>,
    namespaces: BTreeSet<String>,
    /// Expressions by their texts, each with the key of its label.
    expressions: BTreeMap<String, (String, Expression)>,
}

/// Why a recording cannot be redacted.
#[derive(Debug, thiserror::Error)]
pub enum RedactionError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("its policy cannot be written without names: {0}")]
    Policy(#[from] PolicyError),
    #[error("the redacted recording cannot be written: {0}")]
    Write(#[from] io::Error),
}

impl NameCollector {
    /// Collects the names of one part of the recording, up to its last whole entry.
    pub fn collect(&mut self, recording: impl Read) -> Result<(), RedactionError> {
        let mut reader = Reader::new(recording);
        while let Some(part) = next_whole_part(&mut reader)? {
            if let RawPart::Line(line) = part {
                let line = with_policy(*line, self)?;
                serde_json::to_writer(io::sink(), &Redacted::new(&line, self))
                    .map_err(io::Error::from)?;
            }
        }
        Ok(())
    }

    pub fn pseudonyms(self) -> Pseudonyms {
        let CollectedNames {
            texts,
            keys,
            all_keys,
            images,
            namespaces,
            expressions,
        } = self.0.into_inner();
        let numbered = expressions.into_iter().enumerate();
        Pseudonyms {
            names: order::pseudonyms(&texts, &keys),
            keys,
            all_keys,
            images: images.into_iter().zip(1..).collect(),
            namespaces,
            expressions: numbered
                .map(|(number, (text, expression))| {
                    (
                        text,
                        (format!("{EXPRESSION_LABEL_PREFIX}{number}"), expression),
                    )
                })
                .collect(),
        }
    }
}

impl Pseudonyms {
    /// Writes the redacted copy of one part of the recording, up to its last whole entry.
    pub fn write(&self, recording: impl Read, out: &mut dyn Write) -> Result<(), RedactionError> {
        let mut reader = Reader::new(recording);
        let mut header = None;
        while let Some(part) = next_whole_part(&mut reader)? {
            match (part, header.take()) {
                (RawPart::Segment(begun), _) => header = Some(begun),
                // A segment without an entry is none.
                (RawPart::Line(first), Some(begun)) => {
                    let mut segment = SegmentWriter::begin(&mut *out, &begun)?;
                    header = self.write_segment(first, &mut reader, &mut segment)?;
                }
                (RawPart::Line(_), None) => {}
            }
        }
        Ok(())
    }

    /// Writes the lines of one segment. Returns the header of the next one.
    fn write_segment(
        &self,
        first: Box<Line>,
        reader: &mut Reader<impl Read>,
        segment: &mut SegmentWriter<impl Write>,
    ) -> Result<Option<SegmentHeader>, RedactionError> {
        let mut next = Some(RawPart::Line(first));
        while let Some(RawPart::Line(line)) = next {
            segment.push_line(&Redacted::new(&with_policy(*line, self)?, self))?;
            if segment.pending_bytes() >= FLUSH_BYTES {
                segment.flush()?;
            }
            next = next_whole_part(reader)?;
        }
        segment.flush()?;
        Ok(match next {
            Some(RawPart::Segment(header)) => Some(header),
            _ => None,
        })
    }
}

/// Next part as it is stored; `None` from the first incomplete one on, as in a bundle.
fn next_whole_part(reader: &mut Reader<impl Read>) -> Result<Option<RawPart>, ReadError> {
    match reader.next_line() {
        Err(
            ReadError::Cut { .. }
            | ReadError::Damaged { .. }
            | ReadError::NotARecording
            | ReadError::Empty
            | ReadError::OtherFormat { .. },
        ) => Ok(None),
        part => part,
    }
}

/// The line with its policy redacted, if it has one.
fn with_policy(line: Line, names: &dyn PolicyNames) -> Result<Line, PolicyError> {
    Ok(match line {
        Line::Checkpoint(mut checkpoint) => {
            let policy = redacted(checkpoint.state.policy(), names)?;
            checkpoint.state = checkpoint.state.with_policy(policy);
            Line::Checkpoint(checkpoint)
        }
        Line::Input(NumberedInput {
            number,
            input: Input::PolicySet(mut set),
        }) => {
            set.policy = redacted(&set.policy, names)?;
            Line::Input(NumberedInput {
                number,
                input: Input::PolicySet(set),
            })
        }
        line => line,
    })
}

impl Names for NameCollector {
    fn name<'t>(&'t self, name: &'t str) -> Cow<'t, str> {
        let texts = &mut self.0.borrow_mut().texts;
        if !texts.contains(name) {
            texts.insert(name.into());
        }
        name.into()
    }

    fn key<'t>(&'t self, key: &'t str) -> Cow<'t, str> {
        if !self.0.borrow().all_keys.contains(key) {
            self.0.borrow_mut().all_keys.insert(key.into());
        }
        if order::is_known_key(key) && !self.0.borrow().keys.contains(key) {
            self.0.borrow_mut().keys.insert(key.into());
        }
        self.name(key)
    }

    fn image(&self, image: u64) -> u64 {
        self.0.borrow_mut().images.insert(image);
        image
    }

    fn pod(&self, traits: PodTraits) -> PodTraits {
        let namespaces = &mut self.0.borrow_mut().namespaces;
        if !namespaces.contains(&traits.namespace) {
            namespaces.insert(traits.namespace.clone());
        }
        traits
    }
}

impl PolicyNames for NameCollector {
    fn expression(&self, expression: &Expression) -> Option<String> {
        self.0
            .borrow_mut()
            .expressions
            .insert(expression.text().into(), expression.clone());
        None
    }

    fn namespace_pattern(&self, pattern: &str) -> Vec<String> {
        vec![pattern.into()]
    }

    fn resource_pattern(&self, pattern: &str) -> Vec<String> {
        vec![pattern.into()]
    }
}

impl Names for Pseudonyms {
    fn name<'t>(&'t self, name: &'t str) -> Cow<'t, str> {
        match self.names.get(name) {
            Some(pseudonym) => Cow::Borrowed(pseudonym),
            None if order::is_kept(name) || self.keys.contains(name) => Cow::Borrowed(name),
            None => Cow::Borrowed(UNKNOWN_NAME),
        }
    }

    /// The labels that stand for expressions are keys that were not seen.
    fn key<'t>(&'t self, key: &'t str) -> Cow<'t, str> {
        if order::is_known_key(key) {
            Cow::Borrowed(key)
        } else {
            self.name(key)
        }
    }

    fn image(&self, image: u64) -> u64 {
        self.images.get(&image).copied().unwrap_or_default()
    }

    fn pod(&self, mut traits: PodTraits) -> PodTraits {
        let pod = ExpressionPod::new(&traits);
        let matching = self
            .expressions
            .values()
            .filter(|(_, expression)| expression.holds_for(&pod) == Ok(true));
        let labels: Vec<String> = matching.map(|(label, _)| label.clone()).collect();
        drop(pod);
        traits
            .labels
            .extend(labels.into_iter().map(|label| (label, HOLDS.to_owned())));
        traits
    }
}

impl PolicyNames for Pseudonyms {
    fn expression(&self, expression: &Expression) -> Option<String> {
        // One that was not seen holds for no pod.
        let label = self
            .expressions
            .get(expression.text())
            .map(|(label, _)| label.clone());
        Some(label.unwrap_or_else(|| format!("{EXPRESSION_LABEL_PREFIX}{UNKNOWN_NAME}")))
    }

    /// Each pseudonym stays a pattern (`name*`), because an exact name would take precedence over other patterns.
    fn namespace_pattern(&self, pattern: &str) -> Vec<String> {
        let matching = self
            .namespaces
            .iter()
            .filter(|namespace| pattern_matches(pattern, namespace));
        matching
            .map(|namespace| format!("{}*", self.name(namespace)))
            .collect()
    }

    fn resource_pattern(&self, pattern: &str) -> Vec<String> {
        let matching = self
            .all_keys
            .iter()
            .filter(|resource| pattern_matches(pattern, resource));
        matching
            .map(|resource| self.key(resource).into_owned())
            .collect()
    }
}

#[cfg(test)]
mod tests;
