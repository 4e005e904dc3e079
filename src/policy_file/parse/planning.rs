//! Parses and renders the planner's settings.

use super::{percentage, set};
use crate::policy_file::file::{self, Duration};
use crate::scheduling::policy::{Consolidation, Planning, Policy, PressureRules};

pub fn parse(file: &file::PolicySpec, policy: &mut Policy) {
    let Some(said) = &file.planning else { return };
    let planning = &mut policy.planning;
    set(&mut planning.max_gated_time, said.max_gated_time.map(|time| time.0));
    if let Some(groups) = &said.groups {
        set(&mut planning.groups.placement, groups.placement);
        set(&mut planning.groups.when_incomplete, groups.when_incomplete);
    }
    if let Some(said) = &said.pressure {
        planning.pressure = said.enabled.unwrap_or(true).then(|| pressure(said));
    }
    if let Some(said) = &said.consolidation {
        let gain = said.gain.map_or(Consolidation::default().gain, |time| time.0);
        planning.consolidation = said.enabled.unwrap_or(false).then_some(Consolidation { gain });
    }
}

fn pressure(said: &file::PressureSpec) -> PressureRules {
    let mut rules = PressureRules::default();
    if let Some(kv_cache) = &said.kv_cache {
        set(&mut rules.kv_cache.high, kv_cache.high.map(|percent| percent.0));
        set(&mut rules.kv_cache.low, kv_cache.low.map(|percent| percent.0));
    }
    if let Some(queue) = &said.queue {
        set(&mut rules.queue.high, queue.high);
        set(&mut rules.queue.low, queue.low);
    }
    set(&mut rules.evict_after, said.evict_after.map(|time| time.0));
    rules
}

pub fn render(planning: &Planning) -> file::PlanningSpec {
    let Planning { max_gated_time, groups, pressure, consolidation } = planning;
    file::PlanningSpec {
        max_gated_time: Some(Duration(*max_gated_time)),
        groups: Some(file::Groups {
            placement: Some(groups.placement),
            when_incomplete: Some(groups.when_incomplete),
        }),
        pressure: Some(raise_pressure(pressure.as_ref())),
        consolidation: Some(file::ConsolidationSpec {
            enabled: Some(consolidation.is_some()),
            gain: consolidation.map(|rules| Duration(rules.gain)),
        }),
    }
}

fn raise_pressure(rules: Option<&PressureRules>) -> file::PressureSpec {
    let Some(rules) = rules else {
        return file::PressureSpec { enabled: Some(false), ..file::PressureSpec::default() };
    };
    file::PressureSpec {
        enabled: Some(true),
        kv_cache: Some(file::PercentageThreshold {
            high: Some(percentage(rules.kv_cache.high)),
            low: Some(percentage(rules.kv_cache.low)),
        }),
        queue: Some(file::CountThreshold { high: Some(rules.queue.high), low: Some(rules.queue.low) }),
        evict_after: Some(Duration(rules.evict_after)),
    }
}
