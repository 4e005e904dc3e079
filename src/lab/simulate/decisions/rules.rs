//! The policies of a sequence in plain values: the oracle reads these, the core gets the policy that is made of them.

use super::draws::Draws;
use super::limits::EvictionLimits;
use super::planted::PlantedBug;
use stowage_scheduling::policy::{
    Class, ClassLimits, EvictionRates, ExpiredRule, Match, Policy, Preemptibility, Protection,
    SpareRule, StartGate, Tenant, ViolateBudgets,
};
use stowage_scheduling::units::{Bytes, Millis, Percent};
use stowage_scheduling::vocabulary::cluster_share::TenantLimit;

/// Classes by the PriorityClass of their pods; the last one takes all others.
pub const CLASSES: [&str; 5] = ["serving", "batch", "scratch", "solo", "other"];
/// Namespaces; the first is a tenant's, where the policy has one.
pub const NAMESPACES: [&str; 2] = ["team", "free"];
/// Values of the label by which budgets select pods.
pub(crate) const APPS: [&str; 3] = ["a0", "a1", "a2"];

/// How long an engine keeps others from starting beside it. The least and the most are the same, so that no prediction counts.
pub(crate) const START_GATE: u64 = 20_000;
/// How long a reservation lasts beyond the grace of its victims.
pub(crate) const SLACK: u64 = 30_000;
/// Ages in milliseconds from which a reading is stale, and has expired.
pub const FRESH: u64 = 5_000;
pub const STALE: u64 = 30_000;
/// Per cent of a GPU that no pod gets, and that is held back without a fresh reading.
pub(crate) const HEADROOM: u64 = 10;
pub(crate) const MARGIN: u64 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClassRules {
    pub engine: bool,
    pub is_preemptible: bool,
    /// In milliseconds.
    pub min_runtime: u64,
    pub honors_do_not_disrupt: bool,
    pub honors_budgets: bool,
    /// The classes with which it shares a GPU, by bit.
    pub shares: u8,
    pub kv_cache_limit: Option<u8>,
    pub queue_limit: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PolicyRules {
    pub classes: [ClassRules; CLASSES.len()],
    /// Free GPUs that preemptible pods may not take.
    pub spare: u32,
    pub refuses_expired: bool,
    /// VRAM of the first namespace's tenant.
    pub tenant_limit: Option<u64>,
    pub shortlist: u16,
    pub violates_budgets: bool,
    /// Without, there are more than a world has pods.
    pub eviction_limits: Option<EvictionLimits>,
}

impl PolicyRules {
    pub fn draw(draws: &mut Draws<'_>) -> Self {
        let all = (1 << CLASSES.len()) - 1;
        let solo = 1 << 3;
        let class = |engine, is_preemptible| ClassRules {
            engine,
            is_preemptible,
            min_runtime: 0,
            honors_do_not_disrupt: true,
            honors_budgets: true,
            shares: all & !solo,
            kv_cache_limit: None,
            queue_limit: None,
        };
        let serving = class(true, false);
        let batch = ClassRules {
            kv_cache_limit: Some(80),
            queue_limit: Some(8),
            ..class(false, true)
        };
        let scratch = ClassRules {
            min_runtime: if draws.chance(50) { 10_000 } else { 0 },
            honors_do_not_disrupt: draws.chance(50),
            honors_budgets: draws.chance(50),
            ..class(false, true)
        };
        let solo = ClassRules {
            shares: solo,
            ..class(false, draws.chance(50))
        };
        let other = class(draws.chance(50), draws.chance(30));
        Self {
            classes: [serving, batch, scratch, solo, other],
            spare: if draws.chance(25) {
                draws.between(1, 3) as u32
            } else {
                0
            },
            refuses_expired: draws.chance(25),
            tenant_limit: draws
                .chance(25)
                .then(|| (40 + 40 * draws.below(8) as u64) << 30),
            shortlist: draws.of(&[1, 2, 4, 4, 16]),
            violates_budgets: draws.chance(30),
            eviction_limits: draws.chance(30).then(|| {
                let (cluster, node, tenant) = draws.of(&[(4, 2, 3), (3, 1, 2)]);
                EvictionLimits {
                    cluster,
                    node,
                    tenant,
                }
            }),
        }
    }

    pub fn class(&self, class: u8) -> &ClassRules {
        &self.classes[usize::from(class)]
    }

    /// The policy that says so. A planted bug makes it say something else.
    pub fn policy(&self, planted: Option<PlantedBug>) -> Policy {
        let has = |bug| planted == Some(bug);
        let class = |place: usize| {
            let (name, rules) = (CLASSES[place], &self.classes[place]);
            let others = (0..CLASSES.len()).filter(|other| rules.shares >> other & 1 == 1);
            let shares_with = others.map(|other| CLASSES[other].to_owned()).collect();
            let priority_classes = if place + 1 == CLASSES.len() {
                Vec::new()
            } else {
                vec![name.to_owned()]
            };
            Class {
                matches: Match {
                    priority_classes,
                    ..Match::default()
                },
                engine: rules.engine && !has(PlantedBug::ForgetsStartGates),
                shares_with: (!has(PlantedBug::MixesClasses)).then_some(shares_with),
                limits: ClassLimits {
                    kv_cache: rules.kv_cache_limit.and_then(Percent::new),
                    queue: rules.queue_limit,
                    ..ClassLimits::default()
                },
                start_gate: StartGate {
                    min: Millis(START_GATE),
                    max: Millis(START_GATE),
                },
                eviction: match rules.is_preemptible || has(PlantedBug::EvictsAnyClass) {
                    true => Preemptibility::ForHigherPriority,
                    false => Preemptibility::Never,
                },
                min_runtime: Millis(if has(PlantedBug::EvictsAtOnce) {
                    0
                } else {
                    rules.min_runtime
                }),
                do_not_disrupt: protection(rules.honors_do_not_disrupt),
                disruption_budgets: protection(
                    rules.honors_budgets && !has(PlantedBug::ForgetsBudgets),
                ),
                ..Class::named(name)
            }
        };
        let classes = (0..CLASSES.len()).map(class).collect();
        let mut policy = Policy::default()
            .with_classes(classes)
            .expect("its last class takes every pod");
        if let Some(limit) = self
            .tenant_limit
            .filter(|_| !has(PlantedBug::ForgetsTenants))
        {
            let limit = TenantLimit {
                vram: Some(Bytes(limit)),
                milli_gpus: None,
            };
            let tenant = Tenant {
                limit,
                ..Tenant::named("tenant", &[NAMESPACES[0]])
            };
            policy = policy
                .with_tenants(vec![tenant])
                .expect("one tenant has all its namespaces");
        }
        if self.spare > 0 && !has(PlantedBug::ForgetsSpare) {
            let rule = SpareRule {
                gpus: self.spare,
                model: None,
                pool: None,
                when: Vec::new(),
            };
            policy.planning.spare = vec![rule];
        }
        (policy.telemetry.fresh, policy.telemetry.stale) = (Millis(FRESH), Millis(STALE));
        policy.telemetry.expired = if self.refuses_expired {
            ExpiredRule::Refuse
        } else {
            ExpiredRule::LedgerOnly
        };
        policy.scoring.shortlist = self.shortlist;
        policy.preemption.reservation_slack = Millis(SLACK);
        if self.violates_budgets {
            policy.preemption.violate_budgets = ViolateBudgets::WhenNothingElse;
        }
        policy.preemption.evictions_per_minute = match self.eviction_limits {
            Some(EvictionLimits {
                cluster,
                node,
                tenant,
            }) => EvictionRates {
                cluster,
                node,
                tenant,
            },
            None => EvictionRates {
                cluster: 10_000,
                node: 10_000,
                tenant: 10_000,
            },
        };
        policy
    }
}

fn protection(honors: bool) -> Protection {
    if honors {
        Protection::Honor
    } else {
        Protection::Ignore
    }
}
