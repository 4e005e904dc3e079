//! The expected part of free GPU capacity that no pod can use because the node's CPU or memory is spent.
//!
//! The CPU and memory that pods request follow their GPU request only on average. If each unit of GPU that is placed brings `a`
//! of CPU with a variance of `b²`, then free GPU of value W brings a normally distributed demand of mean aW and deviation b√W,
//! and the node's free CPU falls short by the expected overshoot of a normal variable:
//!
//! ```text
//! a = λ·Σcpu ÷ Σgpu        b² = Σ(cpu − Σcpu ÷ Σgpu·gpu)² ÷ Σgpu           over the pods seen recently
//! μ = aW, s = b√W, z = (μ − free) ÷ s:   shortfall = s·(z·Φ(z) + φ(z)) = (μ − free)·Φ(z) + s·φ(z)
//! wasted = min(W, shortfall ÷ a)                                           in GPUs
//! ```

use super::exact;
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// λ: the pod that gets the last GPUs of a node is not the average pod but one of those that fit, and these need less CPU and
/// memory. Found by trial on openb, where it is better than 1 on every variant.
const OF_THOSE_THAT_FIT: f64 = 0.8;

/// What recent pods request of one resource beside their GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct HostDemand {
    /// Amount of the resource per GPU.
    #[serde(with = "exact")]
    per_gpu: f64,
    /// GPUs per unit of the resource.
    #[serde(with = "exact")]
    gpus: f64,
    /// The deviation per GPU, in GPUs.
    #[serde(with = "exact")]
    spread: f64,
    /// The steps of [`overshoot`] in a unit of the resource, on one GPU.
    #[serde(with = "exact")]
    steps: f64,
    /// The square of [`FAR`] deviations.
    #[serde(with = "exact")]
    far: f64,
}

impl HostDemand {
    /// From pods' GPU request and their request of the resource, with a count each. `None` if they request none of it.
    pub fn of(pods: impl Iterator<Item = (f64, f64, f64)> + Clone) -> Option<Self> {
        let sum = |part: fn((f64, f64, f64)) -> f64| pods.clone().map(part).sum::<f64>();
        let gpu = sum(|(gpu, _, count)| gpu * count);
        let brought = sum(|(_, brought, count)| brought * count);
        if gpu <= 0.0 || brought <= 0.0 {
            return None;
        }
        let per_gpu = brought / gpu;
        let squares = pods
            .map(|(gpu, brought, count)| count * (brought - per_gpu * gpu).powi(2))
            .sum::<f64>();
        let spread = (squares / gpu).sqrt();
        let per_gpu = OF_THOSE_THAT_FIT * per_gpu;
        Some(Self {
            per_gpu,
            gpus: 1.0 / per_gpu,
            spread: spread / per_gpu,
            steps: STEPS / spread,
            far: (FAR * spread).powi(2),
        })
    }

    /// The part of free GPU capacity of this value that `free` of the resource cannot serve, in GPUs.
    #[inline]
    pub(crate) fn wasted(self, packing_model: f64, free: f64) -> f64 {
        let shortfall = self.per_gpu * packing_model - free;
        // Most nodes have plenty, and thousands are asked. A value of zero, or below it by a rounding error, ends here, too.
        if shortfall <= 0.0 && shortfall * shortfall >= self.far * packing_model {
            return 0.0;
        }
        if self.spread == 0.0 {
            return packing_model.min(shortfall.max(0.0) * self.gpus);
        }
        // The root and the reciprocal take longest: neither waits for the other.
        let (root, reciprocal) = (packing_model.sqrt(), 1.0 / packing_model);
        let steps = FAR * STEPS + shortfall * self.steps * (root * reciprocal);
        packing_model.min(self.spread * root * overshoot(steps))
    }
}

/// A normal variable rarely exceeds this many deviations: once in thirty thousand times.
const FAR: f64 = 4.0;
/// Steps per deviation in the table of [`overshoot`].
const STEPS: f64 = 64.0;

/// z·Φ(z) + φ(z), where z is `steps` steps above −[`FAR`]: the expected excess of a standard normal variable over −z, where no
/// excess counts as zero. Interpolated in a table, at most 2e-5 too high, because thousands of nodes are asked.
#[inline]
fn overshoot(steps: f64) -> f64 {
    /// The value at each step, and the difference to the next.
    static AT_STEPS: LazyLock<Box<[(f64, f64)]>> = LazyLock::new(|| {
        let at = |step: i32| at_step(f64::from(step) / STEPS - FAR);
        (0..(2.0 * FAR * STEPS) as i32)
            .map(|step| (at(step), at(step + 1) - at(step)))
            .collect()
    });
    if steps <= 0.0 {
        return 0.0;
    }
    let below = steps as i64;
    match AT_STEPS.get(below as usize) {
        Some((low, more)) => low + (steps - below as f64) * more,
        None => steps / STEPS - FAR,
    }
}

/// z·Φ(z) + φ(z), computed; at the ends of the table the limits beyond them.
fn at_step(z: f64) -> f64 {
    if z.abs() >= FAR {
        z.max(0.0)
    } else {
        z * at_most(z) + density(z)
    }
}

/// Φ(z), to seven digits: formula 26.2.17 of Abramowitz and Stegun, "Handbook of Mathematical Functions", 1964.
pub fn at_most(z: f64) -> f64 {
    const TERMS: [f64; 5] = [
        0.319_381_530,
        -0.356_563_782,
        1.781_477_937,
        -1.821_255_978,
        1.330_274_429,
    ];
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let tail = density(z) * TERMS.iter().rev().fold(0.0, |sum, term| (sum + term) * t);
    if z < 0.0 { tail } else { 1.0 - tail }
}

fn density(z: f64) -> f64 {
    const AT_ZERO: f64 = 0.398_942_280_401_432_7;
    AT_ZERO * (-0.5 * z * z).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overshoot(z: f64) -> f64 {
        super::overshoot((z + FAR) * STEPS)
    }

    #[test]
    fn the_normal_distribution_matches_published_tables() {
        for (z, share) in [
            (-3.0, 0.001_349_9),
            (-1.0, 0.158_655_3),
            (0.0, 0.5),
            (1.96, 0.975_002_1),
        ] {
            assert!((at_most(z) - share).abs() < 1e-6, "{z}: {}", at_most(z));
        }
    }

    #[test]
    fn the_expected_overshoot_is_the_integral_of_the_distribution() {
        let step = 1e-3;
        let integral = |z: f64| {
            (-8_000..(z / step) as i64)
                .map(|n| at_most(n as f64 * step) * step)
                .sum::<f64>()
        };
        for z in [-2.0, -0.5, 0.0, 1.0, 3.0] {
            assert!(
                (overshoot(z) - integral(z)).abs() < 1e-3,
                "{z}: {} {}",
                overshoot(z),
                integral(z)
            );
        }
        assert_eq!((overshoot(-40.0), overshoot(40.0)), (0.0, 40.0));
    }

    #[test]
    fn interpolation_adds_almost_nothing_and_never_decreases() {
        let ends = [-FAR, (-FAR).next_up(), FAR.next_down(), FAR].into_iter();
        let mut points: Vec<f64> = (-4500..4500)
            .map(|n| f64::from(n) / 1000.0)
            .chain(ends)
            .collect();
        points.sort_by(f64::total_cmp);
        for z in &points {
            let above = overshoot(*z) - (z * at_most(*z) + density(*z));
            assert!((-1e-5..2e-5).contains(&above), "{z}: {above}");
        }
        assert!(
            points
                .windows(2)
                .all(|pair| overshoot(pair[0]) <= overshoot(pair[1]))
        );
    }

    #[test]
    fn with_equal_host_demand_only_the_shortfall_is_wasted() {
        let host_demand = HostDemand::of([(1.0, 10.0, 3.0), (0.5, 5.0, 1.0)].into_iter()).unwrap();
        // The pods that fit request 8 per GPU.
        assert_eq!(host_demand.wasted(4.0, 32.0), 0.0);
        assert_eq!(host_demand.wasted(4.0, 24.0), 1.0);
        assert_eq!(host_demand.wasted(4.0, 0.0), 4.0);
        assert_eq!(
            (
                host_demand.wasted(0.0, 0.0),
                host_demand.wasted(-1e-17, 0.0)
            ),
            (0.0, 0.0)
        );
    }

    #[test]
    fn more_varied_host_demand_wastes_more_when_resources_just_suffice() {
        let host_demand =
            |other: f64| HostDemand::of([(1.0, 8.0, 1.0), (1.0, other, 1.0)].into_iter()).unwrap();
        let wasted = [8.0, 12.0, 20.0]
            .map(|other| host_demand(other).wasted(2.0, (8.0 + other) / 2.0 * 2.0));
        assert!(wasted[0] < wasted[1] && wasted[1] < wasted[2], "{wasted:?}");
    }

    #[test]
    fn pods_without_host_demand_waste_nothing() {
        assert_eq!(HostDemand::of([(1.0, 0.0, 3.0)].into_iter()), None);
        assert_eq!(HostDemand::of(std::iter::empty()), None);
    }
}
