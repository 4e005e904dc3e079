//! Reports that say what the one before of their node said: most of them, and most of what comes in. Only their times are kept.

use super::answer::Answer;
use super::entry::{Checkpoint, Entry, Numbered};
use crate::ids::NodeName;
use crate::scheduling::verbs::Input;
use crate::scheduling::verbs::observe::{DevicesReported, ReadingReported};
use crate::scheduling::vocabulary::gpu::Device;
use crate::scheduling::vocabulary::node_reading::NodeReading;
use crate::units::Moment;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

/// An entry as a segment has it, a line each.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    Checkpoint(Box<Checkpoint>),
    Clock(Moment),
    Input(Numbered),
    Answer(Answer),
    /// The node's devices were reported again.
    SameDevices {
        n: u64,
        node: NodeName,
    },
    /// The node's reading was reported again, measured at these times.
    SameReading {
        n: u64,
        node: NodeName,
        sampled: Moment,
        seen: Vec<Moment>,
    },
}

/// The latest report of each node, since the segment began.
#[derive(Debug, Default)]
pub struct LatestReports {
    devices: FxHashMap<NodeName, Vec<Device>>,
    readings: FxHashMap<NodeName, NodeReading>,
}

/// A line says that a report is unchanged, and there is none before it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a report of node {0} repeats one that is not in its segment")]
pub struct NothingToRepeat(NodeName);

impl LatestReports {
    pub fn shorten(&mut self, entry: Entry) -> Line {
        let Numbered { number: n, input } = match entry {
            Entry::Checkpoint(checkpoint) => return Line::Checkpoint(checkpoint),
            Entry::Clock(now) => return Line::Clock(now),
            Entry::Answer(answer) => return Line::Answer(answer),
            Entry::Input(numbered) => numbered,
        };
        match input {
            Input::DevicesReported(report) if self.devices.get(&report.node) == Some(&report.devices) => {
                Line::SameDevices { n, node: report.node }
            }
            Input::ReadingReported(report) if self.repeats(&report) => {
                let seen = report.reading.engines.iter().map(|engine| engine.seen).collect();
                Line::SameReading { n, node: report.node, sampled: report.reading.sampled, seen }
            }
            input => {
                self.note(&input);
                Line::Input(Numbered { number: n, input })
            }
        }
    }

    pub fn restore(&mut self, line: Line) -> Result<Entry, NothingToRepeat> {
        let (number, input) = match line {
            Line::Checkpoint(checkpoint) => return Ok(Entry::Checkpoint(checkpoint)),
            Line::Clock(now) => return Ok(Entry::Clock(now)),
            Line::Answer(answer) => return Ok(Entry::Answer(answer)),
            Line::Input(numbered) => {
                self.note(&numbered.input);
                return Ok(Entry::Input(numbered));
            }
            Line::SameDevices { n, node } => {
                let devices = self.devices.get(&node).cloned().ok_or(NothingToRepeat(node.clone()))?;
                (n, DevicesReported { node, devices }.into())
            }
            Line::SameReading { n, node, sampled, seen } => {
                let known = self.readings.get(&node).filter(|known| known.engines.len() == seen.len());
                let mut reading = known.cloned().ok_or(NothingToRepeat(node.clone()))?;
                reading.sampled = sampled;
                reading.engines.iter_mut().zip(seen).for_each(|(engine, seen)| engine.seen = seen);
                (n, ReadingReported { node, reading }.into())
            }
        };
        Ok(Entry::Input(Numbered { number, input }))
    }

    fn note(&mut self, input: &Input) {
        match input {
            Input::DevicesReported(report) => {
                self.devices.insert(report.node.clone(), report.devices.clone());
            }
            Input::ReadingReported(report) => {
                self.readings.insert(report.node.clone(), report.reading.clone());
            }
            _ => {}
        }
    }

    /// Whether the reading differs from the latest one of its node in nothing but times.
    fn repeats(&mut self, report: &ReadingReported) -> bool {
        let (reading, Some(known)) = (&report.reading, self.readings.get_mut(&report.node)) else {
            return false;
        };
        if known.engines.len() != reading.engines.len() {
            return false;
        }
        // The latest one's times are not needed any more.
        known.sampled = reading.sampled;
        known.engines.iter_mut().zip(&reading.engines).for_each(|(known, engine)| known.seen = engine.seen);
        known == reading
    }
}
