//! Runs of one scenario, put together over seeds: a line for each variant, and whether the targets are met.

use super::{Bound, Means, Played, Scenario};
use crate::lab::simulate::preemption::report::Spread;
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScenarioReport {
    pub scenario: &'static str,
    pub claim: &'static str,
    pub seeds: Vec<u64>,
    /// Stowage first.
    pub variants: Vec<VariantLine>,
    pub targets: Vec<Judgement>,
    /// Promises that any scheduler broke, over all runs: there must be none.
    pub broken: Vec<String>,
    pub notes: Vec<String>,
}

/// One variant over all seeds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VariantLine {
    pub variant: &'static str,
    pub figures: BTreeMap<&'static str, Spread>,
}

/// A target, and what came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Judgement {
    pub target: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    pub value: f64,
    pub is_met: bool,
}

impl ScenarioReport {
    /// `runs` are by seed, then by variant.
    pub fn of(scenario: &'static Scenario, seeds: &[u64], runs: &[Vec<Played>]) -> Self {
        let figure = |variant: usize, figure: usize| {
            Spread::of(runs.iter().map(|variants| variants[variant].figures[figure]))
        };
        let spreads: Vec<Vec<Spread>> = (0..scenario.variants.len())
            .map(|variant| (0..scenario.figures.len()).map(|place| figure(variant, place)).collect())
            .collect();
        let means: Vec<Vec<f64>> =
            spreads.iter().map(|line| line.iter().map(|spread| spread.mean).collect()).collect();
        let means = Means { scenario, means: &means };
        let line = |(variant, spreads): (&&'static str, &Vec<Spread>)| VariantLine {
            variant,
            figures: scenario.figures.iter().map(|figure| figure.name).zip(spreads.iter().copied()).collect(),
        };
        let judge = |target: &super::Target| {
            let value = (target.value)(&means);
            let (at_least, at_most) = match target.bound {
                Bound::AtLeast(least) => (Some(least), None),
                Bound::AtMost(most) => (None, Some(most)),
            };
            Judgement { target: target.name, at_least, at_most, value, is_met: target.bound.is_met(value) }
        };
        let broken = runs.iter().flatten().flat_map(|played| &played.broken).map(ToString::to_string);
        let first = runs.first();
        Self {
            scenario: scenario.name,
            claim: scenario.claim,
            seeds: seeds.to_vec(),
            variants: scenario.variants.iter().zip(&spreads).map(line).collect(),
            targets: scenario.targets.iter().map(judge).collect(),
            broken: broken.collect(),
            notes: first.into_iter().flatten().flat_map(|played| played.notes.clone()).collect(),
        }
    }

    /// Whether every target is met, and no promise was broken.
    pub fn is_met(&self) -> bool {
        self.broken.is_empty() && self.targets.iter().all(|target| target.is_met)
    }
}
