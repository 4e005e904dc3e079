//! Workers on the stage: from when until when each has a GPU and its context.

use super::queue::Slot;
use super::{
    A10_INFERENCE_S, COLD_CONTEXT_S, DISK_CONTEXT_S, TITAN_X_INFERENCE_S, WEIGHTS,
    inference_seconds_on,
};
use crate::simulate::fleet::machines::{MachineSpec, Machines};
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::scenarios::shipped_policy;
use crate::simulate::fleet::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName, PodUid};
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

/// What becomes of the GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuSupply {
    Constant,
    /// One more is idle every two seconds.
    Growing,
    /// One is taken every minute, once the workers are ready.
    Draining,
}

/// Workers on the stage, which says from when until when each has a GPU.
pub(crate) struct WorkerRun {
    pub stage: Stage<'static, ()>,
    supply: GpuSupply,
    /// Pods of higher priority that will end.
    other_pods: Vec<PodUid>,
    gpus: u64,
    ready: BTreeMap<PodUid, Slot>,
    pub slots: Vec<Slot>,
}

/// The drain begins when all contexts are there.
const DRAIN_START: Moment = Moment(START.0 + 600_000);

impl WorkerRun {
    pub fn new(variant: usize, gpus: u64, idle: u64, way: GpuSupply, seed: u64) -> Self {
        let policy = include_str!("../../../../../../policies/night-harvest/policy.yaml");
        let scheduler: Box<dyn FleetScheduler> = match variant {
            0 => Box::new(Stowage::new(shipped_policy("night-harvest", policy))),
            _ => Box::new(KubeSchedulerBaseline::new(
                ScoringStrategy::LeastAllocated,
                PreemptionMode::LowerPriority,
                seed,
            )),
        };
        let mut stage = Stage::new(machines(gpus, seed), scheduler, seed);
        let others = (idle..gpus).map(|_| stage.submit(other())).collect();
        (0..gpus).for_each(|_| drop(stage.submit(worker())));
        let first = if way == GpuSupply::Draining {
            DRAIN_START + Millis::seconds(60)
        } else {
            START + Millis::seconds(2)
        };
        stage.schedule_timer(first, ());
        Self {
            stage,
            supply: way,
            other_pods: others,
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
                ScenarioEvent::Ready(uid) => self.record_ready(uid),
                ScenarioEvent::Terminating(uid) => self.end_slot(&uid, now),
                ScenarioEvent::Timer(()) => self.change_supply(now),
                ScenarioEvent::Bound(_) | ScenarioEvent::Deleted(_) => {}
            }
        }
        // A drain ends for all.
        let last = if self.supply == GpuSupply::Draining {
            end.since(DRAIN_START).0 as f64 / 1000.0
        } else {
            f64::INFINITY
        };
        let left = std::mem::take(&mut self.ready).into_values();
        self.slots.extend(left.map(|slot| Slot {
            until_s: last,
            ..slot
        }));
    }

    fn change_supply(&mut self, now: Moment) {
        match self.supply {
            GpuSupply::Constant => {}
            GpuSupply::Growing => {
                let Some(ends) = self.other_pods.pop() else {
                    return;
                };
                self.stage.finish(&ends);
                self.stage.schedule_timer(now + Millis::seconds(2), ());
            }
            GpuSupply::Draining if self.other_pods.len() < self.gpus as usize => {
                self.other_pods.push(self.stage.submit(other()));
                self.stage.schedule_timer(now + Millis::seconds(60), ());
            }
            GpuSupply::Draining => {}
        }
    }

    fn record_ready(&mut self, uid: PodUid) {
        let pod = self.stage.pod(&uid).expect("it is ready");
        let Some(bound) = pod.binding.as_ref().filter(|_| pod.spec.model.is_some()) else {
            return;
        };
        let gpu = self
            .stage
            .machines
            .get(&bound.node)
            .map(|machine| machine.spec.gpu.as_str() == "A10");
        let since = if self.supply == GpuSupply::Draining {
            DRAIN_START
        } else {
            START
        };
        let from = self.stage.now().since(since).0 as f64 / 1000.0;
        let each = if gpu == Some(true) {
            A10_INFERENCE_S
        } else {
            TITAN_X_INFERENCE_S
        };
        self.ready.insert(
            uid,
            Slot {
                from_s: from,
                until_s: f64::INFINITY,
                inference_s: each,
                context_s: 0.0,
            },
        );
    }

    fn end_slot(&mut self, uid: &PodUid, now: Moment) {
        let Some(slot) = self.ready.remove(uid) else {
            return;
        };
        self.slots.push(Slot {
            until_s: now.since(DRAIN_START).0 as f64 / 1000.0,
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
        is_exclusive: true,
        ..pod
    }
}

/// Another team's pod, for which workers leave.
fn other() -> PodSpec {
    PodSpec {
        priority: 1000,
        is_exclusive: true,
        grace: Millis::seconds(30),
        ..PodSpec::plain("serving", Bytes::gib(9))
    }
}

fn machines(gpus: u64, seed: u64) -> Machines {
    let mut draws = Random::seeded(seed, 4);
    let spec = |n: u64| MachineSpec {
        name: NodeName::parse(&format!("node-{n:03}")).expect("digits are a name"),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse(if inference_seconds_on(n) == A10_INFERENCE_S {
            "A10"
        } else {
            "TITAN-X"
        })
        .expect("it is a plain word"),
        gpus: 1,
        vram: Bytes::gib(if inference_seconds_on(n) == A10_INFERENCE_S {
            24
        } else {
            12
        }),
        page_cache: Bytes::gib(32),
    };
    // So that a context takes 40 s from files and 105 s without.
    let disk = Bytes(3_000_000_000);
    let init = Millis((DISK_CONTEXT_S * 1000.0) as u64 - WEIGHTS.transfer_time(disk).0);
    let network = Bytes((WEIGHTS.0 as f64 / (COLD_CONTEXT_S - DISK_CONTEXT_S)) as u64);
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
