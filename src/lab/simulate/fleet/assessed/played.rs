//! The week played on pods that stay where they are, and what engines and exporters show of it.

use super::catalog::Workload;
use super::placement::PlacedPod;
use super::{AssessedWeek, SLO, WeekServed};
use crate::simulate::fleet::engines::engine::busy_share;
use crate::simulate::fleet::engines::{DoesNotFit, Engine, SloTally};
use crate::simulate::fleet::replicas::{
    ObservedReplicas, Replica, ReplicaState, Replicas, Scaler, ScalingDecision, ServingDay,
};
use std::collections::BTreeMap;
use stowage_scheduling::contention::{ComputeSharing, Contention, EngineWork, contention};
use stowage_scheduling::ids::GpuUuid;
use stowage_scheduling::units::{Bytes, Millis, Moment};

/// Between two steps of the engines, over which neighbors cost each other the same.
const ENGINE_STEP: Millis = Millis::seconds(5);
/// Between two samples.
pub const SAMPLE_STEP: Millis = Millis::seconds(300);

/// What is seen of a pod between two samples.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    /// The share of the time for which its GPUs compute.
    pub active: f64,
    /// The most of the rest.
    pub kv_cache: f64,
    pub running: f64,
    pub waiting: f64,
}

/// Nobody scales.
struct Fixed;

impl Scaler for Fixed {
    fn decide(&mut self, observed: &ObservedReplicas, _: Moment) -> ScalingDecision {
        ScalingDecision {
            replicas: observed.count(),
            wake: 0,
        }
    }
}

pub struct Played {
    days: Vec<Option<ServingDay<Fixed>>>,
    /// By pod.
    pub samples: Vec<Vec<Sample>>,
    /// By pod, the tokens that its engine's KV cache holds.
    pub kv_tokens: Vec<Option<f64>>,
}

/// The week with so much VRAM for each workload's pods on each GPU, or with GPUs of their own.
pub fn play(
    week: &AssessedWeek,
    pods: &[PlacedPod],
    grants: &[Option<Bytes>],
    sharing: ComputeSharing,
) -> Result<Played, DoesNotFit> {
    let mut days = Vec::new();
    let mut kv_tokens = Vec::new();
    for (one, grant) in week.workloads.iter().zip(grants) {
        let engine = one.of.engine(grant.unwrap_or(one.of.used())).transpose()?;
        let day = engine.zip(one.traffic.clone());
        days.push(day.map(|(spec, traffic)| ServingDay::new(spec, traffic, SLO, Fixed, Moment(0))));
        kv_tokens.push(engine.map(|spec| spec.kv_capacity));
    }
    let mut played = Played {
        days,
        samples: vec![Vec::new(); pods.len()],
        kv_tokens: pods.iter().map(|pod| kv_tokens[pod.workload]).collect(),
    };
    let mut neighbors: BTreeMap<&GpuUuid, Vec<usize>> = BTreeMap::new();
    for (index, pod) in pods.iter().enumerate() {
        for device in pod.devices() {
            neighbors.entry(device).or_default().push(index);
        }
    }
    neighbors.retain(|_, there| there.len() > 1);
    let steps = week.minutes as u64 * 60_000 / ENGINE_STEP.0;
    for step in 0..=steps {
        let now = Moment(step * ENGINE_STEP.0);
        let under = played.contention(week, pods, neighbors.values(), sharing, now);
        played.step(pods, &under, now);
        // The first step has no time before it.
        if step > 0 {
            played.sample(&week.workloads, pods, now);
        }
    }
    Ok(played)
}

impl Played {
    fn engine(&self, pod: &PlacedPod) -> Option<&Engine> {
        self.days[pod.workload].as_ref()?.engine(pod.replica.into())
    }

    fn work(&self, week: &AssessedWeek, pod: &PlacedPod, now: Moment) -> EngineWork {
        match self.engine(pod) {
            Some(engine) => engine.work(1.0),
            None if self.days[pod.workload].is_some() => EngineWork {
                busy: 0.0,
                ..EngineWork::job(1.0)
            },
            None => week.workloads[pod.workload].process(now),
        }
    }

    /// What each pod's neighbors cost it; on several GPUs, on the one where that is most.
    fn contention<'n>(
        &self,
        week: &AssessedWeek,
        pods: &[PlacedPod],
        neighbors: impl Iterator<Item = &'n Vec<usize>>,
        sharing: ComputeSharing,
        now: Moment,
    ) -> Vec<Contention> {
        let mut most = vec![Contention::ALONE; pods.len()];
        for there in neighbors {
            let works = there.iter().map(|pod| self.work(week, &pods[*pod], now));
            let works: Vec<EngineWork> = works.collect();
            for (pod, under) in there.iter().zip(contention(&works, sharing)) {
                // Turns lengthen all parts of a step alike.
                if under.memory > most[*pod].memory {
                    most[*pod] = under;
                }
            }
        }
        most
    }

    fn step(&mut self, pods: &[PlacedPod], under: &[Contention], now: Moment) {
        let mut up: Vec<Vec<Replica>> = vec![Vec::new(); self.days.len()];
        for (pod, contention) in pods.iter().zip(under) {
            if pod.binding.is_some() {
                up[pod.workload].push(Replica {
                    id: pod.replica.into(),
                    state: ReplicaState::Ready,
                    contention: *contention,
                });
            }
        }
        for (day, up) in self.days.iter_mut().zip(&up) {
            if let Some(day) = day {
                let replicas = Replicas {
                    up,
                    starting: 0,
                    ready_in: Millis::default(),
                };
                day.tick(now, &replicas);
            }
        }
    }

    fn sample(&mut self, workloads: &[Workload], pods: &[PlacedPod], now: Moment) {
        let is_first = (now.0 - ENGINE_STEP.0).is_multiple_of(SAMPLE_STEP.0);
        for (index, pod) in pods.iter().enumerate() {
            let seen = match self.engine(pod) {
                Some(engine) => Sample {
                    active: busy_share(engine.running()),
                    kv_cache: engine.kv_occupancy(),
                    running: engine.running(),
                    waiting: engine.waiting(),
                },
                None => Sample {
                    active: workloads[pod.workload].process(now).busy,
                    ..Sample::default()
                },
            };
            let samples = &mut self.samples[index];
            if is_first {
                samples.push(Sample::default());
            }
            let latest = samples.last_mut().expect("the first step begins one");
            latest.active += seen.active * ENGINE_STEP.0 as f64 / SAMPLE_STEP.0 as f64;
            latest.kv_cache = latest.kv_cache.max(seen.kv_cache);
            latest.running = latest.running.max(seen.running);
            latest.waiting = latest.waiting.max(seen.waiting);
        }
    }

    /// What was served by the end.
    pub fn served(&self, gpus: u32, pods: &[PlacedPod]) -> WeekServed {
        let mut all = SloTally::default();
        let (mut requests, mut refused, mut slowed) = (0.0, 0.0, 0.0);
        for day in self.days.iter().flatten() {
            all.merge(&day.tally.latencies);
            requests += day.tally.arrived;
            refused += day.tally.refused + day.waiting();
            slowed += day.tally.slowed;
        }
        WeekServed {
            gpus,
            pods: pods.len(),
            placed: pods.iter().filter(|pod| pod.binding.is_some()).count(),
            requests,
            late: all.ttft_violations + all.tpot_violations + refused,
            slowed,
            ttft_p99_s: all.ttft.quantile_s(0.99),
            time_per_token_p99_s: all.tpot.quantile_s(0.99),
        }
    }
}
