//! The policies that can be simulated, by name.

use super::arrivals::{Arrivals, RandomStream};
use super::baseline::at_random::RandomPlacer;
use super::baseline::fgd::Fgd;
use super::baseline::fit::{BestFit, DotProduct};
use super::baseline::grouping::{Clustering, PackingBaseline};
use super::baseline::scored::ScoredPlacer;
use super::fragmentation::TypicalPods;
use super::placer::Placer;
use super::shipped::learning::DemandKnowledge;
use super::shipped::{CpuRule, SimulatedEviction, StowagePlacer};
use super::trace::WorkloadTrace;
use serde::Serialize;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SimulatedPolicy {
    Random,
    DotProduct,
    Clustering,
    Packing,
    BestFit,
    Fgd,
    /// Stowage: what the extender would do.
    Stowage,
    /// Stowage, if it knows beforehand how often each kind of pod will arrive.
    StowageKnownDemand,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy {name:?}; write one or several of {}", SimulatedPolicy::ALL.map(SimulatedPolicy::name).join(", "))]
pub struct UnknownPolicy {
    name: String,
}

impl SimulatedPolicy {
    pub const ALL: [Self; 8] = [
        Self::Random,
        Self::DotProduct,
        Self::Clustering,
        Self::Packing,
        Self::BestFit,
        Self::Fgd,
        Self::Stowage,
        Self::StowageKnownDemand,
    ];

    /// Policies that know no more than a scheduler can.
    pub fn usual() -> Vec<Self> {
        Self::ALL
            .into_iter()
            .filter(|policy| *policy != Self::StowageKnownDemand)
            .collect()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::DotProduct => "dot-product",
            Self::Clustering => "clustering",
            Self::Packing => "packing",
            Self::BestFit => "best-fit",
            Self::Fgd => "fgd",
            Self::Stowage => "stowage",
            Self::StowageKnownDemand => "stowage-known-demand",
        }
    }

    /// The name under which its results were published.
    pub fn published_as(self) -> Option<&'static str> {
        match self {
            Self::Random => Some("Random"),
            Self::DotProduct => Some("DotProd"),
            Self::Clustering => Some("GpuClustering"),
            Self::Packing => Some("GpuPacking"),
            Self::BestFit => Some("BestFit"),
            Self::Fgd => Some("FGD"),
            Self::Stowage | Self::StowageKnownDemand => None,
        }
    }

    /// Ready to place the first pod of these arrivals.
    pub fn placer<'s>(
        self,
        setting: &'s WorkloadTrace,
        typical: &'s TypicalPods,
        arrivals: &Arrivals,
        eviction: SimulatedEviction,
        cpu_rule: CpuRule,
    ) -> Box<dyn Placer + 's> {
        match self {
            Self::Random => Box::new(RandomPlacer::new(
                setting,
                RandomStream::Policy.seeded(arrivals.seed),
            )),
            Self::DotProduct => Box::new(ScoredPlacer::new(setting, DotProduct)),
            Self::Clustering => Box::new(ScoredPlacer::new(setting, Clustering)),
            Self::Packing => Box::new(ScoredPlacer::new(setting, PackingBaseline)),
            Self::BestFit => Box::new(ScoredPlacer::new(setting, BestFit)),
            Self::Fgd => Box::new(ScoredPlacer::new(setting, Fgd(typical))),
            Self::Stowage | Self::StowageKnownDemand => {
                let knowledge = self.demand_knowledge(setting);
                Box::new(StowagePlacer::new(
                    setting,
                    &arrivals.ranks,
                    eviction,
                    cpu_rule,
                    knowledge,
                ))
            }
        }
    }

    /// What Stowage knows about the pods to come.
    pub fn demand_knowledge(self, setting: &WorkloadTrace) -> DemandKnowledge {
        match self {
            Self::StowageKnownDemand => DemandKnowledge::of_full_trace(setting),
            _ => DemandKnowledge::Learned,
        }
    }
}

impl FromStr for SimulatedPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL
            .into_iter()
            .find(|policy| policy.name() == name.trim());
        found.ok_or_else(|| UnknownPolicy {
            name: name.trim().into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_found_by_its_name_and_written_so() {
        for policy in SimulatedPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(serde_json::to_value(policy).unwrap(), policy.name());
        }
    }

    #[test]
    fn an_unknown_policy_is_answered_with_those_that_exist() {
        let error = "worst-fit"
            .parse::<SimulatedPolicy>()
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("there is no policy \"worst-fit\"; write one or several of random, "),
            "{error}"
        );
    }
}
