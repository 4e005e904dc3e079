//! What sharing would save in a cluster as it is: what each workload uses and could request, and on how many GPUs the policy places
//! that, by [`plan`].
//!
//! [`usage`] folds what was measured; [`need`] is what a workload could request, or why it keeps GPUs of its own; [`report`] is the
//! answer. Whoever asks makes the pods with these requests, and so no second way of reading pods is here.

pub mod need;
pub mod report;
pub mod usage;

use crate::capacity_plan::question::{CapacityQuestion, NodeTemplate, PodToPlace};
use crate::capacity_plan::report::CapacityPlan;
use crate::capacity_plan::{copies_beside, plan};
use need::{Ask, Need, OwnGpu, Workload, work};
use report::{Assessment, Distribution, Figure, HourAnswer, Source, WorkloadAnswer};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::contention::{ComputeSharing, EngineWork, GpuSpeed, contention};
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, plural};
use usage::{Quantity, Usage};

#[derive(Debug, Clone)]
pub struct AssessQuestion {
    pub policy: Arc<Policy>,
    /// Kinds of nodes whose GPUs are whole today, with the number of nodes that there are.
    pub node_kinds: Vec<NodeTemplate>,
    /// GPUs of all nodes, and how many of them are cut into MIG slices.
    pub gpus: u32,
    pub mig_gpus: u32,
    pub workloads: Vec<AssessedWorkload>,
    pub usage: Usage,
    /// Per cent of the samples.
    pub quantile: f64,
    /// An opportunistic job.
    pub job: Option<PodToPlace>,
    pub gpu_hour_price: Option<f64>,
}

/// A workload, and how many of its pods have one GPU together.
#[derive(Debug, Clone)]
pub struct AssessedWorkload {
    pub workload: Workload,
    /// 1, or the shares or slices of a GPU.
    pub shares_per_gpu: u32,
}

/// Makes a pod, by its index, with so much VRAM on each of its GPUs, or with GPUs of its own; `None` if it cannot be placed.
pub type MakePod<'m> = &'m dyn Fn(usize, Option<Bytes>) -> Option<PodToPlace>;

/// Rounds of plans in which workloads beyond their latency get GPUs of their own.
const MAX_ROUNDS: usize = 3;
/// GPU pods beyond which hours are not filled with jobs: each hour is a trial, and its cost grows with the square.
const MAX_PODS_BY_HOUR: usize = 3000;
const HOURS_PER_MONTH: f64 = 730.0;

/// The plan with these needs, and by workload the most by which neighbors lengthen its steps.
struct Planned {
    plan: CapacityPlan,
    slower: BTreeMap<usize, f64>,
    beyond: Vec<(usize, String)>,
}

pub fn assess(question: &AssessQuestion, make: MakePod<'_>) -> Assessment {
    let workloads = question.workloads.iter().enumerate();
    let mut needs: Vec<Need> = workloads
        .map(|(index, one)| Need::new(&one.workload, index, &question.usage, None))
        .collect();
    let mut planned = planned(question, &needs, make);
    let mut rounds = 1;
    while !planned.beyond.is_empty() && rounds < MAX_ROUNDS {
        for (index, why) in &planned.beyond {
            needs[*index].request = Err(OwnGpu::Latency);
            needs[*index].why.clone_from(why);
        }
        planned = self::planned(question, &needs, make);
        rounds += 1;
    }
    let hours = hours(question, &needs, make);
    let figures = figures(question, &needs, &planned, &hours);
    let answers = needs.iter().enumerate();
    Assessment {
        summary: report::summary(&figures, !planned.plan.not_held.is_empty()),
        workloads: answers
            .map(|(index, need)| workload_answer(question, index, need, &planned.slower))
            .collect(),
        hours,
        cautions: cautions(question, &planned),
        not_held: planned.plan.not_held,
        figures,
    }
}

/// Whether its GPUs stay as they are: shares of nobody knows what, and slices.
fn is_kept(workload: &Workload, need: &Need) -> bool {
    workload.ask == Ask::Mig
        || workload.ask == Ask::TimeSliced && need.request == Err(OwnGpu::Unknown)
}

/// The pods of all workloads whose GPUs do not stay as they are, with the index of their workload.
fn pods(question: &AssessQuestion, needs: &[Need], make: MakePod<'_>) -> Vec<PodToPlace> {
    let mut pods = Vec::new();
    for (index, (one, need)) in question.workloads.iter().zip(needs).enumerate() {
        if is_kept(&one.workload, need) {
            continue;
        }
        let made = one.workload.pods.iter();
        let made = made.filter_map(|pod| make(*pod, need.request.as_ref().ok().copied()));
        pods.extend(made.map(|pod| PodToPlace {
            workload: index,
            ..pod
        }));
    }
    pods
}

fn capacity_question(question: &AssessQuestion, pods: Vec<PodToPlace>) -> CapacityQuestion {
    CapacityQuestion {
        policy: question.policy.clone(),
        pods,
        node_kinds: question.node_kinds.clone(),
    }
}

fn planned(question: &AssessQuestion, needs: &[Need], make: MakePod<'_>) -> Planned {
    let asked = capacity_question(question, pods(question, needs, make));
    let plan = plan(&asked);
    let by_key: BTreeMap<_, _> = asked.pods.iter().map(|pod| (&pod.key, pod)).collect();
    let (mut slower, mut beyond) = (BTreeMap::new(), BTreeMap::new());
    for node in &plan.layout {
        let kind = question
            .node_kinds
            .iter()
            .find(|kind| kind.name == node.kind);
        let speed = kind.and_then(|kind| GpuSpeed::of(kind.gpu.model.as_str()));
        for gpu in node.gpus.iter().filter(|gpu| gpu.pods.len() > 1) {
            let pods = gpu.pods.iter().filter_map(|pod| by_key.get(&pod.pod));
            let pods: Vec<&PodToPlace> = pods.copied().collect();
            let of = |pod: &&PodToPlace| {
                let workload = &question.workloads[pod.workload].workload;
                work(workload, pod.workload, &question.usage, speed)
            };
            let works: Vec<EngineWork> = pods.iter().map(of).collect();
            let under = contention(&works, ComputeSharing::TimeSlicing);
            for ((pod, work), under) in pods.iter().zip(&works).zip(&under) {
                let (alone, beside) = (
                    work.step_s(&contention(&[*work], ComputeSharing::Exclusive)[0]),
                    work.step_s(under),
                );
                let most: &mut f64 = slower.entry(pod.workload).or_insert(1.0);
                *most = most.max(beside / alone);
                let limit = pod.demand.terms.max_time_per_token;
                if let Some(limit) = limit.filter(|limit| beside * 1e6 > limit.0 as f64) {
                    let why = format!(
                        "beside others a token would take {:.1} ms, and its class allows {:.1} ms",
                        beside * 1e3,
                        limit.0 as f64 / 1e3
                    );
                    beyond.insert(pod.workload, why);
                }
            }
        }
    }
    Planned {
        plan,
        slower,
        beyond: beyond.into_iter().collect(),
    }
}

/// GPUs of pods, of which several may be on one: all of them, or those that stay as they are, by GPU model.
fn held_gpus<'q>(
    question: &'q AssessQuestion,
    is_counted: impl Fn(usize, &Workload) -> bool,
) -> BTreeMap<Option<&'q str>, u32> {
    let mut held: BTreeMap<Option<&str>, f64> = BTreeMap::new();
    for (index, one) in question.workloads.iter().enumerate() {
        if is_counted(index, &one.workload) {
            let shares = one.workload.pods.len() as f64 * f64::from(one.workload.gpus);
            let model = one.workload.gpu.as_ref().map(|gpu| gpu.model.as_str());
            *held.entry(model).or_default() += shares / f64::from(one.shares_per_gpu.max(1));
        }
    }
    // Thirds add up to a little more than one.
    let whole = |(model, gpus): (_, f64)| (model, (gpus - 1e-6).ceil() as u32);
    held.into_iter().map(whole).collect()
}

fn hours(question: &AssessQuestion, needs: &[Need], make: MakePod<'_>) -> Vec<HourAnswer> {
    let kept = held_gpus(question, |index, one| is_kept(one, &needs[index]));
    let kinds = question.node_kinds.iter();
    let fleet = kinds.map(|kind| {
        let all = kind.max_nodes.unwrap_or(0).saturating_mul(kind.gpus);
        all.saturating_sub(
            kept.get(&Some(kind.gpu.model.as_str()))
                .copied()
                .unwrap_or(0),
        )
    });
    let fleet: Vec<u32> = fleet.collect();
    let count: usize = question
        .workloads
        .iter()
        .map(|one| one.workload.pods.len())
        .sum();
    let mut known: Vec<(Vec<Need>, u32)> = Vec::new();
    let mut jobs_at = |hour| {
        let job = question
            .job
            .as_ref()
            .filter(|_| count <= MAX_PODS_BY_HOUR)?;
        let of = |(index, need): (usize, &Need)| match need.request {
            Err(_) => need.clone(),
            Ok(_) => {
                let at = Some((hour, question.quantile));
                Need::new(
                    &question.workloads[index].workload,
                    index,
                    &question.usage,
                    at,
                )
            }
        };
        let needs: Vec<Need> = needs.iter().enumerate().map(of).collect();
        let is_same = |other: &[Need]| {
            let both = other.iter().zip(&needs);
            both.into_iter()
                .all(|(one, other)| one.request == other.request)
        };
        if let Some((_, jobs)) = known.iter().find(|(other, _)| is_same(other)) {
            return Some(*jobs);
        }
        let asked = capacity_question(question, pods(question, &needs, make));
        let jobs = copies_beside(&asked, &fleet, job);
        known.push((needs, jobs));
        Some(jobs)
    };
    let samples = question.usage.gpu_samples();
    let idle_at = |hour: usize| {
        let samples = samples?;
        let of = samples.hours[hour];
        let share = of.idle as f64 / of.all as f64;
        (of.all > 0).then(|| round(share * samples.gpus.len() as f64))
    };
    (0..24)
        .map(|hour| HourAnswer {
            hour,
            idle_gpu_hours: idle_at(hour),
            jobs: jobs_at(hour),
        })
        .collect()
}

/// To tenths.
fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn figures(
    question: &AssessQuestion,
    needs: &[Need],
    planned: &Planned,
    hours: &[HourAnswer],
) -> Vec<Figure> {
    let sum = |held: BTreeMap<Option<&str>, u32>| held.values().sum::<u32>();
    let held = sum(held_gpus(question, |_, _| true)).min(question.gpus);
    let kept = sum(held_gpus(question, |index, one| {
        is_kept(one, &needs[index])
    }));
    let plan = &planned.plan;
    let suffice = plan.gpus + kept;
    let count = |name, value: u32, source, caution: Option<String>| Figure {
        name,
        value: Some(f64::from(value)),
        unit: "GPUs",
        source,
        caution,
    };
    let unplaced = (!plan.not_held.is_empty()).then(|| {
        let pods = plural(plan.not_held.len(), "pod");
        format!("{pods} without a place are not in it, so it is too low")
    });
    let is_shared = question.workloads.iter().any(|one| one.shares_per_gpu > 1);
    let at_least =
        is_shared.then(|| "shares and slices are counted as if they filled their GPUs".to_owned());
    let alone = needs
        .iter()
        .filter(|need| need.request == Err(OwnGpu::Unknown))
        .count();
    let moved = (alone > 0).then(|| {
        format!(
            "{} of unknown need keep GPUs of their own",
            plural(alone, "workload")
        )
    });
    let mut figures = vec![
        count("gpusToday", question.gpus, Source::Nodes, None),
        count("gpusHeldToday", held, Source::Pods, at_least),
        count(
            "gpusThatSuffice",
            suffice,
            Source::Plan,
            unplaced.clone().or(moved),
        ),
        count(
            "gpusLowerBound",
            plan.lower_bound.gpus + kept,
            Source::Bound,
            unplaced,
        ),
    ];
    let idle: Option<Vec<f64>> = hours.iter().map(|hour| hour.idle_gpu_hours).collect();
    let with_figures = question
        .usage
        .gpu_samples()
        .map_or(0, |samples| samples.gpus.len());
    figures.push(Figure {
        name: "idleGpuHoursPerDay",
        value: idle.map(|idle| round(idle.iter().sum())),
        unit: "GPU hours",
        source: Source::Exporter,
        caution: Some(format!(
            "{with_figures} of {} GPUs have figures; of the others nothing is known",
            question.gpus
        )),
    });
    let jobs = hours.iter().map(|hour| hour.jobs).min().flatten();
    figures.push(Figure {
        name: "jobsBesideAtEveryHour",
        value: jobs.map(f64::from),
        unit: "jobs",
        source: Source::Fill,
        caution: Some("by VRAM; what they cost their neighbors in time is not in it, nor are evictions between hours".into()),
    });
    if let Some(price) = question.gpu_hour_price {
        let month = |name, gpus: u32| Figure {
            name,
            value: Some(round(f64::from(gpus) * price * HOURS_PER_MONTH)),
            unit: "a month",
            source: Source::Price,
            caution: Some("one price for every GPU; nodes are bought whole".into()),
        };
        figures.push(month("priceToday", question.gpus));
        figures.push(month("priceOfWhatSuffices", suffice));
    }
    figures
}

fn workload_answer(
    question: &AssessQuestion,
    index: usize,
    need: &Need,
    slower: &BTreeMap<usize, f64>,
) -> WorkloadAnswer {
    let AssessedWorkload { workload, .. } = &question.workloads[index];
    let of = |quantity, unit| {
        let samples = question.usage.of(index, quantity)?;
        Distribution::new(samples, quantity, unit, &question.usage, question.quantile)
    };
    let compute = question.usage.compute(index);
    let compute = compute.and_then(|(measure, _)| {
        of(
            measure,
            if measure == Quantity::Active {
                100.0
            } else {
                1.0
            },
        )
    });
    WorkloadAnswer {
        workload: workload.name.clone(),
        pods: workload.pods.len(),
        gpus: workload.pods.len() as u32 * workload.gpus,
        vram_bytes: of(Quantity::Vram, f64::from(1 << 20)),
        compute_percent: compute,
        kv_cache_percent: of(Quantity::KvUsage, 100.0),
        waiting: of(Quantity::Waiting, 1.0),
        could_request_bytes: need
            .request
            .as_ref()
            .ok()
            .map(|each| each.times(workload.gpus.into())),
        own_gpu: need.request.as_ref().err().copied(),
        why: need.why.clone(),
        slower_beside: slower
            .get(&index)
            .map(|most| (most * 100.0).round() / 100.0),
    }
}

fn cautions(question: &AssessQuestion, planned: &Planned) -> Vec<String> {
    let usage = &question.usage;
    let counted =
        |count: u64, what: &str| (count > 0).then(|| format!("{} {what}", plural(count, "sample")));
    let texts = [
        usage.workloads.is_empty().then(|| "without samples of pods no need is known but what allocators were told: give --prometheus or --metrics".to_owned()),
        counted(usage.impossible, "are no possible value, and count as gaps"),
        counted(usage.duplicates, "are of several series of one GPU or engine: the highest counts, once"),
        (question.mig_gpus > 0).then(|| format!("{} cut into MIG slices: their layout stays", plural(question.mig_gpus, "GPU"))),
        (!planned.beyond.is_empty()).then(|| format!("{} would still be beyond the latency of their class after {MAX_ROUNDS} plans", plural(planned.beyond.len(), "workload"))),
        Some("every pod stays on the GPU model that it has; load of other weeks, rollouts with a surge and starts at once are not in it".to_owned()),
    ];
    texts.into_iter().flatten().collect()
}
