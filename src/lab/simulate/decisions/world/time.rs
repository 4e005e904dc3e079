//! What falls due as time passes, and what the watches show.

use super::{Event, World};
use crate::simulate::decisions::core_under_test::{gpu_name, pod_number};
use crate::simulate::decisions::oracle::Checked;
use crate::simulate::decisions::planted::PlantedBug;
use crate::simulate::decisions::record::{KnownState, Place, each};
use crate::simulate::decisions::rules::START_GATE;
use std::sync::Arc;
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::ledger::{ObservedPhase, ObservedWaiting, PodObservation, SchedulingGate};
use stowage_scheduling::units::Millis;
use stowage_scheduling::verbs::observe::{PodDeleted, PodObserved};
use stowage_scheduling::verbs::tick::Tick;
use stowage_scheduling::vocabulary::demand::{Demand, Sharing};
use stowage_scheduling::vocabulary::disruption_info::{
    DisruptionInfo, GroupKey, GroupKind, ObservedDisruptionInfo, PodDeletion,
};

impl World<'_> {
    pub(super) fn pass(&mut self) -> Checked {
        let millis = self
            .draws
            .of(&[50, 200, 500, 1_000, 1_000, 3_000, 6_000, 20_000, 60_000]);
        self.pass_by(millis)
    }

    pub(super) fn pass_by(&mut self, millis: u64) -> Checked {
        self.note(|| format!("{millis} ms pass"));
        // What was sent before arrives before.
        self.record.now += millis;
        self.record.touch_all();
        self.tick(false)?;
        self.due_writes()?;
        self.due_reads()?;
        self.end_pods();
        let shown = if millis >= 1_000 {
            usize::MAX
        } else {
            self.draws.below(4)
        };
        self.show(shown)
    }

    /// The clock is told. After a restart, reservations that could not be taken over end, too.
    pub(super) fn tick(&mut self, is_restart: bool) -> Checked {
        let (now, at) = (self.record.now, self.now());
        let is_leading = !self.core.has(PlantedBug::KeepsReservations);
        let ended = self.core.apply(Tick {
            now: at,
            is_leading,
        });
        for pod in self.record.known.clone() {
            // An engine whose Binding may still land may begin to start at any moment.
            let is_open = matches!(self.record.told(pod), KnownState::Assumed(_));
            if !is_open
                && self.record.pods[pod as usize]
                    .starting
                    .is_some_and(|until| until <= now)
            {
                self.record.edit(pod, |entry| entry.starting = None);
            }
            let Some(kept) = self.record.kept(pod) else {
                continue;
            };
            let has_ended = ended.iter().any(|uid| pod_number(uid) == pod);
            let is_due = kept.deadline <= now;
            let may_break = self.record.nodes[usize::from(kept.place.node)].changed >= kept.made;
            if is_due && !has_ended {
                return Err(format!(
                    "the reservation of pod {pod} outlives its deadline"
                ));
            }
            if has_ended && !is_due && !is_restart && !may_break {
                return Err(format!(
                    "the reservation of pod {pod} ends {} ms early",
                    kept.deadline - now
                ));
            }
            if has_ended {
                self.note(|| format!("the reservation of pod {pod} ends"));
                self.record.edit(pod, |entry| entry.kept = None);
                let api = &mut self.api[pod as usize];
                api.nominated = None;
                // The write that clears its condition may be late.
                if self.draws.chance(70) {
                    api.condition = None;
                }
            }
        }
        Ok(())
    }

    /// Pods whose grace is over are gone.
    fn end_pods(&mut self) {
        let now = self.record.now;
        let is_over = |pod: &u32| self.api[*pod as usize].leaving.is_some_and(|at| at <= now);
        let over: Vec<u32> = self.alive.iter().copied().filter(is_over).collect();
        over.into_iter().for_each(|pod| self.end_pod(pod));
    }

    /// The API server forgets the pod.
    pub(super) fn end_pod(&mut self, pod: u32) {
        let api = &mut self.api[pod as usize];
        api.exists = false;
        let bound = api.bound.take();
        self.alive.retain(|alive| *alive != pod);
        if let Some((place, _)) = bound {
            self.end_process(pod, place.node);
        }
        self.events.push_back(Event::Deleted(pod));
        self.note(|| format!("pod {pod} is gone"));
    }

    pub(super) fn watch(&mut self) -> Checked {
        let count = self.draws.between(1, 6);
        self.show(count)
    }

    /// The next changes are shown, in their order.
    fn show(&mut self, count: usize) -> Checked {
        for _ in 0..count {
            match self.events.pop_front() {
                None => break,
                Some(Event::Changed(pod)) => self.show_pod(pod),
                Some(Event::Deleted(pod)) => self.show_deletion(pod),
            }
        }
        Ok(())
    }

    fn show_deletion(&mut self, pod: u32) {
        self.note(|| format!("the watch shows that pod {pod} is gone"));
        self.record.note_gone(pod);
        self.deletions += 1;
        if !self.core.has(PlantedBug::ForgetsDeletions) || !self.deletions.is_multiple_of(4) {
            self.core
                .apply(PodDeleted(self.pods[pod as usize].uid.clone()));
        }
    }

    /// The watch shows the pod as the API server has it.
    pub(super) fn show_pod(&mut self, pod: u32) {
        let api = &self.api[pod as usize];
        if !api.exists {
            return;
        }
        let now = self.record.now;
        let leaving = api.leaving.filter(|_| api.bound.is_some());
        let state = match api.bound {
            Some((place, at)) => {
                let is_starting = now.saturating_sub(at) < starts_within(pod);
                self.note_shown_bound(pod, place, at, is_starting);
                ObservedPhase::Bound {
                    node: self.node_names[usize::from(place.node)].clone(),
                    devices: Some(self.uuids(place)),
                    starting: is_starting,
                    ran: Some(Millis(now.saturating_sub(at))),
                }
            }
            None => {
                self.record.note_waiting(pod);
                ObservedPhase::Waiting(self.waiting(pod))
            }
        };
        if let (Some(by), KnownState::Bound(..)) = (leaving, self.record.told(pod)) {
            let known = &mut self.record.pods[pod as usize].leaving;
            *known = Some(known.map_or(by, |known| known.min(by)));
        }
        let leaving = leaving.map(|by| PodDeletion {
            asked_ago: Millis(0),
            grace: Millis(by.saturating_sub(now)),
        });
        let observed = Some(ObservedDisruptionInfo {
            leaving,
            ..self.disruption(pod)
        });
        let names = &self.pods[pod as usize];
        let (uid, key, demand) = (names.uid.clone(), names.key.clone(), self.shown_demand(pod));
        self.core.apply(PodObserved(PodObservation {
            uid,
            key,
            demand,
            state,
            observed,
        }));
    }

    /// What keeps the pod from being evicted, by itself.
    pub(super) fn disruption(&self, pod: u32) -> ObservedDisruptionInfo {
        let spec = self.record.spec(pod);
        let group = spec.group.map(|(number, _)| GroupKey {
            namespace: self.pods[pod as usize].key.namespace.clone(),
            kind: GroupKind::Stowage,
            name: format!("group-{number}").into(),
        });
        let disruption_info = DisruptionInfo {
            do_not_disrupt: spec.do_not_disrupt,
            group,
            group_size: spec.group.map(|(_, size)| size),
            ..DisruptionInfo::default()
        };
        ObservedDisruptionInfo {
            disruption_info,
            ..ObservedDisruptionInfo::default()
        }
    }

    fn shown_demand(&self, pod: u32) -> Demand {
        let demand = self.pods[pod as usize].demand.clone();
        match self.core.has(PlantedBug::ForgetsExclusiveness) {
            true => Demand {
                sharing: Sharing::Shared,
                ..demand
            },
            false => demand,
        }
    }

    /// What a pod without a node shows.
    pub(super) fn waiting(&self, pod: u32) -> ObservedWaiting {
        let api = &self.api[pod as usize];
        let shows = !self.core.has(PlantedBug::ForgetsReservations);
        ObservedWaiting {
            reservation: api.condition.clone().filter(|_| shows),
            gate: if api.is_gated {
                SchedulingGate::Planned
            } else {
                SchedulingGate::Open
            },
            nominated: api
                .nominated
                .map(|node| self.node_names[usize::from(node)].clone()),
        }
    }

    fn note_shown_bound(&mut self, pod: u32, place: Place, at: u64, is_starting: bool) {
        let now = self.record.now;
        let told = self.record.told(pod);
        let is_engine = self.record.rules.class(self.record.spec(pod).class).engine;
        let known = self.record.pods[pod as usize].starting;
        let starting = match told {
            KnownState::Bound(bound, since) if bound.node == place.node => {
                // An engine that has started keeps others away for as long as its class says.
                let opens = since + START_GATE;
                let until = known.map(|until| until.min(opens)).filter(|_| opens > now);
                if is_starting { known } else { until }
            }
            KnownState::Assumed(assumed) if assumed.node == place.node => {
                known.map(|_| now + START_GATE)
            }
            _ => (is_engine && is_starting).then_some(now + START_GATE),
        };
        self.record.note_bound(pod, place);
        self.record.edit(pod, |entry| {
            entry.starting = starting;
            entry.started = entry.started.min(at);
        });
    }

    pub(super) fn uuids(&self, place: Place) -> Arc<[GpuUuid]> {
        each(place.gpus)
            .map(|gpu| gpu_name(place.node, gpu as u32))
            .collect()
    }
}

/// How long a pod's engine takes to start.
fn starts_within(pod: u32) -> u64 {
    10_000 + u64::from(pod % 3) * 10_000
}
