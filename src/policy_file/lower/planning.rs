//! The planner's settings, both ways.

use super::{percentage, set};
use crate::policy_file::raw::{self, Duration};
use crate::scheduling::policy::{Consolidation, Planning, Policy, PressureRules};

pub fn lower(raw: &raw::PolicySpec, policy: &mut Policy) {
    let Some(said) = &raw.planning else { return };
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

fn pressure(said: &raw::PressureSpec) -> PressureRules {
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

pub fn raise(planning: &Planning) -> raw::PlanningSpec {
    let Planning { gated_at_most, groups, pressure, consolidation } = planning;
    raw::PlanningSpec {
        gated_at_most: Some(Duration(*gated_at_most)),
        groups: Some(raw::Groups {
            placement: Some(groups.placement),
            when_broken: Some(groups.when_broken),
        }),
        pressure: Some(raise_pressure(pressure.as_ref())),
        consolidation: Some(raw::ConsolidationSpec {
            enabled: Some(consolidation.is_some()),
            gain: consolidation.map(|rules| Duration(rules.gain)),
        }),
    }
}

fn raise_pressure(rules: Option<&PressureRules>) -> raw::PressureSpec {
    let Some(rules) = rules else {
        return raw::PressureSpec { enabled: Some(false), ..raw::PressureSpec::default() };
    };
    raw::PressureSpec {
        enabled: Some(true),
        kv_cache: Some(raw::PercentageThreshold {
            from: Some(percentage(rules.kv_cache.from)),
            to: Some(percentage(rules.kv_cache.to)),
        }),
        queue: Some(raw::CountThreshold { from: Some(rules.queue.from), to: Some(rules.queue.to) }),
        lasts: Some(Duration(rules.lasts)),
    }
}
