//! Pods that use more VRAM than they were granted: by how much, since when, and what is due about it.
//!
//! The agents find them, and the ledger believes an agent once several fresh reports in a row say the same. Only pods that are
//! bound to the agent's own node count, so an agent that lies fills no memory, and what it causes is bounded by the
//! eviction rates. A report without the pod, or a pause between two reports, starts the time again.

use super::Ledger;
use super::pod_state::{PodPhase, PodState};
use crate::ids::{NodeName, PodKey, PodUid};
use crate::policy::namespaces::{ALL_GPUS_LABEL, ALL_GPUS_NAMESPACE};
use crate::policy::{Mode, OveruseRule};
use crate::units::{Bytes, Millis, Moment};
use crate::vocabulary::node::NodeKind;
use crate::vocabulary::node_reading::OverGrant;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Bound;

/// How many reports in a row confirm overuse: as many as confirm VRAM that nothing explains.
const MIN_READINGS: u32 = 3;
/// The shortest time between two evictions of one pod: a budget that forbade the first seldom allows the next within seconds.
const EVICTION_RETRY_INTERVAL: Millis = Millis::seconds(20);
/// The shortest time between two evictions of a pod that was given no GPU, because it is unknown whether it is terminating.
const UNGRANTED_EVICTION_RETRY_INTERVAL: Millis = Millis::seconds(600);
/// How many pods one round checks; the next round continues after them.
const MAX_CHECKED_PER_ROUND: usize = 4096;

/// By node, the pods over their grants.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OverusingPods {
    nodes: BTreeMap<NodeName, BTreeMap<PodUid, Overuse>>,
    /// The node up to which the latest round checked; `None` if it reached the end.
    checked_to: Option<NodeName>,
}

/// One pod over its grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overuse {
    /// Over all its GPUs.
    pub granted: Bytes,
    pub used: Bytes,
    /// When the first of the reports in a row was sampled.
    pub since: Moment,
    /// When the latest was.
    sampled: Moment,
    readings: u32,
    /// When its eviction was announced to its owner.
    announced: Option<Moment>,
    /// When its eviction was last ordered.
    ordered: Option<Moment>,
    /// The pod's name, if it was given no GPU: the ledger does not have the pod.
    #[serde(default)]
    ungranted: Option<PodKey>,
}

/// What is due about a pod over its grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OveruseStep {
    pub uid: PodUid,
    pub key: PodKey,
    pub node: NodeName,
    pub granted: Bytes,
    pub used: Bytes,
    /// For how long it has been over its grant.
    pub duration: Millis,
    /// Whether it was given no GPU at all.
    pub is_ungranted: bool,
    pub action: OveruseAction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OveruseAction {
    /// An Event announces that it is evicted after this time.
    Announce { evicted_in: Millis },
    /// It is evicted; that counts within the eviction rates already.
    Evict,
}

impl OverusingPods {
    pub(super) fn forget_node(&mut self, node: &NodeName) {
        self.nodes.remove(node);
    }
}

impl Overuse {
    /// VRAM beyond the grant.
    pub fn excess(&self) -> Bytes {
        self.used.minus(self.granted)
    }

    fn new(found: &OverGrant, granted: Bytes, sampled: Moment) -> Self {
        Self {
            granted,
            used: found.used,
            since: sampled,
            sampled,
            readings: 1,
            announced: None,
            ordered: None,
            ungranted: found.ungranted.clone().filter(|_| granted == Bytes::ZERO),
        }
    }
}

impl Ledger {
    /// Records the pods that a reading shows over their grants.
    pub(super) fn record_overuse(
        &mut self,
        node: &NodeName,
        reported: &[OverGrant],
        sampled: Moment,
    ) {
        let before = self.overuse.nodes.remove(node).unwrap_or_default();
        let fresh = self.policy.telemetry.fresh;
        if reported.is_empty() || self.now.since(sampled) >= fresh {
            return;
        }
        let overusing = reported.iter().filter_map(|found| {
            let granted = self.granted_on(node, found, sampled)?;
            // A pod that the ledger knows by now was given something.
            let is_same =
                |previous: &&Overuse| previous.ungranted.is_none() || granted == Bytes::ZERO;
            let overuse = match before.get(&found.pod).filter(is_same) {
                // The same sample again.
                Some(previous) if sampled <= previous.sampled => previous.clone(),
                Some(previous) if sampled.since(previous.sampled) < fresh => Overuse {
                    granted,
                    used: found.used,
                    sampled,
                    readings: previous.readings.saturating_add(1),
                    ..previous.clone()
                },
                _ => Overuse::new(found, granted, sampled),
            };
            Some((found.pod.clone(), overuse))
        });
        let over: BTreeMap<PodUid, Overuse> = overusing.collect();
        if !over.is_empty() {
            self.overuse.nodes.insert(node.clone(), over);
        }
    }

    /// The pod's grant, if it was bound to the node when the sample was taken and is over it. The ledger's own record counts if
    /// the agent's is less.
    fn granted_on(&self, node: &NodeName, found: &OverGrant, sampled: Moment) -> Option<Bytes> {
        let Some(pod_state) = self.pod_states.get(&found.pod) else {
            let is_stowage = || {
                self.node(node)
                    .is_some_and(|node| node.kind == NodeKind::Stowage)
            };
            let is_evicted = self
                .ungranted_eviction_delay(found.ungranted.as_ref()?)
                .is_some();
            return (is_evicted && is_stowage()).then_some(Bytes::ZERO);
        };
        let PodPhase::Bound(bound) = &pod_state.phase else {
            return None;
        };
        let counts = bound.node == *node
            && bound.since <= sampled
            && !pod_state.demand.is_allocated_externally();
        let granted = found.granted.max(pod_state.demand.vram());
        (counts && found.used > granted).then_some(granted)
    }

    /// After how long a pod that was given no GPU is due, and evicted as long after that. A namespace whose labels are not known may
    /// see all GPUs.
    fn ungranted_eviction_delay(&self, pod: &PodKey) -> Option<Millis> {
        let labels = self.namespaces.get(&*pod.namespace);
        let sees_all = *pod.namespace == *ALL_GPUS_NAMESPACE
            || labels.is_none_or(|labels| labels.contains_key(ALL_GPUS_LABEL));
        (self.policy.ungranted == OveruseRule::Evict && !sees_all)
            .then_some(self.policy.overuse_after)
    }

    /// A pod that uses GPUs and was given none, and its node.
    pub(super) fn ungranted_overuse(&self, uid: &PodUid) -> Option<(&NodeName, &Overuse)> {
        let all = self.overuse.nodes.iter();
        let mut of_pod = all.filter_map(|(node, pods)| Some((node, pods.get(uid)?)));
        of_pod.find(|(_, overuse)| overuse.ungranted.is_some())
    }

    /// The pod is gone, or is somewhere else.
    pub(super) fn forget_overuse(&mut self, uid: &PodUid, node: &NodeName) {
        if let Some(pods) = self.overuse.nodes.get_mut(node) {
            pods.remove(uid);
            if pods.is_empty() {
                self.overuse.nodes.remove(node);
            }
        }
    }

    /// The next steps for pods over their grants. Every step that is returned counts as done.
    pub(crate) fn take_overuse_steps(&mut self) -> Vec<OveruseStep> {
        let rules = &self.policy;
        let may_evict = rules.ungranted == OveruseRule::Evict
            || rules
                .classes()
                .iter()
                .any(|class| rules.overuse_of(class).0 == OveruseRule::Evict);
        if self.overuse.nodes.is_empty() || !may_evict {
            return Vec::new();
        }
        let mut steps = Vec::new();
        let mut checked = self.overuse_to_check();
        // A pod that is not evicted, as by its budget, keeps no other from its turn.
        checked.sort_by_key(|(turn, ..)| *turn);
        for (_, node, uid) in checked {
            steps.extend(self.overuse_step(&node, &uid));
        }
        steps
    }

    /// The pods of the next round, each with when its eviction was last ordered.
    fn overuse_to_check(&mut self) -> Vec<(Option<Moment>, NodeName, PodUid)> {
        let after = self.overuse.checked_to.take();
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let mut checked = Vec::new();
        for (node, pods) in self
            .overuse
            .nodes
            .range::<NodeName, _>((from, Bound::Unbounded))
        {
            checked.extend(
                pods.iter()
                    .map(|(uid, overuse)| (overuse.ordered, node.clone(), uid.clone())),
            );
            if checked.len() >= MAX_CHECKED_PER_ROUND {
                self.overuse.checked_to = Some(node.clone());
                break;
            }
        }
        checked
    }

    fn overuse_step(&mut self, node: &NodeName, uid: &PodUid) -> Option<OveruseStep> {
        let now = self.now;
        let overuse = self.overuse.nodes.get(node)?.get(uid)?;
        let after = self.overuse_eviction_delay(uid, overuse);
        let Some(after) = after else {
            // It is announced again if the policy changes back.
            self.edit_overuse(node, uid, |overuse| overuse.announced = None);
            return None;
        };
        let is_confirmed = overuse.readings >= MIN_READINGS
            && now.since(overuse.sampled) < self.policy.telemetry.fresh;
        let retry_after = if overuse.ungranted.is_some() {
            UNGRANTED_EVICTION_RETRY_INTERVAL
        } else {
            EVICTION_RETRY_INTERVAL
        };
        let pause = after.max(retry_after);
        let action = match overuse.announced {
            _ if !is_confirmed => return None,
            None if overuse.since + after <= now => OveruseAction::Announce { evicted_in: after },
            Some(announced) if announced + after <= now => OveruseAction::Evict,
            _ => return None,
        };
        if action == OveruseAction::Evict {
            let was_ordered = overuse.ordered.is_some_and(|ordered| ordered + pause > now);
            if was_ordered || !self.is_within_eviction_rates(std::slice::from_ref(uid)) {
                return None;
            }
            self.record_evictions(std::slice::from_ref(uid));
        }
        self.edit_overuse(node, uid, |overuse| match action {
            OveruseAction::Announce { .. } => overuse.announced = Some(now),
            OveruseAction::Evict => overuse.ordered = Some(now),
        });
        let overuse = self.overuse.nodes.get(node)?.get(uid)?;
        Some(OveruseStep {
            uid: uid.clone(),
            key: overuse
                .ungranted
                .clone()
                .or_else(|| Some(self.pod_states.get(uid)?.key.clone()))?,
            node: node.clone(),
            granted: overuse.granted,
            used: overuse.used,
            duration: now.since(overuse.since),
            is_ungranted: overuse.ungranted.is_some(),
            action,
        })
    }

    fn edit_overuse(&mut self, node: &NodeName, uid: &PodUid, edit: impl FnOnce(&mut Overuse)) {
        if let Some(overuse) = self
            .overuse
            .nodes
            .get_mut(node)
            .and_then(|pods| pods.get_mut(uid))
        {
            edit(overuse);
        }
    }

    /// After how long an eviction for overuse is announced, and how long after that it is ordered; `None` if overuse is only reported,
    /// as for a member of a group: a group is never evicted in part, and its other pods keep to their grants.
    fn overuse_eviction_delay(&self, uid: &PodUid, overuse: &Overuse) -> Option<Millis> {
        let Some(pod_state) = self.pod_states.get(uid) else {
            return self.ungranted_eviction_delay(overuse.ungranted.as_ref()?);
        };
        let bound = pod_state.bound().filter(|_| self.is_staying(pod_state))?;
        let class = self.policy.class(pod_state.demand.class);
        let (rule, after) = self.policy.overuse_of(class);
        let is_protected = rule == OveruseRule::Report
            || pod_state.disruption_info.is_static()
            || (pod_state.disruption_info.do_not_disrupt && class.honors_do_not_disrupt())
            || self.is_left_to_kueue(pod_state)
            || self.now.since(bound.started) < class.min_runtime
            || self.has_group_members(pod_state);
        (!is_protected).then_some(after)
    }

    fn has_group_members(&self, pod_state: &PodState) -> bool {
        let group = pod_state.disruption_info.group.as_ref();
        group.is_some_and(|group| self.member_uids(group).nth(1).is_some())
    }

    /// Whether the pod is still over its grant and the policy still evicts it for that: its eviction may have been ordered a while ago.
    pub fn is_evicted_for_overuse(&self, uid: &PodUid) -> bool {
        let is_evicted = |overuse| self.overuse_eviction_delay(uid, overuse).is_some();
        self.policy.mode == Mode::Enforce && self.overuse_of(uid).is_some_and(is_evicted)
    }

    /// How far the pod is over its grant, if that is believed now.
    pub(crate) fn overuse_of(&self, uid: &PodUid) -> Option<&Overuse> {
        let overuse = match self.pod_states.get(uid) {
            Some(pod_state) => self.overuse.nodes.get(pod_state.node()?)?.get(uid)?,
            None => self.ungranted_overuse(uid)?.1,
        };
        self.is_believed(overuse).then_some(overuse)
    }

    /// All pods that are confirmed to be over their grants, by node.
    pub fn overusing_pods(&self) -> impl Iterator<Item = (&PodKey, &Overuse)> {
        let pods = self
            .overuse
            .nodes
            .values()
            .flatten()
            .filter(|(_, overuse)| self.is_believed(overuse));
        pods.filter_map(|(uid, overuse)| Some((&self.pod_states.get(uid)?.key, overuse)))
    }

    fn is_believed(&self, overuse: &Overuse) -> bool {
        overuse.readings >= MIN_READINGS
            && self.now.since(overuse.sampled) < self.policy.telemetry.stale
    }
}

#[cfg(test)]
mod tests;
