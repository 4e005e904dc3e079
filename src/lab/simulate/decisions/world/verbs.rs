//! kube-scheduler asks: filter, prioritize, bind and preempt, as it would for a pod, and out of turn.

use super::{World, mask_of};
use crate::simulate::decisions::core_under_test::{
    evictions, node_number, place_of, pod_number, seen_nodes,
};
use crate::simulate::decisions::oracle::{Checked, SeenBind};
use crate::simulate::decisions::planted::PlantedBug;
use crate::simulate::decisions::record::{Kept, KnownState, Place};
use crate::simulate::decisions::rules::START_GATE;
use crate::simulate::decisions::victims::Evictions;
use stowage_scheduling::evicting::VictimSet;
use stowage_scheduling::ids::{NodeName, PodUid};
use stowage_scheduling::kube_filters::Requirements;
use stowage_scheduling::placing::rank::shortlist;
use stowage_scheduling::verbs::bind::BindAsked;
use stowage_scheduling::verbs::binding::BindingStage;
use stowage_scheduling::verbs::filter::{FilterAsked, decided, filter, offered};
use stowage_scheduling::verbs::preempt::{
    LeftToPlanner, NotReserved, OfferedNode, PreemptAsked, PreemptDecided, PreemptDecision, preempt,
};
use stowage_scheduling::verbs::prioritize::{PrioritizeAsked, prioritize};
use stowage_scheduling::verbs::request::VerbRequest;
use stowage_scheduling::vocabulary::placement::Reservation;

/// A name that no node has.
const NO_NODE: &str = "nowhere";

impl World<'_> {
    /// A scheduling attempt, or its beginning.
    pub(super) fn schedule(&mut self) -> Checked {
        let is_such = |world: &Self, pod: u32| {
            let api = &world.api[pod as usize];
            api.bound.is_none() && !api.is_gated
        };
        // Pods for which GPUs are kept come first now and then.
        let kept = |world: &Self, pod: u32| is_such(world, pod) && world.record.kept(pod).is_some();
        let reserved = if self.draws.chance(40) {
            self.random_pod(kept)
        } else {
            None
        };
        let Some(pod) = reserved.or_else(|| self.random_pod(is_such)) else {
            return Ok(());
        };
        self.ask_filter(pod)?;
        if self.api[pod as usize].passed.len() > 1 && self.draws.chance(70) {
            self.ask_prioritize(pod)?;
        }
        match self.api[pod as usize].passed.first().copied() {
            Some(node) if self.draws.chance(75) => self.ask_bind(pod, node),
            _ => Ok(()),
        }
    }

    /// A scheduler that decided on an older state asks for any node.
    pub(super) fn rebind(&mut self) -> Checked {
        let Some(pod) = self.random_pod(|world, pod| !world.api[pod as usize].is_gated) else {
            return Ok(());
        };
        let node = self.random_node();
        self.ask_bind(pod, node)
    }

    fn request(&self, pod: u32) -> VerbRequest {
        let names = &self.pods[pod as usize];
        VerbRequest {
            uid: names.uid.clone(),
            key: names.key.clone(),
            demand: names.demand.clone(),
            waiting: self.waiting(pod),
            disruption: Some(self.disruption(pod)),
        }
    }

    /// The nodes to ask about: that to which the pod is nominated, all, or some, and now and then one that is not there.
    fn names(&mut self, pod: u32) -> Vec<Option<u8>> {
        if let Some(node) = self.api[pod as usize].nominated
            && self.draws.chance(80)
        {
            return vec![Some(node)];
        }
        let mut asked: Vec<Option<u8>> = (0..self.machines.len() as u8).map(Some).collect();
        match self.draws.below(10) {
            0..7 => {}
            7..9 => {
                let kept = self.draws.between(1, asked.len());
                let first = self.draws.below(asked.len());
                asked.rotate_left(first);
                asked.truncate(kept);
            }
            _ => asked.push(None),
        }
        asked
    }

    pub(super) fn ask_filter(&mut self, pod: u32) -> Checked {
        let asked = self.names(pod);
        let request = self.request(pod);
        let view = self.core.apply(FilterAsked(request));
        self.record.note_waiting(pod);
        let names = named(&self.node_names, &asked);
        let (demand, snapshot) = (&view.request.demand, &view.snapshot);
        let mut scores = self.core.scores.take(snapshot, demand, &view.policy);
        let list = filter(&view, names.iter().copied(), &mut scores);
        let mut again = filter(&view, names.iter().copied(), &mut scores);
        self.core.scores.put(scores);
        if self.core.has(PlantedBug::AnswersOtherwiseAgain) {
            again.best.pop();
        }
        let uncached = || shortlist(snapshot, demand, names.iter().copied(), view.attempt());
        if list != again || self.tally.filter.is_multiple_of(8) && list != uncached() {
            return Err(format!(
                "filter answers pod {pod} {list:?}, and then {again:?}"
            ));
        }
        let seen = self.core.heard(snapshot, &list, &names, demand.gpus);
        let decided = decided(&view, &list);
        self.tally.filter += 1;
        self.count();
        self.note(|| format!("filter for pod {pod} on {asked:?}: {seen:?}"));
        let shortlist = usize::from(self.record.rules.shortlist);
        self.record
            .check_filter(pod, &asked, &seen, shortlist, &mut self.tally)?;
        if let Some(decided) = decided {
            self.core.apply(decided);
        }
        let api = &mut self.api[pod as usize];
        api.passed.clear();
        api.passed
            .extend(seen.passed.iter().map(|place| place.node));
        api.is_refused = seen.passed.is_empty();
        api.is_refused_everywhere = api.is_refused && asked.len() >= self.machines.len();
        let first = (seen.passed.len() == 1).then(|| seen.passed[0].node);
        if self.record.told(pod) == KnownState::Waiting {
            self.record.pods[pod as usize].offered = first;
        }
        Ok(())
    }

    fn ask_prioritize(&mut self, pod: u32) -> Checked {
        let asked: Vec<Option<u8>> = self.api[pod as usize]
            .passed
            .iter()
            .copied()
            .map(Some)
            .collect();
        let request = self.request(pod);
        let view = self.core.apply(PrioritizeAsked(request));
        let names = named(&self.node_names, &asked);
        let list = prioritize(&view, names.iter().copied());
        let again = prioritize(&view, names.iter().copied());
        if list != again {
            return Err(format!(
                "prioritize answers pod {pod} {list:?}, and then {again:?}"
            ));
        }
        let mut seen = seen_nodes(&view.snapshot, &list);
        if self.core.has(PlantedBug::RanksBackwards) {
            seen.passed.reverse();
        }
        self.tally.prioritize += 1;
        self.count();
        self.note(|| format!("prioritize for pod {pod}: {seen:?}"));
        self.record
            .check_filter(pod, &asked, &seen, usize::MAX, &mut self.tally)?;
        // Nothing has happened since filter.
        if !seen.passed.iter().map(|place| Some(place.node)).eq(asked) {
            return Err(format!(
                "prioritize ranks pod {pod}'s nodes otherwise than filter: {seen:?}"
            ));
        }
        if let Some(first) = list.best.first() {
            let offered = offered(&view, first);
            self.core.apply(offered);
            self.record.pods[pod as usize].offered = seen.passed.first().map(|place| place.node);
        }
        Ok(())
    }

    pub(super) fn ask_bind(&mut self, pod: u32, node: u8) -> Checked {
        let names = &self.pods[pod as usize];
        let asked = BindAsked {
            uid: names.uid.clone(),
            key: names.key.clone(),
            node: self.node_names[usize::from(node)].clone(),
        };
        let spec = *self.record.spec(pod);
        let answer = self.core.apply(asked.clone());
        let (seen, decision) = self.core.heard_bind(answer, &spec);
        self.tally.bind += 1;
        self.count();
        self.note(|| format!("bind pod {pod} to node {node}: {seen:?}"));
        self.record.check_bind(pod, node, &seen, &mut self.tally)?;
        let Some(decision) = decision else {
            let answer = self.core.apply(asked);
            let (again, _) = self.core.heard_bind(answer, &spec);
            return match again == seen {
                true => Ok(()),
                false => Err(format!(
                    "bind answers pod {pod} {seen:?}, and then {again:?}"
                )),
            };
        };
        if let SeenBind::Write {
            place,
            is_new: true,
            ..
        } = seen
        {
            let gate = self
                .record
                .rules
                .class(spec.class)
                .engine
                .then_some(self.record.now + START_GATE);
            let now = self.record.now;
            self.record.edit(pod, |entry| {
                (entry.told, entry.starting, entry.assumed_at) =
                    (KnownState::Assumed(place), gate, now);
            });
        }
        let stage = BindingStage::Request {
            is_new: decision.is_new,
        };
        self.write(pod, decision.placement, stage)
    }

    /// kube-scheduler asks where a refused pod may preempt: nodes with pods of lower priority.
    pub(super) fn preempt(&mut self) -> Checked {
        let is_such = |world: &Self, pod: u32| {
            let (api, told) = (&world.api[pod as usize], world.record.told(pod));
            api.is_refused && api.bound.is_none() && !api.is_gated && told == KnownState::Waiting
        };
        let Some(pod) = self.random_pod(is_such) else {
            return Ok(());
        };
        let offered = self.offered_nodes(pod);
        if offered.is_empty() {
            return Ok(());
        }
        let request = self.request(pod);
        let wants = Requirements::default();
        let shown = offered.iter().map(|(node, victims)| OfferedNode {
            node: self.node_names[usize::from(*node)].to_string(),
            victims: victims
                .iter()
                .map(|victim| self.pods[*victim as usize].uid.to_string())
                .collect(),
            pdb_violations: 0,
        });
        let asked = PreemptAsked {
            request,
            wants,
            offered: shown.collect(),
        };
        self.tally.preempt += 1;
        self.count();
        let Some((request, view)) = self.core.apply(asked) else {
            return match self.record.kept(pod) {
                Some(_) => Ok(()),
                None => Err(format!(
                    "preempt finds a reservation of pod {pod}, which has none"
                )),
            };
        };
        let mut decision = preempt(view.clone());
        if decision != preempt(view) {
            return Err(format!(
                "preempt answers pod {pod} {decision:?}, and then otherwise"
            ));
        }
        self.falsify(&mut decision, &offered);
        self.note(|| format!("preempt for pod {pod} on {offered:?}: {decision:?}"));
        match decision {
            PreemptDecision::NoCandidate => {
                self.check_no_candidate(pod, &offered)?;
                self.core.apply(LeftToPlanner(request.uid));
                Ok(())
            }
            PreemptDecision::FitsNow => {
                self.core.apply(LeftToPlanner(request.uid));
                let fits = |(node, _): &(u8, Vec<u32>)| {
                    !self.record.is_certain(*node) || self.record.fits_anew(pod, *node)
                };
                match offered.iter().any(fits) {
                    true => Ok(()),
                    false => Err(format!(
                        "preempt says that pod {pod} fits now, and it fits on no node"
                    )),
                }
            }
            PreemptDecision::Evict { victims, .. } => self.take_victims(pod, request, victims),
        }
    }

    fn offered_nodes(&self, pod: u32) -> Vec<(u8, Vec<u32>)> {
        let priority = self.record.spec(pod).priority;
        let mut offered: Vec<(u8, Vec<u32>)> = Vec::new();
        for other in &self.alive {
            let api = &self.api[*other as usize];
            let Some((place, _)) = api.bound.filter(|_| api.leaving.is_none()) else {
                continue;
            };
            if self.record.spec(*other).priority >= priority {
                continue;
            }
            match offered.iter_mut().find(|(node, _)| *node == place.node) {
                Some((_, victims)) => victims.push(*other),
                None => offered.push((place.node, vec![*other])),
            }
        }
        offered
    }

    fn falsify(&self, decision: &mut PreemptDecision, offered: &[(u8, Vec<u32>)]) {
        let PreemptDecision::Evict { victims, .. } = decision else {
            return;
        };
        match self.core.planted {
            Some(PlantedBug::FindsNoVictims) => *decision = PreemptDecision::NoCandidate,
            Some(PlantedBug::SparesAVictim) => drop(victims.victims.pop()),
            Some(PlantedBug::EvictsProtectedPods) => {
                let all = offered
                    .iter()
                    .flat_map(|(_, pods)| pods)
                    .map(|pod| &self.pods[*pod as usize].uid);
                let other = self
                    .record
                    .known
                    .iter()
                    .map(|pod| &self.pods[*pod as usize].uid)
                    .chain(all);
                let added = other
                    .filter(|uid| !victims.victims.contains(uid))
                    .max()
                    .cloned();
                victims.victims.extend(added);
            }
            _ => {}
        }
    }

    /// No pod may be evicted for the pod, as far as that is simple to see.
    fn check_no_candidate(&mut self, pod: u32, offered: &[(u8, Vec<u32>)]) -> Checked {
        if self.record.spec(pod).group.is_some() {
            return Ok(());
        }
        for (node, victims) in offered {
            if !self.record.is_certain(*node) {
                continue;
            }
            self.tally.no_victims += 1;
            if self.record.fits_by_evictions(pod, *node, victims) {
                return Err(format!(
                    "preempt finds no victims for pod {pod}, where {victims:?} may leave"
                ));
            }
        }
        Ok(())
    }

    fn take_victims(&mut self, pod: u32, request: VerbRequest, victims: VictimSet) -> Checked {
        let all = victims.all_victims();
        let seen = self.evictions_of(&all);
        self.tally.victims += all.len() as u64;
        let snapshot = self.core.cluster.snapshot();
        let node = snapshot
            .node(victims.node.as_str())
            .ok_or("preempt names a node that is not there")?;
        let gpus = victims.gpus.iter().filter_map(|at| node.devices.get(at));
        let place = Place {
            node: node_number(&victims.node),
            gpus: mask_of(gpus.map(|device| device.index as usize)),
        };
        self.record.check_preemption(pod, place, &seen)?;
        let evicted: Vec<u32> = seen.evicted.clone();
        let policy = request.demand.classified_by;
        match self.core.apply(PreemptDecided {
            uid: request.uid,
            victims,
            policy,
        }) {
            Ok(made) => {
                self.record.note_evictions(&evicted)?;
                self.keep(pod, made.reservation);
                self.evict(&evicted);
                Ok(())
            }
            Err(NotReserved::EvictionRates) if self.record.exceeded_by(&evicted).is_some() => {
                Ok(())
            }
            Err(why) => Err(format!(
                "the victims for pod {pod} are chosen, and then: {why}"
            )),
        }
    }

    /// Which of these pods are evicted, and which leave anyway.
    pub(super) fn evictions_of(&self, victims: &[PodUid]) -> Evictions {
        let leaves = |pod: u32| {
            let entry = &self.record.pods[pod as usize];
            entry.leaving.is_some() || entry.told == KnownState::Nothing
        };
        evictions(victims, leaves)
    }

    /// GPUs are kept for the pod; its condition shows them.
    pub(super) fn keep(&mut self, pod: u32, reservation: Reservation) {
        self.tally.reservations += 1;
        let victims = reservation.victims.iter().map(pod_number);
        let kept = Kept {
            place: place_of(&reservation),
            victims: victims.collect(),
            deadline: reservation.deadline.0,
            made: self.record.now,
        };
        self.note(|| format!("{kept:?} for pod {pod}"));
        self.record.edit(pod, |entry| {
            (entry.kept, entry.was_kept) = (Some(kept), true)
        });
        let api = &mut self.api[pod as usize];
        api.nominated = Some(place_of(&reservation).node);
        api.condition = Some(reservation);
    }

    /// The API server is asked to evict these pods.
    pub(super) fn evict(&mut self, pods: &[u32]) {
        for pod in pods {
            let api = &self.api[*pod as usize];
            if api.exists && api.leaving.is_none() {
                self.begin_to_leave(*pod);
            }
        }
    }
}

fn named<'n>(names: &'n [NodeName], asked: &[Option<u8>]) -> Vec<&'n str> {
    let name = |node: &Option<u8>| node.map_or(NO_NODE, |node| names[usize::from(node)].as_str());
    asked.iter().map(name).collect()
}
