//! The state between one pod of the queue and the next: the scratch ledger with the holds of those before, and the rankings.

use super::evict::Known;
use super::ranking::{Kind, Ranking, Seat};
use super::{Means, Place, Seeing, Step, Why};
use crate::ids::{NodeName, PodUid};
use crate::scheduling::decision::Hold;
use crate::scheduling::device::GpuSet;
use crate::scheduling::fit::fit;
use crate::scheduling::ledger::{Ledger, Pending, PodEntry, Way, is_allowed};
use crate::scheduling::policy::Limit;
use crate::scheduling::preempt::Price;
use crate::scheduling::snapshot::Snapshot;
use crate::scheduling::stock::StockSnapshot;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Kinds of pods whose rankings are kept. A queue of more kinds than this ranks some of them again.
const RANKINGS: usize = 32;

pub(super) struct Scratch<'a> {
    pub ledger: Ledger,
    pub stock: &'a StockSnapshot,
    rankings: Vec<Ranking>,
    pub known: Known,
    /// Kinds of pods for which nobody's leaving helps. What is held in the meantime only makes it harder.
    pub hopeless: Vec<Kind>,
    /// Members of groups that have been dealt with.
    pub done: BTreeSet<PodUid>,
    /// For whom others move: the pods that will be made in place of those, which have room held, too.
    pub successors: BTreeMap<PodUid, Vec<PodUid>>,
}

impl<'a> Scratch<'a> {
    pub fn new(ledger: Ledger, stock: &'a StockSnapshot) -> Self {
        Self {
            ledger,
            stock,
            rankings: Vec::new(),
            known: Known::default(),
            hopeless: Vec::new(),
            done: BTreeSet::new(),
            successors: BTreeMap::new(),
        }
    }

    /// What is to be done about the next pod, or about its group; nothing, if that has been said with another of the group.
    pub fn step(&mut self, pod: &Pending) -> Vec<Step> {
        if self.done.contains(&pod.uid) {
            return Vec::new();
        }
        if pod.demand.asks_plugin() {
            return match pod.way {
                // The kubelet picks its GPUs: there is nothing to be held for it, so nothing to wait for behind the gate.
                Way::Gated => {
                    vec![Step::Wait { uid: pod.uid.clone(), key: pod.key.clone(), why: Why::ByPlugin }]
                }
                _ => self.devices(pod).into_iter().collect(),
            };
        }
        if let (Way::Gated, Some(group)) = (&pod.way, self.group_of(&pod.uid)) {
            return self.group(&group);
        }
        let (uid, key) = (pod.uid.clone(), pod.key.clone());
        vec![match self.place(pod) {
            Ok(place) => Step::Place(vec![place]),
            // The scheduler can judge what Stowage cannot: it looks again where there is room.
            Err(Why::CannotJudge(_)) if self.would_fit_unjudged(pod) => Step::Wake { uid, key },
            Err(why) => Step::Wait { uid, key, why },
        }]
    }

    fn would_fit_unjudged(&mut self, pod: &Pending) -> bool {
        let snapshot = self.ledger.snapshot();
        let is_refused = matches!(pod.way, Way::Refused { .. });
        let seats = self.ranking(pod, &snapshot).seats();
        let unjudged =
            seats.iter().zip(snapshot.nodes()).filter(|(seat, _)| matches!(seat, Seat::Unjudged(_)));
        is_refused && unjudged.map(|(_, node)| node).any(|node| fit(node, &pod.demand).is_ok())
    }

    /// Room for one pod, held on the scratch ledger.
    pub fn place(&mut self, pod: &Pending) -> Result<Place, Why> {
        match self.free_place(pod) {
            Some(place) => Ok(place),
            None => {
                let kind = Kind::of(pod, self.stock);
                let is_hopeless = || self.hopeless.iter().any(|known| known.is_like(&kind));
                if !self.ledger.may_evict_for(&pod.uid) || is_hopeless() {
                    return Err(self.why(pod));
                }
                let place = self.evicting(pod).or_else(|| self.moving(pod));
                if place.is_none() {
                    self.hopeless.push(kind);
                }
                place.ok_or_else(|| self.why(pod))
            }
        }
    }

    /// The best place that is free now.
    pub fn free_place(&mut self, pod: &Pending) -> Option<Place> {
        let snapshot = self.ledger.snapshot();
        let allowance = self.ledger.allowance(&pod.uid, &pod.demand);
        let is_within = |(place, gpus): &(usize, GpuSet)| {
            is_allowed(allowance, &snapshot.nodes()[*place].gpus, &pod.demand, *gpus)
        };
        let (place, gpus) = self.ranking(pod, &snapshot).free().find(is_within)?;
        self.hold_at(pod, &snapshot, place, gpus)
    }

    /// Holds these GPUs, which are free.
    pub fn hold_at(
        &mut self,
        pod: &Pending,
        snapshot: &Snapshot,
        place: usize,
        gpus: GpuSet,
    ) -> Option<Place> {
        let node = &snapshot.nodes()[place];
        let hold = Hold {
            node: node.name.clone(),
            devices: gpus.iter().map(|gpu| node.devices[gpu].uuid.clone()).collect(),
            victims: Arc::new([]),
            deadline: self.ledger.now() + self.ledger.policy().hold_slack,
        };
        self.hold(pod, hold, Price::default(), true)
    }

    /// Takes the hold on the scratch ledger.
    pub fn hold(&mut self, pod: &Pending, hold: Hold, price: Price, exact: bool) -> Option<Place> {
        self.take(Place {
            uid: pod.uid.clone(),
            key: pod.key.clone(),
            hold,
            price,
            exact,
            by: Means::Preemption,
        })
    }

    /// The same; its victims are moved.
    pub fn hold_by_moving(&mut self, pod: &Pending, hold: Hold, price: Price, exact: bool) -> Option<Place> {
        self.take(Place { uid: pod.uid.clone(), key: pod.key.clone(), hold, price, exact, by: Means::Moves })
    }

    fn take(&mut self, place: Place) -> Option<Place> {
        if !self.ledger.may_order(&place.hold.victims) {
            return None;
        }
        place.take(&mut self.ledger).ok()?;
        self.ledger.note_ordered(&place.hold.victims);
        // With a group its members on other nodes leave.
        for victim in place.hold.victims.iter() {
            let node = self.ledger.entry(victim).and_then(PodEntry::node);
            node.into_iter().for_each(|node| self.known.forget_node(node));
        }
        self.look_again(&place.hold.node);
        Some(place)
    }

    /// The reverse.
    pub fn drop_hold(&mut self, place: &Place) {
        self.ledger.drop_hold(&place.uid);
        self.ledger.take_back_ordered(&place.hold.victims);
        for successor in self.successors.remove(&place.uid).unwrap_or_default() {
            let released = self.ledger.release(&successor);
            let node = released.as_ref().and_then(PodEntry::hold).map(|hold| &hold.node);
            node.into_iter().for_each(|node| self.look_again(node));
        }
        self.hopeless.clear();
        self.known.forget();
        self.look_again(&place.hold.node);
    }

    /// The nodes in order for pods of this one's kind.
    pub fn ranking(&mut self, pod: &Pending, snapshot: &Snapshot) -> &Ranking {
        let kind = Kind::of(pod, self.stock);
        if let Some(known) = self.rankings.iter().position(|ranking| ranking.is_for(&kind)) {
            return &self.rankings[known];
        }
        let seeing = Seeing { ledger: &self.ledger, snapshot };
        let ranking = Ranking::new(kind, &seeing, self.stock);
        self.rankings.insert(0, ranking);
        self.rankings.truncate(RANKINGS);
        &self.rankings[0]
    }

    fn look_again(&mut self, node: &NodeName) {
        self.known.forget_node(node);
        let snapshot = self.ledger.snapshot();
        let Some(place) = snapshot.place_of(node.as_str()) else { return };
        let seeing = Seeing { ledger: &self.ledger, snapshot: &snapshot };
        for ranking in &mut self.rankings {
            ranking.look_again_at(place, &seeing, self.stock);
        }
    }

    /// Why there is no place for the pod; what is nearest to one counts.
    fn why(&mut self, pod: &Pending) -> Why {
        let allowance = self.ledger.allowance(&pod.uid, &pod.demand);
        let snapshot = self.ledger.snapshot();
        let seats = self.ranking(pod, &snapshot).seats();
        let full = || {
            seats.iter().filter_map(|seat| match seat {
                Seat::Full(misfit) => Some(*misfit),
                _ => None,
            })
        };
        let has_free = seats.iter().any(|seat| matches!(seat, Seat::Free(..)));
        let unjudged = seats.iter().find_map(|seat| match seat {
            Seat::Unjudged(unjudged) => Some(*unjudged),
            _ => None,
        });
        match (full().next(), unjudged) {
            _ if has_free && allowance != Limit::default() => Why::BeyondLimit { vram: pod.demand.vram() },
            (Some(nearest), _) => Why::NoRoom { nodes: full().count() as u32, nearest },
            (None, Some(unjudged)) => Why::CannotJudge(unjudged),
            (None, None) => Why::NoNode,
        }
    }

    /// A node whose device plugin has what the pod asks for, counted as taken on the scratch ledger.
    fn devices(&mut self, pod: &Pending) -> Option<Step> {
        let snapshot = self.ledger.snapshot();
        let allowance = self.ledger.allowance(&pod.uid, &pod.demand);
        let is_within = |(place, gpus): &(usize, GpuSet)| {
            is_allowed(allowance, &snapshot.nodes()[*place].gpus, &pod.demand, *gpus)
        };
        let (place, _) = self.ranking(pod, &snapshot).free().find(is_within)?;
        let node = snapshot.nodes()[place].name.clone();
        drop(snapshot);
        self.ledger.assume(&pod.uid, &node).ok()?;
        self.look_again(&node);
        let is_due = matches!(pod.way, Way::Refused { .. });
        is_due.then(|| Step::Wake { uid: pod.uid.clone(), key: pod.key.clone() })
    }
}
