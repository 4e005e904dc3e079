//! Families about the use of VRAM: the cluster as a whole, classes, tenants, reservations. All sampled from a copy of the ledger.

use super::family::{Families, Sampled, known, open};
use super::scrape::Scrape;
use std::io;
use stowage_scheduling::explaining::usage::{ClassUsage, ClusterUsage, TenantShare};
use stowage_scheduling::ledger::Totals;
use stowage_scheduling::policy::SpareRule;
use stowage_scheduling::units::{Bytes, Millis};

/// A policy has at most 64 of them.
const CLASSES: &str = "the policy's classes, at most 64";
const TENANTS: &str = "the policy's tenants";

/// What a scrape found out about the cluster.
pub struct UsageSample<'l> {
    pub totals: Totals,
    pub usage: ClusterUsage,
    pub fragmented: Bytes,
    /// The free GPUs of each rule of `planning.spare`, or `None` if it does not hold now.
    pub spare: Vec<(&'l SpareRule, Option<u32>)>,
}

pub struct UsageMetrics {
    ledger_pods: Sampled,
    nodes: Sampled,
    dra_nodes: Sampled,
    gpus: Sampled,
    vram_allocatable: Sampled,
    vram_allocated: Sampled,
    vram_fragmented: Sampled,
    vram_lent: Sampled,
    borrowers: Sampled,
    reusable_engines: Sampled,
    spare: Sampled,
    reservations: Sampled,
    reservation_age: Sampled,
    class: ClassFamilies,
    tenant: TenantFamilies,
}

struct ClassFamilies {
    allocated: Sampled,
    borrowed: Sampled,
    pods: Sampled,
    oldest_pending: Sampled,
}

struct TenantFamilies {
    allocated: Sampled,
    guarantee: Sampled,
    borrowed: Sampled,
    limit: Sampled,
    pending: Sampled,
}

impl UsageMetrics {
    pub(super) fn new(families: &mut Families) -> Self {
        let states = [
            "waiting",
            "assumed",
            "bound",
            "unplaced",
            "reserved",
            "soft-reserved",
        ];
        Self {
            ledger_pods: families.sampled(
                "stowage_ledger_pods",
                "Pods in the ledger, by state; those with a reservation are waiting, too.",
                [known("state", states)],
            ),
            nodes: families.sampled("stowage_nodes", "GPU nodes in the ledger.", []),
            dra_nodes: families.sampled(
                "stowage_dra_nodes",
                "Nodes whose GPUs a DRA driver publishes, so that Stowage allocates none of them.",
                [],
            ),
            gpus: families.sampled("stowage_gpus", "GPUs and MIG slices in the ledger.", []),
            vram_allocatable: families.sampled(
                "stowage_vram_allocatable_bytes",
                "VRAM that pods can be allocated: total less the driver's reserve and the headroom.",
                [],
            ),
            vram_allocated: families.sampled("stowage_vram_allocated_bytes", "VRAM allocated to pods.", []),
            vram_fragmented: families.sampled(
                "stowage_vram_fragmented_bytes",
                "Free VRAM that a pod like the latest to arrive could not use, in expectation over them (FGD's measure); 0 until one \
                 has arrived.",
                [],
            ),
            vram_lent: families.sampled(
                "stowage_vram_lent_bytes",
                "VRAM that engines lend, used or not.",
                [],
            ),
            borrowers: families.sampled(
                "stowage_borrowing_pods",
                "Pods whose VRAM is lent by engines.",
                [],
            ),
            reusable_engines: families.sampled(
                "stowage_reusable_engines",
                "Sleeping engines that new pods may wake and none has taken.",
                [],
            ),
            spare: families.sampled(
                "stowage_spare_gpus",
                "GPUs that a rule of planning.spare keeps free, and free GPUs that count for it, while the rule holds.",
                [open("rule", "the policy's rules of planning.spare"), known("kind", ["kept", "free"])],
            ),
            reservations: families.sampled("stowage_reservations", "Reservations of pods that wait.", []),
            reservation_age: families.sampled(
                "stowage_reservation_age_seconds",
                "Age of the oldest reservation; 0 without one.",
                [],
            ),
            class: ClassFamilies::new(families),
            tenant: TenantFamilies::new(families),
        }
    }

    pub fn write(&self, scrape: &mut Scrape<'_>, sample: &UsageSample<'_>) -> io::Result<()> {
        let UsageSample {
            totals,
            usage,
            fragmented,
            spare,
        } = sample;
        let pods = [
            ("waiting", totals.waiting),
            ("assumed", totals.assumed),
            ("bound", totals.bound),
            ("unplaced", totals.unplaced),
            ("reserved", totals.reservations),
            ("soft-reserved", totals.soft_reservations),
        ];
        scrape.write_samples(
            &self.ledger_pods,
            pods.map(|(state, count)| ([state], count as f64)),
        )?;
        scrape.write_value(&self.nodes, totals.nodes as f64)?;
        scrape.write_value(&self.dra_nodes, totals.dra_nodes as f64)?;
        scrape.write_value(&self.gpus, totals.gpus as f64)?;
        scrape.write_value(&self.vram_allocatable, bytes(totals.capacity))?;
        scrape.write_value(&self.vram_allocated, bytes(totals.charged))?;
        scrape.write_value(&self.vram_fragmented, bytes(*fragmented))?;
        scrape.write_value(&self.vram_lent, bytes(totals.lent))?;
        scrape.write_value(&self.borrowers, totals.borrowing as f64)?;
        scrape.write_value(&self.reusable_engines, totals.reusable_engines as f64)?;
        scrape.write_samples(
            &self.spare,
            spare.iter().enumerate().flat_map(spare_samples),
        )?;
        scrape.write_value(&self.reservations, totals.reservations as f64)?;
        scrape.write_value(&self.reservation_age, seconds(usage.oldest_reservation))?;
        self.class.write(scrape, &usage.classes)?;
        self.tenant.write(scrape, &usage.tenants)
    }
}

impl ClassFamilies {
    fn new(families: &mut Families) -> Self {
        let mut sampled = |name, help| families.sampled(name, help, [open("class", CLASSES)]);
        Self {
            allocated: sampled(
                "stowage_class_vram_allocated_bytes",
                "VRAM allocated to or reserved for the pods of a class.",
            ),
            borrowed: sampled(
                "stowage_class_vram_borrowed_bytes",
                "VRAM of the pods of a class that engines lend to them.",
            ),
            oldest_pending: sampled(
                "stowage_oldest_pending_pod_age_seconds",
                "How long the pod of a class that has waited longest has waited for Stowage; 0 if none waits.",
            ),
            pods: families.sampled(
                "stowage_class_pods",
                "Pods of a class: bound ones, and those that only Stowage keeps pending.",
                [open("class", CLASSES), known("phase", ["pending", "bound"])],
            ),
        }
    }

    fn write(&self, scrape: &mut Scrape<'_>, classes: &[ClassUsage]) -> io::Result<()> {
        let of = |figure: fn(&ClassUsage) -> f64| {
            classes.iter().map(move |one| ([&one.name], figure(one)))
        };
        scrape.write_samples(&self.allocated, of(|class| bytes(class.allocated)))?;
        scrape.write_samples(&self.borrowed, of(|class| bytes(class.borrowed)))?;
        scrape.write_samples(
            &self.oldest_pending,
            of(|class| seconds(class.oldest_pending)),
        )?;
        let pods = classes.iter().flat_map(|one| {
            let name = one.name.as_str();
            [
                ([name, "pending"], one.pending as f64),
                ([name, "bound"], one.bound as f64),
            ]
        });
        scrape.write_samples(&self.pods, pods)
    }
}

impl TenantFamilies {
    fn new(families: &mut Families) -> Self {
        let mut sampled = |name, help| families.sampled(name, help, [open("tenant", TENANTS)]);
        Self {
            allocated: sampled(
                "stowage_tenant_vram_allocated_bytes",
                "VRAM allocated to or reserved for the pods of a tenant.",
            ),
            guarantee: sampled(
                "stowage_tenant_vram_guarantee_bytes",
                "VRAM that the policy guarantees a tenant; absent if its guarantee is in GPUs only.",
            ),
            borrowed: sampled(
                "stowage_tenant_vram_borrowed_bytes",
                "VRAM that a tenant has beyond its guarantee, which other tenants may reclaim.",
            ),
            limit: sampled(
                "stowage_tenant_vram_limit_bytes",
                "The most VRAM that the policy lets a tenant have; absent without a limit.",
            ),
            pending: sampled(
                "stowage_tenant_pending_pods",
                "Pods of a tenant that only Stowage keeps pending.",
            ),
        }
    }

    fn write(&self, scrape: &mut Scrape<'_>, tenants: &[TenantShare]) -> io::Result<()> {
        let of = |figure: fn(&TenantShare) -> Option<f64>| {
            tenants
                .iter()
                .filter_map(move |one| Some(([&one.name], figure(one)?)))
        };
        scrape.write_samples(&self.allocated, of(|tenant| Some(bytes(tenant.allocated))))?;
        scrape.write_samples(&self.guarantee, of(|tenant| tenant.guarantee.map(bytes)))?;
        scrape.write_samples(&self.borrowed, of(|tenant| Some(bytes(tenant.borrowed))))?;
        scrape.write_samples(&self.limit, of(|tenant| tenant.limit.map(bytes)))?;
        scrape.write_samples(&self.pending, of(|tenant| Some(tenant.pending as f64)))
    }
}

/// Two rules may be for the same GPUs, so each has its place in front.
fn spare_samples(
    (rule_index, (rule, free)): (usize, &(&SpareRule, Option<u32>)),
) -> Vec<([String; 2], f64)> {
    let Some(free) = free else { return Vec::new() };
    let name = format!("{rule_index}: {rule}");
    vec![
        ([name.clone(), "kept".into()], rule.gpus.into()),
        ([name, "free".into()], (*free).into()),
    ]
}

pub(super) fn bytes(bytes: Bytes) -> f64 {
    bytes.0 as f64
}

pub(super) fn seconds(millis: Millis) -> f64 {
    millis.0 as f64 / 1e3
}
