//! What holds for every scenario.

use super::*;

fn short() -> ScenarioInput {
    ScenarioInput {
        is_short: true,
        ..ScenarioInput::default()
    }
}

#[test]
fn every_scenario_plays_every_variant_with_all_its_figures_breaks_no_promise_and_repeats_itself() {
    for scenario in SCENARIOS {
        for (variant, name) in scenario.variants.iter().enumerate() {
            let played = (scenario.play)(&short(), variant, 42);
            assert_eq!(
                played.figures.len(),
                scenario.figures.len(),
                "{} {name}",
                scenario.name
            );
            assert!(
                played.figures.iter().all(|figure| figure.is_finite()),
                "{} {name}: {:?}",
                scenario.name,
                played.figures
            );
            assert_eq!(played.broken, [], "{} {name}", scenario.name);
            if variant == 0 {
                let again = (scenario.play)(&short(), variant, 42).figures;
                assert_eq!(
                    again, played.figures,
                    "{}: the same seed gives the same figures",
                    scenario.name
                );
            }
        }
    }
}

#[test]
fn names_are_distinct_and_targets_name_what_is_there() {
    let names: std::collections::BTreeSet<&str> =
        SCENARIOS.iter().map(|scenario| scenario.name).collect();
    assert_eq!(names.len(), SCENARIOS.len());
    for scenario in SCENARIOS {
        let runs = [scenario
            .variants
            .iter()
            .map(|_| Played {
                figures: vec![1.0; scenario.figures.len()],
                ..Played::default()
            })
            .collect()];
        let report = ScenarioReport::of(scenario, &[42], &runs);
        assert_eq!(report.targets.len(), scenario.targets.len());
    }
}

#[test]
fn a_target_that_is_missed_and_a_broken_promise_are_both_no_success() {
    let scenario = SCENARIOS[0];
    let even: Vec<Played> = scenario
        .variants
        .iter()
        .map(|_| Played {
            figures: vec![1.0; scenario.figures.len()],
            ..Played::default()
        })
        .collect();
    let report = ScenarioReport::of(scenario, &[1], std::slice::from_ref(&even));
    assert!(!report.is_met(), "equal starts are no gain");
    let mut broken = even;
    let (pod, asked, got) = (stowage_scheduling::testkit::uid("p"), 1, 2);
    let promise = BrokenPromise::OtherCount { pod, asked, got };
    broken[0].broken.push(promise);
    let all_met = |mut report: ScenarioReport| {
        report
            .targets
            .iter_mut()
            .for_each(|target| target.verdict = report::Verdict::Met);
        report.is_met()
    };
    assert!(all_met(report));
    assert!(!all_met(ScenarioReport::of(scenario, &[1], &[broken])));
}

#[test]
fn quantiles_are_by_the_nearest_rank() {
    let mut values = vec![4.0, 1.0, 3.0, 2.0];
    assert_eq!(
        [0.5, 0.99, 1.0].map(|share| quantile(&mut values, share)),
        [2.0, 4.0, 4.0]
    );
    assert_eq!(quantile(&mut [], 0.5), 0.0);
}
