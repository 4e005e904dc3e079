//! Random schedules: pods of all classes in any order, and what the hardware holds of them.

use super::app::App;
use super::{GPU_VRAM, machines};
use crate::simulate::fleet::machines::PhysicalGpu;
use crate::simulate::fleet::pods::PodSpec;
use crate::simulate::fleet::schedulers::FleetScheduler;
use crate::simulate::fleet::stage::{START, ScenarioEvent, Stage, StagePod};
use std::collections::BTreeMap;
use stowage_scheduling::ids::{GpuUuid, PodUid};
use stowage_scheduling::testkit::oracle::BrokenInvariant;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis, Moment};

/// Pods of one schedule.
const PODS_PER_SCHEDULE: (usize, usize) = (4, 12);
/// They come within this time, and it is played for as long again.
const ARRIVAL_PERIOD: Millis = Millis::seconds(60);
const VRAM_GIB: (usize, usize) = (4, 60);
/// What the policy's headroom leaves of a GPU.
const ALLOCATABLE: Bytes = Bytes(GPU_VRAM.0 / 10 * 9);

/// How long what pods have left to another may be kept for it at most: grace, the report after it, and a round.
const MAX_RESERVED_TIME: Millis = Millis::seconds(30);

/// By pod that others were evicted for and that is not bound yet: the GPU, and since when.
type ReservedGpus = BTreeMap<PodUid, (GpuUuid, Moment)>;

#[derive(Debug, Default)]
pub struct Schedules {
    /// Pods that were bound beside fraud detection, or beside which it was bound.
    pub beside_fraud: u64,
    /// Sets of victims, each for one pod.
    pub evictions: u64,
    /// Sets with credit scoring in them where chatbots alone would have made the room.
    avoidable_credit_evictions: u64,
    /// Sets with credit scoring in them where room was kept for a waiting pod of lower priority.
    pub credit_evictions_beside_reserved: u64,
    pub fraud_evicted: u64,
    /// Whether fraud detection shares its GPU.
    shares: bool,
    pub broken: Vec<BrokenInvariant>,
}

enum Timer {
    Arrives(PodSpec),
    Ends(PodUid),
}

impl Schedules {
    pub fn play_schedules(
        count: usize,
        seed: u64,
        shares: bool,
        new: impl Fn(u64) -> Box<dyn FleetScheduler>,
    ) -> Self {
        let mut sums = Self {
            shares,
            ..Self::default()
        };
        let mut draws = Random::seeded(seed, 7);
        for n in 0..count as u64 {
            sums.play(
                Stage::new(machines(), new(seed.wrapping_add(n)), n),
                &mut draws,
            );
        }
        sums
    }

    fn play(&mut self, mut stage: Stage<'_, Timer>, draws: &mut Random) {
        for _ in 0..PODS_PER_SCHEDULE.0 + draws.below(PODS_PER_SCHEDULE.1 - PODS_PER_SCHEDULE.0 + 1)
        {
            let at = START + Millis(draws.below(ARRIVAL_PERIOD.0 as usize) as u64);
            stage.schedule_timer(at, Timer::Arrives(pod(draws)));
        }
        let mut last_set = None;
        let mut kept = ReservedGpus::new();
        while let Some(happened) = stage.next(START + ARRIVAL_PERIOD.times(2)) {
            let now = stage.now();
            match happened {
                ScenarioEvent::Timer(Timer::Arrives(spec)) => drop(stage.submit(spec)),
                ScenarioEvent::Timer(Timer::Ends(uid)) => stage.finish(&uid),
                ScenarioEvent::Bound(uid) => {
                    kept.remove(&uid);
                    self.beside_fraud += count_beside_fraud(&stage, &uid);
                    // Two in three end.
                    if draws.below(3) > 0 {
                        let after = draws.log_uniform(Millis::seconds(5), ARRIVAL_PERIOD);
                        stage.schedule_timer(now + after, Timer::Ends(uid));
                    }
                }
                ScenarioEvent::Terminating(uid) => {
                    let of = stage.pod(&uid).and_then(|pod| pod.evicted_for.clone());
                    let set = of.map(|of| (now, of));
                    if set != last_set {
                        self.check_victim_set(&stage, set.as_ref(), &kept);
                        last_set = set.clone();
                    }
                    let on = stage.pod(&uid).and_then(|pod| pod.binding.as_ref());
                    let on = on.and_then(|bound| bound.devices.first());
                    kept.extend(set.zip(on).map(|((at, of), gpu)| (of, (gpu.clone(), at))));
                }
                ScenarioEvent::Ready(_) | ScenarioEvent::Deleted(_) => {}
            }
        }
        self.broken.append(&mut stage.violations);
    }

    /// The pods that leave since then for that pod, all at once.
    fn check_victim_set(
        &mut self,
        stage: &Stage<'_, Timer>,
        set: Option<&(Moment, PodUid)>,
        kept: &ReservedGpus,
    ) {
        self.evictions += 1;
        let leaves = |uid: &PodUid| {
            let pod = stage.pod(uid)?;
            (pod.terminating_since.zip(pod.evicted_for.clone()).as_ref() == set)
                .then(|| App::from_pod(&pod.spec))
        };
        let apps: Vec<App> = stage.pods().filter_map(|(uid, _)| leaves(uid)).collect();
        self.fraud_evicted += apps.iter().filter(|app| **app == App::Fraud).count() as u64;
        let Some((at, preemptor)) = set else { return };
        let Some(spec) = stage.pod(preemptor).map(|pod| &pod.spec) else {
            return;
        };
        // Other pods that wait for what others have left to them.
        let is_kept =
            |of: &PodUid, since: Moment| of != preemptor && stage.now() < since + MAX_RESERVED_TIME;
        let coming = |gpu: &PhysicalGpu, from: i32| {
            let here = kept
                .iter()
                .filter(|(of, (uuid, since))| *uuid == gpu.uuid && is_kept(of, *since));
            let pods = here
                .filter_map(|(of, _)| stage.pod(of))
                .map(|pod| &pod.spec);
            pods.filter(move |spec| spec.priority >= from)
                .cloned()
                .collect::<Vec<_>>()
        };
        let fits_without_chatbots = |gpu: &PhysicalGpu, kept_from: i32| {
            let others = gpu
                .pods
                .keys()
                .filter_map(|uid| Some((uid, stage.pod(uid)?)));
            let is_free_to_go = others
                .clone()
                .all(|(uid, pod)| pod.terminating_since.is_none() || leaves(uid).is_some());
            // The Binding of a pod that came in this moment was on its way: there was no pod to evict.
            let is_bound = |pod: &StagePod| pod.submitted_at < *at;
            let stay = others
                .filter(|(_, pod)| App::from_pod(&pod.spec) != App::Chatbot || !is_bound(pod));
            // An engine that starts keeps others from starting on its GPU.
            let starts = stay.clone().any(|(_, pod)| pod.ready_at.is_none());
            let stay: Vec<_> = stay
                .map(|(_, pod)| pod.spec.clone())
                .chain(coming(gpu, kept_from))
                .collect();
            let taken: Bytes = stay.iter().map(|spec| spec.vram).sum();
            let is_alone =
                |spec: &PodSpec| matches!(App::from_pod(spec), App::Fraud | App::Pretender);
            let keeps_off = match App::from_pod(spec) {
                _ if self.shares => false,
                App::Fraud => !stay.is_empty(),
                _ => stay.iter().any(|spec| is_alone(spec)),
            };
            is_free_to_go && !keeps_off && !starts && spec.vram + taken <= ALLOCATABLE
        };
        let gpus = || stage.machines.iter().flat_map(|machine| &machine.gpus);
        if !apps.contains(&App::Credit) {
            return;
        }
        if gpus().any(|gpu| fits_without_chatbots(gpu, i32::MIN)) {
            self.avoidable_credit_evictions += 1;
        } else if gpus().any(|gpu| fits_without_chatbots(gpu, spec.priority)) {
            self.credit_evictions_beside_reserved += 1;
        }
    }

    /// Victim sets in which the chatbot leaves first, in percent.
    pub(crate) fn chatbot_first(&self) -> f64 {
        100.0 - 100.0 * self.avoidable_credit_evictions as f64 / self.evictions.max(1) as f64
    }
}

fn pod(draws: &mut Random) -> PodSpec {
    use App::{Chatbot, Credit, Fraud, Pretender};
    let app = [
        Fraud, Fraud, Pretender, Credit, Credit, Credit, Chatbot, Chatbot, Chatbot, Chatbot,
    ];
    let app = app[draws.below(10)];
    let gib = VRAM_GIB.0 + draws.below(VRAM_GIB.1 - VRAM_GIB.0 + 1);
    let pod = app.pod(Bytes::gib(gib as u64));
    let priority = match app {
        // Of two pods of fraud detection none is evicted for the other, whatever their priorities.
        Fraud => pod.priority + draws.below(3) as i32 * 500,
        Pretender => draws.below(1000) as i32,
        Credit | Chatbot => pod.priority,
    };
    PodSpec {
        priority,
        grace: Millis(1000 + draws.below(20_000) as u64),
        ..pod
    }
}

/// Pods that share a GPU with fraud detection since this one was bound.
fn count_beside_fraud(stage: &Stage<'_, Timer>, uid: &PodUid) -> u64 {
    let is_fraud = |uid: &PodUid| {
        stage
            .pod(uid)
            .is_some_and(|pod| App::from_pod(&pod.spec) == App::Fraud)
    };
    let gpus = stage.machines.iter().flat_map(|machine| &machine.gpus);
    let shared = gpus.filter(|gpu| gpu.pods.contains_key(uid) && gpu.pods.keys().any(is_fraud));
    shared
        .map(|gpu| {
            if is_fraud(uid) {
                gpu.pods.len() as u64 - 1
            } else {
                1
            }
        })
        .sum()
}
