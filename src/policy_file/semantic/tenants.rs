//! Finds guarantees to tenants that cannot be kept, and combinations that cannot be intended.

use super::{WrittenPolicy, selectors, span};
use crate::diagnostic::{Diagnostic, quoted};
use crate::format::format_quantity;
use crate::source::Span;
use crate::tree::YamlNode;
use std::collections::BTreeMap;
use stowage_scheduling::policy::selection::{is_pattern, pattern_matches};
use stowage_scheduling::policy::{Borrowing, Tenant};
use stowage_scheduling::units::{Bytes, plural};

/// Enough to see which figures are meant.
const MAX_POOLS_SHOWN: usize = 4;

/// A counted amount of a tenant, by its field.
#[derive(Clone, Copy)]
enum TenantResource {
    Vram,
    Gpus,
}

impl TenantResource {
    const ALL: [Self; 2] = [Self::Vram, Self::Gpus];

    fn field(self) -> &'static str {
        match self {
            Self::Vram => "vram",
            Self::Gpus => "gpus",
        }
    }

    /// Its guarantee, if it is set.
    fn guarantee(self, tenant: &Tenant) -> Option<u64> {
        let amount = match self {
            Self::Vram => tenant.guarantee.vram.0,
            Self::Gpus => tenant.guarantee.milli_gpus,
        };
        (amount != u64::MAX).then_some(amount)
    }

    fn limit(self, tenant: &Tenant) -> Option<u64> {
        match self {
            Self::Vram => tenant.limit.vram.map(|vram| vram.0),
            Self::Gpus => tenant.limit.milli_gpus,
        }
    }

    fn zero_text(self) -> &'static str {
        match self {
            Self::Vram => "no VRAM",
            Self::Gpus => "0 GPUs",
        }
    }

    fn text(self, amount: u64) -> String {
        match self {
            Self::Vram => format_quantity(Bytes(amount)),
            Self::Gpus => plural(amount / 1000, "GPU"),
        }
    }
}

pub fn check(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let entries = policy.entries("tenants");
    for (tenant, entry) in policy.draft.tenants.iter().zip(entries) {
        TenantResource::ALL
            .into_iter()
            .for_each(|part| check_limit(part, tenant, entry, found));
        check_unusable(tenant, entry, found);
        selectors::check_namespace_selector(tenant.namespace_selector.as_ref(), entry, found);
    }
    check_namespaces(entries, found);
    check_patterns(policy, found);
    TenantResource::ALL
        .into_iter()
        .for_each(|part| check_capacity(policy, part, found));
}

fn check_limit(
    part: TenantResource,
    tenant: &Tenant,
    entry: &YamlNode,
    found: &mut Vec<Diagnostic>,
) {
    let (Some(guarantee), Some(limit)) = (part.guarantee(tenant), part.limit(tenant)) else {
        return;
    };
    let at = |what: &str| span(entry, &[what, part.field()]);
    let (less, more) = (part.text(limit), part.text(guarantee));
    if limit < guarantee {
        let message = format!(
            "{} is guaranteed {more} and may use {less} at most",
            quoted(&tenant.name)
        );
        found.push(
            Diagnostic::error("limit-below-guarantee", at("limit"), message)
                .related(at("guarantee"), "the guarantee is more")
                .help("raise the limit to the guarantee at least, or leave it out for no limit"),
        );
    } else if limit > guarantee && tenant.borrowing == Borrowing::Never {
        let message = format!(
            "the limit of {} is never reached: it borrows nothing beyond its guarantee",
            quoted(&tenant.name)
        );
        found.push(
            Diagnostic::warning("limit-without-borrowing", at("limit"), message)
                .related(span(entry, &["borrowing"]), "so it ends at the guarantee")
                .help("take the limit away, or allow borrowing"),
        );
    }
}

fn check_unusable(tenant: &Tenant, entry: &YamlNode, found: &mut Vec<Diagnostic>) {
    if let Some(part) = TenantResource::ALL
        .into_iter()
        .find(|part| part.limit(tenant) == Some(0))
    {
        let message = format!(
            "{} may use {} at most, so none of its pods is ever placed",
            quoted(&tenant.name),
            part.zero_text()
        );
        found.push(
            Diagnostic::warning(
                "nothing-to-use",
                span(entry, &["limit", part.field()]),
                message,
            )
            .help("raise the limit, or take the line away for no limit"),
        );
    }
    if tenant.borrowing == Borrowing::Never && tenant.guarantee == Default::default() {
        let message = format!(
            "{} has no guarantee and borrows nothing, so none of its pods is ever placed",
            quoted(&tenant.name)
        );
        found.push(
            Diagnostic::error("nothing-to-use", span(entry, &["borrowing"]), message)
                .help("give it a `guarantee`, or allow borrowing"),
        );
    }
    if tenant.namespaces.is_empty() && tenant.namespace_selector.is_none() {
        let message = format!(
            "{} has no namespaces, so no pod counts for it",
            quoted(&tenant.name)
        );
        found.push(
            Diagnostic::warning(
                "tenant-without-namespaces",
                span(entry, &["namespaces"]),
                message,
            )
            .help("add `namespaces: [...]`"),
        );
    }
}

fn check_namespaces(entries: &[YamlNode], found: &mut Vec<Diagnostic>) {
    let mut owners: BTreeMap<&str, (Span, &YamlNode)> = BTreeMap::new();
    for entry in entries {
        let names = entry
            .get("namespaces")
            .map(YamlNode::items)
            .unwrap_or_default();
        for (name, text) in names.iter().filter_map(|name| Some((name, name.text()?))) {
            let Some((first, owner)) = owners.insert(text, (name.span, entry)) else {
                continue;
            };
            let (message, help) = match std::ptr::eq(owner, entry) {
                true => (
                    format!("the namespace {} is named twice", quoted(text)),
                    "keep one of them",
                ),
                false => (
                    format!("the namespace {} is of two tenants", quoted(text)),
                    "a pod counts for one tenant: take the namespace away from the other",
                ),
            };
            found.push(
                Diagnostic::error("shared-namespace", name.span, message)
                    .label("again here")
                    .related(first, "first here")
                    .help(help),
            );
        }
    }
}

/// A pattern all of whose namespaces an earlier tenant takes by a pattern of its own counts for nothing. Selectors are not
/// compared with patterns: which namespaces have which labels is unknown here.
fn check_patterns(policy: WrittenPolicy<'_>, found: &mut Vec<Diagnostic>) {
    let mut earlier: Vec<(&str, &YamlNode, &str)> = Vec::new();
    for (tenant, entry) in policy.draft.tenants.iter().zip(policy.entries("tenants")) {
        let names = entry
            .get("namespaces")
            .map(YamlNode::items)
            .unwrap_or_default();
        let written = names
            .iter()
            .filter_map(|name| Some((name, name.text().filter(|text| is_pattern(text))?)));
        for (node, text) in written.clone() {
            let taker = earlier
                .iter()
                .find(|(one, ..)| pattern_matches(one, text) && *one != text);
            if let Some((_, taken_by, owner)) = taker {
                let message = format!(
                    "every namespace of {} is of the tenant {} before",
                    quoted(text),
                    quoted(owner)
                );
                found.push(
                    Diagnostic::error("unreachable-pattern", node.span, message)
                        .related(taken_by.span, "this takes them all")
                        .help(format!(
                            "put {} before {}, or give one of them a narrower pattern",
                            quoted(&tenant.name),
                            quoted(owner)
                        )),
                );
            }
        }
        earlier.extend(written.map(|(node, text)| (text, node, tenant.name.as_str())));
    }
}

/// Only if every pool has a capacity the total is known.
fn check_capacity(policy: WrittenPolicy<'_>, part: TenantResource, found: &mut Vec<Diagnostic>) {
    let pools = &policy.draft.pools;
    let capacity = |pool: &stowage_scheduling::policy::Pool| {
        let all = pool.capacity?;
        let amount = match part {
            TenantResource::Vram => all.vram.0,
            TenantResource::Gpus => all.milli_gpus,
        };
        (amount != u64::MAX).then_some(amount)
    };
    let Some(total) = pools
        .iter()
        .map(capacity)
        .sum::<Option<u64>>()
        .filter(|_| !pools.is_empty())
    else {
        return;
    };
    let mut guaranteed = 0u64;
    for (tenant, entry) in policy.draft.tenants.iter().zip(policy.entries("tenants")) {
        let guarantee = part.guarantee(tenant).unwrap_or_default();
        guaranteed = guaranteed.saturating_add(guarantee);
        if guaranteed <= total || guarantee == 0 {
            continue;
        }
        let message = format!(
            "the guarantees up to {} come to {}, and all node pools together have {}",
            quoted(&tenant.name),
            part.text(guaranteed),
            part.text(total)
        );
        let diagnostic = Diagnostic::error(
            "guarantee-above-capacity",
            span(entry, &["guarantee", part.field()]),
            message,
        );
        let pools = policy.entries("nodePools").iter().take(MAX_POOLS_SHOWN);
        let diagnostic = pools.fold(diagnostic, |diagnostic, pool| {
            diagnostic.related(span(pool, &["capacity", part.field()]), "a pool's part")
        });
        found.push(
            diagnostic
                .help("lower guarantees until they fit, or fix `capacity` if the pools have more"),
        );
        return;
    }
}
