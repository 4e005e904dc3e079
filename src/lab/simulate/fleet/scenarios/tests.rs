//! What holds for every scenario.

use super::*;

fn short() -> ScenarioInput {
    ScenarioInput {
        is_short: true,
        ..ScenarioInput::default()
    }
}

#[test]
fn every_scenario_plays_all_variants_without_violations_and_reproducibly() {
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
            assert_eq!(played.violations, [], "{} {name}", scenario.name);
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
            .map(|_| VariantRun {
                figures: vec![1.0; scenario.figures.len()],
                ..VariantRun::default()
            })
            .collect()];
        let report = ScenarioReport::from_runs(scenario, &[42], &runs);
        assert_eq!(report.targets.len(), scenario.targets.len());
    }
}

#[test]
fn a_missed_target_or_a_violation_fails_the_report() {
    let scenario = SCENARIOS[0];
    let even: Vec<VariantRun> = scenario
        .variants
        .iter()
        .map(|_| VariantRun {
            figures: vec![1.0; scenario.figures.len()],
            ..VariantRun::default()
        })
        .collect();
    let report = ScenarioReport::from_runs(scenario, &[1], std::slice::from_ref(&even));
    assert!(!report.is_met(), "equal starts are no gain");
    let mut broken = even;
    let (pod, asked, got) = (stowage_scheduling::testkit::uid("p"), 1, 2);
    let promise = BrokenInvariant::OtherCount { pod, asked, got };
    broken[0].violations.push(promise);
    let all_met = |mut report: ScenarioReport| {
        report
            .targets
            .iter_mut()
            .for_each(|target| target.verdict = report::TargetVerdict::Met);
        report.is_met()
    };
    assert!(all_met(report));
    assert!(!all_met(ScenarioReport::from_runs(
        scenario,
        &[1],
        &[broken]
    )));
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
