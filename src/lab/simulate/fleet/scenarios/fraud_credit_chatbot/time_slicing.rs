//! GPUs that a device plugin slices by time: a pod gets any GPU, and nothing is isolated. Only memory is looked at here, in its
//! favor: a real one lets pods run out of it.

use crate::simulate::fleet::machines::{Machine, Machines, PhysicalGpu};
use crate::simulate::fleet::messages::{BindingLoan, Message, SchedulerAction};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::schedulers::FleetScheduler;
use std::sync::Arc;
use stowage_scheduling::ids::PodUid;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Moment};

pub(crate) struct TimeSlicing {
    /// In the order in which they came.
    pending: Vec<(PodUid, Arc<PodSpec>)>,
    draws: Random,
    has_changed: bool,
}

impl TimeSlicing {
    pub fn new(seed: u64) -> Self {
        Self {
            pending: Vec::new(),
            draws: Random::seeded(seed, 10),
            has_changed: false,
        }
    }
}

impl FleetScheduler for TimeSlicing {
    fn initialize(&mut self, _: Moment, _: &Machines) {}

    fn observe(&mut self, _: Moment, message: &Message) {
        match message {
            Message::Pod(shown) if shown.bound.is_some() || shown.terminating_since.is_some() => {
                self.pending.retain(|(uid, _)| *uid != shown.uid);
            }
            Message::Pod(shown) if self.pending.iter().all(|(uid, _)| *uid != shown.uid) => {
                self.pending.push((shown.uid.clone(), shown.spec.clone()));
            }
            Message::PodDeleted(gone) => self.pending.retain(|(uid, _)| uid != gone),
            _ => return,
        }
        self.has_changed = true;
    }

    fn round(&mut self, _: Moment, machines: &Machines) -> Vec<SchedulerAction> {
        self.has_changed = false;
        let gpus = machines
            .iter()
            .flat_map(|machine| machine.gpus.iter().map(move |gpu| (machine, gpu)));
        let mut free_gpus: Vec<(&Machine, &PhysicalGpu, Bytes)> = gpus
            .map(|(machine, gpu)| (machine, gpu, machine.spec.vram.minus(gpu.granted_bytes())))
            .collect();
        let mut acts = Vec::new();
        for (uid, spec) in &self.pending {
            let fitting: Vec<usize> = (0..free_gpus.len())
                .filter(|index| spec.vram <= free_gpus[*index].2)
                .collect();
            let Some(index) = fitting.get(self.draws.below(fitting.len())) else {
                continue;
            };
            let (machine, gpu, free) = &mut free_gpus[*index];
            *free = free.minus(spec.vram);
            let (node, devices) = (machine.spec.name.clone(), [gpu.uuid.clone()].into());
            acts.push(SchedulerAction::Bind {
                uid: uid.clone(),
                node,
                devices,
                loan: BindingLoan::default(),
            });
        }
        acts
    }

    fn reads_reports(&self) -> bool {
        false
    }

    fn has_pending(&self) -> bool {
        self.has_changed && !self.pending.is_empty()
    }
}
