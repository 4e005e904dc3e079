//! Parses classes: the owner's own in their order, then the built-in ones, changed if the owner names them.

use super::{DraftClass, set, texts};
use crate::policy_file::file::{self, PriorityRange};
use crate::scheduling::policy::{Class, Expression, Match, Preemptibility, built_in_classes};
use std::ops::RangeInclusive;

/// The last built-in class takes all remaining pods, and stays last.
pub const SERVING: &str = "serving";

/// The built-in class of that name.
fn built_in(name: &str) -> Option<Class> {
    built_in_classes().into_iter().find(|class| class.name == name)
}

pub fn parse(file: &file::PolicySpec) -> Vec<DraftClass> {
    let written: Vec<(usize, &file::ClassSpec)> = file.classes.iter().flatten().enumerate().collect();
    let gate = file.start_gate.as_ref().and_then(|gate| gate.max);
    let parse = |class: Class, entry: Option<(usize, &file::ClassSpec)>| {
        let mut class = class;
        set(&mut class.start_gate.max, gate.map(|time| time.0));
        if let Some((_, file)) = entry {
            overlay(&mut class, file);
        }
        DraftClass { class, entry: entry.map(|(place, _)| place) }
    };
    let own = written.iter().filter(|(_, file)| built_in(&file.name.0).is_none());
    let own = own.map(|&(place, file)| parse(Class::named(&file.name.0), Some((place, file))));
    let built_in = built_in_classes().into_iter().map(|class| {
        let entry = written.iter().copied().find(|(_, file)| file.name.0 == class.name);
        parse(class, entry)
    });
    own.chain(built_in).collect()
}

fn overlay(class: &mut Class, file: &file::ClassSpec) {
    set(&mut class.matches, file.matches.as_ref().map(matches));
    set(&mut class.engine, file.engine);
    if let Some(names) = &file.may_share_with {
        class.shares_with = Some(names.iter().map(|name| name.0.clone()).collect());
    }
    if let Some(limits) = &file.limits {
        set(&mut class.kv_cache_limit, limits.kv_cache.map(|percent| Some(percent.0)));
        set(&mut class.queue_limit, limits.queue.map(Some));
    }
    if let Some(gate) = &file.start_gate {
        set(&mut class.start_gate.min, gate.min.map(|time| time.0));
        set(&mut class.start_gate.max, gate.max.map(|time| time.0));
    }
    set(&mut class.eviction, file.preemptible.map(eviction));
    set(&mut class.min_runtime, file.min_runtime.map(|time| time.0));
    set(&mut class.drain_time, file.drain_time.map(|time| time.0));
    set(&mut class.do_not_disrupt, file.do_not_disrupt);
    set(&mut class.disruption_budgets, file.disruption_budgets);
    set(&mut class.max_lost_work, file.max_lost_work.map(|time| Some(time.0)));
}

fn eviction(preemptible: bool) -> Preemptibility {
    if preemptible { Preemptibility::ForHigherPriority } else { Preemptibility::Never }
}

fn matches(file: &file::MatchSpec) -> Match {
    Match {
        sharing: file.sharing,
        priority: file.priority.as_ref().map(range),
        priority_classes: file.priority_classes.iter().flatten().map(|name| name.0.clone()).collect(),
        namespaces: file.namespaces.iter().flatten().map(|name| name.0.clone()).collect(),
        labels: texts(&file.labels),
        resources: file.resources.iter().flatten().map(|name| name.0.clone()).collect(),
        // Compiled when the file was checked; there is no other text here.
        expression: file.expression.as_ref().and_then(|cel| Expression::compile(&cel.0).ok()),
    }
}

fn range(file: &PriorityRange) -> RangeInclusive<i32> {
    file.min.unwrap_or(i32::MIN)..=file.max.unwrap_or(i32::MAX)
}
