//! Whether a report is of the machine that has its node's name now.
//!
//! A machine with other GPUs may reuse a node name. Late reports of the old machine must not restore its GPUs, and reports of the
//! new machine must not be refused for long, because without them nothing is placed there. An agent's token names the Node
//! object that had the name when the token was issued. It may name an earlier Node of the same machine, which has registered again
//! since, or a Node that the watch does not show yet, or none. Then the replica waits until no late report can come.

use super::auth::Sender;
use dashmap::DashMap;
use stowage_kubernetes_objects::port::AgentNode;
use stowage_scheduling::ids::NodeName;
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::vocabulary::node::NodeIdentity;

/// How long reports of an agent that has ended may still come. Agents give one up after a second, and its head has ten to arrive.
pub(crate) const MAX_REPORT_DELAY: Millis = Millis::seconds(30);
/// Seconds of a Node's age after which it has replaced no machine within [`MAX_REPORT_DELAY`], even if the clock is some way off.
const SETTLED_NODE_SECONDS: i64 = 120;

/// The Node objects under which reports were received.
#[derive(Debug, Default)]
pub struct ReportOrigins {
    nodes: DashMap<NodeName, ReportedNode>,
}

#[derive(Debug)]
struct ReportedNode {
    node: NodeIdentity,
    /// When the first report under it came.
    since: Moment,
    /// The Node that had the name before this one.
    previous: Option<NodeIdentity>,
    /// An agent has reported whose token names it: what others report is of other machines.
    has_own_agent: bool,
}

impl ReportOrigins {
    /// Whether a report counts under `present`, the Node that has the name, and records what it shows. `counted_under` had the name
    /// when a report of the same boot of the agent counted last. `wall` is in seconds since 1970.
    pub fn admit(
        &self,
        sender: &Sender,
        name: &NodeName,
        present: &NodeIdentity,
        counted_under: Option<&NodeIdentity>,
        now: Moment,
        wall: i64,
    ) -> bool {
        let new_entry = || ReportedNode {
            node: present.clone(),
            since: now,
            previous: None,
            has_own_agent: false,
        };
        let mut reported = self.nodes.entry(name.clone()).or_insert_with(new_entry);
        reported.update_node(present, now);
        let is_old = present
            .created
            .is_some_and(|created| created + SETTLED_NODE_SECONDS <= wall);
        let is_past_late_reports = is_old || reported.since + MAX_REPORT_DELAY <= now;
        match sender {
            Sender::AgentOn(agent) => reported.admit_agent(agent, is_past_late_reports),
            Sender::Anyone => {
                is_past_late_reports
                    || counted_under.is_none_or(|node| node.is_same_machine(present))
            }
        }
    }

    /// The nodes with an entry, in no order.
    pub fn names(&self) -> Vec<NodeName> {
        self.nodes.iter().map(|node| node.key().clone()).collect()
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn remove(&self, name: &NodeName) {
        self.nodes.remove(name);
    }
}

impl ReportedNode {
    fn update_node(&mut self, present: &NodeIdentity, now: Moment) {
        if self.node.uid != present.uid {
            self.previous = Some(self.node.clone());
            (self.since, self.has_own_agent) = (now, false);
        }
        // A Node may show its machine later.
        if self.node != *present {
            self.node = present.clone();
        }
    }

    fn admit_agent(&mut self, agent: &AgentNode, is_past_late_reports: bool) -> bool {
        let before = self
            .previous
            .as_ref()
            .filter(|before| agent.uid.as_ref() == Some(&before.uid));
        // The API server takes the Node from a cache: a token of the present machine may name the Node before.
        let is_issued_since = agent
            .issued
            .zip(self.node.created)
            .map(|(issued, created)| created <= issued);
        if agent.uid.as_ref() == Some(&self.node.uid)
            || before.is_some() && is_issued_since == Some(true)
        {
            self.has_own_agent = true;
            return true;
        }
        match before {
            _ if self.has_own_agent => false,
            Some(before) if before.is_same_machine(&self.node) => true,
            Some(before) if before.machine.is_some() && self.node.machine.is_some() => {
                is_issued_since.is_none() && is_past_late_reports
            }
            _ => is_past_late_reports,
        }
    }
}
