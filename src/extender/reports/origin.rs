//! The machine that an agent's reports belong to: the one that had the Node's name when the first report arrived or, if the agent
//! was faster than the watch of nodes, the next one.
//!
//! A machine with other GPUs may reuse a node name. Late reports of the old machine must not restore its GPUs, and reports of the
//! new machine must not be refused for long, because without them nothing is placed there. A report does not name its Node
//! object, so the machine is derived from the arrival times, and from the GPUs in the first report.

use crate::scheduling::vocabulary::gpu::{Device, Health};
use crate::scheduling::vocabulary::node::NodeIdentity;
use crate::units::{Millis, Moment};

/// How long an agent may be ahead of the watch that shows its Node. A watch whose connection died is noticed within 75 seconds.
const MAX_AHEAD: Millis = Millis::seconds(120);
/// How long reports of an agent that has ended may still come. Agents give one up after a second, and a request's head has ten.
const MAX_LATE: Millis = Millis::seconds(30);

/// The origin of the reports of one boot of an agent, as far as is known.
#[derive(Debug, Clone, Default)]
pub struct ReportOrigin {
    /// The Node object that had the name.
    machine: Option<NodeIdentity>,
    ahead: Option<PossiblyAhead>,
    /// When the first of its reports came after another machine had got the name.
    outlived: Option<Moment>,
}

/// The agent may be on the machine that comes under the name, which is not known yet.
#[derive(Debug, Clone, Copy)]
struct PossiblyAhead {
    until: Moment,
    /// Agents had reported other GPUs of the machine that has the name. Otherwise nothing tells whether it is ahead.
    has_other_gpus: bool,
}

impl ReportOrigin {
    /// Of an agent's first report. `known` are the node's GPUs before it, `reported` those in it, if they could be read.
    pub fn of_first(
        machine: Option<NodeIdentity>,
        known: &[Device],
        reported: Option<&[Device]>,
        received: Moment,
    ) -> Self {
        // Lost ones may be of a machine before this one.
        let is_of_agent = |known: &&Device| known.health != Health::Lost && known.uuid.index().is_none();
        let mut known = known.iter().filter(is_of_agent).peekable();
        let reported = reported.unwrap_or_default();
        let has_other_gpus = known.peek().is_some() && !reported.is_empty();
        let is_there = known.any(|known| reported.iter().any(|device| device.uuid == known.uuid));
        let ahead = PossiblyAhead { until: received + MAX_AHEAD, has_other_gpus };
        Self { machine, ahead: (!is_there).then_some(ahead), outlived: None }
    }

    /// Of a later report, which comes while `machine` has the name. `None` if its agent was on a machine that is gone, as far as
    /// is known yet.
    pub fn of_next(&mut self, machine: Option<NodeIdentity>, received: Moment) -> Option<Self> {
        let is_replaced = self
            .machine
            .as_ref()
            .zip(machine.as_ref())
            .is_some_and(|(known, now)| !known.is_same_machine(now));
        if is_replaced {
            return self.was_ahead(received).then(|| Self { machine, ..Self::default() });
        }
        let ahead = self.ahead.filter(|ahead| received < ahead.until);
        Some(Self { machine, ahead, outlived: None })
    }

    /// Whether it is on the machine that has got the name since. If nothing else tells, it is if it reports for longer than one
    /// that is gone could.
    fn was_ahead(&mut self, received: Moment) -> bool {
        let Some(ahead) = self.ahead else { return false };
        let outlived = *self.outlived.get_or_insert(received);
        outlived < ahead.until && (ahead.has_other_gpus || received >= outlived + MAX_LATE)
    }
}
