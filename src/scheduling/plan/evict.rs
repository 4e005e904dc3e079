//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::ranking::Kind;
use super::scratch::Scratch;
use super::{Place, Seeing};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::{Claim, Pending};
use crate::scheduling::preempt::{self, Effort, Room, Rules, VictimSet};
use crate::scheduling::request::Demand;
use crate::scheduling::snapshot::Snapshot;
use crate::scheduling::stock::Freed;
use std::collections::BTreeSet;

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        let snapshot = self.ledger.snapshot();
        let mut not_there = BTreeSet::new();
        let set = loop {
            let set = self.cheapest_beside(pod, &snapshot, &not_there)?;
            if self.is_enough(pod, &set) && self.ledger.may_order(&set.everyone()) {
                break set;
            }
            not_there.insert(set.node);
        };
        self.hold(pod, self.hold_of(&set)?, set.price, set.exact)
    }

    fn cheapest_beside(
        &self,
        pod: &Pending,
        snapshot: &Snapshot,
        not_there: &BTreeSet<NodeName>,
    ) -> Option<VictimSet> {
        let claim = self.ledger.claim(&pod.uid);
        let kind = Kind::of(pod, self.stock);
        let mut look = self.looking(&kind, snapshot, &pod.demand, &claim);
        let look = |node: &NodeName| (!not_there.contains(node)).then(|| look(node)).flatten();
        let prospects = self.ledger.prospects(&claim, &pod.demand);
        preempt::cheapest_among(prospects, &pod.demand, Rules::Keep, Effort::default(), look)
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
