//! The value of each free part of a GPU: the cutting-stock problem on the sizes that pods request.
//!
//! A GPU is a roll of [`GRID`] hundredths, demands are cut from it, and as few rolls as possible are to be used (Gilmore and
//! Gomory, "A Linear Programming Approach to the Cutting-Stock Problem", Operations Research 9, 1961):
//!
//! ```text
//! minimize  Σ_p x_p   with  Σ_p a_ip·x_p = d_i  for each size i,  x ≥ 0        p: every way to cut one GPU
//! duals     π_i       with  Σ_i π_i·a_ip ≤ 1    for each p                     π_i: what a piece of size i is worth, in GPUs
//! U(r) = max Σ_i π_i·n_i  with  Σ_i s_i·n_i ≤ r                                the best that r hundredths can still be cut into
//! ```
//!
//! The ways to cut are far too many to list; the simplex method gets one at a time, the one that the present duals value most,
//! which is a knapsack problem. A hundred rows at most: dense arithmetic, and small enough to be read.
//!
//! Floating point is fine here: a value orders places, it never counts allocations.

use super::exact;
use serde::{Deserialize, Serialize};

/// Parts into which a GPU is divided. A finer grid distinguishes nothing in real demand, and its cost grows by the square.
pub(crate) const GRID: usize = 100;
/// A figure below this is rounding noise.
const EPSILON: f64 = 1e-9;
/// Far more steps than a problem of that size takes. If they run out, the duals are scaled, and are feasible all the same.
const STEPS_PER_SIZE: usize = 50;

/// A size in hundredths of a GPU, rounded up, and how many of it are wanted, in any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WantedSize {
    pub size: usize,
    pub count: f64,
}

/// U(r), in GPUs, for each r from 0 to [`GRID`] hundredths. Never decreases; no free VRAM has the value 0, and a whole GPU has
/// the value 1, whatever the demand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ValueCurve(#[serde(with = "exact")] [f64; GRID + 1]);

/// One way to cut a GPU: the count of each size.
type Cut = Vec<u8>;

impl ValueCurve {
    /// The value of free parts for the demand of these sizes: each at most once, from 1 to [`GRID`], with a count above zero.
    pub fn from_demand(wanted: &[WantedSize]) -> Self {
        let sizes: Vec<usize> = wanted.iter().map(|wanted| wanted.size).collect();
        let (duals, _) = solve(wanted);
        let (mut values, _) = knapsack(&sizes, &duals);
        let whole = values[GRID];
        values
            .iter_mut()
            .for_each(|value| *value = if whole > EPSILON { *value / whole } else { 0.0 });
        values[GRID] = 1.0;
        Self(values)
    }

    /// How many of these hundredths add no value.
    pub fn worthless(&self, hundredths: usize) -> usize {
        let value = self.0[hundredths];
        hundredths - self.0.partition_point(|less| *less < value - EPSILON)
    }

    /// The value of `hundredths`, at most [`GRID`].
    pub fn at(&self, hundredths: usize) -> f64 {
        self.0[hundredths]
    }
}

/// The duals, and the program's optimum: into how many GPUs everything that is wanted could be cut, if GPUs came in parts.
pub fn solve(wanted: &[WantedSize]) -> (Vec<f64>, f64) {
    let sizes: Vec<usize> = wanted.iter().map(|wanted| wanted.size).collect();
    let mut tableau = Tableau::new(wanted);
    for _ in 0..STEPS_PER_SIZE * (sizes.len() + 1) {
        let duals = tableau.duals();
        let (values, cut) = knapsack(&sizes, &duals);
        if values[GRID] <= 1.0 + EPSILON || !tableau.enter(&cut) {
            break;
        }
    }
    let mut duals = tableau.duals();
    // If the steps ran out, some cut has a value above one GPU. Scaled, none has: a little less than the optimum, and feasible.
    let (values, _) = knapsack(&sizes, &duals);
    let scale = values[GRID].max(1.0);
    duals
        .iter_mut()
        .for_each(|dual| *dual = dual.max(0.0) / scale);
    let optimum = duals
        .iter()
        .zip(wanted)
        .map(|(dual, wanted)| dual * wanted.count)
        .sum();
    (duals, optimum)
}

/// For each capacity the best value that it can be cut into, and the best cut of a whole GPU.
fn knapsack(sizes: &[usize], values: &[f64]) -> ([f64; GRID + 1], Cut) {
    let mut best = [0.0; GRID + 1];
    // The piece added last to the best cut of each capacity.
    let mut last = [None; GRID + 1];
    for capacity in 1..=GRID {
        best[capacity] = best[capacity - 1];
        for (piece, (&size, &value)) in sizes.iter().zip(values).enumerate() {
            if size <= capacity && best[capacity - size] + value > best[capacity] + EPSILON {
                best[capacity] = best[capacity - size] + value;
                last[capacity] = Some(piece);
            }
        }
    }
    (best, cut_of(sizes, &last))
}

fn cut_of(sizes: &[usize], last: &[Option<usize>; GRID + 1]) -> Cut {
    let mut cut = vec![0; sizes.len()];
    let mut capacity = GRID;
    while capacity > 0 {
        match last[capacity] {
            Some(piece) => {
                cut[piece] += 1;
                capacity -= sizes[piece];
            }
            None => capacity -= 1,
        }
    }
    cut
}

/// The simplex method with an explicit inverse of its basis, row by row.
struct Tableau {
    rows: usize,
    inverse: Vec<f64>,
    /// How many times each cut of the basis is made.
    made: Vec<f64>,
}

impl Tableau {
    /// Starts with each size cut from separate GPUs.
    fn new(wanted: &[WantedSize]) -> Self {
        let rows = wanted.len();
        let mut inverse = vec![0.0; rows * rows];
        let pieces = |wanted: &WantedSize| (GRID / wanted.size) as f64;
        for (row, wanted) in wanted.iter().enumerate() {
            inverse[row * rows + row] = 1.0 / pieces(wanted);
        }
        let made = wanted
            .iter()
            .map(|wanted| wanted.count / pieces(wanted))
            .collect();
        Self {
            rows,
            inverse,
            made,
        }
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.inverse[row * self.rows..(row + 1) * self.rows]
    }

    /// Each cut costs one GPU, so the duals are the sums of the inverse's columns.
    fn duals(&self) -> Vec<f64> {
        let mut duals = vec![0.0; self.rows];
        for row in 0..self.rows {
            duals
                .iter_mut()
                .zip(self.row(row))
                .for_each(|(dual, part)| *dual += part);
        }
        duals
    }

    /// Takes a cut into the basis, in place of the one that reaches zero first. False if nothing would change.
    fn enter(&mut self, cut: &Cut) -> bool {
        let replaces: Vec<f64> = (0..self.rows)
            .map(|row| {
                self.row(row)
                    .iter()
                    .zip(cut)
                    .map(|(part, pieces)| part * f64::from(*pieces))
                    .sum()
            })
            .collect();
        let used_up = (0..self.rows)
            .filter(|row| replaces[*row] > EPSILON)
            .min_by(|a, b| {
                (self.made[*a] / replaces[*a]).total_cmp(&(self.made[*b] / replaces[*b]))
            });
        let Some(leaving) = used_up else { return false };
        self.pivot(leaving, &replaces);
        true
    }

    fn pivot(&mut self, leaving: usize, replaces: &[f64]) {
        let rows = self.rows;
        let share = 1.0 / replaces[leaving];
        let pivot: Vec<f64> = self.row(leaving).iter().map(|part| part * share).collect();
        let made = self.made[leaving] * share;
        for row in (0..rows).filter(|row| *row != leaving && replaces[*row] != 0.0) {
            let factor = replaces[row];
            let parts = &mut self.inverse[row * rows..(row + 1) * rows];
            parts
                .iter_mut()
                .zip(&pivot)
                .for_each(|(part, of_pivot)| *part -= factor * of_pivot);
            self.made[row] = (self.made[row] - factor * made).max(0.0);
        }
        self.inverse[leaving * rows..(leaving + 1) * rows].copy_from_slice(&pivot);
        self.made[leaving] = made;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wanted(sizes: &[(usize, u32)]) -> Vec<WantedSize> {
        sizes
            .iter()
            .map(|(size, count)| WantedSize {
                size: *size,
                count: f64::from(*count),
            })
            .collect()
    }

    /// Every way to cut `capacity` into these sizes.
    fn cuts(sizes: &[usize], capacity: usize) -> Vec<Vec<usize>> {
        let Some((&size, rest)) = sizes.split_first() else {
            return vec![vec![]];
        };
        let with = |pieces: usize| {
            cuts(rest, capacity - pieces * size)
                .into_iter()
                .map(move |cut| [vec![pieces], cut].concat())
        };
        (0..=capacity / size).flat_map(with).collect()
    }

    /// The optimum by brute force over every basis of two or three cuts.
    fn optimum_by_definition(wanted: &[WantedSize]) -> f64 {
        let sizes: Vec<usize> = wanted.iter().map(|wanted| wanted.size).collect();
        let cuts = cuts(&sizes, GRID);
        let mut best = f64::INFINITY;
        let mut try_basis = |basis: &[&Vec<usize>]| {
            let made = solve_square(basis, wanted);
            if let Some(made) = made.filter(|made| made.iter().all(|made| *made >= -1e-9)) {
                best = best.min(made.iter().sum());
            }
        };
        for (n, first) in cuts.iter().enumerate() {
            for (m, second) in cuts[..n].iter().enumerate() {
                match wanted.len() {
                    2 => try_basis(&[first, second]),
                    _ => cuts[..m]
                        .iter()
                        .for_each(|third| try_basis(&[first, second, third])),
                }
            }
        }
        best
    }

    /// How many times each cut of a basis is made, by Cramer's rule.
    fn solve_square(basis: &[&Vec<usize>], wanted: &[WantedSize]) -> Option<Vec<f64>> {
        let n = wanted.len();
        let matrix = |replaced: Option<usize>| -> Vec<Vec<f64>> {
            let entry = |row: usize, column: usize| match replaced == Some(column) {
                true => wanted[row].count,
                false => basis[column][row] as f64,
            };
            (0..n)
                .map(|row| (0..n).map(|column| entry(row, column)).collect())
                .collect()
        };
        let whole = determinant(&matrix(None));
        (whole.abs() > 1e-9).then(|| {
            (0..n)
                .map(|c| determinant(&matrix(Some(c))) / whole)
                .collect()
        })
    }

    fn determinant(m: &[Vec<f64>]) -> f64 {
        match m.len() {
            2 => m[0][0] * m[1][1] - m[0][1] * m[1][0],
            _ => (0..3)
                .map(|c| {
                    m[0][c]
                        * (m[1][(c + 1) % 3] * m[2][(c + 2) % 3]
                            - m[1][(c + 2) % 3] * m[2][(c + 1) % 3])
                })
                .sum(),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_optimum_equals_the_one_that_brute_force_finds(
            sizes in prop::collection::btree_map(20usize..=100, 1u32..50, 2..=3)
        ) {
            let wanted = wanted(&sizes.into_iter().collect::<Vec<_>>());
            let (_, optimum) = solve(&wanted);
            prop_assert!((optimum - optimum_by_definition(&wanted)).abs() < 1e-6);
        }

        #[test]
        fn no_way_to_cut_a_gpu_is_worth_more_than_the_gpu(
            sizes in prop::collection::btree_map(10usize..=100, 1u32..50, 1..=5)
        ) {
            let wanted = wanted(&sizes.into_iter().collect::<Vec<_>>());
            let (duals, _) = solve(&wanted);
            prop_assert!(duals.iter().all(|dual| *dual >= 0.0));
            let sizes: Vec<usize> = wanted.iter().map(|wanted| wanted.size).collect();
            for cut in cuts(&sizes, GRID) {
                let packing_model: f64 = cut.iter().zip(&duals).map(|(pieces, dual)| *pieces as f64 * dual).sum();
                prop_assert!(packing_model <= 1.0 + 1e-6, "{cut:?} is worth {packing_model}");
            }
        }

        #[test]
        fn free_vram_has_the_value_of_its_best_cut(
            sizes in prop::collection::btree_map(15usize..=100, 1u32..50, 1..=4), part in 0usize..=100
        ) {
            let wanted = wanted(&sizes.into_iter().collect::<Vec<_>>());
            let (duals, _) = solve(&wanted);
            let sizes: Vec<usize> = wanted.iter().map(|wanted| wanted.size).collect();
            let packing_model = |room: usize| {
                let of = |cut: Vec<usize>| cut.iter().zip(&duals).map(|(n, dual)| *n as f64 * dual).sum::<f64>();
                cuts(&sizes, room).into_iter().map(of).fold(0.0, f64::max)
            };
            prop_assert!((ValueCurve::from_demand(&wanted).at(part) - packing_model(part) / packing_model(GRID)).abs() < 1e-6);
        }
    }

    #[test]
    fn with_one_size_only_whole_pieces_have_value() {
        let curve = ValueCurve::from_demand(&wanted(&[(30, 7)]));
        let third = 1.0 / 3.0;
        for (part, value) in [
            (0, 0.0),
            (29, 0.0),
            (30, third),
            (59, third),
            (89, 2.0 * third),
            (90, 1.0),
            (99, 1.0),
        ] {
            assert!(
                (curve.at(part) - value).abs() < 1e-9,
                "{part}: {}",
                curve.at(part)
            );
        }
    }

    #[test]
    fn with_one_size_just_over_a_half_the_rest_has_no_value() {
        let curve = ValueCurve::from_demand(&wanted(&[(51, 7)]));
        assert_eq!(
            (
                curve.worthless(49),
                curve.worthless(51),
                curve.worthless(60)
            ),
            (49, 0, 9)
        );
        assert_eq!(
            (curve.at(49), curve.at(50), curve.at(51), curve.at(100)),
            (0.0, 0.0, 1.0, 1.0)
        );
    }

    #[test]
    fn without_demand_only_a_whole_gpu_has_value() {
        let curve = ValueCurve::from_demand(&[]);
        assert_eq!((curve.at(0), curve.at(99), curve.at(100)), (0.0, 0.0, 1.0));
    }

    #[test]
    fn a_hundred_sizes_are_solved_completely() {
        let sizes: Vec<(usize, u32)> = (1..=100)
            .map(|size| (size, 1 + (size as u32 * 37) % 11))
            .collect();
        let wanted = wanted(&sizes);
        let (_, optimum) = solve(&wanted);
        let volume: f64 = wanted
            .iter()
            .map(|wanted| wanted.size as f64 * wanted.count / 100.0)
            .sum();
        // With so many small pieces nothing need be wasted.
        assert!(
            (optimum - volume).abs() / volume < 0.01,
            "{optimum} GPUs for {volume}"
        );
    }
}
