//! Runs of one scenario, put together over seeds: a line for each variant, and whether the targets are met.

use super::{Means, Scenario, TargetBound, VariantRun};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScenarioReport {
    pub scenario: &'static str,
    pub claim: &'static str,
    pub seeds: Vec<u64>,
    /// Stowage first.
    pub variants: Vec<VariantLine>,
    pub targets: Vec<TargetResult>,
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

/// A figure over several seeds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    pub mean: f64,
    /// The standard deviation of a sample; 0 of a single seed.
    pub deviation: f64,
}

/// A target, and what came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TargetResult {
    pub target: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    pub value: f64,
    /// What the best possible scheduler would come to, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    pub verdict: TargetVerdict,
}

/// Whether a target is met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetVerdict {
    Met,
    Missed,
    /// No scheduler can meet it as things are priced, and this one comes to nine tenths of the limit at least.
    OutOfReach,
}

/// Share of the best possible value that counts as near it, where the target is out of reach.
const NEAR_LIMIT_SHARE: f64 = 0.9;

impl TargetVerdict {
    fn from_value(bound: TargetBound, value: f64, limit: Option<f64>) -> Self {
        let is_near = |limit: f64| match bound {
            TargetBound::AtLeast(_) => value >= NEAR_LIMIT_SHARE * limit,
            TargetBound::AtMost(_) => NEAR_LIMIT_SHARE * value <= limit,
        };
        match limit.filter(|limit| !bound.is_met(*limit)) {
            _ if bound.is_met(value) => Self::Met,
            Some(limit) if is_near(limit) => Self::OutOfReach,
            _ => Self::Missed,
        }
    }

    pub fn label(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "missed",
            Self::OutOfReach => "at the limit",
        }
    }
}

impl Spread {
    fn from_figures(figures: impl Iterator<Item = f64>) -> Self {
        let figures: Vec<f64> = figures.collect();
        let count = figures.len() as f64;
        let mean = figures.iter().sum::<f64>() / count.max(1.0);
        let squares: f64 = figures.iter().map(|figure| (figure - mean).powi(2)).sum();
        let deviation = if figures.len() < 2 {
            0.0
        } else {
            (squares / (count - 1.0)).sqrt()
        };
        Self { mean, deviation }
    }
}

impl ScenarioReport {
    /// `runs` are by seed, then by variant.
    pub fn from_runs(scenario: &'static Scenario, seeds: &[u64], runs: &[Vec<VariantRun>]) -> Self {
        let figure = |variant: usize, figure: usize| {
            Spread::from_figures(
                runs.iter()
                    .map(|variants| variants[variant].figures[figure]),
            )
        };
        let spreads: Vec<Vec<Spread>> = (0..scenario.variants.len())
            .map(|variant| {
                (0..scenario.figures.len())
                    .map(|figure_index| figure(variant, figure_index))
                    .collect()
            })
            .collect();
        let means: Vec<Vec<f64>> = spreads
            .iter()
            .map(|line| line.iter().map(|spread| spread.mean).collect())
            .collect();
        let means = Means {
            scenario,
            means: &means,
        };
        let line = |(variant, spreads): (&&'static str, &Vec<Spread>)| VariantLine {
            variant,
            figures: scenario
                .figures
                .iter()
                .map(|figure| figure.name)
                .zip(spreads.iter().copied())
                .collect(),
        };
        let result_of = |target: &super::Target| {
            let value = (target.value)(&means);
            let (at_least, at_most) = match target.bound {
                TargetBound::AtLeast(least) => (Some(least), None),
                TargetBound::AtMost(most) => (None, Some(most)),
            };
            let limit = target.limit.map(|limit| limit(&means));
            let verdict = TargetVerdict::from_value(target.bound, value, limit);
            TargetResult {
                target: target.name,
                at_least,
                at_most,
                value,
                limit,
                verdict,
            }
        };
        let broken = runs
            .iter()
            .flatten()
            .flat_map(|played| &played.violations)
            .map(ToString::to_string);
        let first = runs.first();
        Self {
            scenario: scenario.name,
            claim: scenario.claim,
            seeds: seeds.to_vec(),
            variants: scenario.variants.iter().zip(&spreads).map(line).collect(),
            targets: scenario.targets.iter().map(result_of).collect(),
            broken: broken.collect(),
            notes: first
                .into_iter()
                .flatten()
                .flat_map(|played| played.notes.clone())
                .collect(),
        }
    }

    /// Whether no target is missed, and no promise was broken.
    pub fn is_met(&self) -> bool {
        self.broken.is_empty()
            && self
                .targets
                .iter()
                .all(|target| target.verdict != TargetVerdict::Missed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_is_that_of_a_sample() {
        let spread = Spread::from_figures([2.0, 4.0, 6.0].into_iter());
        assert_eq!((spread.mean, spread.deviation), (4.0, 2.0));
        assert_eq!(
            Spread::from_figures([5.0].into_iter()),
            Spread {
                mean: 5.0,
                deviation: 0.0
            }
        );
    }

    #[test]
    fn a_target_beyond_the_limit_is_checked_by_the_limit() {
        let at_least =
            |value, limit| TargetVerdict::from_value(TargetBound::AtLeast(10.0), value, limit);
        assert_eq!(at_least(10.0, None), TargetVerdict::Met);
        assert_eq!(at_least(9.9, None), TargetVerdict::Missed);
        assert_eq!(
            at_least(9.0, Some(12.0)),
            TargetVerdict::Missed,
            "it was in reach"
        );
        assert_eq!(at_least(5.5, Some(6.0)), TargetVerdict::OutOfReach);
        assert_eq!(at_least(5.0, Some(6.0)), TargetVerdict::Missed);
        assert_eq!(
            TargetVerdict::from_value(TargetBound::AtMost(1.0), 2.1, Some(2.0)),
            TargetVerdict::OutOfReach
        );
        assert_eq!(
            TargetVerdict::from_value(TargetBound::AtMost(1.0), 2.5, Some(2.0)),
            TargetVerdict::Missed
        );
    }
}
