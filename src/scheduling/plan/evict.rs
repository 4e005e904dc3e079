//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::ranking::Kind;
use super::scratch::Scratch;
use super::{Place, Seeing};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::Pending;
use crate::scheduling::preempt::{self, Effort, Room, Rules, VictimSet};

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        let rooms = self.rooms(pod);
        let set = preempt::cheapest(&rooms, &pod.demand, Rules::Keep, Effort::default())?;
        self.hold_set(pod, &set)
    }

    fn hold_set(&mut self, pod: &Pending, set: &VictimSet) -> Option<Place> {
        let node = self.ledger.node(&set.node)?;
        let hold = Hold {
            node: set.node.clone(),
            devices: set.gpus.iter().map(|gpu| node.devices[gpu].uuid.clone()).collect(),
            victims: set.everyone().into(),
            deadline: self.ledger.now() + set.longest_grace + self.ledger.policy().hold_slack,
        };
        self.hold(pod, hold, set.price, set.exact)
    }

    /// Nodes that the pod could go to if all left who may.
    fn rooms(&mut self, pod: &Pending) -> Vec<Room> {
        let snapshot = self.ledger.snapshot();
        let kind = Kind::of(pod, self.stock);
        let question = kind.question(self.stock);
        let seeing = Seeing { ledger: &self.ledger, snapshot: &snapshot };
        let names: Vec<&NodeName> = snapshot.nodes().iter().map(|node| &node.name).collect();
        let claim = self.ledger.claim(&pod.uid);
        let mut rooms = self.ledger.rooms_for(&claim, names);
        rooms.retain(|room| {
            let place = snapshot.place_of(room.node.as_str());
            let leaving: Vec<PodUid> =
                room.candidates.iter().chain(&room.awaited).map(|resident| resident.uid.clone()).collect();
            place.is_some_and(|place| kind.admits(place, &seeing, question.as_ref(), &leaving).is_ok())
        });
        rooms
    }
}
