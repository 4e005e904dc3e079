//! Finds settings of the whole policy that contradict each other.

use super::{WrittenPolicy, span};
use crate::diagnostic::{Diagnostic, quoted};
use crate::format::format_duration;
use std::collections::BTreeMap;
use stowage_scheduling::units::Millis;

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    telemetry(policy, found);
    weights(policy, found);
    models(policy, found);
    pressure(policy, found);
    evictions(policy, found);
    autoscaling(policy, found);
}

fn telemetry(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let rules = &policy.draft.settings.telemetry;
    if rules.stale > rules.fresh {
        return;
    }
    let (fresh, stale) = (format_duration(rules.fresh), format_duration(rules.stale));
    let message =
        format!("readings are stale after {stale}, before they stop being fresh after {fresh}");
    let is_set = |field: &str| {
        policy
            .merged
            .get("telemetry")
            .is_some_and(|telemetry| telemetry.get(field).is_some())
    };
    let (at, other) = if is_set("stale") {
        ("stale", "fresh")
    } else {
        ("fresh", "stale")
    };
    let diagnostic = Diagnostic::error(
        "stale-before-fresh",
        policy.span(&["telemetry", at]),
        message,
    );
    let diagnostic = match is_set(other) {
        true => diagnostic.related(
            policy.span(&["telemetry", other]),
            format!("`{other}` is said here"),
        ),
        false => diagnostic.label(format!(
            "`{other}` is not said, so it is {}",
            if other == "stale" { &stale } else { &fresh }
        )),
    };
    found.push(diagnostic.help("make `stale` longer than `fresh`, by several samples"));
}

fn weights(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let weights = &policy.draft.settings.scoring.weights;
    let at = policy.span(&["scoring", "weights"]);
    if weights.are_all_zero() {
        found.push(
            Diagnostic::warning(
                "weights-all-zero",
                at,
                "all weights are 0, so every node is as good as another",
            )
            .help("give what matters a weight; left out, all have the default"),
        );
    }
    if weights.packing == weights.spread && weights.packing > 0 {
        let message = "`packing` and `spread` have the same weight and pull in opposite directions";
        found.push(
            Diagnostic::warning(
                "weights-cancel-out",
                policy.span(&["scoring", "weights", "spread"]),
                message,
            )
            .related(
                policy.span(&["scoring", "weights", "packing"]),
                "against this",
            )
            .help("give the one that matters more the larger weight, or set the other to 0"),
        );
    }
}

/// Pressure that ends above where it begins would never end, or never begin.
fn pressure(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let Some(rules) = &policy.draft.settings.planning.pressure else {
        return;
    };
    let (kv, queue) = (rules.kv_cache, rules.queue);
    let thresholds = [
        (
            "kvCache",
            kv.low < kv.high,
            format!("{}%", kv.high.get()),
            format!("{}%", kv.low.get()),
        ),
        (
            "queue",
            queue.low < queue.high,
            queue.high.to_string(),
            queue.low.to_string(),
        ),
    ];
    for (field, is_sound, high, low) in thresholds {
        if is_sound {
            continue;
        }
        let message = format!("pressure begins at {high} and already ends at {low}");
        let at = policy.span(&["planning", "pressure", field]);
        let diagnostic = Diagnostic::error("pressure-without-end", at, message);
        found.push(diagnostic.help(
            "make `low` less than `high`, by as much as the figure varies between two reports",
        ));
    }
}

/// A rate of zero stops all evictions, and a limit for one node above the cluster's is never reached.
fn evictions(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let rates = policy.draft.settings.preemption.evictions_per_minute;
    for (field, rate) in [
        ("cluster", rates.cluster),
        ("node", rates.node),
        ("tenant", rates.tenant),
    ] {
        let at = policy.span(&["preemption", "evictionsPerMinute", field]);
        if rate == 0 {
            let message = "with no eviction per minute Stowage never preempts by itself";
            found.push(Diagnostic::warning("no-evictions", at, message).help(
                "write 1 or more; to keep pods, say so of their class: `preemptible: false`",
            ));
        } else if rate > rates.cluster && rates.cluster > 0 {
            let message = format!(
                "{rate} evictions a minute are never reached: in the whole cluster there are {} at most",
                rates.cluster
            );
            found.push(
                Diagnostic::warning("rate-beyond-clusters", at, message)
                    .help("raise `cluster`, or lower this one"),
            );
        }
    }
}

/// An HPA looks back no further than an hour, and a longer window would hold yesterday's peak.
const MAX_SCALING_WINDOW: Millis = Millis::seconds(3600);

/// Targets that no replica can have, bounds that exclude each other, and windows that outlast every peak.
fn autoscaling(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let rules = &policy.draft.settings.autoscaling;
    check_replica_bounds(
        policy,
        &["autoscaling"],
        rules.kv_cache.get(),
        rules.min_replicas,
        rules.max_replicas,
        found,
    );
    for (name, model_rules) in &rules.models {
        let path = ["autoscaling", "models", name.as_str()];
        if name.trim().is_empty() {
            let message = "no model has an empty name";
            found.push(
                Diagnostic::error("empty-name", policy.span(&path), message)
                    .help("write a model's name, or a pattern such as `meta-llama/*`"),
            );
        }
        if has_empty_namespaces(policy, &path) {
            let at = policy.span(&[&path[..], &["namespaces"]].concat());
            found.push(
                Diagnostic::error(
                    "empty-condition",
                    at,
                    "`namespaces` is empty, so no pod could be a replica",
                )
                .help("take the line away to count the pods of all namespaces, or name some"),
            );
        }
        let kv_cache = model_rules.kv_cache.unwrap_or(rules.kv_cache).get();
        let least = model_rules.min_replicas.unwrap_or(rules.min_replicas);
        let most = model_rules.max_replicas.unwrap_or(rules.max_replicas);
        // What is wrong for all models is said once.
        if model_rules.kv_cache.is_some()
            || model_rules.min_replicas.is_some()
            || model_rules.max_replicas.is_some()
        {
            check_replica_bounds(policy, &path, kv_cache, least, most, found);
        }
    }
    for (field, window) in [
        ("scaleUp", rules.scale_up.window),
        ("scaleDown", rules.scale_down.window),
    ] {
        if window > MAX_SCALING_WINDOW {
            let message = format!(
                "a window of {} is longer than an hour",
                format_duration(window)
            );
            let at = policy.span(&["autoscaling", field, "window"]);
            found
                .push(Diagnostic::error("window-too-long", at, message).help("write at most `1h`"));
        }
    }
}

/// Whether the model at `path` has a list of namespaces and none in it.
fn has_empty_namespaces(policy: WrittenPolicy<'_>, path: &[&str]) -> bool {
    let model = path
        .iter()
        .try_fold(policy.merged, |node, field| node.get(field));
    model
        .and_then(|model| model.get("namespaces"))
        .is_some_and(|list| list.items().is_empty())
}

fn check_replica_bounds(
    policy: WrittenPolicy<'_>,
    path: &[&str],
    kv_cache: u8,
    least: u32,
    most: u32,
    found: &mut Vec<Diagnostic>,
) {
    if kv_cache == 0 {
        let at = policy.span(&[path, &["kvCache"]].concat());
        found.push(
            Diagnostic::error(
                "target-of-nothing",
                at,
                "a replica that may use no KV cache serves no request",
            )
            .help("write more than 0%, such as `70%`"),
        );
    }
    if least > most {
        let at = policy.span(&[path, &["minReplicas"]].concat());
        let message =
            format!("at least {least} replicas are more than the {most} that there are at most");
        found.push(
            Diagnostic::error("replicas-turned-round", at, message)
                .help("lower `minReplicas`, or raise `maxReplicas`"),
        );
    }
}

/// Parts of names are compared in lower case.
fn models(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let Some(models) = policy
        .merged
        .get("headroom")
        .and_then(|headroom| headroom.get("models"))
    else {
        return;
    };
    let mut first_spans = BTreeMap::new();
    for (key, value) in models.entries() {
        if let Some(first) = first_spans.insert(key.text.to_ascii_lowercase(), key.span) {
            found.push(
                Diagnostic::error(
                    "name-twice",
                    key.span,
                    format!("{} is said twice; case does not count", quoted(&key.text)),
                )
                .label("again here")
                .related(first, "first here")
                .help("keep one of them"),
            );
        }
        if key.text.trim().is_empty() {
            found.push(
                Diagnostic::error(
                    "empty-name",
                    span(value, &[]),
                    "every GPU model's name has the empty text in it",
                )
                .help("use `headroom.default` for all GPUs"),
            );
        }
    }
}
