//! Parses and renders the planner's settings.

use super::{percentage, set};
use crate::policy_file::file::{self, Duration};
use crate::scheduling::policy::{Consolidation, Planning, Policy, PressureRules};

pub fn parse(file: &file::PolicySpec, policy: &mut Policy) {
    let Some(said) = &file.planning else { return };
    let planning = &mut policy.planning;
    set(&mut planning.gated_at_most, said.gated_at_most.map(|time| time.0));
    if let Some(groups) = &said.groups {
        set(&mut planning.groups.placement, groups.placement);
        set(&mut planning.groups.when_broken, groups.when_broken);
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
        set(&mut rules.kv_cache.from, kv_cache.from.map(|percent| percent.0));
        set(&mut rules.kv_cache.to, kv_cache.to.map(|percent| percent.0));
    }
    if let Some(queue) = &said.queue {
        set(&mut rules.queue.from, queue.from);
        set(&mut rules.queue.to, queue.to);
    }
    set(&mut rules.lasts, said.lasts.map(|time| time.0));
    rules
}

pub fn render(planning: &Planning) -> file::PlanningSpec {
    let Planning { gated_at_most, groups, pressure, consolidation } = planning;
    file::PlanningSpec {
        gated_at_most: Some(Duration(*gated_at_most)),
        groups: Some(file::Groups {
            placement: Some(groups.placement),
            when_broken: Some(groups.when_broken),
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
            from: Some(percentage(rules.kv_cache.from)),
            to: Some(percentage(rules.kv_cache.to)),
        }),
        queue: Some(file::CountThreshold { from: Some(rules.queue.from), to: Some(rules.queue.to) }),
        lasts: Some(Duration(rules.lasts)),
    }
}
