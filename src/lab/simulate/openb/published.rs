//! Results of published runs of other policies, to compare with Stowage's simulation of them. Figures only; how they were
//! computed is not known here.

use super::{TraceError, TraceText};
use crate::simulate::table::{Column, Table, TableRow};

/// The file of published allocation ratios.
pub const PUBLISHED: &str = "published_alloc_ratio.csv";

/// One policy on one variant with one seed.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedRun {
    pub variant: String,
    /// By the name it was published under.
    pub policy: String,
    pub seed: u64,
    /// Percent of all GPUs, when 100 % of them had been requested.
    pub at_100: f64,
    pub at_130: f64,
}

/// Means over seeds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SeedMeans {
    pub at_100: f64,
    pub at_130: f64,
}

pub fn read(source: TraceText<'_>) -> Result<Vec<PublishedRun>, TraceError> {
    let table = Table::read(source)?;
    let columns = table.columns(["trace", "policy", "seed", "a100", "a130"])?;
    table.rows().iter().map(|row| run(row, columns)).collect()
}

fn run(
    row: &TableRow<'_>,
    [variant, policy, seed, at_100, at_130]: [Column; 5],
) -> Result<PublishedRun, TraceError> {
    Ok(PublishedRun {
        variant: row.text(variant).into(),
        policy: row.text(policy).into(),
        seed: row.whole(seed, u64::MAX)?,
        at_100: row.number(at_100, 100.0)?,
        at_130: row.number(at_130, 100.0)?,
    })
}

/// Mean of a policy on a variant, over the published seeds among these; `None` if there is none.
pub fn means(
    runs: &[PublishedRun],
    variant: &str,
    policy: &str,
    seeds: &[u64],
) -> Option<SeedMeans> {
    let is_requested = |run: &&PublishedRun| {
        run.variant == variant && run.policy == policy && seeds.contains(&run.seed)
    };
    let runs: Vec<&PublishedRun> = runs.iter().filter(is_requested).collect();
    let mean = |of: fn(&PublishedRun) -> f64| {
        runs.iter().map(|run| of(run)).sum::<f64>() / runs.len() as f64
    };
    (!runs.is_empty()).then(|| SeedMeans {
        at_100: mean(|run| run.at_100),
        at_130: mean(|run| run.at_130),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "trace,policy,seed,a95,a100,a130\nd,FGD,42,90,95,96\nd,FGD,43,90,97.5,98\nd,FGD,44,9,9,9\n";

    #[test]
    fn means_are_over_the_seeds_that_were_asked_for() {
        let runs = read(TraceText {
            file: "p.csv",
            text: TEXT,
        })
        .unwrap();
        let means = |policy, seeds: &[u64]| means(&runs, "d", policy, seeds);
        assert_eq!(
            means("FGD", &[42, 43, 99]),
            Some(SeedMeans {
                at_100: 96.25,
                at_130: 97.0
            })
        );
        assert_eq!(means("FGD", &[99]), None);
        assert_eq!(means("Random", &[42]), None);
    }

    #[test]
    fn the_error_for_a_figure_that_is_no_share_names_its_line() {
        let text = TEXT.replace("97.5", "197.5");
        let error = read(TraceText {
            file: "p.csv",
            text: &text,
        })
        .unwrap_err()
        .to_string();
        assert!(
            error.starts_with("p.csv, line 3: a100 is 197.5; write at most 100"),
            "{error}"
        );
    }
}
