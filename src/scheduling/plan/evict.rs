//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::ranking::Kind;
use super::scratch::Scratch;
use super::{Place, Seeing};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::{Claim, Pending};
use crate::scheduling::preempt::{self, Effort, Room, Rules, VictimSet};
use crate::scheduling::request::Demand;
use crate::scheduling::stock::Freed;
use std::collections::BTreeSet;

/// What was found of the nodes for pods of one kind, as long as it holds.
#[derive(Debug, Default)]
pub(super) struct KnownRooms {
    known: Option<(Kind, Vec<Room>)>,
    /// Nodes to be looked at again.
    changed: BTreeSet<NodeName>,
}

impl KnownRooms {
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    pub fn note_changed(&mut self, node: &NodeName) {
        if self.known.is_some() {
            self.changed.insert(node.clone());
        }
    }

    fn keep(&mut self, kind: Kind, rooms: Vec<Room>) {
        *self = Self { known: Some((kind, rooms)), changed: BTreeSet::new() };
    }

    fn take(&mut self, kind: &Kind) -> Option<(Vec<Room>, BTreeSet<NodeName>)> {
        let (of, rooms) = self.known.take()?;
        let changed = std::mem::take(&mut self.changed);
        of.is_like(kind).then_some((rooms, changed))
    }
}

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        let mut rooms = self.rooms_for(pod);
        let found = loop {
            let Some(set) = preempt::cheapest(&rooms, &pod.demand, Rules::Keep, Effort::default()) else {
                break None;
            };
            let is_in_order = self.is_enough(pod, &set) && self.ledger.may_order(&set.everyone());
            if is_in_order {
                break Some(set);
            }
            rooms.retain(|room| room.node != set.node);
        };
        self.rooms.keep(Kind::of(pod, self.stock), rooms);
        let set = found?;
        self.hold(pod, self.hold_of(&set)?, set.price, set.exact)
    }

    /// The rooms that the pod's kind could have, of which most are known from the pod before.
    fn rooms_for(&mut self, pod: &Pending) -> Vec<Room> {
        let snapshot = self.ledger.snapshot();
        let claim = self.ledger.claim(&pod.uid);
        let is_alike = self.ledger.policy().tenants().is_empty();
        let known = self.rooms.take(&Kind::of(pod, self.stock)).filter(|_| is_alike);
        match known {
            None => {
                let names: Vec<&NodeName> = snapshot.nodes().iter().map(|node| &node.name).collect();
                self.rooms_by(pod, &pod.demand, &claim, names)
            }
            Some((mut rooms, changed)) => {
                rooms.retain(|room| !changed.contains(&room.node));
                rooms.extend(self.rooms_by(pod, &pod.demand, &claim, changed.iter().collect()));
                rooms
            }
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

    /// Nodes that the pod could go to if all left who may.
    pub(super) fn rooms_by(
        &mut self,
        pod: &Pending,
        demand: &Demand,
        claim: &Claim,
        names: Vec<&NodeName>,
    ) -> Vec<Room> {
        let snapshot = self.ledger.snapshot();
        let kind = Kind::of(pod, self.stock);
        let question = kind.question(self.stock);
        let seeing = Seeing { ledger: &self.ledger, snapshot: &snapshot };
        let mut rooms = self.ledger.rooms_for_demand(claim, demand, names);
        rooms.retain(|room| {
            let place = snapshot.place_of(room.node.as_str());
            let leaving: Vec<PodUid> =
                room.candidates.iter().chain(&room.awaited).map(|resident| resident.uid.clone()).collect();
            place.is_some_and(|place| kind.admits(place, &seeing, question.as_ref(), &leaving).is_ok())
        });
        for room in &mut rooms {
            let coming = self.ledger.coming_to(&room.node);
            let beside = Freed { leaving: &[], coming: &coming };
            let lack = question.as_ref().map(|question| question.lack(&room.node, &beside));
            room.shortfall.companion = lack.unwrap_or_default();
        }
        rooms
    }
}
