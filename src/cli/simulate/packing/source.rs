//! Sources of pods and nodes: a trace's files, or a generated trace; and other tools' results, if they are next to the trace.

use crate::cli::simulate::{file_in, trace_in};
use anyhow::{Context, Result, bail};
use std::path::Path;
use stowage_lab::simulate::openb::published;
use stowage_lab::simulate::openb::published::{PUBLISHED, PublishedRun, SeedMeans};
use stowage_lab::simulate::openb::{Trace, built_in, pods_of, variant_of};
use stowage_lab::simulate::packing::PlayedPolicy;

pub struct PackingTrace {
    pub variant: String,
    /// Whether it is generated.
    pub is_built_in: bool,
    pub trace: Trace,
    published: Vec<PublishedRun>,
}

impl PackingTrace {
    pub fn built_in() -> Self {
        Self { variant: "made-up".into(), is_built_in: true, trace: built_in::trace(), published: Vec::new() }
    }

    pub fn read(directory: &Path, variant: &str) -> Result<Self> {
        let variants = variants_in(directory)?;
        if !variants.iter().any(|one| one == variant) {
            let found = if variants.is_empty() { "none".into() } else { variants.join(", ") };
            bail!("there is no variant {variant:?} in {}; it has {found}", directory.display());
        }
        let trace = trace_in(directory, &pods_of(variant))?;
        Ok(Self {
            published: match directory.join(PUBLISHED).is_file() {
                true => published::read(file_in(directory, PUBLISHED)?.as_text())?,
                false => Vec::new(),
            },
            variant: variant.into(),
            is_built_in: false,
            trace,
        })
    }

    /// Other tools' results of a policy with these seeds.
    pub fn published(&self, policy: PlayedPolicy, seeds: &[u64]) -> Option<SeedMeans> {
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
