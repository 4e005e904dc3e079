//! What engines on one GPU cost each other: by how much each part of a decode step takes longer than with the whole GPU.
//!
//! A step is overhead (launches, sampling, links: not on this GPU's memory or SMs), memory (weights and KV cache, read once a
//! step) and compute (a token's operations for each request). With `a` the share of time for which an engine has work:
//!
//! ```text
//! time-slicing   engines that have work have equal parts of the time, whatever they do in them:
//!                all parts × (1 + Σ a_j) · (1 + σ·(1 − Π (1 − a_j)))         over the neighbors j
//! SM sharing     steps run beside each other; one engine's overhead overlaps with the others' memory traffic:
//!                memory    × 1 + Σ a_j·u_j       u: the share of its step for which an engine is on the GPU
//!                compute   ÷ the engine's share of the SMs
//! ```
//!
//! An idle neighbor costs nothing, but for the SMs that are its own. Pure arithmetic: where load, shapes of models and modes come
//! from is not known here. `docs/inside/fleet-simulator.md` has the model beside published measurements.

mod gpu_speed;
#[cfg(test)]
mod proptests;

pub use gpu_speed::{BANDWIDTH_REACHED, FLOPS_REACHED, GpuSpeed, STEP_OVERHEAD_S};

/// σ: what switching between processes adds under time-slicing, as a share of the time, while two or more have work. Fitted to
/// the rows of 2, 8 and 32 requests of the measurements that NVIDIA publishes as "Interpreting GPU Sharing Results" (Dynamo,
/// Qwen3-4B on A100 40 GB); anything from 0.06 to 0.20 is as honest, for it trades against [`STEP_OVERHEAD_S`].
pub const SWITCH_OVERHEAD: f64 = 0.136;

/// The shares of time on the GPU depend on the steps that they lengthen. So many rounds are within a hundredth of the fixed point
/// with eight of the smallest engines, and within a thousandth with two or three.
const ROUNDS: usize = 8;

/// How the processes on a GPU share its compute. A MIG slice is a GPU of its own, with a part of its parent's speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeSharing {
    Exclusive,
    /// They take turns.
    TimeSlicing,
    /// Their kernels run beside each other, each on its part of the SMs (MPS).
    SmSharing,
}

/// A decode step of one engine with the whole GPU, in seconds by its parts, and how much of the GPU the engine takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineWork {
    pub overhead_s: f64,
    pub memory_s: f64,
    pub compute_s: f64,
    /// The share of time for which it has work, from 0 to 1.
    pub busy: f64,
    /// Its share of the SMs, above 0, up to 1. Counts under SM sharing alone.
    pub sms: f64,
}

/// What each part of an engine's step is multiplied by. Reading a prompt is compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contention {
    pub overhead: f64,
    pub memory: f64,
    pub compute: f64,
}

impl Contention {
    /// The whole GPU.
    pub const ALONE: Self = Self {
        overhead: 1.0,
        memory: 1.0,
        compute: 1.0,
    };

    /// Seconds of a step with these parts.
    pub fn step_s(&self, overhead_s: f64, memory_s: f64, compute_s: f64) -> f64 {
        self.overhead * overhead_s + self.memory * memory_s + self.compute * compute_s
    }
}

impl EngineWork {
    /// A process that is no engine and always has a kernel on the GPU.
    pub const fn job(sms: f64) -> Self {
        Self {
            overhead_s: 0.0,
            memory_s: 0.0,
            compute_s: 1.0,
            busy: 1.0,
            sms,
        }
    }

    /// Seconds of its step.
    pub fn step_s(&self, under: &Contention) -> f64 {
        under.step_s(self.overhead_s, self.memory_s, self.compute_s)
    }

    /// The share of its step for which it is on the GPU.
    fn on_gpu(&self, under: &Contention) -> f64 {
        let step_s = self.step_s(under);
        if step_s > 0.0 {
            1.0 - under.overhead * self.overhead_s / step_s
        } else {
            0.0
        }
    }
}

/// What each of these engines on one GPU has to wait for the others, in their order.
pub fn contention(engines: &[EngineWork], sharing: ComputeSharing) -> Vec<Contention> {
    match sharing {
        ComputeSharing::Exclusive => vec![Contention::ALONE; engines.len()],
        ComputeSharing::TimeSlicing => time_slicing(engines),
        ComputeSharing::SmSharing => sm_sharing(engines),
    }
}

fn time_slicing(engines: &[EngineWork]) -> Vec<Contention> {
    let turns = |of: usize| {
        let busy: f64 = others(engines, of).map(|other| other.busy).sum();
        let all_idle: f64 = others(engines, of).map(|other| 1.0 - other.busy).product();
        (1.0 + busy) * (1.0 + SWITCH_OVERHEAD * (1.0 - all_idle))
    };
    let slowed = |of| {
        let turns = turns(of);
        Contention {
            overhead: turns,
            memory: turns,
            compute: turns,
        }
    };
    (0..engines.len()).map(slowed).collect()
}

fn sm_sharing(engines: &[EngineWork]) -> Vec<Contention> {
    let of = |engine: &EngineWork| Contention {
        compute: 1.0 / engine.sms,
        ..Contention::ALONE
    };
    let mut all: Vec<Contention> = engines.iter().map(of).collect();
    for _ in 0..ROUNDS {
        let shares = engines.iter().zip(&all);
        let reading: Vec<f64> = shares
            .map(|(engine, under)| engine.busy * engine.on_gpu(under))
            .collect();
        for (of, under) in all.iter_mut().enumerate() {
            under.memory = 1.0 + others(&reading, of).sum::<f64>();
        }
    }
    all
}

fn others<T>(all: &[T], of: usize) -> impl Iterator<Item = &T> {
    all.iter()
        .enumerate()
        .filter(move |(other, _)| *other != of)
        .map(|(_, other)| other)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-4B in bfloat16 on an A100 40 GB, with so many requests of 2,048 tokens in and 256 out.
    fn small(requests: f64, busy: f64) -> EngineWork {
        let gpu = GpuSpeed::A100_40GB;
        EngineWork {
            overhead_s: STEP_OVERHEAD_S,
            memory_s: gpu.memory_s(8.044e9 + requests * 2176.0 * 147_456.0),
            compute_s: requests * gpu.compute_s(8.044e9),
            busy,
            sms: 0.5,
        }
    }

    fn steps_ms(engines: &[EngineWork], sharing: ComputeSharing) -> Vec<f64> {
        let under = contention(engines, sharing);
        engines
            .iter()
            .zip(under)
            .map(|(engine, under)| 1e3 * engine.step_s(&under))
            .collect()
    }

    fn assert_near(actual: f64, expected: f64) {
        assert!(
            (actual / expected - 1.0).abs() < 0.01,
            "{actual}, not {expected}"
        );
    }

    #[test]
    fn two_engines_with_a_request_each_take_the_steps_that_were_reckoned() {
        let engine = small(1.0, 1.0);
        assert_near(
            steps_ms(&[engine, engine], ComputeSharing::Exclusive)[0],
            7.88,
        );
        assert_near(
            steps_ms(&[engine, engine], ComputeSharing::TimeSlicing)[0],
            17.9,
        );
        assert_near(
            steps_ms(&[engine, engine], ComputeSharing::SmSharing)[0],
            13.5,
        );
    }

    #[test]
    fn beside_a_larger_engine_the_smaller_one_pays_no_more_and_the_larger_one_most() {
        let (own, mut large) = (small(4.0, 1.0), small(4.0, 1.0));
        (large.memory_s, large.compute_s) = (4.0 * own.memory_s, 4.0 * own.compute_s);
        for sharing in [ComputeSharing::TimeSlicing, ComputeSharing::SmSharing] {
            let (beside_own, beside_large) = (
                steps_ms(&[own, own], sharing),
                steps_ms(&[own, large], sharing),
            );
            assert!(
                beside_large[0] < 1.1 * beside_own[0] && beside_large[1] > 3.0 * beside_large[0],
                "{beside_large:?}"
            );
        }
    }

    #[test]
    fn a_job_counts_as_one_engine_that_always_works() {
        let engine = small(1.0, 1.0);
        let under = |sharing| contention(&[engine, EngineWork::job(0.5)], sharing)[0];
        assert_eq!(
            under(ComputeSharing::TimeSlicing).memory,
            2.0 * (1.0 + SWITCH_OVERHEAD)
        );
        let beside = under(ComputeSharing::SmSharing);
        assert_eq!(
            (beside.overhead, beside.memory, beside.compute),
            (1.0, 2.0, 2.0)
        );
    }

    #[test]
    fn the_rounds_are_near_the_fixed_point_with_eight_small_engines() {
        let tiny = EngineWork {
            overhead_s: 1.5e-3,
            memory_s: 0.3e-3,
            compute_s: 0.0,
            busy: 1.0,
            sms: 0.125,
        };
        let memory = contention(&[tiny; 8], ComputeSharing::SmSharing)[0].memory;
        let on_gpu = memory * tiny.memory_s / (tiny.overhead_s + memory * tiny.memory_s);
        assert_near(memory, 1.0 + 7.0 * on_gpu);
    }

    #[test]
    fn engines_without_work_are_no_reason_for_not_a_number() {
        let none = EngineWork {
            overhead_s: 0.0,
            compute_s: 0.0,
            ..EngineWork::job(1.0)
        };
        assert_eq!(
            contention(&[none, none], ComputeSharing::SmSharing),
            [Contention::ALONE; 2]
        );
        assert!(contention(&[], ComputeSharing::TimeSlicing).is_empty());
    }
}
