//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::ranking::Kind;
use super::scratch::Scratch;
use super::{Place, Seeing};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::{Claim, Ledger, Pending, Survey};
use crate::scheduling::preempt::{self, Effort, Price, Prospect, Room, Rooms, Rules, Seen, VictimSet};
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::Snapshot;
use crate::scheduling::stock::{Freed, Question};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What was found of nodes for pods of one kind, as long as it holds: pods of a kind that come one after the other look at the same
/// nodes.
#[derive(Debug, Default)]
pub(super) struct Known {
    kind: Option<Kind>,
    /// As the first search for a pod of the kind began. What has been held since makes no node cheaper.
    prospects: Vec<Prospect>,
    rooms: KnownRooms,
}

/// `None` of a node where nobody's leaving would be enough, or that would not take the pod even then.
type KnownRooms = BTreeMap<NodeName, Option<Seen<Rc<Room>>>>;

/// Finds nodes that pods of a kind could go to if all left who may, one by one.
pub(super) struct Looking<'l> {
    ledger: &'l Ledger,
    snapshot: &'l Snapshot,
    kind: &'l Kind,
    question: Option<Question<'l>>,
    survey: Survey<'l>,
}

/// The same; but what is known already is not looked for again.
struct Remembering<'l, 'k> {
    looking: Looking<'l>,
    demand: &'l Demand,
    rooms: &'k mut KnownRooms,
}

impl Known {
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    pub fn forget_node(&mut self, node: &NodeName) {
        self.rooms.remove(node);
    }

    /// As much of it as holds for a pod of this kind.
    fn for_kind(self, kind: &Kind, ledger: &Ledger, claim: &Claim) -> Self {
        if !self.kind.as_ref().is_some_and(|known| known.is_like(kind)) {
            let prospects = ledger.prospects(claim, kind.demand());
            return Self { kind: Some(kind.clone()), prospects, rooms: KnownRooms::new() };
        }
        // As a tenant's use grows its pods are spared less, wherever they are: a prospect's floor is below that, a room's is not.
        let rooms = if ledger.policy().tenants().is_empty() { self.rooms } else { KnownRooms::new() };
        Self { rooms, ..self }
    }
}

impl Looking<'_> {
    pub fn room(&mut self, node: &NodeName) -> Option<Room> {
        let mut room = self.survey.room(node)?;
        let Self { ledger, snapshot, kind, question, .. } = self;
        let seeing = Seeing { ledger, snapshot };
        let leaving: Vec<PodUid> =
            room.candidates.iter().chain(&room.awaited).map(|resident| resident.uid.clone()).collect();
        let place = snapshot.place_of(node.as_str())?;
        kind.admits(place, &seeing, question.as_ref(), &leaving).ok()?;
        let beside = Freed { leaving: &[], coming: ledger.coming_to(node) };
        let lack = question.as_ref().map(|question| question.lack(node, &beside));
        room.shortfall.companion = lack.unwrap_or_default();
        Some(room)
    }
}

impl Rooms for Remembering<'_, '_> {
    type Room = Rc<Room>;

    fn look(&mut self, node: &NodeName) -> Option<Seen<Rc<Room>>> {
        let Self { looking, demand, rooms } = self;
        if let Some(known) = rooms.get_mut(node) {
            let (floor, room) = known.as_mut()?;
            looking.survey.allow(Rc::make_mut(room));
            return Some((*floor, Rc::clone(room)));
        }
        let found = looking.room(node).and_then(|room| preempt::seen(room, demand));
        let found = found.map(|(floor, room)| (floor, Rc::new(room)));
        rooms.insert(node.clone(), found.clone());
        found
    }

    /// Until something is undone there are only more holds, and budgets let only fewer leave: a room becomes no cheaper. (A search
    /// that is cut short may end with another set for it, as it begins elsewhere.)
    fn learn(&mut self, node: &NodeName, least: Option<Price>) {
        if let Some(known) = self.rooms.get_mut(node) {
            *known = known.take().zip(least).map(|((_, room), least)| (least, room));
        }
    }
}

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        let snapshot = self.ledger.snapshot();
        let (kind, claim) = (Kind::of(pod, self.stock), self.ledger.claim(&pod.uid));
        self.known = std::mem::take(&mut self.known).for_kind(&kind, &self.ledger, &claim);
        let mut not_there = BTreeSet::new();
        loop {
            let mut known = std::mem::take(&mut self.known);
            let looking = self.looking(&kind, &snapshot, &pod.demand, &claim);
            let set = cheapest_beside(looking, &pod.demand, &mut known, &not_there);
            self.known = known;
            let set = set?;
            // Sets by which nobody is evicted are cheaper than all others.
            if set.evicted().next().is_some() && !self.ledger.may_order_more() {
                return None;
            }
            let hold = if self.is_enough(pod, &set) { self.hold_of(&set) } else { None };
            let place = hold.and_then(|hold| self.hold(pod, hold, set.price, set.exact));
            if place.is_some() {
                return place;
            }
            not_there.insert(set.node);
        }
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

    pub(super) fn looking<'l>(
        &'l self,
        kind: &'l Kind,
        snapshot: &'l Snapshot,
        demand: &'l Demand,
        claim: &'l Claim,
    ) -> Looking<'l> {
        let (question, survey) = (kind.question(self.stock), self.ledger.survey(claim, demand));
        Looking { ledger: &self.ledger, snapshot, kind, question, survey }
    }
}

fn cheapest_beside(
    looking: Looking<'_>,
    demand: &Demand,
    known: &mut Known,
    not_there: &BTreeSet<NodeName>,
) -> Option<VictimSet> {
    let wanted = known.prospects.iter().filter(|prospect| !not_there.contains(&prospect.node)).cloned();
    let rooms = Remembering { looking, demand, rooms: &mut known.rooms };
    preempt::cheapest_among(wanted, demand, Rules::Keep, Effort::default(), rooms)
}
