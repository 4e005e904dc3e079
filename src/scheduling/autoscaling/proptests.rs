//! What holds for any policy, any load and any times.

use super::*;
use crate::policy::{AutoscalingRules, Reserve, ScaleDown, ScaleUp};
use crate::units::{Millis, Moment, Percent};
use proptest::prelude::*;

/// Numbers as they come, and the extremes.
fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![4 => 0u64..20_000, 1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn counts() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 0u32..40, 1 => 0u32..5000, 1 => Just(u32::MAX)]
}

fn loads() -> impl Strategy<Value = ModelLoad> {
    let reported = || (numbers(), 0u32..=100);
    (
        counts(),
        counts(),
        counts(),
        reported(),
        reported(),
        reported(),
        numbers(),
    )
        .prop_map(
            |(serving, starting, asleep, kv_cache, waiting, running, ready_in)| {
                // Most replicas report; a figure is never that of more replicas than serve.
                let of = |(sum, share): (u64, u32)| {
                    let share = if share > 40 { 100 } else { share };
                    let replicas = (u64::from(serving) * u64::from(share) / 100) as u32;
                    ReportedSum {
                        sum: if replicas == 0 { 0 } else { sum },
                        replicas,
                    }
                };
                ModelLoad {
                    serving,
                    starting,
                    asleep,
                    kv_cache: of(kv_cache),
                    waiting: of(waiting),
                    running: of(running),
                    ready_in: Millis(ready_in),
                }
            },
        )
}

fn percents() -> impl Strategy<Value = Percent> {
    (0u8..=100).prop_map(|percent| Percent::new(percent).unwrap())
}

prop_compose! {
    fn policies()(
        kv_cache in percents(),
        waiting in 0u32..1000,
        running in prop::option::of(0u32..1000),
        min_replicas in 0u32..20,
        max_replicas in 0u32..3000,
        reserve in (0u32..10, percents()),
        tolerance in (0u8..=50).prop_map(|percent| Percent::new(percent).unwrap()),
        look_ahead in 0u64..1_000_000,
        up in (0u64..400_000, 1u32..50, 0u32..400),
        down in (0u64..700_000, 1u32..50, percents(), 0u64..200_000),
    ) -> AutoscalingRules {
        AutoscalingRules {
            kv_cache,
            waiting,
            running,
            min_replicas,
            max_replicas,
            reserve: Reserve { replicas: reserve.0, percent: reserve.1 },
            tolerance,
            look_ahead: Millis(look_ahead),
            scale_up: ScaleUp { window: Millis(up.0), replicas: up.1, percent: up.2 },
            scale_down: ScaleDown {
                window: Millis(down.0),
                replicas: down.1,
                percent: down.2,
                period: Millis(down.3),
            },
            ..AutoscalingRules::default()
        }
    }
}

/// Steps of time in milliseconds: mostly some seconds, sometimes none, back, or far ahead.
fn steps() -> impl Strategy<Value = i64> {
    prop_oneof![8 => 1000i64..30_000, 1 => Just(0), 1 => -100_000i64..0, 1 => 0i64..100_000_000]
}

fn histories() -> impl Strategy<Value = Vec<(i64, ModelLoad)>> {
    prop::collection::vec((steps(), loads()), 1..60)
}

fn moved(now: Moment, step: i64) -> Moment {
    Moment(now.0.saturating_add_signed(step))
}

fn played(
    rules: &AutoscalingRules,
    history: &[(i64, ModelLoad)],
) -> (ModelScaling, Moment, Vec<u32>) {
    let (mut scaling, mut now, mut answers) =
        (ModelScaling::default(), Moment(1_000_000_000), Vec::new());
    for (step, load) in history {
        now = moved(now, *step);
        answers.push(scaling.decide(rules, load, now).replicas);
    }
    (scaling, now, answers)
}

proptest! {
    #[test]
    fn the_number_is_within_its_bounds_whatever_happens(rules in policies(), history in histories()) {
        let (.., answers) = played(&rules, &history);
        let (min, max) = (rules.min_replicas.min(rules.max_replicas), rules.max_replicas);
        prop_assert!(answers.iter().all(|replicas| (min..=max).contains(replicas)), "{answers:?}");
    }

    #[test]
    fn the_same_loads_at_the_same_times_give_the_same_numbers(rules in policies(), history in histories()) {
        let first = played(&rules, &history);
        let stored = serde_json::to_string(&first.0).unwrap();
        prop_assert_eq!(&played(&rules, &history), &first);
        prop_assert_eq!(serde_json::from_str::<ModelScaling>(&stored).unwrap(), first.0);
    }

    /// Against a list of all that was asked for: it falls only if a whole window asked for no more.
    #[test]
    fn it_never_falls_below_the_most_that_was_asked_for_within_the_window(
        rules in policies(),
        history in prop::collection::vec((1000u64..30_000, loads()), 1..80),
    ) {
        let (mut scaling, mut now) = (ModelScaling::default(), Moment(0));
        let (mut asked, mut before): (Vec<(Moment, u32)>, Option<u32>) = (Vec::new(), None);
        for (step, load) in history {
            now = now + Millis(step);
            let desired = scaling.decide(&rules, &load, now);
            asked.push((now, desired.requested.min(rules.max_replicas)));
            if before.is_some_and(|before| desired.replicas < before) {
                let window = rules.scale_down.window;
                prop_assert!(now.since(asked[0].0) >= window, "nothing is known of the whole window");
                let within = asked.iter().filter(|(at, _)| now.since(*at) <= window);
                let most = within.map(|(_, replicas)| *replicas).max().unwrap();
                prop_assert!(desired.replicas >= most, "{} of {most}", desired.replicas);
            }
            before = Some(desired.replicas);
        }
    }

    /// From the same past, more load never asks for fewer replicas.
    #[test]
    fn more_load_never_asks_for_fewer(
        rules in policies(),
        history in histories(),
        load in loads(),
        step in steps(),
        more in (numbers(), numbers(), numbers()),
    ) {
        let (scaling, now, _) = played(&rules, &history);
        let heavier = |reported: ReportedSum, more: u64| match reported.replicas {
            0 => reported,
            _ => ReportedSum { sum: reported.sum.saturating_add(more), ..reported },
        };
        let busier = ModelLoad {
            kv_cache: heavier(load.kv_cache, more.0),
            waiting: heavier(load.waiting, more.1),
            running: heavier(load.running, more.2),
            ..load
        };
        let at = moved(now, step);
        let (less, more) = (scaling.clone().decide(&rules, &load, at), scaling.clone().decide(&rules, &busier, at));
        prop_assert!(less.replicas <= more.replicas && less.requested <= more.requested, "{less:?}\n{more:?}");
        prop_assert!(less.wake <= more.wake);
    }

    /// What a replica does not say never removes one.
    #[test]
    fn replicas_that_say_nothing_are_kept(rules in policies(), history in histories(), serving in 1u32..5000) {
        let (mut scaling, now, answers) = played(&rules, &history);
        let silent = ModelLoad { serving, ..ModelLoad::default() };
        let before = *answers.last().unwrap();
        let after: Vec<u32> =
            (1..100).map(|n| scaling.decide(&rules, &silent, now + Millis::seconds(15 * n)).replicas).collect();
        prop_assert!(after.iter().all(|replicas| *replicas >= before), "{before} before, {after:?}");
    }

    /// Noise within the tolerance changes nothing, at any size.
    #[test]
    fn a_noisily_steady_load_within_the_tolerance_changes_nothing(
        serving in prop_oneof![1u64..40, 1000u64..5000],
        noise in prop::collection::vec(-6i64..=6, 1000),
    ) {
        let rules = AutoscalingRules { max_replicas: 5000, look_ahead: Millis(0), ..AutoscalingRules::default() };
        let mut scaling = ModelScaling::default();
        for (n, noise) in noise.iter().enumerate() {
            let usage = 700 + 7 * noise;
            let kv_cache = ReportedSum { sum: serving * usage as u64, replicas: serving as u32 };
            let load = ModelLoad { serving: serving as u32, kv_cache, ..ModelLoad::default() };
            let desired = scaling.decide(&rules, &load, Moment(0) + Millis::seconds(15 * n as u64));
            prop_assert_eq!(u64::from(desired.replicas), serving);
        }
    }

    /// Noise of any size: it turns round at most once in a window, in either direction.
    #[test]
    fn however_noisy_a_steady_load_is_it_turns_at_most_once_a_window(
        noise in prop::collection::vec(0u64..=1000, 2000),
        serving in 2u32..60,
    ) {
        let rules = AutoscalingRules::default();
        let mut scaling = ModelScaling::default();
        let (mut turns, mut direction, mut before) = (0, 0, None);
        for (n, usage) in noise.iter().enumerate() {
            let kv_cache = ReportedSum { sum: u64::from(serving) * usage, replicas: serving };
            let load = ModelLoad { serving, kv_cache, ready_in: Millis::seconds(60), ..ModelLoad::default() };
            let now = Moment(0) + Millis::seconds(15 * n as u64);
            let replicas = i64::from(scaling.decide(&rules, &load, now).replicas);
            let change = (replicas - before.unwrap_or(replicas)).signum();
            turns += i32::from(change < 0 && direction >= 0);
            direction = if change == 0 { direction } else { change };
            before = Some(replicas);
        }
        let windows = 2000 * 15 / 300;
        prop_assert!(turns <= windows, "{turns} falls in {windows} windows");
    }
}
