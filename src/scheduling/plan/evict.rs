//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::ranking::Kind;
use super::scratch::Scratch;
use super::{Place, Seeing};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::{Claim, Pending};
use crate::scheduling::preempt::{self, Effort, Prospect, Room, Rules, Seen, VictimSet};
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::Snapshot;
use crate::scheduling::stock::Freed;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What was found of nodes for pods of one kind, as long as it holds: a group's pods look at the same nodes, one after the other.
#[derive(Debug, Default)]
pub(super) struct KnownRooms {
    kind: Option<Kind>,
    /// With less than what any set of victims costs there; `None` of a node where nobody's leaving would be enough.
    rooms: BTreeMap<NodeName, Option<Seen<Rc<Room>>>>,
}

impl KnownRooms {
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    pub fn forget_node(&mut self, node: &NodeName) {
        self.rooms.remove(node);
    }

    /// Those of a kind, if that was the last that was looked at.
    fn take(&mut self, kind: &Kind) -> BTreeMap<NodeName, Option<Seen<Rc<Room>>>> {
        let known = std::mem::take(self);
        if known.kind.is_some_and(|of| of.is_like(kind)) { known.rooms } else { BTreeMap::new() }
    }
}

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        let snapshot = self.ledger.snapshot();
        let kind = Kind::of(pod, self.stock);
        // What a tenant may still have changes with each of its pods.
        let is_alike = self.ledger.policy().tenants().is_empty();
        let mut rooms = if is_alike { self.rooms.take(&kind) } else { BTreeMap::new() };
        let mut not_there = BTreeSet::new();
        let set = loop {
            let Some(set) = self.cheapest_beside(pod, &snapshot, &mut rooms, &not_there) else { break None };
            if self.is_enough(pod, &set) && self.ledger.may_order(&set.everyone()) {
                break Some(set);
            }
            not_there.insert(set.node);
        };
        self.rooms = KnownRooms { kind: Some(kind), rooms };
        let set = set?;
        self.hold(pod, self.hold_of(&set)?, set.price, set.exact)
    }

    fn cheapest_beside(
        &self,
        pod: &Pending,
        snapshot: &Snapshot,
        rooms: &mut BTreeMap<NodeName, Option<Seen<Rc<Room>>>>,
        not_there: &BTreeSet<NodeName>,
    ) -> Option<VictimSet> {
        let claim = self.ledger.claim(&pod.uid);
        let kind = Kind::of(pod, self.stock);
        let survey = self.ledger.survey(&claim, &pod.demand);
        rooms.values_mut().flatten().for_each(|(_, room)| survey.allow(Rc::make_mut(room)));
        let mut find = self.looking(&kind, snapshot, &pod.demand, &claim);
        let prospects = self.ledger.prospects(&claim, &pod.demand);
        let wanted = prospects.iter().filter(|prospect| !not_there.contains(&prospect.node));
        let wanted: Vec<Prospect> = wanted.cloned().collect();
        let look = |node: &NodeName| {
            let mut find =
                || preempt::seen(find(node)?, &pod.demand).map(|(floor, room)| (floor, Rc::new(room)));
            rooms.entry(node.clone()).or_insert_with(&mut find).clone()
        };
        preempt::cheapest_among(wanted, &pod.demand, Rules::Keep, Effort::default(), look)
    }

    /// Whether the node's stock filters accept the pod once these have left. What pods ask for beside CPU and memory is not in
    /// their price, so that the search does not see it.
    pub(super) fn is_enough(&mut self, pod: &Pending, set: &VictimSet) -> bool {
        let snapshot = self.ledger.snapshot();
        let kind = Kind::of(pod, self.stock);
        let seeing = Seeing { ledger: &self.ledger, snapshot: &snapshot };
        let leaving = set.everyone();
        let admits =
            |place| kind.admits(place, &seeing, kind.question(self.stock).as_ref(), &leaving).is_ok();
        snapshot.place_of(set.node.as_str()).is_some_and(admits)
    }

    pub(super) fn hold_set_by_moving(&mut self, pod: &Pending, set: &VictimSet) -> Option<Place> {
        self.hold_by_moving(pod, self.hold_of(set)?, set.price, set.exact)
    }

    fn hold_of(&self, set: &VictimSet) -> Option<Hold> {
        let node = self.ledger.node(&set.node)?;
        Some(Hold {
            node: set.node.clone(),
            devices: set.gpus.iter().map(|gpu| node.devices[gpu].uuid.clone()).collect(),
            victims: set.everyone().into(),
            deadline: self.ledger.now() + set.longest_grace + self.ledger.policy().hold_slack,
        })
    }

    /// Finds nodes that pods of a kind could go to if all left who may, one by one.
    pub(super) fn looking<'l>(
        &'l self,
        kind: &'l Kind,
        snapshot: &'l Snapshot,
        demand: &'l Demand,
        claim: &'l Claim,
    ) -> impl FnMut(&NodeName) -> Option<Room> + 'l {
        let question = kind.question(self.stock);
        let mut survey = self.ledger.survey(claim, demand);
        move |node| {
            let mut room = survey.room(node)?;
            let seeing = Seeing { ledger: &self.ledger, snapshot };
            let leaving: Vec<PodUid> =
                room.candidates.iter().chain(&room.awaited).map(|resident| resident.uid.clone()).collect();
            let place = snapshot.place_of(node.as_str())?;
            kind.admits(place, &seeing, question.as_ref(), &leaving).ok()?;
            let beside = Freed { leaving: &[], coming: self.ledger.coming_to(node) };
            let lack = question.as_ref().map(|question| question.lack(node, &beside));
            room.shortfall.companion = lack.unwrap_or_default();
            Some(room)
        }
    }
}
