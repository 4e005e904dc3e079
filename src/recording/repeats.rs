//! Reports that say what the one before of their node said, or differ from it in figures: most of what comes in. Only their times
//! and the differences are kept.

use super::answer::Answer;
use super::entry::{Checkpoint, Entry, Numbered};
use super::figures::{self, Figures};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::Input;
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::vocabulary::node_reading::NodeReading;

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
    /// Some figures of the node's reading are others, by so much each.
    ReadingDiffers {
        n: u64,
        node: NodeName,
        by: Vec<i64>,
    },
}

/// The latest report of each node, since the segment began.
#[derive(Debug, Default)]
pub(crate) struct LatestReports {
    devices: FxHashMap<NodeName, DevicesReported>,
    readings: FxHashMap<NodeName, KnownReading>,
}

/// A reading of which only the figures change.
#[derive(Debug)]
struct KnownReading {
    /// Its figures may be older ones.
    shape: Arc<NodeReading>,
    /// `None` if they are no numbers to take differences of.
    figures: Option<Figures>,
}

/// A line says that a report is unchanged, or by how much it differs, and there is none before it that it could follow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a report of node {0} repeats one that is not in its segment")]
pub(crate) struct NothingToRepeat(NodeName);

impl LatestReports {
    pub fn shorten(&mut self, entry: Entry) -> Line {
        let Numbered { number: n, input } = match entry {
            Entry::Checkpoint(checkpoint) => return Line::Checkpoint(checkpoint),
            Entry::Clock(now) => return Line::Clock(now),
            Entry::Answer(answer) => return Line::Answer(answer),
            Entry::Input(numbered) => numbered,
        };
        match input {
            Input::DevicesReported(report) if self.devices.get(&report.node) == Some(&report) => {
                Line::SameDevices {
                    n,
                    node: report.node,
                }
            }
            Input::ReadingReported(report) => match self.difference(&report) {
                Some(by) if by.len() <= figures::times(&report.reading) => {
                    let seen = report
                        .reading
                        .engines
                        .iter()
                        .map(|engine| engine.seen)
                        .collect();
                    Line::SameReading {
                        n,
                        node: report.node,
                        sampled: report.reading.sampled,
                        seen,
                    }
                }
                Some(by) => Line::ReadingDiffers {
                    n,
                    node: report.node,
                    by,
                },
                None => {
                    let input = Input::ReadingReported(report);
                    self.note(&input);
                    Line::Input(Numbered { number: n, input })
                }
            },
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
                let report = self
                    .devices
                    .get(&node)
                    .cloned()
                    .ok_or(NothingToRepeat(node))?;
                (n, report.into())
            }
            Line::SameReading {
                n,
                node,
                sampled,
                seen,
            } => {
                let mut reading = self.latest(&node).ok_or(NothingToRepeat(node.clone()))?;
                if reading.engines.len() != seen.len() {
                    return Err(NothingToRepeat(node));
                }
                reading.sampled = sampled;
                reading
                    .engines
                    .iter_mut()
                    .zip(seen)
                    .for_each(|(engine, seen)| engine.seen = seen);
                self.note_reading(&node, &reading);
                (
                    n,
                    ReadingReported {
                        node,
                        reading: reading.into(),
                    }
                    .into(),
                )
            }
            Line::ReadingDiffers { n, node, by } => {
                let reading = self
                    .after(&node, &by)
                    .ok_or(NothingToRepeat(node.clone()))?;
                (
                    n,
                    ReadingReported {
                        node,
                        reading: reading.into(),
                    }
                    .into(),
                )
            }
        };
        Ok(Entry::Input(Numbered { number, input }))
    }

    fn note(&mut self, input: &Input) {
        match input {
            Input::DevicesReported(report) => {
                self.devices
                    .insert(report.node.clone(), DevicesReported::clone(report));
            }
            Input::ReadingReported(report) => {
                let known = KnownReading {
                    figures: Figures::of(&report.reading),
                    shape: report.reading.clone(),
                };
                self.readings.insert(report.node.clone(), known);
            }
            _ => {}
        }
    }

    /// By how much the reading's figures differ from the latest ones of its node, which they are from here on; `None` if it
    /// differs in anything else.
    fn difference(&mut self, report: &ReadingReported) -> Option<Vec<i64>> {
        let known = self.readings.get_mut(&report.node)?;
        let latest = known
            .figures
            .as_mut()
            .filter(|_| figures::have_one_shape(&known.shape, &report.reading))?;
        let figures = Figures::of(&report.reading)?;
        let by = figures.since(latest);
        *latest = figures;
        Some(by)
    }

    /// The latest reading of a node.
    fn latest(&self, node: &NodeName) -> Option<NodeReading> {
        let known = self.readings.get(node)?;
        let mut reading = NodeReading::clone(&known.shape);
        if let Some(figures) = &known.figures {
            figures.put_into(&mut reading)?;
        }
        Some(reading)
    }

    /// The reading that differs so from the latest one of its node, which it is from here on.
    fn after(&mut self, node: &NodeName, by: &[i64]) -> Option<NodeReading> {
        let known = self.readings.get_mut(node)?;
        let figures = known.figures.as_ref()?.after(by)?;
        let mut reading = NodeReading::clone(&known.shape);
        figures.put_into(&mut reading)?;
        known.figures = Some(figures);
        Some(reading)
    }

    /// The latest reading of a node is this one, of the same shape.
    fn note_reading(&mut self, node: &NodeName, reading: &NodeReading) {
        self.readings
            .get_mut(node)
            .into_iter()
            .for_each(|known| known.figures = Figures::of(reading));
    }
}
