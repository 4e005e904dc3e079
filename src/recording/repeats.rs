//! Reports that say what the one before of their node said, or differ from it in figures: most of what comes in. Only their times
//! and the differences are kept.

use super::answer::Answer;
use super::entry::{Checkpoint, Entry, NumberedInput};
use super::figures::{self, Figures};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::Input;
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::vocabulary::node_reading::NodeReading;

/// Line of a segment: an entry, with reports shortened.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    Checkpoint(Box<Checkpoint>),
    Clock(Moment),
    Input(NumberedInput),
    Answer(Answer),
    /// Report of the node's devices, unchanged.
    SameDevices {
        n: u64,
        node: NodeName,
    },
    /// Report of the node's reading, unchanged but for these times.
    SameReading {
        n: u64,
        node: NodeName,
        sampled: Moment,
        #[serde(rename = "seen")]
        observed_at: Vec<Moment>,
    },
    /// Report of the node's reading, with these differences of its figures.
    ReadingDiffers {
        n: u64,
        node: NodeName,
        by: Vec<i64>,
    },
}

/// Latest report of each node since the segment began.
#[derive(Debug, Default)]
pub(crate) struct LatestReports {
    devices: FxHashMap<NodeName, DevicesReported>,
    readings: FxHashMap<NodeName, LatestReading>,
}

/// Latest reading of a node: its shape, and its figures apart.
#[derive(Debug)]
struct LatestReading {
    /// A reading with the right names; its figures may be older.
    shape: Arc<NodeReading>,
    /// `None` if a figure is too large to take differences of.
    figures: Option<Figures>,
}

/// Error: a line repeats a report, or differs from one, that is not in its segment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a report of node {0} repeats one that is not in its segment")]
pub(crate) struct MissingEarlierReport(NodeName);

impl LatestReports {
    pub fn shorten(&mut self, entry: Entry) -> Line {
        let NumberedInput { number: n, input } = match entry {
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
            Input::ReadingReported(report) => match self.take_differences(&report) {
                Some(by) if by.len() <= figures::time_count(&report.reading) => {
                    let observed_at = report
                        .reading
                        .engines
                        .iter()
                        .map(|engine| engine.observed_at)
                        .collect();
                    Line::SameReading {
                        n,
                        node: report.node,
                        sampled: report.reading.sampled,
                        observed_at,
                    }
                }
                Some(by) => Line::ReadingDiffers {
                    n,
                    node: report.node,
                    by,
                },
                None => {
                    let input = Input::ReadingReported(report);
                    self.record_report(&input);
                    Line::Input(NumberedInput { number: n, input })
                }
            },
            input => {
                self.record_report(&input);
                Line::Input(NumberedInput { number: n, input })
            }
        }
    }

    pub fn restore(&mut self, line: Line) -> Result<Entry, MissingEarlierReport> {
        let (number, input) = match line {
            Line::Checkpoint(checkpoint) => return Ok(Entry::Checkpoint(checkpoint)),
            Line::Clock(now) => return Ok(Entry::Clock(now)),
            Line::Answer(answer) => return Ok(Entry::Answer(answer)),
            Line::Input(numbered) => {
                self.record_report(&numbered.input);
                return Ok(Entry::Input(numbered));
            }
            Line::SameDevices { n, node } => {
                let report = self
                    .devices
                    .get(&node)
                    .cloned()
                    .ok_or(MissingEarlierReport(node))?;
                (n, report.into())
            }
            Line::SameReading {
                n,
                node,
                sampled,
                observed_at,
            } => {
                let mut reading = self
                    .latest_reading(&node)
                    .ok_or(MissingEarlierReport(node.clone()))?;
                if reading.engines.len() != observed_at.len() {
                    return Err(MissingEarlierReport(node));
                }
                reading.sampled = sampled;
                reading
                    .engines
                    .iter_mut()
                    .zip(observed_at)
                    .for_each(|(engine, observed_at)| engine.observed_at = observed_at);
                self.record_reading(&node, &reading);
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
                    .apply_differences(&node, &by)
                    .ok_or(MissingEarlierReport(node.clone()))?;
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
        Ok(Entry::Input(NumberedInput { number, input }))
    }

    fn record_report(&mut self, input: &Input) {
        match input {
            Input::DevicesReported(report) => {
                self.devices
                    .insert(report.node.clone(), DevicesReported::clone(report));
            }
            Input::ReadingReported(report) => {
                let latest = LatestReading {
                    figures: Figures::from_reading(&report.reading),
                    shape: report.reading.clone(),
                };
                self.readings.insert(report.node.clone(), latest);
            }
            _ => {}
        }
    }

    /// Differences of the reading's figures from the latest ones of its node, which it replaces; `None` if it differs in anything
    /// else.
    fn take_differences(&mut self, report: &ReadingReported) -> Option<Vec<i64>> {
        let latest_reading = self.readings.get_mut(&report.node)?;
        let latest = latest_reading
            .figures
            .as_mut()
            .filter(|_| figures::have_same_shape(&latest_reading.shape, &report.reading))?;
        let figures = Figures::from_reading(&report.reading)?;
        let by = figures.differences_from(latest);
        *latest = figures;
        Some(by)
    }

    /// Latest reading of a node.
    fn latest_reading(&self, node: &NodeName) -> Option<NodeReading> {
        let latest = self.readings.get(node)?;
        let mut reading = NodeReading::clone(&latest.shape);
        if let Some(figures) = &latest.figures {
            figures.write_into(&mut reading)?;
        }
        Some(reading)
    }

    /// The latest reading of a node with differences added, which replaces it.
    fn apply_differences(&mut self, node: &NodeName, by: &[i64]) -> Option<NodeReading> {
        let latest = self.readings.get_mut(node)?;
        let figures = latest.figures.as_ref()?.with_differences(by)?;
        let mut reading = NodeReading::clone(&latest.shape);
        figures.write_into(&mut reading)?;
        latest.figures = Some(figures);
        Some(reading)
    }

    /// Replaces the figures of the latest reading of a node by those of a reading of the same shape.
    fn record_reading(&mut self, node: &NodeName, reading: &NodeReading) {
        self.readings
            .get_mut(node)
            .into_iter()
            .for_each(|latest| latest.figures = Figures::from_reading(reading));
    }
}
