//! Whether a report is of the machine that has its node's name now.
//!
//! A machine with other GPUs may reuse a node name. Late reports of the old machine must not restore its GPUs, and reports of the
//! new machine must not be refused for long, because without them nothing is placed there. An agent's token names the Node
//! object that its pod was on when the token was issued. It may also name an earlier Node of the same machine, which has
//! registered again since, or a Node that the watch does not show yet, or none. Then nothing tells until no late report can come.

use super::auth::Sender;
use crate::ids::NodeName;
use crate::kubernetes::port::AgentNode;
use crate::scheduling::vocabulary::node::NodeIdentity;
use crate::units::{Millis, Moment};
use dashmap::DashMap;

/// How long after the first report under a Node reports of a machine that is gone may still come. Agents give one up after a
/// second, and a request's head has ten; a report counts as received with its head, at most 15 seconds before it is applied.
const MAX_LATE: Millis = Millis::seconds(30);

/// The Nodes of which reports came.
#[derive(Debug, Default)]
pub struct ReportOrigins {
    nodes: DashMap<NodeName, ReportedNode>,
}

#[derive(Debug)]
struct ReportedNode {
    node: NodeIdentity,
    /// When the first report under it came.
    since: Moment,
    /// Which had the name before.
    before: Option<NodeIdentity>,
    /// An agent's token has named it: what other agents report is of other machines.
    has_own_agent: bool,
}

impl ReportOrigins {
    /// Whether a report counts under `present`, the Node that has the name. `counted_under` had it when a report of the same boot
    /// of the agent counted last.
    pub fn is_present(
        &self,
        sender: &Sender,
        name: &NodeName,
        present: &NodeIdentity,
        counted_under: Option<&NodeIdentity>,
        received: Moment,
    ) -> bool {
        let first =
            || ReportedNode { node: present.clone(), since: received, before: None, has_own_agent: false };
        let mut reported = self.nodes.entry(name.clone()).or_insert_with(first);
        reported.follow(present, received);
        reported.takes(sender, counted_under, received)
    }

    /// In no order.
    pub fn names(&self) -> Vec<NodeName> {
        self.nodes.iter().map(|node| node.key().clone()).collect()
    }

    pub fn forget(&self, name: &NodeName) {
        self.nodes.remove(name);
    }
}

impl ReportedNode {
    fn follow(&mut self, present: &NodeIdentity, received: Moment) {
        if self.node.uid != present.uid {
            self.before = Some(self.node.clone());
            (self.since, self.has_own_agent) = (received, false);
        }
        // A Node may show its machine later.
        if self.node != *present {
            self.node = present.clone();
        }
    }

    fn takes(&mut self, sender: &Sender, counted_under: Option<&NodeIdentity>, received: Moment) -> bool {
        let is_certain = received >= self.since + MAX_LATE;
        let Sender::AgentOn(AgentNode { uid, .. }) = sender else {
            return is_certain || counted_under.is_none_or(|node| node.is_same_machine(&self.node));
        };
        let names = |node: &NodeIdentity| uid.as_ref() == Some(&node.uid);
        if names(&self.node) {
            self.has_own_agent = true;
            return true;
        }
        let has_registered_again =
            self.before.as_ref().is_some_and(|before| names(before) && before.is_same_machine(&self.node));
        has_registered_again || is_certain && !self.has_own_agent
    }
}
