//! Pods that ask to wake, and loans that end, as the ledger tells the planner of them.

use super::super::{NodeState, ResidentPod};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::ledger::Ledger;
use std::sync::Arc;

/// A pod that is to wake, or may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WakeStatus {
    pub uid: PodUid,
    pub key: PodKey,
    /// What its annotation says.
    pub request: Option<Arc<str>>,
    /// The request that its condition answers.
    pub told: Option<Arc<str>>,
    /// Its whole grant is free: no borrower has any of it, and none will.
    pub is_wakeable: bool,
    /// Borrowers that are still on its GPUs.
    pub borrowers: usize,
}

impl Ledger {
    /// The pods that have not been told what their request, or the end of it, asks for, in order of node and UID.
    pub fn open_wakes(&self) -> Vec<WakeStatus> {
        let nodes = self
            .node_states
            .with_loans()
            .filter_map(|name| self.node_states.get(name));
        nodes
            .flat_map(|node_state| {
                node_state
                    .wakes()
                    .map(move |resident| (node_state, resident))
            })
            .filter_map(|(node_state, resident)| self.wake_status_at(node_state, resident))
            .collect()
    }

    /// How far a pod is that is to wake, or may; `None` for any other.
    pub fn wake_status(&self, uid: &PodUid) -> Option<WakeStatus> {
        let node_state = self.node_states.get(self.pod_states.get(uid)?.node()?)?;
        let resident = node_state
            .resident_of(uid)
            .filter(|resident| resident.is_waking)?;
        self.wake_status_at(node_state, resident)
    }

    /// Whether a bound pod's engine that sleeps may wake now: nothing of its grant is lent, and nothing will be. A pod of a class
    /// that lends has to ask, and to be told. `None` for a pod that is not bound.
    pub(crate) fn may_wake(&self, uid: &PodUid) -> Option<bool> {
        let pod_state = self.pod_states.get(uid)?;
        let wake = &pod_state.bound()?.wake;
        let resident = self.node_states.get(pod_state.node()?)?.resident_of(uid)?;
        Some(
            !(resident.lends || resident.is_waking)
                || wake.request.is_some() && wake.request == wake.told,
        )
    }

    fn wake_status_at(&self, node_state: &NodeState, resident: &ResidentPod) -> Option<WakeStatus> {
        let pod_state = self.pod_states.get(&resident.uid)?;
        let wake = &pod_state.bound()?.wake;
        Some(WakeStatus {
            uid: resident.uid.clone(),
            key: pod_state.key.clone(),
            request: wake.request.clone(),
            told: wake.told.clone(),
            is_wakeable: node_state.is_wakeable(
                resident,
                self.policy.planning.lending.margin,
                self.now,
            ),
            borrowers: node_state.borrowers_beside(resident),
        })
    }

    /// These pods get back what they lent before they ask for it, or need not any more.
    pub(crate) fn set_recalled(&mut self, pods: &[PodUid], is_recalled: bool) {
        for uid in pods {
            let Some(name) = self
                .pod_states
                .get(uid)
                .and_then(|pod_state| pod_state.node())
                .cloned()
            else {
                continue;
            };
            let node_state = self.node_states.get_mut(&name);
            if node_state.is_some_and(|node_state| node_state.set_recalled(uid, is_recalled)) {
                self.node_states
                    .refresh_view(&name, &self.pod_states, &self.policy);
            }
        }
    }

    /// Nodes with engines that sleep and lend, or may come to, in order of name.
    pub(crate) fn nodes_with_lenders(&self) -> impl Iterator<Item = &NodeState> {
        self.node_states
            .with_lenders()
            .filter_map(|name| self.node_states.existing(name))
    }

    /// Nodes with pods that borrow, or that are to wake, in order of name.
    pub(crate) fn nodes_with_loans(&self) -> impl Iterator<Item = (&NodeName, &NodeState)> {
        self.node_states
            .with_loans()
            .filter_map(|name| Some((name, self.node_states.get(name)?)))
    }
}
