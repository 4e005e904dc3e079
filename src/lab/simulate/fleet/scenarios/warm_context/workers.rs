//! Workers on the stage: from when until when each has a GPU and its context.

use super::queue::Slot;
use super::{A10, COLD, FROM_DISK, TITAN_X, WEIGHTS, seconds_on};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::shipped;
use crate::simulate::fleet::schedulers::{
    FleetScheduler, Placing, Preempting, StockScheduler, Stowage,
};
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName, PodUid};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

/// What becomes of the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Keeps,
    /// One more is idle every two seconds.
    Grows,
    /// One is taken every minute, once the workers are ready.
    Drains,
}

/// Workers on the stage, which says from when until when each has a GPU.
pub(crate) struct WorkerRun {
    pub stage: Stage<'static, ()>,
    way: Way,
    /// Pods of higher priority that will end.
    others: Vec<PodUid>,
    gpus: u64,
    ready: BTreeMap<PodUid, Slot>,
    pub slots: Vec<Slot>,
}

/// The drain begins when all contexts are there.
const DRAIN: Moment = Moment(START.0 + 600_000);

impl WorkerRun {
    pub fn new(variant: usize, gpus: u64, idle: u64, way: Way, seed: u64) -> Self {
        let policy = include_str!("../../../../../../policies/night-harvest/policy.yaml");
        let scheduler: Box<dyn FleetScheduler> = match variant {
            0 => Box::new(Stowage::new(shipped("night-harvest", policy))),
            _ => Box::new(StockScheduler::new(
                Placing::LeastAllocated,
                Preempting::LowerPriority,
                seed,
            )),
        };
        let mut stage = Stage::new(machines(gpus, seed), scheduler, seed);
        let others = (idle..gpus).map(|_| stage.submit(other())).collect();
        (0..gpus).for_each(|_| drop(stage.submit(worker())));
        let first = if way == Way::Drains {
            DRAIN + Millis::seconds(60)
        } else {
            START + Millis::seconds(2)
        };
        stage.at(first, ());
        Self {
            stage,
            way,
            others,
            gpus,
            ready: BTreeMap::new(),
            slots: Vec::new(),
        }
    }

    pub fn play(&mut self) {
        let end = START + Millis::seconds(1800);
        while let Some(happened) = self.stage.next(end) {
            let now = self.stage.now();
            match happened {
                ScenarioEvent::Ready(uid) => self.note_ready(uid),
                ScenarioEvent::Leaving(uid) => self.end(&uid, now),
                ScenarioEvent::Timer(()) => self.change(now),
                ScenarioEvent::Bound(_) | ScenarioEvent::Gone(_) => {}
            }
        }
        // A drain ends for all.
        let last = if self.way == Way::Drains {
            end.since(DRAIN).0 as f64 / 1000.0
        } else {
            f64::INFINITY
        };
        let left = std::mem::take(&mut self.ready).into_values();
        self.slots.extend(left.map(|slot| Slot {
            until: last,
            ..slot
        }));
    }

    fn change(&mut self, now: Moment) {
        match self.way {
            Way::Keeps => {}
            Way::Grows => {
                let Some(ends) = self.others.pop() else {
                    return;
                };
                self.stage.finish(&ends);
                self.stage.at(now + Millis::seconds(2), ());
            }
            Way::Drains if self.others.len() < self.gpus as usize => {
                self.others.push(self.stage.submit(other()));
                self.stage.at(now + Millis::seconds(60), ());
            }
            Way::Drains => {}
        }
    }

    fn note_ready(&mut self, uid: PodUid) {
        let pod = self.stage.pod(&uid).expect("it is ready");
        let Some(bound) = pod.bound.as_ref().filter(|_| pod.spec.model.is_some()) else {
            return;
        };
        let gpu = self
            .stage
            .machines
            .get(&bound.node)
            .map(|machine| machine.spec.gpu.as_str() == "A10");
        let since = if self.way == Way::Drains {
            DRAIN
        } else {
            START
        };
        let from = self.stage.now().since(since).0 as f64 / 1000.0;
        let each = if gpu == Some(true) { A10 } else { TITAN_X };
        self.ready.insert(
            uid,
            Slot {
                from,
                until: f64::INFINITY,
                each,
                context: 0.0,
            },
        );
    }

    fn end(&mut self, uid: &PodUid, now: Moment) {
        let Some(slot) = self.ready.remove(uid) else {
            return;
        };
        self.slots.push(Slot {
            until: now.since(DRAIN).0 as f64 / 1000.0,
            ..slot
        });
        // Its Job makes another.
        self.stage.submit(worker());
    }
}

fn worker() -> PodSpec {
    let labels = BTreeMap::from([("stowage.dev/checkpoints".to_owned(), "true".to_owned())]);
    let model = ModelId::parse("smollm2-1.7b").expect("it is a name");
    let pod = PodSpec::serving("harvest", model, WEIGHTS, Bytes::gib(9));
    PodSpec {
        labels,
        priority: -10,
        exclusive: true,
        ..pod
    }
}

/// Another team's pod, for which workers leave.
fn other() -> PodSpec {
    PodSpec {
        priority: 1000,
        exclusive: true,
        grace: Millis::seconds(30),
        ..PodSpec::plain("serving", Bytes::gib(9))
    }
}

fn machines(gpus: u64, seed: u64) -> Machines {
    let mut draws = Random::seeded(seed, 4);
    let spec = |n: u64| MachineSpec {
        name: NodeName::parse(&format!("node-{n:03}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse(if seconds_on(n) == A10 {
            "A10"
        } else {
            "TITAN-X"
        })
        .expect("it is a plain word"),
        gpus: 1,
        vram: Bytes::gib(if seconds_on(n) == A10 { 24 } else { 12 }),
        page_cache: Bytes::gib(32),
    };
    // So that a context takes 40 s from files and 105 s without.
    let disk = Bytes(3_000_000_000);
    let init = Millis((FROM_DISK * 1000.0) as u64 - WEIGHTS.over(disk).0);
    let network = Bytes((WEIGHTS.0 as f64 / (COLD - FROM_DISK)) as u64);
    let speeds = LoadingSpeeds {
        network,
        disk,
        page_cache: disk,
        init,
        ..LoadingSpeeds::default()
    };
    let mut machines = Machines::new((0..gpus).map(spec), speeds);
    for n in 0..gpus {
        if draws.below(2) == 0 {
            let model = ModelId::parse("smollm2-1.7b").expect("it is a name");
            machines
                .get_mut(&spec(n).name)
                .expect("it was just made")
                .disk
                .insert(model, WEIGHTS);
        }
    }
    machines
}
