//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::ranking::{Kind, Seat};
use super::scratch::Scratch;
use super::{Place, Seeing};
use crate::ids::PodUid;
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::Pending;
use crate::scheduling::preempt::{Room, Shortfall, VictimSet, cheapest_victims};
use crate::scheduling::snapshot::Snapshot;
use std::sync::Arc;

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        if !pod.demand.may_preempt {
            return None;
        }
        let set = self.cheapest(pod)?;
        let node = self.ledger.node(&set.node)?;
        let hold = Hold {
            node: set.node.clone(),
            devices: set.gpus.iter().map(|gpu| node.devices[gpu].uuid.clone()).collect(),
            victims: set.victims.into(),
            elsewhere: Arc::new([]),
            deadline: self.ledger.now() + set.longest_grace + self.ledger.policy().hold_slack,
        };
        self.hold(pod, hold, set.price, set.exact)
    }

    fn cheapest(&mut self, pod: &Pending) -> Option<VictimSet> {
        let snapshot = self.ledger.snapshot();
        let kind = Kind::of(pod, self.stock);
        let sets = self.rooms(pod, &kind, &snapshot).into_iter().filter_map(|room| {
            let set = cheapest_victims(&room, &pod.demand, Shortfall::default())?;
            Some(set)
        });
        sets.min_by(|a, b| a.price.cmp(&b.price).then_with(|| a.node.cmp(&b.node)))
    }

    /// Nodes that the pod could go to if all left who may.
    fn rooms(&self, pod: &Pending, kind: &Kind, snapshot: &Snapshot) -> Vec<Room> {
        let seeing = Seeing { ledger: &self.ledger, snapshot };
        let tenancy = self.ledger.tenancy(&pod.uid);
        let question = kind.question(self.stock);
        let room = |place: usize| {
            let room = self.ledger.room_for(&pod.uid, &snapshot.nodes()[place].name, &tenancy)?;
            let leaving: Vec<PodUid> = room.candidates.iter().map(|resident| resident.uid.clone()).collect();
            let admitted = kind.admits(place, &seeing, question.as_ref(), &leaving);
            match admitted {
                Ok(()) => Some(room),
                Err(Seat::Shut | Seat::Unjudged(_) | Seat::Free(..) | Seat::Full(_)) => None,
            }
        };
        (0..snapshot.nodes().len()).filter_map(room).collect()
    }
}
