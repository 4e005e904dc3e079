//! What single loads ask for, one rule at a time.

use super::*;
use crate::ids::ModelId;
use crate::policy::{AutoscalingRules, ModelRules, Reserve, ScaleDown, ScaleUp};
use crate::units::{Millis, Moment, Percent};
use std::collections::BTreeMap;

/// Seconds after some start.
fn at(seconds: u64) -> Moment {
    Moment(1_000_000) + Millis::seconds(seconds)
}

/// So many replicas, each with this KV cache usage in per cent and so many waiting and running requests.
fn load(serving: u32, kv_cache: u16, waiting: u64, running: u64) -> ModelLoad {
    let mut load = ModelLoad {
        ready_in: Millis::seconds(60),
        ..ModelLoad::default()
    };
    let kv_cache = Permille::from_share(f64::from(kv_cache) / 100.0);
    for _ in 0..serving {
        load.add(EngineFigures::Serving {
            kv_cache,
            waiting: Some(waiting),
            running: Some(running),
        });
    }
    load
}

fn with(mut load: ModelLoad, replicas: u32, figures: EngineFigures) -> ModelLoad {
    (0..replicas).for_each(|_| load.add(figures));
    load
}

fn rules() -> AutoscalingRules {
    AutoscalingRules::default()
}

/// The answer to the same load every fifteen seconds, the last one.
fn after(
    scaling: &mut ModelScaling,
    rules: &AutoscalingRules,
    load: &ModelLoad,
    from: u64,
    seconds: u64,
) -> DesiredReplicas {
    let times = (from..=from + seconds).step_by(15);
    times
        .map(|second| scaling.decide(rules, load, at(second)))
        .last()
        .unwrap()
}

#[test]
fn the_total_of_the_kv_caches_in_use_by_the_target_is_the_number_of_replicas() {
    // 4 × 95 % of a target of 70 % are 5.4 replicas.
    let desired = ModelScaling::default().decide(&rules(), &load(4, 95, 0, 20), at(0));
    assert_eq!(
        (desired.replicas, desired.by),
        (6, DecidingFactor::Signal(Signal::KvCache))
    );
    assert_eq!(desired.needs[0].milli_replicas, MilliReplicas(5429));
}

#[test]
fn a_queue_asks_for_replicas_where_full_caches_cannot() {
    // 40 waiting requests at 5 a replica.
    let desired = ModelScaling::default().decide(&rules(), &load(4, 100, 10, 20), at(0));
    assert_eq!(
        (desired.replicas, desired.by),
        (8, DecidingFactor::Signal(Signal::Waiting))
    );
}

#[test]
fn requests_count_if_the_policy_gives_a_target_and_those_that_wait_count_too() {
    let rules = AutoscalingRules {
        running: Some(10),
        waiting: 1000,
        ..rules()
    };
    let desired = ModelScaling::default().decide(&rules, &load(4, 30, 5, 20), at(0));
    assert_eq!(
        (desired.replicas, desired.by),
        (8, DecidingFactor::Step),
        "10 are asked for, and 4 serve"
    );
    assert_eq!(desired.requested, 10);
}

#[test]
fn within_the_tolerance_nothing_changes() {
    let mut scaling = ModelScaling::default();
    for kv_cache in [70, 76, 64, 70] {
        let desired = scaling.decide(&rules(), &load(10, kv_cache, 0, 5), at(0));
        assert_eq!(
            (desired.replicas, desired.by),
            (10, DecidingFactor::Tolerance),
            "{kv_cache} %"
        );
    }
}

#[test]
fn it_falls_when_a_whole_window_has_asked_for_less_and_by_half_a_minute() {
    let (mut scaling, idle) = (ModelScaling::default(), load(16, 0, 0, 0));
    let held = after(&mut scaling, &rules(), &idle, 0, 285);
    assert_eq!(
        (held.replicas, held.requested, held.by),
        (16, 0, DecidingFactor::Window)
    );
    assert_eq!(after(&mut scaling, &rules(), &idle, 300, 0).replicas, 8);
    assert_eq!(
        after(&mut scaling, &rules(), &idle, 315, 30).replicas,
        8,
        "half a minute is no minute"
    );
    assert_eq!(after(&mut scaling, &rules(), &idle, 360, 0).replicas, 4);
    assert_eq!(
        after(&mut scaling, &rules(), &idle, 375, 600).replicas,
        1,
        "minReplicas"
    );
}

#[test]
fn a_peak_holds_the_number_for_a_window() {
    let (mut scaling, usual) = (ModelScaling::default(), load(8, 30, 0, 5));
    after(&mut scaling, &rules(), &usual, 0, 200);
    assert_eq!(
        scaling
            .decide(&rules(), &load(8, 90, 0, 30), at(215))
            .replicas,
        11
    );
    assert_eq!(
        after(&mut scaling, &rules(), &load(11, 25, 0, 5), 230, 285).replicas,
        11
    );
    assert_eq!(
        after(&mut scaling, &rules(), &load(11, 25, 0, 5), 530, 0).replicas,
        6,
        "by half at most"
    );
}

#[test]
fn a_scale_up_window_lets_a_short_peak_pass() {
    let scale_up = ScaleUp {
        window: Millis::seconds(60),
        ..ScaleUp::default()
    };
    let rules = AutoscalingRules {
        scale_up,
        look_ahead: Millis(0),
        ..rules()
    };
    let mut scaling = ModelScaling::default();
    after(&mut scaling, &rules, &load(4, 70, 0, 5), 0, 90);
    assert_eq!(
        after(&mut scaling, &rules, &load(4, 100, 0, 9), 105, 30).by,
        DecidingFactor::Window
    );
    assert_eq!(
        after(&mut scaling, &rules, &load(4, 70, 0, 5), 150, 60).replicas,
        4
    );
    assert_eq!(
        after(&mut scaling, &rules, &load(4, 100, 0, 9), 225, 60).replicas,
        6
    );
}

#[test]
fn replicas_that_start_are_within_the_step() {
    // However long four replicas take to start and however the queue grows: no more than four are beyond the two that serve.
    let mut scaling = ModelScaling::default();
    for n in 0..40 {
        let load = with(load(2, 100, 50 + 40 * n, 30), 4, EngineFigures::Starting);
        let desired = scaling.decide(&rules(), &load, at(15 * n));
        assert_eq!(
            (desired.replicas, desired.by),
            (6, DecidingFactor::Step),
            "evaluation {n}"
        );
    }
    // They serve: 8.6 are asked for by their caches, and by the queue no more before it is seen what they make of it.
    assert_eq!(
        after(&mut scaling, &rules(), &load(6, 100, 500, 30), 600, 30).replicas,
        9
    );
    assert_eq!(
        after(&mut scaling, &rules(), &load(6, 100, 500, 30), 645, 0).replicas,
        12,
        "it does not fall"
    );
}

#[test]
fn a_rising_load_is_met_before_it_is_there() {
    let rules = AutoscalingRules {
        scale_up: ScaleUp {
            replicas: 100,
            ..ScaleUp::default()
        },
        ..rules()
    };
    let mut scaling = ModelScaling::default();
    let mut desired = None;
    for n in 0..9u64 {
        // 4 % of ten caches more each fifteen seconds.
        desired = Some(scaling.decide(&rules, &load(10, 30 + 4 * n as u16, 0, 5), at(15 * n)));
    }
    let desired = desired.unwrap();
    // 6.2 caches now; a replica answers in a minute: 16 % of ten more.
    assert_eq!(
        (desired.needs[0].now, desired.needs[0].predicted),
        (6200, 7800)
    );
    assert_eq!(desired.replicas, 12);
    let blind = AutoscalingRules {
        look_ahead: Millis(0),
        ..rules
    };
    assert_eq!(
        ModelScaling::default()
            .decide(&blind, &load(10, 62, 0, 5), at(0))
            .replicas,
        10
    );
}

#[test]
fn a_queue_that_will_be_gone_in_time_asks_for_nothing() {
    let mut scaling = ModelScaling::default();
    let mut desired = None;
    for n in 0..9u64 {
        desired = Some(scaling.decide(&rules(), &load(4, 65, 90 - 10 * n, 20), at(15 * n)));
    }
    let waiting = desired.unwrap().needs[1];
    assert_eq!(
        (waiting.now, waiting.predicted, waiting.milli_replicas),
        (40, 0, MilliReplicas(0))
    );
}

#[test]
fn unknown_load_is_not_zero() {
    let unknown = with(ModelLoad::default(), 5, EngineFigures::Silent);
    let mut scaling = ModelScaling::default();
    let desired = after(&mut scaling, &rules(), &unknown, 0, 3600);
    assert_eq!(
        (desired.replicas, desired.by),
        (5, DecidingFactor::UnknownLoad)
    );
    // One of five is idle: the four others count as full.
    let some = with(load(1, 0, 0, 0), 4, EngineFigures::Silent);
    assert_eq!(
        after(&mut ModelScaling::default(), &rules(), &some, 0, 3600).replicas,
        4
    );
    // A queue alone does not say that replicas are idle.
    let queues = |running| {
        let mut load = ModelLoad::default();
        (0..5).for_each(|_| {
            load.add(EngineFigures::Serving {
                kv_cache: None,
                waiting: Some(0),
                running,
            })
        });
        load
    };
    assert_eq!(
        after(
            &mut ModelScaling::default(),
            &rules(),
            &queues(Some(0)),
            0,
            3600
        )
        .replicas,
        5
    );
    let counting = AutoscalingRules {
        running: Some(8),
        ..rules()
    };
    assert_eq!(
        after(
            &mut ModelScaling::default(),
            &counting,
            &queues(Some(2)),
            0,
            3600
        )
        .replicas,
        2
    );
}

#[test]
fn replicas_that_only_start_keep_their_number() {
    let starting = with(ModelLoad::default(), 7, EngineFigures::Starting);
    assert_eq!(
        after(&mut ModelScaling::default(), &rules(), &starting, 0, 3600).replicas,
        7
    );
}

#[test]
fn sleeping_replicas_stay_and_are_woken_before_others_start() {
    let asleep = |serving, kv_cache| with(load(serving, kv_cache, 0, 5), 6, EngineFigures::Asleep);
    let desired = after(
        &mut ModelScaling::default(),
        &rules(),
        &asleep(4, 70),
        0,
        3600,
    );
    assert_eq!((desired.replicas, desired.wake), (10, 0));
    let desired = ModelScaling::default().decide(&rules(), &asleep(4, 100), at(0));
    assert_eq!(
        (desired.replicas, desired.wake),
        (10, 2),
        "{}",
        desired.message()
    );
    let few = with(load(4, 100, 20, 5), 1, EngineFigures::Asleep);
    let desired = ModelScaling::default().decide(&rules(), &few, at(0));
    assert_eq!(
        (desired.replicas, desired.wake),
        (9, 1),
        "16 are asked for; 4 serve, 1 sleeps, 4 are the step"
    );
}

#[test]
fn a_reserve_is_kept_and_the_larger_part_of_it_counts() {
    let reserve = Reserve {
        replicas: 2,
        percent: Percent::new(50).unwrap(),
    };
    let rules = AutoscalingRules { reserve, ..rules() };
    let desired = |serving, kv| {
        ModelScaling::default()
            .decide(&rules, &load(serving, kv, 0, 5), at(0))
            .replicas
    };
    assert_eq!((desired(2, 70), desired(10, 70)), (4, 15));
}

#[test]
fn none_is_needed_only_by_choice() {
    let idle = load(2, 0, 0, 0);
    let zero = AutoscalingRules {
        min_replicas: 0,
        ..rules()
    };
    assert_eq!(
        after(&mut ModelScaling::default(), &zero, &idle, 0, 3600).replicas,
        0
    );
    let desired = after(&mut ModelScaling::default(), &rules(), &idle, 0, 3600);
    assert_eq!((desired.replicas, desired.by), (1, DecidingFactor::Min));
    assert_eq!(
        ModelScaling::default()
            .decide(&zero, &load(1, 1, 0, 1), at(0))
            .replicas,
        1
    );
}

#[test]
fn after_a_pause_a_whole_window_passes_before_it_falls() {
    let (mut scaling, idle) = (ModelScaling::default(), load(8, 0, 0, 0));
    after(&mut scaling, &rules(), &idle, 0, 285);
    assert_eq!(
        scaling.decide(&rules(), &idle, at(10_000)).replicas,
        8,
        "what was asked for meanwhile is unknown"
    );
    assert_eq!(
        after(&mut scaling, &rules(), &idle, 10_015, 285).replicas,
        4
    );
    let again = scaling.decide(&rules(), &idle, at(5));
    assert_eq!(again.replicas, 4, "a time that goes back is no time");
}

#[test]
fn the_answer_names_its_numbers() {
    let desired = ModelScaling::default().decide(&rules(), &load(4, 95, 1, 20), at(0));
    assert_eq!(
        desired.message(),
        "6: as the load requires. 4 serve, 0 start, 0 sleep. 3.80 KV caches ask for 5.43 replicas. 4 waiting requests ask for \
         0.80 replicas."
    );
    let down = ScaleDown {
        window: Millis(0),
        ..ScaleDown::default()
    };
    let rules = AutoscalingRules {
        scale_down: down,
        max_replicas: 3,
        ..rules()
    };
    let desired = ModelScaling::default().decide(&rules, &load(4, 95, 1, 20), at(0));
    assert!(
        desired
            .message()
            .starts_with("3: maxReplicas; the load asks for 6."),
        "{}",
        desired.message()
    );
}

#[test]
fn a_model_is_known_by_its_replicas_or_by_its_name_in_the_policy() {
    let model = |name: &str| ModelId::parse(name).unwrap();
    let zero = ModelRules {
        min_replicas: Some(0),
        ..ModelRules::default()
    };
    let models = [
        ("by-name".to_owned(), zero),
        ("by-*".to_owned(), ModelRules::default()),
    ]
    .into();
    let rules = AutoscalingRules { models, ..rules() };
    let mut autoscaler = Autoscaler::default();
    let there = BTreeMap::from([(model("there"), load(3, 70, 0, 1))]);
    let desired = |autoscaler: &mut Autoscaler, loads, seconds| -> Vec<(String, u32)> {
        let all = autoscaler.evaluate(&rules, loads, at(seconds));
        all.into_iter()
            .map(|(model, desired)| (model.to_string(), desired.replicas))
            .collect()
    };
    let both = vec![("by-name".to_owned(), 0), ("there".to_owned(), 3)];
    assert_eq!(desired(&mut autoscaler, there, 0), both);
    // All its pods are replaced at once: it does not vanish from an HPA's sight.
    assert_eq!(desired(&mut autoscaler, BTreeMap::new(), 15), both);
    assert_eq!(
        desired(&mut autoscaler, BTreeMap::new(), 301),
        [("by-name".to_owned(), 0)]
    );
}

#[test]
fn of_too_many_models_those_with_the_most_replicas_are_answered_for() {
    let replicas = |n: usize| {
        (
            ModelId::parse(&format!("model-{n}")).unwrap(),
            load(1 + n as u32 % 7, 70, 0, 1),
        )
    };
    let loads: BTreeMap<_, _> = (0..MAX_MODELS + 500).map(replicas).collect();
    let mut autoscaler = Autoscaler::default();
    let desired = autoscaler.evaluate(&rules(), loads.clone(), at(0));
    assert_eq!(desired.len(), MAX_MODELS);
    let left: Vec<_> = loads
        .iter()
        .filter(|(model, _)| !desired.contains_key(*model))
        .collect();
    assert!(left.iter().all(|(_, load)| load.serving <= 2), "{left:?}");
}
