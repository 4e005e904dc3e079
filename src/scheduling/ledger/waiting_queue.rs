//! The order in which the planner tries waiting pods. However many wait, the next ones are found without reading all of them:
//! every round of the planner asks for them, under the ledger's lock.
//!
//! A pod is due at a time, and is ready from then on; of the ready ones the higher priority comes first. Of one priority the
//! tenants have their turns, first the one that borrows least; namespaces without a tenant count as one each. Within those the
//! earlier class comes first, then the pod that was looked at the longest ago. A part of each round goes to the longest-waiting
//! pods, whatever their priority. What a pod waits for is not known here.

use crate::ids::PodUid;
use crate::sharing::ShardedMap;
use crate::units::Moment;
use crate::vocabulary::classification::{ClassId, TenantId};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

/// One in this many slots of a round goes to the pod that has waited longest.
const SLOTS_PER_LONGEST_WAITING: usize = 4;

/// Pods that have their turns together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) struct QueueBand {
    pub line: WaitingLine,
    pub priority: Reverse<i32>,
    pub class: ClassId,
    pub tenant: Option<TenantId>,
    /// The namespace, of a pod without a tenant.
    #[serde(default)]
    pub namespace: Option<Arc<str>>,
}

/// The two ways to wait, each with a limit of its own in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(super) enum WaitingLine {
    Gated,
    Refused,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "StoredQueue", into = "StoredQueue")]
pub(super) struct WaitingQueue {
    /// In shards, as `requeued_at`: a hash map is rehashed as a whole when it grows, and this is under the lock.
    pods: ShardedMap<PodUid, QueuePosition>,
    /// Not due yet.
    later: BTreeSet<(Moment, PodUid)>,
    ready: BTreeMap<QueueBand, BTreeSet<(u64, PodUid)>>,
    /// Pods that were requeued and have not tried since, by when they were requeued.
    requeued: BTreeSet<(Moment, PodUid)>,
    requeued_at: ShardedMap<PodUid, Moment>,
    /// Rises with each turn that is given.
    turn: u64,
    /// Rises with each round: another tenant begins.
    round: usize,
}

#[derive(Debug, Clone)]
enum QueuePosition {
    Later(Moment),
    /// `before` is the turn it had until it was last handed out.
    Ready {
        queue_band: QueueBand,
        turn: u64,
        previous_turn: u64,
    },
}

/// What is stored of a queue: where each pod is follows from it.
#[derive(Serialize, Deserialize)]
struct StoredQueue {
    later: BTreeSet<(Moment, PodUid)>,
    /// Each with its turn and the turn before.
    ready: Vec<(QueueBand, u64, u64, PodUid)>,
    #[serde(rename = "woken")]
    requeued: BTreeSet<(Moment, PodUid)>,
    turn: u64,
    #[serde(default)]
    round: usize,
}

impl From<WaitingQueue> for StoredQueue {
    fn from(queue: WaitingQueue) -> Self {
        let before = |uid: &PodUid| match queue.pods.get(uid) {
            Some(QueuePosition::Ready {
                previous_turn: before,
                ..
            }) => *before,
            _ => 0,
        };
        let ready = queue.ready.iter().flat_map(|(band, pods)| {
            pods.iter()
                .map(|(turn, uid)| (band.clone(), *turn, before(uid), uid.clone()))
        });
        Self {
            ready: ready.collect(),
            later: queue.later,
            requeued: queue.requeued,
            turn: queue.turn,
            round: queue.round,
        }
    }
}

impl From<StoredQueue> for WaitingQueue {
    fn from(stored: StoredQueue) -> Self {
        let mut queue = Self {
            turn: stored.turn,
            round: stored.round,
            ..Self::default()
        };
        stored
            .later
            .iter()
            .for_each(|(due, uid)| queue.set_later(uid, *due));
        stored.ready.iter().for_each(|(band, turn, before, uid)| {
            queue.insert_ready(uid, band.clone(), *turn, *before)
        });
        stored
            .requeued
            .iter()
            .for_each(|(at, uid)| queue.set_requeued(uid, Some(*at)));
        queue
    }
}

impl WaitingQueue {
    /// The pod is due then.
    pub(super) fn set_later(&mut self, uid: &PodUid, due: Moment) {
        self.set_position(uid, QueuePosition::Later(due));
        self.later.insert((due, uid.clone()));
    }

    /// The pod is due. One that was already keeps its turn.
    pub(super) fn set_ready(&mut self, uid: &PodUid, queue_band: QueueBand) {
        let turn = match self.pods.get(uid) {
            Some(QueuePosition::Ready {
                queue_band: current_band,
                ..
            }) if *current_band == queue_band => return,
            Some(QueuePosition::Ready { turn, .. }) => *turn,
            _ => self.next_turn(),
        };
        self.insert_ready(uid, queue_band, turn, turn);
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        if let Some(position) = self.pods.remove(uid) {
            self.remove_from_order(uid, position);
        }
    }

    /// The next that is due by `now` and not ready yet.
    pub(super) fn next_due(&self, now: Moment) -> Option<&PodUid> {
        self.later
            .first()
            .filter(|(due, _)| *due <= now)
            .map(|(_, uid)| uid)
    }

    /// The next `limit` pods of a line, in order; their next turns come after those of all others of their tenant and class. `share`
    /// says which tenant begins among those of one priority.
    pub(super) fn hand_out(
        &mut self,
        line: WaitingLine,
        limit: usize,
        share: impl Fn(Option<TenantId>) -> u64,
    ) -> Vec<PodUid> {
        let mut longest = self.longest_waiting(line, limit / SLOTS_PER_LONGEST_WAITING);
        let mut free_slots = limit - longest.len();
        let mut handed_out = Vec::new();
        let bands: Vec<_> = self
            .ready
            .iter()
            .filter(|(queue_band, _)| queue_band.line == line)
            .collect();
        let by_priority = bands.chunk_by(|(one, _), (other, _)| one.priority == other.priority);
        for uid in by_priority.flat_map(|bands| self.interleave_tenants(bands, limit, &share)) {
            if !longest.remove(uid) {
                if free_slots == 0 {
                    break;
                }
                free_slots -= 1;
            }
            handed_out.push(uid.clone());
        }
        handed_out.extend(longest);
        self.round = self
            .round
            .wrapping_add(usize::from(line == WaitingLine::Refused));
        let mut turns: Vec<(u64, &PodUid)> = handed_out
            .iter()
            .map(|uid| (self.turn_of(uid), uid))
            .collect();
        turns.sort_unstable();
        turns
            .into_iter()
            .for_each(|(before, uid)| self.put_at_end(uid, before));
        handed_out
    }

    /// Pods of one priority, at least `limit` if there are as many: the first of each tenant, then the second of each.
    fn interleave_tenants<'q>(
        &self,
        bands: &[(&'q QueueBand, &'q BTreeSet<(u64, PodUid)>)],
        limit: usize,
        share: impl Fn(Option<TenantId>) -> u64,
    ) -> Vec<&'q PodUid> {
        let mut of_tenants: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (
            QueueBand {
                tenant, namespace, ..
            },
            pods,
        ) in bands
        {
            of_tenants
                .entry((*tenant, namespace))
                .or_default()
                .push(*pods);
        }
        let first_tenant = self.round % of_tenants.len().max(1);
        let line = |((tenant, _), pods): (_, Vec<_>)| (share(tenant), pods.into_iter().flatten());
        let mut lines: Vec<_> = of_tenants.into_iter().map(line).collect();
        lines.rotate_left(first_tenant);
        lines.sort_by_key(|(share, _)| *share);
        let mut pods = Vec::new();
        while pods.len() < limit && !lines.is_empty() {
            lines.retain_mut(|(_, line)| line.next().map(|(_, uid)| pods.push(uid)).is_some());
        }
        pods
    }

    /// Gives a pod back its turn, because it was handed out and not tried.
    pub(super) fn put_back(&mut self, uid: &PodUid) {
        if let Some(QueuePosition::Ready {
            queue_band,
            previous_turn: before,
            ..
        }) = self.pods.get(uid).cloned()
        {
            self.insert_ready(uid, queue_band, before, before);
        }
    }

    /// Sets when the pod was requeued, if it has not tried since; `None` otherwise.
    pub(super) fn set_requeued(&mut self, uid: &PodUid, at: Option<Moment>) {
        let before = match at {
            Some(at) => self.requeued_at.insert(uid.clone(), at),
            None => self.requeued_at.remove(uid),
        };
        if let Some(before) = before {
            self.requeued.remove(&(before, uid.clone()));
        }
        self.requeued.extend(at.map(|at| (at, uid.clone())));
    }

    /// The pods that were requeued last: something else keeps back those that were requeued long ago.
    pub(super) fn last_requeued(&self, limit: usize) -> Vec<PodUid> {
        self.requeued
            .iter()
            .rev()
            .take(limit)
            .map(|(_, uid)| uid.clone())
            .collect()
    }

    /// Whether the pod is in the queue, or was requeued and has not tried since.
    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.pods.contains_key(uid) || self.requeued_at.contains_key(uid)
    }

    /// All pods that wait, in order of time and turn.
    pub(super) fn all(&self) -> Vec<PodUid> {
        let ready = self.ready.values().flatten().map(|(_, uid)| uid);
        self.later
            .iter()
            .map(|(_, uid)| uid)
            .chain(ready)
            .cloned()
            .collect()
    }

    /// How many wait, due or not.
    pub(super) fn len(&self) -> usize {
        self.later.len() + self.ready.values().map(BTreeSet::len).sum::<usize>()
    }

    fn longest_waiting(&self, line: WaitingLine, limit: usize) -> BTreeSet<PodUid> {
        let bands = self
            .ready
            .iter()
            .filter(|(queue_band, _)| queue_band.line == line);
        let mut bands: Vec<_> = bands.map(|(_, pods)| pods.iter()).collect();
        let firsts = bands
            .iter_mut()
            .enumerate()
            .filter_map(|(band_index, pods)| Some((pods.next()?, band_index)));
        let mut firsts: BinaryHeap<_> = firsts.map(Reverse).collect();
        let mut longest = BTreeSet::new();
        while longest.len() < limit {
            let Some(Reverse(((_, uid), band_index))) = firsts.pop() else {
                break;
            };
            longest.insert(uid.clone());
            firsts.extend(
                bands[band_index]
                    .next()
                    .map(|next| Reverse((next, band_index))),
            );
        }
        longest
    }

    fn turn_of(&self, uid: &PodUid) -> u64 {
        match self.pods.get(uid) {
            Some(QueuePosition::Ready { turn, .. }) => *turn,
            _ => 0,
        }
    }

    fn put_at_end(&mut self, uid: &PodUid, previous_turn: u64) {
        if let Some(QueuePosition::Ready { queue_band, .. }) = self.pods.get(uid).cloned() {
            let turn = self.next_turn();
            self.insert_ready(uid, queue_band, turn, previous_turn);
        }
    }

    fn insert_ready(&mut self, uid: &PodUid, queue_band: QueueBand, turn: u64, previous_turn: u64) {
        self.set_position(
            uid,
            QueuePosition::Ready {
                queue_band: queue_band.clone(),
                turn,
                previous_turn,
            },
        );
        self.ready
            .entry(queue_band)
            .or_default()
            .insert((turn, uid.clone()));
    }

    fn set_position(&mut self, uid: &PodUid, position: QueuePosition) {
        if let Some(before) = self.pods.insert(uid.clone(), position) {
            self.remove_from_order(uid, before);
        }
    }

    fn remove_from_order(&mut self, uid: &PodUid, position: QueuePosition) {
        match position {
            QueuePosition::Later(due) => {
                self.later.remove(&(due, uid.clone()));
            }
            QueuePosition::Ready {
                queue_band, turn, ..
            } => {
                let Some(pods) = self.ready.get_mut(&queue_band) else {
                    return;
                };
                pods.remove(&(turn, uid.clone()));
                if pods.is_empty() {
                    self.ready.remove(&queue_band);
                }
            }
        }
    }

    fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::uid;

    fn queue_band(priority: i32) -> QueueBand {
        QueueBand {
            line: WaitingLine::Gated,
            priority: Reverse(priority),
            class: ClassId::default(),
            tenant: None,
            namespace: None,
        }
    }

    fn next(waiting_queue: &mut WaitingQueue, limit: usize) -> Vec<String> {
        waiting_queue
            .hand_out(WaitingLine::Gated, limit, |_| 0)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn within_a_priority_pods_take_turns_and_a_pod_put_back_keeps_its_turn() {
        let mut waiting_queue = WaitingQueue::default();
        ["a", "b", "c"]
            .iter()
            .for_each(|name| waiting_queue.set_ready(&uid(name), queue_band(0)));
        assert_eq!(next(&mut waiting_queue, 2), ["a", "b"]);
        waiting_queue.put_back(&uid("b"));
        assert_eq!(next(&mut waiting_queue, 2), ["b", "c"]);
        assert_eq!(next(&mut waiting_queue, 2), ["a", "b"]);
        waiting_queue.remove(&uid("a"));
        waiting_queue.set_later(&uid("b"), Moment(7));
        assert_eq!(
            (next(&mut waiting_queue, 2), waiting_queue.len()),
            (vec!["c".to_owned()], 2)
        );
        assert_eq!(waiting_queue.next_due(Moment(6)), None);
        assert_eq!(waiting_queue.next_due(Moment(7)), Some(&uid("b")));
    }

    #[test]
    fn a_higher_priority_comes_first_without_starving_a_lower_one() {
        let mut waiting_queue = WaitingQueue::default();
        (0..40).for_each(|n| waiting_queue.set_ready(&uid(&format!("high-{n:02}")), queue_band(1)));
        waiting_queue.set_ready(&uid("low"), queue_band(0));
        let rounds = (0..20).position(|_| next(&mut waiting_queue, 4).contains(&"low".to_owned()));
        assert!(rounds.is_some_and(|rounds| rounds > 3), "{rounds:?}");
    }

    #[test]
    fn each_waiting_line_has_its_own_limit() {
        let mut waiting_queue = WaitingQueue::default();
        (0..9).for_each(|n| waiting_queue.set_ready(&uid(&format!("gated-{n}")), queue_band(9)));
        waiting_queue.set_ready(
            &uid("refused"),
            QueueBand {
                line: WaitingLine::Refused,
                ..queue_band(0)
            },
        );
        assert_eq!(
            waiting_queue.hand_out(WaitingLine::Refused, 2, |_| 0),
            [uid("refused")]
        );
        assert_eq!(next(&mut waiting_queue, 4).len(), 4);
    }
}
