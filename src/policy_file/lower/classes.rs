//! Classes: the owner's own in their order, then the built-in ones, changed where the owner names them.

use super::{DraftClass, set, texts};
use crate::policy_file::raw::{self, PriorityRange};
use crate::scheduling::policy::{Class, Expression, Match, Preemptibility, built_in_classes};
use std::ops::RangeInclusive;

/// The last built-in class takes what is left, and stays so.
pub const SERVING: &str = "serving";

/// The built-in class of that name.
fn built_in(name: &str) -> Option<Class> {
    built_in_classes().into_iter().find(|class| class.name == name)
}

pub fn lower(raw: &raw::PolicySpec) -> Vec<DraftClass> {
    let written: Vec<(usize, &raw::ClassSpec)> = raw.classes.iter().flatten().enumerate().collect();
    let gate = raw.start_gate.as_ref().and_then(|gate| gate.at_most);
    let lower = |class: Class, entry: Option<(usize, &raw::ClassSpec)>| {
        let mut class = class;
        set(&mut class.start_gate.at_most, gate.map(|time| time.0));
        if let Some((_, raw)) = entry {
            overlay(&mut class, raw);
        }
        DraftClass { class, entry: entry.map(|(place, _)| place) }
    };
    let own = written.iter().filter(|(_, raw)| built_in(&raw.name.0).is_none());
    let own = own.map(|&(place, raw)| lower(Class::named(&raw.name.0), Some((place, raw))));
    let built_in = built_in_classes().into_iter().map(|class| {
        let entry = written.iter().copied().find(|(_, raw)| raw.name.0 == class.name);
        lower(class, entry)
    });
    own.chain(built_in).collect()
}

fn overlay(class: &mut Class, raw: &raw::ClassSpec) {
    set(&mut class.matches, raw.matches.as_ref().map(matches));
    set(&mut class.engine, raw.engine);
    if let Some(names) = &raw.may_share_with {
        class.shares_with = Some(names.iter().map(|name| name.0.clone()).collect());
    }
    if let Some(limits) = &raw.limits {
        set(&mut class.kv_cache_limit, limits.kv_cache.map(|percent| Some(percent.0)));
        set(&mut class.queue_limit, limits.queue.map(Some));
    }
    if let Some(gate) = &raw.start_gate {
        set(&mut class.start_gate.at_least, gate.at_least.map(|time| time.0));
        set(&mut class.start_gate.at_most, gate.at_most.map(|time| time.0));
    }
    set(&mut class.eviction, raw.preemptible.map(eviction));
    set(&mut class.min_runtime, raw.min_runtime.map(|time| time.0));
    set(&mut class.drain_time, raw.drain_time.map(|time| time.0));
    set(&mut class.do_not_disrupt, raw.do_not_disrupt);
    set(&mut class.disruption_budgets, raw.disruption_budgets);
    set(&mut class.lost_work_at_most, raw.lost_work_at_most.map(|time| Some(time.0)));
}

fn eviction(preemptible: bool) -> Preemptibility {
    if preemptible { Preemptibility::ForHigherPriority } else { Preemptibility::Never }
}

fn matches(raw: &raw::MatchSpec) -> Match {
    Match {
        sharing: raw.sharing,
        priority: raw.priority.as_ref().map(range),
        priority_classes: raw.priority_classes.iter().flatten().map(|name| name.0.clone()).collect(),
        namespaces: raw.namespaces.iter().flatten().map(|name| name.0.clone()).collect(),
        labels: texts(&raw.labels),
        resources: raw.resources.iter().flatten().map(|name| name.0.clone()).collect(),
        // Compiled when the file was checked; there is no other text here.
        expression: raw.expression.as_ref().and_then(|cel| Expression::compile(&cel.0).ok()),
    }
}

fn range(raw: &PriorityRange) -> RangeInclusive<i32> {
    raw.at_least.unwrap_or(i32::MIN)..=raw.at_most.unwrap_or(i32::MAX)
}
