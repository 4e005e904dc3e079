//! What every scheduler must keep to on the stage, and what Stowage does there.

use super::machines::{MachineSpec, Machines, SleepingEngine};
use super::messages::{Delivery, DeliveryOutcome, Message, MessageDirection, SchedulerAction};
use super::pods::PodSpec;
use super::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use super::stage::{START, ScenarioEvent, Stage};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use stowage_scheduling::ids::{GpuModel, ModelId, NodeName, PodUid};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::{Bytes, Millis, Moment};
use stowage_scheduling::vocabulary::model_tier::LoadingSpeeds;

fn machines(nodes: usize, gpus: u32) -> Machines {
    let spec = |n: usize| MachineSpec {
        name: NodeName::parse(&format!("node-{n:03}")).unwrap(),
        labels: BTreeMap::new(),
        gpu: GpuModel::parse("H100-80GB").unwrap(),
        gpus,
        vram: Bytes::gib(80),
        page_cache: Bytes::gib(200),
    };
    Machines::new((0..nodes).map(spec), LoadingSpeeds::default())
}

fn schedulers(seed: u64) -> [Box<dyn FleetScheduler>; 3] {
    [
        Box::new(Stowage::new(Policy::default())),
        Box::new(KubeSchedulerBaseline::new(
            ScoringStrategy::LeastAllocated,
            PreemptionMode::LowerPriority,
            seed,
        )),
        Box::new(KubeSchedulerBaseline::new(
            ScoringStrategy::MostAllocated,
            PreemptionMode::Never,
            seed,
        )),
    ]
}

/// A scheduler that a test looks into after it has played.
impl<S: FleetScheduler> FleetScheduler for Rc<RefCell<S>> {
    fn initialize(&mut self, now: Moment, machines: &Machines) {
        self.borrow_mut().initialize(now, machines);
    }

    fn observe(&mut self, now: Moment, message: &Message) {
        self.borrow_mut().observe(now, message);
    }

    fn round(&mut self, now: Moment, machines: &Machines) -> Vec<SchedulerAction> {
        self.borrow_mut().round(now, machines)
    }

    fn reads_reports(&self) -> bool {
        self.borrow().reads_reports()
    }

    fn has_pending(&self) -> bool {
        self.borrow().has_pending()
    }
}

/// Pods of all kinds come, run and end, for an hour.
fn play(stage: &mut Stage<'_, u32>, seed: u64) -> usize {
    let mut dice = Random::seeded(seed, 1);
    let end = START + Millis::seconds(3600);
    let mut ready = 0;
    (0..200).for_each(|n| stage.schedule_timer(START + Millis::seconds(n * 15), 0));
    while let Some(happened) = stage.next(end) {
        match happened {
            ScenarioEvent::Timer(0) => {
                let gib = 5 + dice.below(70) as u64;
                let gpus = [1, 1, 1, 2, 4][dice.below(5)];
                let spec = PodSpec {
                    priority: [-10, 0, 1000][dice.below(3)],
                    gpus,
                    is_exclusive: dice.below(4) == 0,
                    ..PodSpec::plain("a", Bytes::gib(gib).times(u64::from(gpus)))
                };
                stage.submit(spec);
            }
            ScenarioEvent::Ready(uid) => {
                ready += 1;
                // Most end soon after.
                if dice.below(4) > 0 {
                    stage.finish(&uid);
                }
            }
            _ => {}
        }
        assert_eq!(stage.violations, []);
    }
    ready
}

#[test]
fn no_scheduler_violates_an_invariant_and_all_place_pods() {
    for seed in 0..4 {
        for scheduler in schedulers(seed) {
            let mut stage = Stage::new(machines(6, 4), scheduler, seed);
            assert!(play(&mut stage, seed) > 30);
        }
    }
}

#[test]
fn the_ledger_of_stowage_adds_up_after_every_round() {
    for seed in 0..4 {
        let stowage = Rc::new(RefCell::new(Stowage::new(Policy::default()).audited()));
        let mut stage = Stage::new(machines(6, 4), Box::new(stowage.clone()), seed);
        play(&mut stage, seed);
        assert_eq!(stowage.borrow().violations, []);
    }
}

#[test]
fn the_same_seed_plays_the_same() {
    let run = |seed| {
        let [stowage, ..] = schedulers(seed);
        let mut stage = Stage::new(machines(4, 4), stowage, seed);
        let ready = play(&mut stage, seed);
        let bindings: Vec<String> = stage
            .pods()
            .map(|(uid, pod)| format!("{uid} {:?} {:?}", pod.binding, pod.ready_at))
            .collect();
        (ready, bindings)
    };
    assert_eq!(run(7), run(7));
}

/// A preemptor gets the GPUs of pods that leave for it, with both schedulers that preempt.
#[test]
fn a_preemptor_gets_the_gpus_of_its_victims() {
    for scheduler in schedulers(1).into_iter().take(2) {
        let mut stage: Stage<'_, u32> = Stage::new(machines(1, 2), scheduler, 1);
        let job = PodSpec {
            priority: -10,
            is_exclusive: true,
            ..PodSpec::plain("jobs", Bytes::gib(70))
        };
        (0..2).for_each(|_| drop(stage.submit(job.clone())));
        let mut order = Vec::new();
        stage.schedule_timer(START + Millis::seconds(600), 1);
        let mut urgent = None;
        while let Some(happened) = stage.next(START + Millis::seconds(1200)) {
            match happened {
                ScenarioEvent::Timer(_) => {
                    let spec = PodSpec {
                        priority: 1000,
                        is_exclusive: true,
                        gpus: 2,
                        ..PodSpec::plain("serving", Bytes::gib(140))
                    };
                    urgent = Some(stage.submit(spec));
                }
                ScenarioEvent::Terminating(_) => order.push("leaving"),
                ScenarioEvent::Deleted(_) => order.push("gone"),
                ScenarioEvent::Bound(uid) if Some(&uid) == urgent.as_ref() => order.push("bound"),
                _ => {}
            }
        }
        assert_eq!(order, ["leaving", "leaving", "gone", "gone", "bound"]);
        assert_eq!((&stage.violations[..], stage.evictions), (&[][..], 2));
    }
}

#[test]
fn stowage_wakes_sleeping_engines_and_kube_scheduler_only_by_chance() {
    let model = ModelId::parse("llama").unwrap();
    let pod = PodSpec {
        is_exclusive: true,
        ..PodSpec::serving("a", model.clone(), Bytes::gib(15), Bytes::gib(40))
    };
    let time_to_ready = |scheduler: Box<dyn FleetScheduler>| {
        let mut machines = machines(8, 4);
        let node = NodeName::parse("node-005").unwrap();
        let sleeper = SleepingEngine {
            pod: PodUid::parse("asleep").unwrap(),
            model: model.clone(),
            weights: Bytes::gib(15),
            gpus: vec![2],
            namespace: "a".into(),
        };
        let sleeping = machines.get_mut(&node).unwrap();
        sleeping.sleeping_engines.push(sleeper);
        sleeping.read_files(&model, Bytes::gib(15));
        let mut stage: Stage<'_, u32> = Stage::new(machines, scheduler, 3);
        let uid = stage.submit(pod.clone());
        while stage.next(START + Millis::seconds(900)).is_some() {}
        let pod = stage.pod(&uid).unwrap();
        pod.ready_at.unwrap().since(pod.submitted_at)
    };
    let [stowage, stock, _] = schedulers(3);
    assert!(time_to_ready(stowage) < Millis::seconds(3));
    assert!(time_to_ready(stock) > Millis::seconds(15));
}

/// Faults: a message that is lost is not seen, one that is late is seen late, and a Binding that is written twice is
/// one Binding.
#[test]
fn messages_can_be_lost_delayed_or_repeated() {
    struct Every(u32);
    impl Delivery for Every {
        fn outcome_of(&mut self, _: Moment, envelope: MessageDirection<'_>) -> DeliveryOutcome {
            self.0 += 1;
            match envelope {
                MessageDirection::FromScheduler => DeliveryOutcome::Twice {
                    after: Millis(100),
                    again_after: Millis(300),
                },
                MessageDirection::ToScheduler(Message::Pod(_)) if self.0.is_multiple_of(2) => {
                    DeliveryOutcome::Arrives {
                        after: Millis::seconds(2),
                    }
                }
                MessageDirection::ToScheduler(_) => DeliveryOutcome::Arrives { after: Millis(0) },
            }
        }
    }
    let [stowage, ..] = schedulers(0);
    let mut stage: Stage<'_, u32> =
        Stage::with_delivery(machines(2, 4), stowage, Box::new(Every(0)), 0);
    let pods: Vec<PodUid> = (0..6)
        .map(|_| stage.submit(PodSpec::plain("a", Bytes::gib(30))))
        .collect();
    while stage.next(START + Millis::seconds(120)).is_some() {}
    assert!(
        pods.iter()
            .all(|uid| stage.pod(uid).is_some_and(|pod| pod.ready_at.is_some()))
    );
    assert_eq!(stage.violations, []);
}
