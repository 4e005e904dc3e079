//! Terms: a replica that acts has waited until nothing of another leader can land any more, and has listed everything since.

use super::*;

/// One replica's leadership, from a list of everything on.
#[derive(Clone, PartialEq)]
pub(crate) struct ActingTerm {
    client: String,
    epoch: String,
    term: u64,
    takeover: u64,
}

impl ActingTerm {
    /// The replica that acts.
    pub fn client(&self) -> &str {
        &self.client
    }
}

impl FaultyCluster {
    pub(super) fn acting_term(&self) -> Option<ActingTerm> {
        let replica = self.replicas[self.acting_replica()?].as_ref()?;
        let leadership = &replica.state.leadership;
        let epoch = leadership.epoch()?.to_string();
        Some(ActingTerm {
            client: replica.client.clone(),
            epoch,
            term: leadership.list_generation(),
            takeover: leadership.takeover(),
        })
    }

    /// Which replica acts now.
    pub(super) fn record_term(&mut self) {
        self.last_acting_term = self.acting_term();
    }

    /// Whether a replica acts that did not at the last look, or has listed everything since.
    pub(super) fn is_new_term(&self) -> bool {
        let acts = self.acting_term();
        acts.is_some() && acts != self.last_acting_term
    }

    /// Whether what is seen for the first time at this look, and was written in this epoch, landed while another leader acted. It
    /// was not in that leader's lists if the leader acted at the last look, too.
    pub(super) fn committed_in_another_term(&self, epoch: Option<&str>) -> bool {
        let acts = self
            .acting_term()
            .filter(|acts| self.last_acting_term.as_ref() == Some(acts));
        acts.is_some_and(|acts| epoch.is_some_and(|epoch| epoch != acts.epoch))
    }

    /// Whether the leader that wrote in this epoch acts now.
    pub(super) fn acts_in_term(&self, epoch: Option<&str>) -> bool {
        let acts = self.acting_term();
        acts.is_some_and(|acts| epoch == Some(&*acts.epoch))
    }

    /// Only what a proxy delayed lands so late.
    pub(super) fn check_commit(&mut self, what: &str) {
        self.tally.late_commits += 1;
        let what = format!("{what} landed while another leader acted");
        if self.has_proxy {
            self.log(what)
        } else {
            self.fail(what)
        }
    }
}
