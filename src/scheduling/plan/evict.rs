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

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        let mut rooms = self.rooms_by(pod, &pod.demand, &self.ledger.claim(&pod.uid));
        loop {
            let set = preempt::cheapest(&rooms, &pod.demand, Rules::Keep, Effort::default())?;
            if self.is_enough(pod, &set) {
                return self.hold(pod, self.hold_of(&set)?, set.price, set.exact);
            }
            rooms.retain(|room| room.node != set.node);
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
    pub(super) fn rooms_by(&mut self, pod: &Pending, demand: &Demand, claim: &Claim) -> Vec<Room> {
        let snapshot = self.ledger.snapshot();
        let kind = Kind::of(pod, self.stock);
        let question = kind.question(self.stock);
        let seeing = Seeing { ledger: &self.ledger, snapshot: &snapshot };
        let names: Vec<&NodeName> = snapshot.nodes().iter().map(|node| &node.name).collect();
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
