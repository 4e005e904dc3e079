//! Renders a policy with every setting: for `policy show`, and for the digest, which must not depend on how the settings were
//! written.

use super::parse::{MILLI, UNBOUNDED, percentage, planning};
use crate::policy_file::file::{
    self, AmountSpec, Duration, LabelValue, MemoryQuantity, MigProfile, Name, Percentage, PoolCapacitySpec,
    PriorityRange, QualifiedName, Speed, Subdomain,
};
use crate::scheduling::policy::{Class, Match, PackingRules, Policy, Pool, Preemptibility, Tenant};
use crate::scheduling::vocabulary::cluster_share::TenantUsage;
use crate::units::Bytes;
use std::collections::BTreeMap;

/// Parsing it gives the same policy.
pub fn render(policy: &Policy) -> file::PolicySpec {
    file::PolicySpec {
        api_version: Some(file::ApiVersion::V1Alpha1),
        kind: Some(file::PolicyKind::SchedulingPolicy),
        mode: Some(policy.mode),
        headroom: Some(headroom(policy)),
        telemetry: Some(telemetry(policy)),
        loading: Some(loading(policy)),
        // Each class has its own.
        start_gate: None,
        scoring: Some(scoring(policy)),
        packing: Some(packing(policy)),
        preemption: Some(preemption(policy)),
        conflicts: Some(policy.conflicts),
        planning: Some(planning::render(&policy.planning)),
        classes: Some(policy.classes().iter().map(class).collect()),
        tenants: Some(policy.tenants().iter().map(tenant).collect()),
        node_pools: Some(policy.pools().iter().map(pool).collect()),
    }
}

fn headroom(policy: &Policy) -> file::HeadroomSpec {
    let models = policy.headroom.models.iter();
    let models: BTreeMap<String, Percentage<90>> =
        models.map(|(part, percent)| (part.clone(), percentage(*percent))).collect();
    file::HeadroomSpec {
        default: Some(percentage(policy.headroom.default)),
        models: (!models.is_empty()).then_some(models),
    }
}

fn telemetry(policy: &Policy) -> file::Telemetry {
    let rules = &policy.telemetry;
    file::Telemetry {
        fresh: Some(Duration(rules.fresh)),
        stale: Some(Duration(rules.stale)),
        margin: Some(percentage(rules.margin)),
        expired: Some(rules.expired),
    }
}

fn loading(policy: &Policy) -> file::Loading {
    let speeds = &policy.loading;
    file::Loading {
        network: Some(Speed(speeds.network)),
        disk: Some(Speed(speeds.disk)),
        page_cache: Some(Speed(speeds.page_cache)),
        init: Some(Duration(speeds.init)),
    }
}

fn scoring(policy: &Policy) -> file::Scoring {
    let weights = &policy.weights;
    let weight = |weight: u32| Some(u16::try_from(weight).unwrap_or(u16::MAX));
    file::Scoring {
        shortlist: Some(policy.shortlist),
        soft_reservation_lifetime: Some(Duration(policy.soft_reservation_lifetime)),
        weights: Some(file::WeightsSpec {
            packing: weight(weights.packing),
            kv_headroom: weight(weights.kv_headroom),
            time_to_ready: weight(weights.time_to_ready),
            interference: weight(weights.interference),
            topology: weight(weights.topology),
            spread: weight(weights.spread),
        }),
    }
}

fn packing(policy: &Policy) -> file::PackingSpec {
    let PackingRules { policy, learning, window } = policy.packing;
    file::PackingSpec { policy: Some(policy), learning: Some(learning), window: Some(window) }
}

fn preemption(policy: &Policy) -> file::Preemption {
    file::Preemption {
        reservation_slack: Some(Duration(policy.reservation_slack)),
        costs: Some(file::Costs {
            per_pod: Some(Duration(policy.eviction_costs.per_pod)),
            max_lost_work: Some(Duration(policy.eviction_costs.max_lost_work)),
            per_request: Some(Duration(policy.eviction_costs.per_request)),
            again_within: Some(Duration(policy.eviction_costs.again_within)),
        }),
        violate_budgets: Some(policy.violate_budgets),
        evictions_per_minute: Some(file::EvictionRatesSpec {
            cluster: Some(policy.eviction_rates.cluster),
            node: Some(policy.eviction_rates.node),
            tenant: Some(policy.eviction_rates.tenant),
        }),
    }
}

fn class(class: &Class) -> file::ClassSpec {
    let limits =
        file::EngineLimitsSpec { kv_cache: class.kv_cache_limit.map(percentage), queue: class.queue_limit };
    file::ClassSpec {
        name: Name(class.name.clone()),
        matches: (class.matches != Match::default()).then(|| matches(&class.matches)),
        engine: Some(class.engine),
        may_share_with: class.shares_with.as_deref().map(|names| words(names, Name)),
        limits: (limits != file::EngineLimitsSpec::default()).then_some(limits),
        start_gate: Some(file::KeptRange {
            min: Some(Duration(class.start_gate.min)),
            max: Some(Duration(class.start_gate.max)),
        }),
        preemptible: Some(class.eviction == Preemptibility::ForHigherPriority),
        min_runtime: Some(Duration(class.min_runtime)),
        drain_time: Some(Duration(class.drain_time)),
        do_not_disrupt: Some(class.do_not_disrupt),
        disruption_budgets: Some(class.disruption_budgets),
        max_lost_work: class.max_lost_work.map(Duration),
    }
}

fn matches(matches: &Match) -> file::MatchSpec {
    let range = |range: &std::ops::RangeInclusive<i32>| PriorityRange {
        min: Some(*range.start()).filter(|&least| least != i32::MIN),
        max: Some(*range.end()).filter(|&most| most != i32::MAX),
    };
    file::MatchSpec {
        namespaces: some_words(&matches.namespaces, Name),
        labels: labels(&matches.labels),
        priority_classes: some_words(&matches.priority_classes, Subdomain),
        priority: matches.priority.as_ref().map(range),
        resources: some_words(&matches.resources, QualifiedName),
        sharing: matches.sharing,
        expression: matches.expression.as_ref().map(|one| file::Cel(one.text().to_owned())),
    }
}

fn tenant(tenant: &Tenant) -> file::TenantSpec {
    let guaranteed = tenant.guarantee != TenantUsage::default();
    let limit =
        AmountSpec { vram: tenant.limit.vram.map(MemoryQuantity), gpus: tenant.limit.milli_gpus.map(gpus) };
    file::TenantSpec {
        name: Name(tenant.name.clone()),
        namespaces: some_words(&tenant.namespaces, Name),
        guarantee: guaranteed
            .then(|| AmountSpec { vram: vram(tenant.guarantee), gpus: whole_gpus(tenant.guarantee) }),
        limit: (limit != AmountSpec::default()).then_some(limit),
        borrowing: Some(tenant.borrowing),
        reclaim: Some(tenant.reclaim),
        weight: Some(u16::try_from(tenant.weight).unwrap_or(u16::MAX)),
    }
}

fn pool(pool: &Pool) -> file::NodePool {
    file::NodePool {
        name: Name(pool.name.clone()),
        selector: labels(&pool.selector),
        allocator: Some(pool.allocator),
        classes: pool.classes.as_deref().map(|names| words(names, Name)),
        mig: pool.mig.as_deref().map(|profiles| words(profiles, MigProfile)),
        capacity: pool.capacity.map(|all| PoolCapacitySpec { gpus: whole_gpus(all), vram: vram(all) }),
    }
}

fn vram(usage: TenantUsage) -> Option<MemoryQuantity> {
    (usage.vram != Bytes(UNBOUNDED)).then_some(MemoryQuantity(usage.vram))
}

fn whole_gpus(usage: TenantUsage) -> Option<u32> {
    (usage.milli_gpus != UNBOUNDED).then(|| gpus(usage.milli_gpus))
}

fn gpus(milli: u64) -> u32 {
    u32::try_from(milli / MILLI).unwrap_or(u32::MAX)
}

fn words<T>(names: &[String], word: fn(String) -> T) -> Vec<T> {
    names.iter().cloned().map(word).collect()
}

fn some_words<T>(names: &[String], word: fn(String) -> T) -> Option<Vec<T>> {
    (!names.is_empty()).then(|| words(names, word))
}

fn labels(labels: &BTreeMap<String, String>) -> Option<BTreeMap<String, LabelValue>> {
    let labels: BTreeMap<String, LabelValue> =
        labels.iter().map(|(key, value)| (key.clone(), LabelValue(value.clone()))).collect();
    (!labels.is_empty()).then_some(labels)
}
