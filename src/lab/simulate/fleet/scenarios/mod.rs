//! The scenarios: stories that people tell of GPU clusters, each with a workload, the shipped policy that serves it, the
//! schedulers that it is compared with in the same run, and targets. A scenario is data ([`Scenario`]) and one function that
//! plays a seed; [`report`] puts seeds together and evaluates the targets.

mod cold_start;
mod endless_jobs;
mod fraud_credit_chatbot;
mod mixed_models;
mod night_pool;
pub mod report;
mod running_jobs;
mod teams;
mod warm_context;

pub use report::{ScenarioReport, Spread, TargetResult, VariantLine};

use super::traffic::TrafficError;
use std::collections::BTreeMap;
use stowage_policy_file as policy_file;
use stowage_policy_file::SourceText;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::oracle::BrokenInvariant;

/// One story.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// What it is called on the command line.
    pub name: &'static str,
    /// What is claimed, in a sentence.
    pub claim: &'static str,
    /// What is compared: Stowage first.
    pub variants: &'static [&'static str],
    /// The figures of each variant, in the order of [`VariantRun::figures`].
    pub figures: &'static [Figure],
    pub targets: &'static [Target],
    /// Names of the files that `--trace DIR` is read for; none if the workload is always its own.
    pub traces: &'static [&'static str],
    /// Whether the traces can be played.
    pub check: Option<CheckTraces>,
    /// Plays one variant with one seed.
    pub play: fn(&ScenarioInput, variant: usize, seed: u64) -> VariantRun,
}

pub(crate) type CheckTraces = fn(&ScenarioInput) -> Result<(), TrafficError>;

/// One number of a variant.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// The head of its column.
    pub name: &'static str,
    pub decimals: usize,
    /// What it is, with its unit.
    pub help: &'static str,
}

/// What Stowage's runs must come to, over all seeds.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    pub name: &'static str,
    pub bound: TargetBound,
    /// The figure from the means of all variants.
    pub value: fn(&Means<'_>) -> f64,
    /// What the best possible scheduler would come to, where that is known: a bound beyond it is out of reach as priced.
    pub limit: Option<fn(&Means<'_>) -> f64>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TargetBound {
    AtLeast(f64),
    AtMost(f64),
}

/// The means over seeds, by variant and figure.
#[derive(Debug, Clone, Copy)]
pub struct Means<'a> {
    scenario: &'a Scenario,
    /// By variant, then by figure.
    means: &'a [Vec<f64>],
}

/// The input of a scenario: traces, and how much of the workload to play.
#[derive(Debug, Clone, Default)]
pub struct ScenarioInput {
    /// The texts of trace files, by name; none for the built-in workload.
    pub traces: BTreeMap<&'static str, TraceFileText>,
    /// A part of the workload that takes seconds, for tests.
    pub is_short: bool,
}

/// A trace's file.
#[derive(Debug, Clone)]
pub struct TraceFileText {
    /// Its name for messages.
    pub file: String,
    pub text: String,
}

/// One variant, played with one seed.
#[derive(Debug, Clone, Default)]
pub struct VariantRun {
    pub figures: Vec<f64>,
    /// Curves for a picture.
    pub curves: Vec<Curve>,
    /// Promises that the scheduler broke: there must be none.
    pub violations: Vec<BrokenInvariant>,
    /// What the variant's figures cannot say, such as a limit of the workload.
    pub notes: Vec<String>,
}

/// A line of a picture.
#[derive(Debug, Clone, Default)]
pub struct Curve {
    /// The title of its panel.
    pub name: &'static str,
    /// What the horizontal axis is.
    pub x_label: &'static str,
    pub points: Vec<(f64, f64)>,
}

/// All scenarios, in the order of their stories.
pub static SCENARIOS: [&Scenario; 6] = [
    &night_pool::NIGHT_POOL,
    &mixed_models::MIXED_MODELS,
    &cold_start::COLD_START,
    &warm_context::WARM_CONTEXT,
    &fraud_credit_chatbot::FRAUD_CREDIT_CHATBOT,
    &teams::TEAMS,
];

impl Means<'_> {
    pub fn mean_of(&self, variant: &str, figure: &str) -> f64 {
        let variant = self
            .scenario
            .variants
            .iter()
            .position(|name| *name == variant);
        let figure = self
            .scenario
            .figures
            .iter()
            .position(|figure_spec| figure_spec.name == figure);
        let (variant, figure) = variant
            .zip(figure)
            .expect("a target names what its scenario has");
        self.means[variant][figure]
    }
}

impl TargetBound {
    pub fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
        }
    }
}

/// A policy that ships. Its file is part of the program, so a mistake in it is found by the tests of `policies/`.
fn shipped_policy(name: &str, text: &str) -> Policy {
    let loaded = policy_file::load(&[SourceText::new(name, text)]);
    loaded
        .map(|loaded| loaded.policy)
        .unwrap_or_else(|_| panic!("{name} is a policy that ships"))
}

/// The `share`-quantile of these, by the nearest rank; 0 of none.
fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (share * values.len() as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests;
