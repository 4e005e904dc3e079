//! Checks classes and their names: conditions that no pod can meet, and neighbors that do not exist.

use super::{WrittenPolicy, key_span, name_span, selectors, span};
use crate::diagnostic::{Diagnostic, quoted};
use crate::format::format_duration;
use crate::nearest::nearest;
use crate::parse::{DraftClass, SERVING};
use crate::source::Span;
use crate::tree::YamlNode;
use stowage_scheduling::policy::{SleepingRule, UnusedRule};
use stowage_scheduling::units::Millis;
use stowage_scheduling::vocabulary::classification::{Isolation, MAX_CLASSES};
use stowage_scheduling::vocabulary::demand::MAX_GRACE_PERIOD;

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let entries = policy.entries("classes");
    let count = policy.draft.classes.len();
    if count > MAX_CLASSES {
        return found.push(too_many(policy, count));
    }
    for one in &policy.draft.classes {
        let Some(entry) = one.written_index.and_then(|index| entries.get(index)) else {
            continue;
        };
        conditions(one, entry, found);
        gate(policy, one, entry, found);
        grace(one, entry, found);
        sharing_partners(policy, one, entry, found);
        pools(policy, one, entry, found);
        reusable_that_lend(one, entry, found);
        unused_without_limits(one, entry, found);
        latency_limits(one, entry, found);
    }
}

/// Same-GPU affinity never uses an engine that lends: its VRAM may be another pod's when the new pod would wake it.
fn reusable_that_lend(one: &DraftClass, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    if !one.class.reusable || one.class.sleeping != SleepingRule::Lend {
        return;
    }
    let message = format!(
        "engines of {} lend VRAM while they sleep, so no new pod is placed to wake one of them",
        quoted(&one.class.name)
    );
    found.push(
        Diagnostic::warning("reusable-that-lends", span(entry, &["reusable"]), message)
            .related(
                span(entry, &["sleeping"]),
                "engines that lend are not open to same-GPU affinity",
            )
            .help("take `reusable` away, or let them keep their VRAM with `sleeping: keep`"),
    );
}

/// The driver gives an engine back what it lent only if the engine has limits.
fn unused_without_limits(one: &DraftClass, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    if one.class.unused == UnusedRule::Lend && one.class.isolation == Isolation::None {
        let message = format!(
            "engines of {} lend nothing while they are awake: they have no VRAM limits, by which they get it back",
            quoted(&one.class.name)
        );
        found.push(
            Diagnostic::error("unused-without-limits", span(entry, &["unused"]), message)
                .help("add `isolation: preferred` or `required`, or lend only what sleeping engines do not use: `sleeping: lend`"),
        );
    }
}

/// A limit on latency is kept for engines alone, and no engine keeps one of nothing.
fn latency_limits(one: &DraftClass, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let limits = [
        ("maxTimePerToken", one.class.max_time_per_token),
        ("maxTimeToFirstToken", one.class.max_time_to_first_token),
    ];
    for (field, limit) in limits {
        let class = quoted(&one.class.name);
        let diagnostic = match limit {
            Some(Millis(0)) => Diagnostic::error(
                "no-latency",
                span(entry, &[field]),
                format!("no engine of {class} keeps 0 s, so no pod would ever come beside one"),
            )
            .help("write what it may take at most, such as `50ms`, or take the line away"),
            Some(_) if !one.class.engine => Diagnostic::warning(
                "latency-without-engine",
                span(entry, &[field]),
                format!("{class} has no engines, so nothing keeps its pods within this limit"),
            )
            .help("add `engine: true`, or take the line away"),
            _ => continue,
        };
        found.push(diagnostic);
    }
}

/// The pools that a class is kept in: they are there, and admit it.
fn pools(
    policy: WrittenPolicy<'_>,
    one: &DraftClass,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    let Some(list) = entry.get("pools") else {
        return;
    };
    let class = &one.class.name;
    if list.items().is_empty() {
        found.push(
            Diagnostic::error("class-nowhere", list.span, format!("no pod of class {} is ever placed: it is kept in no pool", quoted(class)))
                .help("name node pools, or take the line away: then every node whose pool admits the class takes it"),
        );
    }
    for name in list.items() {
        let Some(text) = name.text() else { continue };
        let pools = &policy.draft.pools;
        let Some(index) = pools.iter().position(|pool| pool.name == text) else {
            found.push(unknown_pool(policy, text, name.span));
            continue;
        };
        if pools[index]
            .classes
            .as_ref()
            .is_some_and(|names| !names.contains(class))
        {
            let message = format!(
                "{} is kept in {}, which does not admit it",
                quoted(class),
                quoted(text)
            );
            let admits = policy
                .entries("nodePools")
                .get(index)
                .map_or(name.span, |pool| span(pool, &["classes"]));
            found.push(
                Diagnostic::error("pool-without-its-class", name.span, message)
                    .related(admits, format!("`{class}` is not in here"))
                    .help(format!(
                        "add `{class}` to `classes` of the pool, or take the pool away here"
                    )),
            );
        }
    }
}

fn unknown_pool(policy: WrittenPolicy<'_>, name: &str, at: Span) -> Diagnostic {
    let names: Vec<&str> = policy
        .draft
        .pools
        .iter()
        .map(|pool| pool.name.as_str())
        .collect();
    let help = match (nearest(name, &names), names.is_empty()) {
        (Some(near), _) => format!("did you mean `{near}`?"),
        (None, true) => "the policy has no `nodePools`: add the pool there".into(),
        (None, false) => format!("the node pools are {}", names.join(", ")),
    };
    Diagnostic::error(
        "unknown-pool",
        at,
        format!("there is no node pool {}", quoted(name)),
    )
    .help(help)
}

fn too_many(policy: WrittenPolicy<'_>, count: usize) -> Diagnostic {
    let span = policy
        .entries("classes")
        .last()
        .map_or(policy.merged.span, name_span);
    let message = format!(
        "the policy has {count} classes with the built-in ones; {MAX_CLASSES} are the most"
    );
    Diagnostic::error("too-many-classes", span, message)
        .help("put classes that are treated alike into one, with several namespaces")
}

fn conditions(one: &DraftClass, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let Some(matches) = entry.get("match") else {
        return;
    };
    if one.class.name == SERVING {
        found.push(
            Diagnostic::error(
                "serving-match",
                key_span(entry, "match"),
                "`serving` takes every pod that is left, so it has no conditions",
            )
            .help("take `match` away, or give a class of your own these conditions"),
        );
    }
    for list in ["namespaces", "priorityClasses", "resources"] {
        if matches
            .get(list)
            .is_some_and(|node| node.items().is_empty())
        {
            let message = format!("`{list}` is empty, so no pod could match");
            found.push(
                Diagnostic::error("empty-condition", span(matches, &[list]), message)
                    .help("take the line away to match any, or name some"),
            );
        }
    }
    selectors::check_pod_labels(&one.class.matches, matches, found);
    selectors::check_namespace_selector(
        one.class.matches.namespace_selector.as_ref(),
        matches,
        found,
    );
    if let Some(range) = one
        .class
        .matches
        .priority
        .as_ref()
        .filter(|range| range.is_empty())
    {
        let message = format!(
            "no priority is at least {} and at most {}",
            range.start(),
            range.end()
        );
        found.push(
            Diagnostic::error("no-pod-matches", span(matches, &["priority"]), message)
                .label(format!("no pod is ever of class `{}`", one.class.name))
                .help("exchange the two"),
        );
    }
}

fn gate(
    policy: WrittenPolicy<'_>,
    one: &DraftClass,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    let gate = one.class.start_gate;
    if gate.min <= gate.max {
        return;
    }
    let (least, most) = (format_duration(gate.min), format_duration(gate.max));
    let message =
        format!("the start gate stays closed for at least {least} and opens after at most {most}");
    let diagnostic = Diagnostic::error(
        "gate-never-opens",
        span(entry, &["startGate", "min"]),
        message,
    );
    let class_max = entry.get("startGate").and_then(|gate| gate.get("max"));
    let policy_max = policy
        .merged
        .get("startGate")
        .and_then(|gate| gate.get("max"));
    let diagnostic = match class_max.or(policy_max) {
        Some(most) => diagnostic.related(most.span, "it must open by then"),
        None => diagnostic.label(format!("`max` is not said, so it is {most}")),
    };
    found.push(diagnostic.help("make `min` shorter than `max`"));
}

/// With less than a second the API server would delete a victim at once, and no reservation lasts longer than an hour for one.
fn grace(one: &DraftClass, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    let longest = one.class.max_grace_period;
    if (Millis::seconds(1)..=MAX_GRACE_PERIOD).contains(&longest) {
        return;
    }
    let message = format!(
        "pods cannot be evicted with a grace period of at most {}",
        format_duration(longest)
    );
    found.push(
        Diagnostic::error(
            "grace-out-of-range",
            span(entry, &["maxGracePeriod"]),
            message,
        )
        .help(
            "write a time from 1s to 1h; to keep pods, say so of their class: `preemptible: false`",
        ),
    );
}

fn sharing_partners(
    policy: WrittenPolicy<'_>,
    one: &DraftClass,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    let Some(list) = entry.get("mayShareWith") else {
        return;
    };
    for name in list.items() {
        let Some(text) = name.text() else { continue };
        let Some(other) = policy
            .draft
            .classes
            .iter()
            .find(|other| other.class.name == text)
        else {
            found.push(unknown_class(policy, text, name.span));
            continue;
        };
        if !other.class.shares_with(&one.class.name) {
            found.push(one_sided(policy, one, other, name.span));
        }
    }
}

/// A name that no class has, with the one that was probably meant.
pub(crate) fn unknown_class(policy: WrittenPolicy<'_>, name: &str, at: Span) -> Diagnostic {
    let names: Vec<&str> = policy
        .draft
        .classes
        .iter()
        .map(|one| one.class.name.as_str())
        .collect();
    let help = match nearest(name, &names) {
        Some(near) => format!("did you mean `{near}`?"),
        None => format!("the classes are {}", names.join(", ")),
    };
    Diagnostic::error(
        "unknown-class",
        at,
        format!("there is no class {}", quoted(name)),
    )
    .help(help)
}

fn one_sided(
    policy: WrittenPolicy<'_>,
    one: &DraftClass,
    other: &DraftClass,
    at: Span,
) -> Diagnostic {
    let (name, neighbor) = (&one.class.name, &other.class.name);
    let message =
        format!("`{name}` would share a GPU with `{neighbor}`, but `{neighbor}` not with `{name}`");
    let diagnostic = Diagnostic::warning("one-sided-sharing", at, message);
    let list = other
        .written_index
        .and_then(|index| policy.entries("classes").get(index)?.get("mayShareWith"));
    let diagnostic = match list {
        Some(list) => diagnostic.related(list.span, format!("`{name}` is not in here")),
        None => diagnostic,
    };
    diagnostic.help(format!(
        "both must agree: add `{name}` to `mayShareWith` of `{neighbor}`, or take `{neighbor}` away here"
    ))
}
