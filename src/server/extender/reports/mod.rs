//! Receives agents' reports: what each node's agent measured on it.
//!
//! ```text
//!  head ─► auth ─► byte limit ─► body ─► each report: parse ─► own node? ─► validate ─► board (order) ─► apply
//! ```
//!
//! A report is taken as a whole or not at all, and each report of a batch by itself. Reports are ordered by (the agent's boot,
//! sequence number); one that is not newer than the known one is dropped. Times are this process' own: when the request
//! arrived, and how old its figures were then. A report changes state only from `apply` on; nothing here decides about a pod.

pub mod auth;
pub mod board;
mod bodies;
#[cfg(test)]
mod flip_tests;
mod origin;
#[cfg(test)]
mod origin_tests;
mod packed_text;
mod pod_warnings;
#[cfg(test)]
mod tests;
pub mod validate;

pub use auth::{AgentAuth, Sender, TokenGuard};
pub use board::Board;
pub use bodies::{ReportBodies, announced_bytes};
pub use validate::{Flaw, ReportError};

use super::Extender;
use super::request::BadRequest;
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};
use serde_json::value::RawValue;
use std::sync::Arc;
use stowage_report::NodeReport;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::ledger::{DeviceReportError, Ledger};
use stowage_scheduling::policy::TelemetryRules;
use stowage_scheduling::units::Moment;
use stowage_scheduling::verbs::observe::{DevicesReported, ReadingReported};
use stowage_scheduling::vocabulary::gpu::Device;
use stowage_scheduling::vocabulary::node::NodeIdentity;

/// Maximum reports in one batch. An agent sends one; batches are for clients that report for several nodes, such as a test.
const MAX_BATCH: usize = 1024;
/// Rejected reports of one batch that are explained one by one.
const MAX_EXPLAINED: usize = 100;

/// The result of each report of a body.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportsResult {
    pub accepted: usize,
    /// Not newer than the latest known report, and dropped.
    pub dropped: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedReport>,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct RefusedReport {
    /// Its index in the batch, from 0.
    pub report: usize,
    #[serde(flatten)]
    pub why: ReportError,
}

/// Takes the reports of one request. `received` is when its head arrived: however slowly its body arrives, its figures are not
/// younger.
pub fn reports(
    extender: &Extender,
    sender: &Sender,
    received: Moment,
    body: &[u8],
) -> Result<ReportsResult, BadRequest> {
    extender
        .state
        .metrics
        .report_bytes
        .inc_by(body.len() as u64);
    // The whole body is checked at once, which costs less than string by string.
    let body =
        std::str::from_utf8(body).map_err(|error| BadRequest::Malformed(error.to_string()))?;
    let mut result = ReportsResult::default();
    for (index, text) in split(body)?.into_iter().enumerate() {
        let outcome = match serde_json::from_str(text) {
            Ok(report) => take_report(extender, sender, received, report, text),
            Err(error) if !error.is_data() => return Err(BadRequest::Malformed(error.to_string())),
            Err(error) => Err(ReportError::Malformed(super::request::with_path::<
                NodeReport,
            >(
                text.as_bytes(), &error
            ))),
        };
        let label = result.record_outcome(index, outcome);
        extender
            .state
            .metrics
            .reports
            .with_label_values(&[label])
            .inc();
    }
    if extender.board.needs_node_check() {
        let ledger = extender.state.ledger_copy();
        remove_gone_nodes(&extender.board, &ledger);
    }
    result.into_answer()
}

impl ReportsResult {
    /// Counts the result of one report; returns its name.
    fn record_outcome(&mut self, index: usize, outcome: Result<(), ReportError>) -> &'static str {
        let Err(why) = outcome else {
            self.accepted += 1;
            return "accepted";
        };
        let code = why.code();
        match why {
            ReportError::Old { .. } | ReportError::EarlierBoot => self.dropped += 1,
            why if self.refused.len() < MAX_EXPLAINED => {
                self.refused.push(RefusedReport { report: index, why });
            }
            _ => {}
        }
        code
    }

    /// A single rejected report is the request's own error; of a batch the others still count.
    fn into_answer(mut self) -> Result<Self, BadRequest> {
        if self.accepted + self.dropped > 0 || self.refused.len() != 1 {
            return Ok(self);
        }
        self.refused
            .pop()
            .map_or(Ok(self), |refused| Err(refused.why.into()))
    }
}

impl From<ReportError> for BadRequest {
    fn from(error: ReportError) -> Self {
        let (code, message) = (error.code(), error.to_string());
        match error {
            ReportError::WrongNode { .. } => Self::Forbidden { code, message },
            _ => Self::Unprocessable { code, message },
        }
    }
}

impl Serialize for ReportError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("ReportError", 2)?;
        fields.serialize_field("code", self.code())?;
        fields.serialize_field("error", &self.to_string())?;
        fields.end()
    }
}

/// The reports in a body: the body itself, or each element if it is an array.
fn split(body: &str) -> Result<Vec<&str>, BadRequest> {
    if !body.trim_ascii_start().starts_with('[') {
        return Ok(vec![body]);
    }
    let batch: Vec<&RawValue> = super::request::parse(body.as_bytes())?;
    if batch.len() > MAX_BATCH {
        let message = format!(
            "the batch has {} reports; send at most {MAX_BATCH} at once",
            batch.len()
        );
        return Err(BadRequest::unprocessable("batch-too-long", message));
    }
    Ok(batch.into_iter().map(RawValue::get).collect())
}

fn take_report(
    extender: &Extender,
    sender: &Sender,
    received: Moment,
    report: NodeReport,
    text: &str,
) -> Result<(), ReportError> {
    if let Sender::AgentOn(node) = sender
        && node.name != report.node
    {
        return Err(ReportError::WrongNode {
            node: report.node,
            actual: node.name.clone(),
        });
    }
    let report = validate::check(report)?;
    extender.board.record(&report, text, received, |before| {
        let counted_under = apply(extender, sender, &report, received, before.counted_under)?;
        pod_warnings::record_findings(extender, before.findings, &report);
        pod_warnings::warn_of_unkept_limits(extender, before.unkept_limits, &report);
        Ok(counted_under)
    })
}

/// Applies a report that counts: it is complete, it is from its own node, and no later one of that node is known. If it is
/// rejected here it changes nothing in the ledger. `counted_under` is the Node that had the name when a report of the same boot
/// counted last; returns the one that has it now.
fn apply(
    extender: &Extender,
    sender: &Sender,
    report: &NodeReport,
    received: Moment,
    counted_under: Option<&NodeIdentity>,
) -> Result<Option<NodeIdentity>, ReportError> {
    let node = &report.node;
    let unknown = || ReportError::UnknownNode(node.clone());
    let (fresh, lost_after) = {
        let cluster = extender.state.cluster();
        let TelemetryRules {
            fresh, lost_after, ..
        } = cluster.ledger().policy().telemetry;
        (fresh, lost_after)
    };
    let reading = report.reading(received, fresh);
    let (before, present, ended_unasked) = {
        let mut cluster = extender.state.cluster();
        if !cluster.ledger().has_node(node) {
            return Err(unknown());
        }
        let present = cluster.ledger().node_identity(node).cloned();
        let origins = &extender.board.origins;
        let (now, wall) = (
            extender.state.now(),
            extender.state.clock.wall().as_second(),
        );
        let admits = |present| origins.admit(sender, node, present, counted_under, now, wall);
        if !present.as_ref().is_none_or(admits) {
            return Err(ReportError::ReplacedNode(node.clone()));
        }
        let before = devices_of(cluster.ledger(), node);
        // A report without GPUs keeps the known ones.
        let Some(devices) =
            validate::devices(report, lost_after).or_else(|| cluster.ledger().unread_devices(node))
        else {
            return Ok(present);
        };
        let are_all = validate::lists_all_gpus(report);
        let devices = match &before {
            Some(previous) if **previous == *devices => previous.clone(),
            _ => devices.into(),
        };
        let waiting = cluster
            .apply(DevicesReported {
                node: node.clone(),
                devices,
                are_all,
            })
            .map_err(|error| match error {
                DeviceReportError::UnknownNode => unknown(),
                DeviceReportError::TooMany(devices) => ReportError::Flawed {
                    node: node.clone(),
                    flaw: Flaw::TooManyGpus(devices),
                },
            })?;
        extender.state.metrics.gpus_delayed.inc_by(waiting as u64);
        let ended = reading.map(|mut reading| {
            // The ledger and the recorder keep the reading, and with its own names much of the report's memory.
            cluster.ledger().intern_names(node, &mut reading);
            cluster.apply(ReadingReported {
                node: node.clone(),
                reading: reading.into(),
            })
        });

        let is_other = |before: &Arc<[Device]>| {
            devices_of(cluster.ledger(), node).is_some_and(|now| !Arc::ptr_eq(before, &now))
        };
        (before.filter(is_other), present, ended.unwrap_or_default())
    };
    pod_warnings::warn_of_loans_ended_unasked(extender, node, ended_unasked);
    pod_warnings::warn_of_low_latency_limits(extender, node);
    if let Some(before) = before {
        pod_warnings::warn_of_lost_gpus(extender, &before, report, lost_after);
    }
    Ok(present)
}

/// The devices of a node. The list is the same allocation as long as nothing in it has changed.
fn devices_of(ledger: &Ledger, node: &NodeName) -> Option<Arc<[Device]>> {
    ledger.node(node).map(|node| node.devices.clone())
}

/// Removes nodes that are gone from the board, by a copy of the ledger. The ledger is not locked while an entry of the board
/// is: [`Board::record`] locks them in the other order.
pub fn remove_gone_nodes(board: &Board, ledger: &Ledger) {
    board.retain_nodes(|name| ledger.has_node(name));
}
