//! The linear program of the bound. Its dual is solved: prices of capacity at which no placement of a pod makes a profit.
//!
//! ```text
//! maximize  Σ_k gpu_k Σ_n x_kn            x_kn: pods of kind k on nodes of sort n, as if these were one node
//! with      placed_k ≤ Σ_n x_kn ≤ came_k
//!           Σ_k cpu_k·x_kn ≤ CPU_n,  Σ_k memory_k·x_kn ≤ memory_n
//!           Σ_k whole_k·x_kn + Σ_p y_pn ≤ GPU_n        y_pn: GPUs cut in the way p, as in the cutting-stock problem
//!           Σ_{k of size s} x_kn ≤ Σ_p a_sp·y_pn       for each size s of parts
//! ```
//!
//! Each way to cut a GPU is a column, so in the dual it is a constraint: a GPU's price is at least the sum of the prices of the
//! parts of each cut (Gilmore and Gomory, 1961). There are too many cuts to list. Each round adds, for each sort of node, the
//! cut that is violated most; solving a knapsack problem finds it (Kelley's cutting planes, 1960).
//!
//! Simplifications, such as treating all nodes of a sort as one, make the bound higher, never lower. Prices that satisfy all
//! constraints are an upper bound even if they are not optimal; if the rounds end early, the prices of GPUs are raised until
//! they satisfy all constraints.

use super::demand_at_load::DemandAtLoad;
use crate::simulate::openb::WHOLE_GPU;
use crate::simulate::packing::trace::{PodKind, WorkloadNode, WorkloadTrace};
use microlp::{ComparisonOp, OptimizationDirection, Problem, Solution, Variable};
use std::collections::BTreeMap;

/// Below this a violated cut is arithmetic noise.
const EPSILON: f64 = 1e-7;
/// Far more than any trace takes.
const MAX_ROUNDS: usize = 200;
/// The required placements are reduced by this, so that rounding never requires more than fits.
const SLACK: f64 = 1e-9;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Unsolved {
    #[error(
        "the program of the bound has no solution that the solver can verify ({0}); leave --bound out"
    )]
    Solver(#[from] microlp::Error),
    #[error("the solver of the bound stopped before it had a solution; leave --bound out")]
    Interrupted,
}

/// In GPUs, for one required pod: more than any pod can displace. Without this limit there is no first solution as long as the
/// cuts that would fit all pods are missing.
const MAX_REQUIRED_PRICE: f64 = 1000.0;

/// The most GPUs that can be allocated when this many pods of each kind have arrived.
pub fn max_allocation(setting: &WorkloadTrace, demand: &DemandAtLoad) -> Result<f64, Unsolved> {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let is_relevant = |kind: &usize| {
        demand.arrived[*kind] > 0.0 && setting.fits_empty_cluster(&setting.kinds[*kind])
    };
    let kinds: Vec<usize> = (0..setting.kinds.len()).filter(is_relevant).collect();
    let prices: Vec<(usize, KindPrices)> = kinds
        .iter()
        .map(|kind| (*kind, KindPrices::new(&mut problem, demand, *kind)))
        .collect();
    let mut node_groups = Vec::new();
    for (site, count) in group_alike_nodes(setting) {
        let kinds = prices
            .iter()
            .map(|(kind, prices_of_kind)| (&setting.kinds[*kind], *prices_of_kind));
        node_groups.push(NodePrices::new(
            &mut problem,
            site,
            count,
            kinds.filter(|(kind, _)| site.fits_when_empty(kind)),
        ));
    }
    let solution = solved(problem.solve()?)?;
    let (solution, missed) = add_violated_cuts(solution, &node_groups)?;
    Ok(solution.objective() + missed)
}

/// Nodes that are alike, and how many there are.
fn group_alike_nodes(setting: &WorkloadTrace) -> Vec<(&WorkloadNode, f64)> {
    let mut sorts: BTreeMap<_, (&WorkloadNode, f64)> = BTreeMap::new();
    for site in &setting.nodes {
        sorts
            .entry((site.model, site.cpu, site.memory, site.gpus))
            .or_insert((site, 0.0))
            .1 += 1.0;
    }
    sorts.into_values().collect()
}

/// The value of one more arrived pod of a kind, and the cost of one more required placement.
#[derive(Debug, Clone, Copy)]
struct KindPrices {
    arrived: Variable,
    placed: Variable,
}

impl KindPrices {
    fn new(problem: &mut Problem, demand: &DemandAtLoad, kind: usize) -> Self {
        let placed = demand.placed[kind] * (1.0 - SLACK);
        Self {
            arrived: problem.add_var(demand.arrived[kind], (0.0, f64::INFINITY)),
            placed: problem.add_var(-placed, (0.0, MAX_REQUIRED_PRICE)),
        }
    }
}

/// The prices on nodes that are alike.
struct NodePrices {
    /// GPUs of all these nodes.
    gpus: f64,
    gpu: Variable,
    /// Prices of a part of a GPU, by its size in thousandths.
    parts: BTreeMap<u32, Variable>,
}

impl NodePrices {
    fn new<'s>(
        problem: &mut Problem,
        site: &WorkloadNode,
        count: f64,
        kinds: impl Iterator<Item = (&'s PodKind, KindPrices)>,
    ) -> Self {
        let any = (0.0, f64::INFINITY);
        let gpus = count * f64::from(site.gpus);
        let cpu = problem.add_var(count * cores(site.cpu), any);
        let memory = problem.add_var(count * gib(site.memory), any);
        let mut sort = Self {
            gpus,
            gpu: problem.add_var(gpus, any),
            parts: BTreeMap::new(),
        };
        for (kind, prices) in kinds {
            let mut costs = vec![(prices.arrived, 1.0), (prices.placed, -1.0)];
            costs.extend(
                [(cpu, cores(kind.cpu)), (memory, gib(kind.memory))]
                    .into_iter()
                    .filter(|(_, n)| *n > 0.0),
            );
            match kind.gpus {
                0 => {}
                _ if kind.is_shared() => costs.push((sort.part(problem, kind.milli_per_gpu), 1.0)),
                whole => costs.push((sort.gpu, f64::from(whole))),
            }
            let value = kind.milli_gpus() as f64 / f64::from(WHOLE_GPU);
            problem.add_constraint(costs, ComparisonOp::Ge, value);
        }
        sort
    }

    /// At first a GPU's price is constrained only by cuts of one size each.
    fn part(&mut self, problem: &mut Problem, milli: u32) -> Variable {
        *self.parts.entry(milli).or_insert_with(|| {
            let part = problem.add_var(0.0, (0.0, f64::INFINITY));
            let pieces = f64::from(WHOLE_GPU / milli);
            problem.add_constraint([(self.gpu, 1.0), (part, -pieces)], ComparisonOp::Ge, 0.0);
            part
        })
    }

    /// The cut with the most valuable parts, as the number of parts by size, and by how much its value exceeds a GPU's price.
    fn most_violated_cut(&self, solution: &Solution) -> (BTreeMap<u32, u32>, f64) {
        let values: Vec<(u32, f64)> = self
            .parts
            .iter()
            .map(|(milli, part)| (*milli, solution.var_value(*part)))
            .collect();
        let (pieces, value) = best_cut(&values);
        (pieces, value - solution.var_value(self.gpu))
    }

    fn constraint(&self, pieces: &BTreeMap<u32, u32>) -> Vec<(Variable, f64)> {
        let parts = pieces
            .iter()
            .map(|(milli, count)| (self.parts[milli], -f64::from(*count)));
        [(self.gpu, 1.0)].into_iter().chain(parts).collect()
    }
}

/// Adds cuts until none is violated; returns what the prices of GPUs still lack, over all GPUs.
fn add_violated_cuts(
    mut solution: Solution,
    sorts: &[NodePrices],
) -> Result<(Solution, f64), Unsolved> {
    for _ in 0..MAX_ROUNDS {
        let mut is_done = true;
        for sort in sorts {
            let (pieces, missed) = sort.most_violated_cut(&solution);
            if missed > EPSILON {
                is_done = false;
                solution = solved(solution.add_constraint(
                    sort.constraint(&pieces),
                    ComparisonOp::Ge,
                    0.0,
                )?)?;
            }
        }
        if is_done {
            break;
        }
    }
    let missing_price = sorts
        .iter()
        .map(|sort| sort.gpus * sort.most_violated_cut(&solution).1.max(0.0))
        .sum();
    Ok((solution, missing_price))
}

fn solved(outcome: microlp::SolveOutcome) -> Result<Solution, Unsolved> {
    outcome.into_solution().map_err(|_| Unsolved::Interrupted)
}

/// The most valuable set of parts that fits on one GPU. `parts` are sizes in thousandths, and their values.
fn best_cut(parts: &[(u32, f64)]) -> (BTreeMap<u32, u32>, f64) {
    let whole = WHOLE_GPU as usize;
    let mut best = vec![0.0; whole + 1];
    let mut last = vec![None; whole + 1];
    for capacity in 1..=whole {
        best[capacity] = best[capacity - 1];
        for &(milli, value) in parts {
            let Some(rest) = capacity.checked_sub(milli as usize) else {
                continue;
            };
            if best[rest] + value > best[capacity] {
                best[capacity] = best[rest] + value;
                last[capacity] = Some(milli);
            }
        }
    }
    let mut pieces = BTreeMap::new();
    let mut capacity = whole;
    while capacity > 0 {
        if let Some(milli) = last[capacity] {
            *pieces.entry(milli).or_default() += 1;
        }
        capacity -= last[capacity].map_or(1, |milli| milli as usize);
    }
    (pieces, best[whole])
}

/// Scales figures to the size of GPUs, so that the solver's arithmetic is sound.
fn cores(milli: u64) -> f64 {
    milli as f64 / 1000.0
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
