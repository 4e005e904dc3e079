//! Bindings on their way: they land at once, late or never, and are answered truly, wrongly or not at all.

use super::{Event, World};
use crate::simulate::decisions::core_under_test::{gpus_of, node_number};
use crate::simulate::decisions::oracle::Checked;
use crate::simulate::decisions::planted::PlantedBug;
use crate::simulate::decisions::record::{KnownState, Place};
use stowage_scheduling::units::{Millis, Moment};
use stowage_scheduling::verbs::binding::{
    BindingAnswer, BindingAnswered, BindingFailed, BindingRead, BindingStage, BindingStep, PodRead,
    SettlingAsked,
};
use stowage_scheduling::vocabulary::placement::Placement;

/// For how long after it was given up a Binding may land.
const LATEST_LANDING: u64 = 16_000;

/// A Binding that was written and not answered yet.
#[derive(Debug, Clone)]
pub(crate) struct OpenWrite {
    pod: u32,
    placement: Placement,
    stage: BindingStage,
    begun: u64,
    /// When it reaches the API server, if it does.
    lands: Option<u64>,
    /// When it is answered, and whether truly.
    answered: Option<(u64, Truth)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Truth {
    True,
    /// The API server refused it, and it never lands.
    Refused,
    Lost,
}

/// A loop that reads a pod until its Binding is settled.
#[derive(Debug, Clone)]
pub struct Settling {
    pod: u32,
    placement: Placement,
    due: u64,
}

impl World<'_> {
    /// A Binding is sent.
    pub(super) fn write(&mut self, pod: u32, placement: Placement, stage: BindingStage) -> Checked {
        let now = self.record.now;
        self.record.pods[pod as usize].open.under_way += 1;
        let soon = now + self.draws.of(&[0, 0, 0, 100, 2_000]);
        let (lands, answered) = match self.draws.below(20) {
            0..12 => (Some(soon), (soon, Truth::True)),
            12..14 => (None, (soon, Truth::Refused)),
            14..16 => (Some(now), (soon, Truth::Lost)),
            16..19 => (
                Some(now + self.draws.below(160) as u64 * 100),
                (soon, Truth::Lost),
            ),
            _ => (None, (soon, Truth::Lost)),
        };
        self.writes.push(OpenWrite {
            pod,
            placement,
            stage,
            begun: now,
            lands,
            answered: Some(answered),
        });
        self.due_writes()
    }

    /// Whatever is due by now lands, and is answered.
    pub(super) fn due_writes(&mut self) -> Checked {
        let now = self.record.now;
        loop {
            let landing = |write: &OpenWrite| write.lands.filter(|at| *at <= now);
            let next = (0..self.writes.len())
                .filter_map(|at| Some((landing(&self.writes[at])?, at)))
                .min();
            let Some((_, at)) = next else { break };
            self.land(at)?;
        }
        loop {
            let is_due = |write: &OpenWrite| write.answered.is_some_and(|(at, _)| at <= now);
            let Some(at) = self.writes.iter().position(is_due) else {
                break;
            };
            self.answer(at)?;
        }
        self.writes
            .retain(|write| write.lands.is_some() || write.answered.is_some());
        Ok(())
    }

    /// One write lands now, or is answered now, whenever it was to be.
    pub(super) fn settle_one(&mut self) -> Checked {
        let now = self.record.now;
        let count = self.writes.len();
        if count > 0 {
            let at = self.draws.below(count);
            let write = &mut self.writes[at];
            if let Some(lands) = &mut write.lands {
                *lands = now;
            }
            if let Some((at, _)) = &mut write.answered {
                *at = now;
            }
            return self.due_writes();
        }
        self.settling
            .iter_mut()
            .for_each(|settling| settling.due = now);
        self.due_reads()
    }

    /// What is on its way lands or is lost, and no process waits for it.
    pub(super) fn end_writes(&mut self) -> Checked {
        for write in &mut self.writes {
            (write.answered, write.lands) = (None, write.lands.filter(|_| self.draws.chance(50)));
        }
        self.writes
            .iter_mut()
            .filter_map(|write| write.lands.as_mut())
            .for_each(|lands| *lands = 0);
        self.due_writes()?;
        self.writes.clear();
        self.settling.clear();
        Ok(())
    }

    fn land(&mut self, at: usize) -> Checked {
        let write = &mut self.writes[at];
        let (pod, lands) = (
            write.pod,
            write.lands.take().unwrap_or_default().max(write.begun),
        );
        let place = Place {
            node: node_number(&write.placement.node),
            gpus: gpus_of(&write.placement.devices),
        };
        let is_late = matches!(write.answered, None | Some((_, Truth::Lost)));
        let api = &mut self.api[pod as usize];
        if !api.exists || api.bound.is_some() {
            return Ok(());
        }
        (api.bound, api.condition, api.nominated) = (Some((place, lands)), None, None);
        self.tally.bound += 1;
        self.tally.late += u64::from(is_late);
        self.events.push_back(Event::Changed(pod));
        self.start_process(pod, place, lands);
        self.note(|| format!("pod {pod} is bound to {place:?}"));
        self.check_bound(place.node)
    }

    fn answer(&mut self, at: usize) -> Checked {
        let write = &mut self.writes[at];
        let (_, truth) = write.answered.take().expect("it is due");
        let OpenWrite {
            pod,
            placement,
            stage,
            ..
        } = write.clone();
        let place = Place {
            node: node_number(&placement.node),
            gpus: gpus_of(&placement.devices),
        };
        let is_bound_here = self.api[pod as usize]
            .bound
            .is_some_and(|(bound, _)| bound == place);
        let answer = match truth {
            Truth::Lost => BindingAnswer::Unknown,
            Truth::Refused => BindingAnswer::Refused,
            Truth::True if self.api[pod as usize].exists && is_bound_here => BindingAnswer::Written,
            Truth::True => BindingAnswer::Conflict,
        };
        self.note(|| format!("the Binding of pod {pod} to {place:?} is answered {answer:?}"));
        let open = &mut self.record.pods[pod as usize].open;
        open.under_way = open.under_way.saturating_sub(1);
        if matches!(answer, BindingAnswer::Conflict | BindingAnswer::Unknown) {
            open.may_land = open.may_land.max(Some(self.record.now));
        }
        match (answer, stage) {
            (BindingAnswer::Written, _) => self.note_confirmed(pod, place),
            (
                BindingAnswer::Refused,
                BindingStage::Request { is_new: true } | BindingStage::Settling,
            ) => {
                self.note_refused(pod);
            }
            _ => {}
        }
        let uid = self.pods[pod as usize].uid.clone();
        let heard = match answer {
            BindingAnswer::Refused if self.core.has(PlantedBug::ConfirmsRefusedBindings) => {
                BindingAnswer::Written
            }
            answer => answer,
        };
        let step = self.core.apply(BindingAnswered {
            uid: uid.clone(),
            placement: placement.clone(),
            stage,
            answer: heard,
            latest_landing: Millis(LATEST_LANDING),
        });
        if answer == BindingAnswer::Unknown && self.core.has(PlantedBug::ForgetsLostAnswers) {
            self.core.apply(BindingFailed(uid));
        }
        self.follow(pod, placement, step)
    }

    /// The pod was told to be bound; one that the core does not know stays unknown. No other Binding of it can land.
    fn note_confirmed(&mut self, pod: u32, place: Place) {
        self.record.pods[pod as usize].open.may_land = None;
        if self.record.told(pod) != KnownState::Nothing {
            self.record.note_bound(pod, place);
        }
    }

    /// A refused pod, or one that a read shows unbound, waits again, unless another of its Bindings may land.
    fn note_refused(&mut self, pod: u32) {
        let open = self.record.pods[pod as usize].open;
        let has_landed = |given_up: u64| given_up + LATEST_LANDING < self.record.now;
        if open.under_way == 0 && open.may_land.is_none_or(has_landed) {
            self.record.note_unbound(pod);
        }
    }

    fn follow(&mut self, pod: u32, placement: Placement, step: BindingStep) -> Checked {
        match step {
            BindingStep::Bound | BindingStep::Failed(_) => Ok(()),
            BindingStep::Read => {
                let step = self.read(pod, &placement, BindingStage::Request { is_new: false });
                self.follow(pod, placement, step)
            }
            BindingStep::Settle => {
                let uid = self.pods[pod as usize].uid.clone();
                match self.core.apply(SettlingAsked {
                    uid,
                    placement: placement.clone(),
                }) {
                    Some(step) => self.follow(pod, placement, step),
                    None => Ok(()),
                }
            }
            BindingStep::Pause(pause) => {
                self.settling.push(Settling {
                    pod,
                    placement,
                    due: self.record.now + pause.0,
                });
                Ok(())
            }
            BindingStep::Write if self.record.is_old(pod) => Err(format!(
                "the Binding of pod {pod} is written again long after it was decided"
            )),
            BindingStep::Write => self.write(pod, placement, BindingStage::Settling),
            BindingStep::Over => {
                // What was written for another placement since may land still.
                if !matches!(self.record.told(pod), KnownState::Assumed(_)) {
                    self.record.pods[pod as usize].open.may_land = None;
                }
                Ok(())
            }
        }
    }

    /// Loops that settle Bindings read their pods.
    pub(super) fn due_reads(&mut self) -> Checked {
        let now = self.record.now;
        while let Some(at) = self
            .settling
            .iter()
            .position(|settling| settling.due <= now)
        {
            let Settling { pod, placement, .. } = self.settling.swap_remove(at);
            let step = self.read(pod, &placement, BindingStage::Settling);
            let is_over = matches!(step, BindingStep::Bound | BindingStep::Failed(_));
            self.follow(pod, placement.clone(), step)?;
            if is_over {
                self.follow(pod, placement, BindingStep::Over)?;
            }
        }
        Ok(())
    }

    /// The pod is read past every cache.
    fn read(&mut self, pod: u32, placement: &Placement, stage: BindingStage) -> BindingStep {
        let api = &self.api[pod as usize];
        let shown = match (api.exists, api.bound) {
            _ if self.draws.chance(10) => PodRead::Failed,
            (false, _) => PodRead::Gone,
            (true, None) => PodRead::Unbound,
            (true, Some((place, _))) => PodRead::Bound {
                node: self.node_names[usize::from(place.node)].clone(),
                devices: Some(self.uuids(place)),
                borrows: false,
            },
        };
        let place = Place {
            node: node_number(&placement.node),
            gpus: gpus_of(&placement.devices),
        };
        let is_heard =
            stage != BindingStage::Settling || self.record.told(pod) == KnownState::Assumed(place);
        match &shown {
            PodRead::Gone if is_heard => {
                self.record.pods[pod as usize].open.may_land = None;
                self.record.note_gone(pod);
            }
            PodRead::Bound { .. } if is_heard => {
                let (place, _) = self.api[pod as usize].bound.expect("it is shown so");
                self.note_confirmed(pod, place);
            }
            PodRead::Unbound
                if is_heard && stage == BindingStage::Settling && self.record.is_old(pod) =>
            {
                self.note_refused(pod);
            }
            _ => {}
        }
        self.note(|| format!("pod {pod} is read: {shown:?}"));
        let uid = self.pods[pod as usize].uid.clone();
        let (placement, latest_landing) = (placement.clone(), Millis(LATEST_LANDING));
        let asked = Moment(self.record.now);
        self.core.apply(BindingRead {
            uid,
            placement,
            stage,
            pod: shown,
            asked,
            latest_landing,
        })
    }
}
