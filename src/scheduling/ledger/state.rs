//! The whole state of a ledger as one value, to be stored and loaded again.
//!
//! Stored is what the ledger cannot derive. Deadlines, groups, sums, aging, counts and the snapshot follow from that and are made
//! again, so a stored state cannot contradict itself. A ledger that is loaded answers everything as the one that was exported.

use super::disruption_budgets::DisruptionBudgets;
use super::evictions::OwnerEvictions;
use super::evictions::RecentEvictions;
use super::expected_work::ModelWork;
use super::node_states::{NodeStates, StoredNodes};
use super::overuse::OverusingPods;
use super::packing::PackingState;
use super::pod_states::PlacelessMembers;
use super::pod_states::PodStates;
use super::pod_states::SharedParts;
use super::reservations::LeaderRecord;
use super::resource_slices::ResourceSlices;
use super::start_times::StartTimes;
use super::waiting_pods::WaitingPods;
use super::{Ledger, PodState};
use crate::ids::{NodeName, PodUid};
use crate::policy::{NamespaceLabels, Policy};
use crate::units::Moment;
use crate::vocabulary::disruption_info::PlacelessMember;
use crate::vocabulary::is_default;
use crate::vocabulary::placement::Reservation;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Everything a ledger knows, except for its policy. Pods and nodes are shared with the ledger: an export is cheap.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LedgerState {
    /// The version of the policy by which pods and nodes are classified.
    policy_version: u64,
    #[serde(default)]
    namespaces: Arc<NamespaceLabels>,
    now: Moment,
    pods: BTreeMap<PodUid, Arc<PodState>>,
    nodes: StoredNodes,
    waiting_pods: WaitingPods,
    evictions: RecentEvictions,
    owner_evictions: Arc<OwnerEvictions>,
    budgets: DisruptionBudgets,
    packing: PackingState,
    start_times: StartTimes,
    #[serde(default, skip_serializing_if = "is_default")]
    model_work: ModelWork,
    origin: LeaderRecord,
    #[serde(default, skip_serializing_if = "is_default")]
    shown_reservations: Arc<BTreeMap<PodUid, Reservation>>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    showing_reservations: BTreeSet<PodUid>,
    slices: Arc<ResourceSlices>,
    #[serde(default)]
    overuse: OverusingPods,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    showing_evictions: BTreeSet<PodUid>,
    #[serde(default, skip_serializing_if = "is_default")]
    placeless_members: Arc<BTreeMap<PodUid, PlacelessMember>>,
}

/// Why a stored state is not loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    #[error("the state is of version {stored} of the policy, which has version {given}")]
    OtherPolicy { stored: u64, given: u64 },
    #[error("pod {pod} is of a class that the policy does not have")]
    UnknownClass { pod: PodUid },
    #[error("pod {pod} has something on node {node}, which is not in the state")]
    UnknownNode { pod: PodUid, node: NodeName },
    #[error("pod {pod} has a soft reservation of more GPUs than node {node} has")]
    UnknownGpu { pod: PodUid, node: NodeName },
    #[error("pod {pod} was refused by other nodes than the state has")]
    UnknownNodeSet { pod: PodUid },
}

impl Ledger {
    /// Everything the ledger knows, except for its policy.
    pub(crate) fn export(&self) -> LedgerState {
        LedgerState {
            policy_version: self.policy.version,
            namespaces: self.namespaces.clone(),
            now: self.now,
            pods: self.pod_states.export(),
            nodes: self.node_states.export(),
            waiting_pods: self.waiting_pods.clone(),
            evictions: self.evictions.clone(),
            owner_evictions: self.owner_evictions.clone(),
            budgets: self.budgets.clone(),
            packing: self.packing.clone(),
            start_times: self.start_times.clone(),
            model_work: self.model_work.clone(),
            origin: self.leader_record.clone(),
            shown_reservations: self.observed_reservations.clone(),
            showing_reservations: self.pods_with_reservation_condition.clone(),
            slices: self.slices.clone(),
            overuse: self.overuse.clone(),
            showing_evictions: self.pods_with_eviction_condition.clone(),
            placeless_members: self.placeless_members.export(),
        }
    }

    /// The ledger that was exported under this policy.
    pub(crate) fn load(policy: Arc<Policy>, state: LedgerState) -> Result<Self, LoadError> {
        state.check_references(&policy)?;
        // What its selectors say of namespaces is not stored with it.
        let policy = Arc::new(Policy::clone(&policy).with_namespace_labels(&state.namespaces));
        let pod_states = PodStates::load(state.pods);
        let node_states = NodeStates::load(state.nodes, &pod_states, &policy)
            .map_err(|(pod, node)| LoadError::UnknownNode { pod, node })?;
        Ok(Self {
            policy,
            namespaces: state.namespaces,
            now: state.now,
            pod_states,
            node_states,
            waiting_pods: state.waiting_pods,
            evictions: state.evictions,
            owner_evictions: state.owner_evictions,
            budgets: state.budgets,
            packing: state.packing,
            start_times: state.start_times,
            model_work: state.model_work,
            leader_record: state.origin,
            observed_reservations: state.shown_reservations,
            pods_with_reservation_condition: state.showing_reservations,
            slices: state.slices,
            overuse: state.overuse,
            pods_with_eviction_condition: state.showing_evictions,
            placeless_members: PlacelessMembers::load(&state.placeless_members),
            shared_parts: SharedParts::default(),
        })
    }
}

impl LedgerState {
    pub(crate) fn now(&self) -> Moment {
        self.now
    }

    /// Checks that every class, node and GPU index in the state refers to something that exists.
    fn check_references(&self, policy: &Policy) -> Result<(), LoadError> {
        let (stored, given) = (self.policy_version, policy.version);
        if stored != given {
            return Err(LoadError::OtherPolicy { stored, given });
        }
        let devices: BTreeMap<&NodeName, usize> = self
            .nodes
            .iter()
            .map(|node_state| (&node_state.view().name, node_state.devices().len()))
            .collect();
        let existing = self
            .nodes
            .iter()
            .filter(|node_state| node_state.exists())
            .count();
        for (uid, pod_state) in &self.pods {
            if pod_state.demand.class.index() >= policy.classes().len() {
                return Err(LoadError::UnknownClass { pod: uid.clone() });
            }
            if let Some(soft_reservation) = pod_state.soft_reservation() {
                let (node, gpus) = (&soft_reservation.node, soft_reservation.gpus);
                if devices
                    .get(node)
                    .is_some_and(|count| gpus.iter().any(|index| index >= *count))
                {
                    return Err(LoadError::UnknownGpu {
                        pod: uid.clone(),
                        node: node.clone(),
                    });
                }
            }
            let queried_nodes = pod_state
                .refusal()
                .and_then(|refused| refused.queried_nodes.as_ref());
            if queried_nodes.is_some_and(|queried_nodes| {
                !queried_nodes.is_valid_for(self.nodes.node_list_generation(), existing)
            }) {
                return Err(LoadError::UnknownNodeSet { pod: uid.clone() });
            }
        }
        Ok(())
    }
}
