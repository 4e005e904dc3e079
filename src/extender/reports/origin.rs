//! Whether a report is of the machine that has its node's name now.
//!
//! A machine with other GPUs may reuse a node name. Late reports of the old machine must not restore its GPUs, and reports of the
//! new machine must not be refused for long, because without them nothing is placed there. An agent's token names the Node
//! object that its pod was on when the token was issued. It may name an earlier Node of the same machine, which has registered
//! again since, and it may name a Node that the watch does not show yet. If nothing tells, only time does.

use crate::scheduling::vocabulary::node::NodeIdentity;
use crate::units::Millis;

/// How long reports of a machine may still come after another has got its name. Agents give one up after a second, and a
/// request's head has ten.
pub const MAX_LATE: Millis = Millis::seconds(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportOrigin {
    /// The machine that has the name.
    Present,
    /// A machine that had it before.
    Earlier,
    /// Either, or a machine that comes.
    Unknown,
}

impl ReportOrigin {
    /// `token` is the UID of the Node that the sender's token names, and `known` had the name when a report of the same boot of
    /// the agent counted last.
    pub fn of(token: Option<&str>, known: Option<&NodeIdentity>, now: &NodeIdentity) -> Self {
        let names = |node: &NodeIdentity| token == Some(&*node.uid);
        match known {
            _ if names(now) => Self::Present,
            Some(known) if known.is_same_machine(now) => Self::Present,
            Some(known) if names(known) && known.machine.is_some() && now.machine.is_some() => Self::Earlier,
            // Clients on loopback have no token.
            None if token.is_none() => Self::Present,
            _ => Self::Unknown,
        }
    }
}
