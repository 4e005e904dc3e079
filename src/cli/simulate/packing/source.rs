//! Sources of pods and nodes: a trace's files, or a generated trace; and other tools' results, if they are next to the trace.

use anyhow::{Context, Result, bail};
use std::path::Path;
use stowage_lab::simulate::openb::published;
use stowage_lab::simulate::openb::published::{PUBLISHED, PublishedRun, SeedMeans};
use stowage_lab::simulate::openb::{NODES, Trace, TraceText, built_in, pods_file, variant_of};
use stowage_lab::simulate::packing::SimulatedPolicy;

pub struct PackingTrace {
    pub variant: String,
    /// Whether it is generated.
    pub is_built_in: bool,
    pub trace: Trace,
    published: Vec<PublishedRun>,
}

impl PackingTrace {
    pub fn built_in() -> Self {
        Self {
            variant: "made-up".into(),
            is_built_in: true,
            trace: built_in::trace(),
            published: Vec::new(),
        }
    }

    pub fn read(directory: &Path, variant: &str) -> Result<Self> {
        let variants = variants_in(directory)?;
        if !variants.iter().any(|one| one == variant) {
            let found = if variants.is_empty() {
                "none".into()
            } else {
                variants.join(", ")
            };
            bail!(
                "there is no variant {variant:?} in {}; it has {found}",
                directory.display()
            );
        }
        let (nodes, pods) = (
            read_file(directory, NODES)?,
            read_file(directory, &pods_file(variant))?,
        );
        let trace = Trace::read(nodes.as_text(), pods.as_text())?;
        Ok(Self {
            published: match directory.join(PUBLISHED).is_file() {
                true => published::read(read_file(directory, PUBLISHED)?.as_text())?,
                false => Vec::new(),
            },
            variant: variant.into(),
            is_built_in: false,
            trace,
        })
    }

    /// Other tools' results of a policy with these seeds.
    pub fn published(&self, policy: SimulatedPolicy, seeds: &[u64]) -> Option<SeedMeans> {
        published::means(
            &self.published,
            &self.variant,
            policy.published_as()?,
            seeds,
        )
    }
}

/// In order of name.
fn variants_in(directory: &Path) -> Result<Vec<String>> {
    let unreadable = || {
        format!(
            "{} cannot be read; --trace is the directory of openb's files",
            directory.display()
        )
    };
    let mut variants = Vec::new();
    for entry in std::fs::read_dir(directory).with_context(unreadable)? {
        let name = entry.with_context(unreadable)?.file_name();
        variants.extend(name.to_str().and_then(variant_of).map(str::to_owned));
    }
    variants.sort_unstable();
    Ok(variants)
}

/// A file as it was read, with its name for messages.
struct TraceFile {
    file: String,
    text: String,
}

impl TraceFile {
    fn as_text(&self) -> TraceText<'_> {
        TraceText {
            file: &self.file,
            text: &self.text,
        }
    }
}

fn read_file(directory: &Path, name: &str) -> Result<TraceFile> {
    let path = directory.join(name);
    let text = std::fs::read_to_string(&path).with_context(|| {
        format!(
            "{} cannot be read; --trace is the directory of openb's files",
            path.display()
        )
    })?;
    Ok(TraceFile {
        file: path.display().to_string(),
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_a_directory_without_nodes_names_the_missing_file() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(pods_file("tiny")), "").unwrap();
        let refusal = || {
            PackingTrace::read(directory.path(), "tiny")
                .err()
                .unwrap()
                .to_string()
        };
        let error = refusal();
        assert!(
            error.contains(NODES) && error.contains("--trace is the directory"),
            "{error}"
        );
        std::fs::write(directory.path().join(NODES), "sn,cpu_milli\nn0,1\n").unwrap();
        let error = refusal();
        assert!(
            error.contains(NODES) && error.contains("there is no column \"memory_mib\""),
            "{error}"
        );
    }
}
