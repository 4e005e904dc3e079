//! Where pods and nodes come from: the files of a trace, or what is made up; and what lies beside a trace: the order of the
//! published runs, and what those came to.

use crate::cli::simulate::{file_in, trace_in};
use crate::sim::openb::orders::{self, Orders, orders_of};
use crate::sim::openb::published::{self, Means, PUBLISHED, Run};
use crate::sim::openb::{Trace, built_in, pods_of, variant_of};
use crate::sim::packing::{Arrivals, PackingPolicy, Setting};
use anyhow::{Context, Result, bail};
use std::path::Path;

pub struct Source {
    pub variant: String,
    /// Whether it is made up.
    pub is_built_in: bool,
    pub trace: Trace,
    /// Of seeds whose published order is known.
    orders: Orders,
    published: Vec<Run>,
}

impl Source {
    pub fn built_in() -> Self {
        Self {
            variant: "made-up".into(),
            is_built_in: true,
            trace: built_in::trace(),
            orders: Orders::new(),
            published: Vec::new(),
        }
    }

    pub fn read(directory: &Path, variant: &str) -> Result<Self> {
        let variants = variants_in(directory)?;
        if !variants.iter().any(|one| one == variant) {
            let found = if variants.is_empty() { "none".into() } else { variants.join(", ") };
            bail!("there is no variant {variant:?} in {}; it has {found}", directory.display());
        }
        let trace = trace_in(directory, &pods_of(variant))?;
        let (order, published) = (orders_of(variant), PUBLISHED);
        let has = |name: &str| directory.join(name).is_file();
        Ok(Self {
            orders: match has(&order) {
                true => orders::read(file_in(directory, &order)?.as_text(), trace.pods.len())?,
                false => Orders::new(),
            },
            published: match has(published) {
                true => published::read(file_in(directory, published)?.as_text())?,
                false => Vec::new(),
            },
            variant: variant.into(),
            is_built_in: false,
            trace,
        })
    }

    /// In the published order, or shuffled where none is known.
    pub fn arrivals(&self, setting: &Setting, seed: u64) -> Arrivals {
        match self.orders.get(&seed) {
            Some(pods) => Arrivals::in_order(setting, seed, pods.clone()),
            None => Arrivals::shuffled(setting, seed),
        }
    }

    /// What runs of a policy with these seeds came to elsewhere.
    pub fn published(&self, policy: PackingPolicy, seeds: &[u64]) -> Option<Means> {
        published::means(&self.published, &self.variant, policy.published_as()?, seeds)
    }
}

/// In order of name.
fn variants_in(directory: &Path) -> Result<Vec<String>> {
    let unreadable =
        || format!("{} cannot be read; --trace is the directory of openb's files", directory.display());
    let mut variants = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(unreadable)? {
        let name = entry.with_context(unreadable)?.file_name();
        variants.extend(name.to_str().and_then(variant_of).map(str::to_owned));
    }
    variants.sort_unstable();
    Ok(variants)
}
