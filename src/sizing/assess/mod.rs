//! What sharing would save in a cluster as it is: what each workload uses and could request, and on how many GPUs the policy places
//! that, by [`plan`].
//!
//! [`usage`] folds what was measured; [`need`] is what a workload could request, or why it keeps GPUs of its own; [`report`] is the
//! answer. Whoever asks makes the pods with these requests, so that no second way of reading pods is here.

pub mod need;
pub mod report;
pub mod usage;

use crate::capacity_plan::question::{CapacityQuestion, NodeTemplate, PodToPlace};
use crate::capacity_plan::report::CapacityPlan;
use crate::capacity_plan::{copies_beside, plan};
use need::{Measured, Need, OwnGpu, Workload, own};
use report::{Assessment, Distribution, Figure, HourAnswer, WorkloadAnswer};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::contention::{ComputeSharing, EngineWork, contention};
use stowage_scheduling::ids::GpuModel;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::units::{Bytes, Micros, plural};
use stowage_scheduling::vocabulary::classification::ClassId;
use stowage_scheduling::vocabulary::demand::Sharing;
use usage::{Quantity, Usage};

pub struct AssessQuestion<'q> {
    /// Without limits on latency: a trial knows no load, and so lets nothing join an engine that has one. What was measured is judged
    /// after it.
    pub policy: Arc<Policy>,
    /// The limit on time per token of each class.
    pub limit: &'q dyn Fn(ClassId) -> Option<Micros>,
    /// Kinds of nodes whose GPUs are whole today, with the number of nodes that there are.
    pub node_kinds: Vec<NodeTemplate>,
    /// GPUs by node.
    pub gpus: BTreeMap<String, u32>,
    /// Pods of which nobody knows how many GPUs they have.
    pub unreadable: usize,
    pub workloads: Vec<Workload>,
    pub usage: Usage,
    /// Per cent of the samples.
    pub quantile: f64,
    /// An opportunistic job; `None`: the largest preemptible pod.
    pub job: Option<PodToPlace>,
    pub gpu_hour_price: Option<f64>,
    /// Makes a pod, by its index, with so much VRAM on each of its GPUs, or with GPUs of its own.
    pub make: MakePod<'q>,
}

/// `None` for a pod that cannot be placed.
pub type MakePod<'m> = &'m dyn Fn(usize, &Workload, Option<Bytes>) -> Option<PodToPlace>;

/// Pods beyond which hours are not filled with jobs: each hour is a trial, and its cost grows with the square.
const MAX_PODS_BY_HOUR: usize = 2000;
const HOURS_PER_MONTH: f64 = 730.0;

/// GPUs of the cluster.
struct Totals {
    all: u32,
    requested: u32,
    /// How many suffice, and the lower bound; or what is lacking to know it.
    needed: Result<(u32, u32), String>,
}

/// A plan, and what neighbors would do in it, by workload.
struct Planned {
    plan: CapacityPlan,
    /// By how much its steps take longer at most.
    slower: BTreeMap<usize, f64>,
    /// What it needs if it should have no neighbors.
    alone: BTreeMap<usize, Need>,
}

pub fn assess(question: &AssessQuestion<'_>) -> Assessment {
    let mut needs = question.needs(None);
    let mut planned = question.plan(&needs);
    // Each round takes the neighbors from a workload that had some.
    while !planned.alone.is_empty() {
        for (index, need) in planned.alone {
            needs[index] = need;
        }
        planned = question.plan(&needs);
    }
    let totals = question.totals(&planned.plan);
    let hours = question.hours(&needs, totals.needed.is_ok());
    let answers = (0..).zip(&needs);
    let answers = answers.map(|(index, need)| question.workload(index, need, &planned.slower));
    Assessment {
        summary: question.summary(&needs, &totals),
        figures: question.figures(&needs, &totals, &hours),
        workloads: answers.collect(),
        hours,
        cautions: question.cautions(),
        not_held: planned.plan.not_held,
    }
}

impl AssessQuestion<'_> {
    fn measured(&self, index: usize) -> Measured<'_> {
        Measured {
            workload: &self.workloads[index],
            index,
            usage: &self.usage,
        }
    }

    fn needs(&self, hour: Option<(usize, f64)>) -> Vec<Need> {
        let all = 0..self.workloads.len();
        all.map(|index| self.measured(index).need(hour)).collect()
    }

    /// All pods whose GPUs do not stay as they are, with the index of their workload.
    fn capacity(&self, needs: &[Need]) -> CapacityQuestion {
        let mut pods = Vec::new();
        for (workload, (one, need)) in self.workloads.iter().zip(needs).enumerate() {
            let each = one.pods.iter().filter(|_| one.kept.is_none());
            let made = each.filter_map(|pod| (self.make)(*pod, one, need.request.ok()));
            pods.extend(made.map(|pod| PodToPlace { workload, ..pod }));
        }
        CapacityQuestion {
            policy: self.policy.clone(),
            pods,
            node_kinds: self.node_kinds.clone(),
        }
    }

    fn plan(&self, needs: &[Need]) -> Planned {
        let asked = self.capacity(needs);
        let mut planned = Planned {
            plan: plan(&asked),
            slower: BTreeMap::new(),
            alone: BTreeMap::new(),
        };
        let by_key: BTreeMap<_, _> = asked.pods.iter().map(|pod| (&pod.key, pod)).collect();
        for gpu in planned.plan.layout.iter().flat_map(|node| &node.gpus) {
            let pods = gpu.pods.iter().filter_map(|pod| by_key.get(&pod.pod));
            let pods: Vec<&PodToPlace> = pods.copied().collect();
            if pods.len() > 1 {
                self.judge(&pods, &mut planned.slower, &mut planned.alone);
            }
        }
        planned
    }

    /// What pods on one GPU cost each other.
    fn judge(
        &self,
        pods: &[&PodToPlace],
        slower: &mut BTreeMap<usize, f64>,
        alone: &mut BTreeMap<usize, Need>,
    ) {
        let works = pods.iter().map(|pod| self.measured(pod.workload).work());
        let works: Vec<EngineWork> = works.collect();
        let busy: f64 = works.iter().map(|work| work.busy).sum();
        let busiest = pods.iter().zip(&works);
        let busiest = busiest.max_by(|one, other| one.1.busy.total_cmp(&other.1.busy));
        if let Some((pod, _)) = busiest.filter(|_| busy > 1.0) {
            let percent = busy * 100.0;
            let why = format!("with its neighbors it would compute {percent:.0} % of an hour");
            alone.insert(pod.workload, own(OwnGpu::Busy, why));
        }
        let under = contention(&works, ComputeSharing::TimeSlicing);
        for ((pod, work), under) in pods.iter().zip(&works).zip(&under) {
            // Time-slicing lengthens all parts alike.
            let most = slower.entry(pod.workload).or_insert(1.0);
            *most = under.memory.max(*most);
            let step_ms = work.step_s(under) * 1e3;
            let limit_ms = (self.limit)(pod.demand.class).map(|limit| limit.0 as f64 / 1e3);
            if let Some(limit_ms) = limit_ms.filter(|limit_ms| step_ms > *limit_ms) {
                let why = format!("a token would take {step_ms:.1} ms of {limit_ms} ms");
                alone.insert(pod.workload, own(OwnGpu::Latency, why));
            }
        }
    }

    /// GPUs that some workloads request, parts of GPUs as parts.
    fn requested(&self, is_counted: impl Fn(&&Workload) -> bool) -> u32 {
        let counted = self.workloads.iter().filter(is_counted);
        let gpus = counted.map(|one| one.pods.len() as f64 * f64::from(one.gpus) * one.part);
        // Thirds add up to a little more than one.
        (gpus.sum::<f64>() - 1e-6).ceil() as u32
    }

    /// GPUs on which pods that stay may be, of one model or of all: nobody knows which pods are on one together.
    fn kept(&self, model: Option<&GpuModel>) -> u32 {
        let mut pods: BTreeMap<&String, [u32; 2]> = BTreeMap::new();
        for one in &self.workloads {
            let is_counted = model.is_none() || one.gpu.as_ref().map(|gpu| &gpu.model) == model;
            for (node, count) in one.nodes.iter().filter(|_| is_counted) {
                let by_kind = pods.entry(node).or_default();
                by_kind[usize::from(one.kept.is_some())] += count * one.gpus;
            }
        }
        let nodes = pods.into_iter().map(|(node, [others, kept])| {
            let gpus = self.gpus.get(node).copied().unwrap_or(0);
            kept.min(gpus.saturating_sub(others).max(1))
        });
        nodes.sum()
    }

    fn hours(&self, needs: &[Need], is_known: bool) -> Vec<HourAnswer> {
        let count: usize = self.workloads.iter().map(|one| one.pods.len()).sum();
        let (mut before, mut jobs) = (Vec::new(), None);
        let hours = (0..24).map(|hour| {
            let mut at_hour = self.needs(Some((hour, self.quantile)));
            for (now, need) in at_hour.iter_mut().zip(needs) {
                now.request = need.request.and(now.request);
            }
            if is_known && count <= MAX_PODS_BY_HOUR && at_hour != before {
                jobs = self.jobs_beside(&at_hour);
                before = at_hour;
            }
            HourAnswer {
                hour,
                idle_gpu_hours: self.usage.idle_gpu_hours(hour).map(rounded),
                jobs,
            }
        });
        hours.collect()
    }

    /// How many jobs fit on today's GPUs beside what the workloads need.
    fn jobs_beside(&self, needs: &[Need]) -> Option<u32> {
        let fleet = self.node_kinds.iter().map(|kind| {
            let kept = self.kept(Some(&kind.gpu.model));
            let all = kind.max_nodes.unwrap_or(0).saturating_mul(kind.gpus);
            all.saturating_sub(kept)
        });
        let asked = self.capacity(needs);
        let jobs = asked.pods.iter().filter(|pod| {
            let demand = &pod.demand;
            self.policy.is_preemptible(demand.class) && demand.sharing == Sharing::Shared
        });
        let largest = jobs.max_by_key(|pod| pod.demand.per_gpu);
        let job = self.job.as_ref().or(largest)?;
        Some(copies_beside(&asked, &fleet.collect::<Vec<u32>>(), job))
    }

    fn totals(&self, plan: &CapacityPlan) -> Totals {
        let parts = self.requested(|one| one.kept.is_some());
        let (unplaced, unreadable) = (plan.not_held.len(), self.unreadable);
        let needed = if unplaced > 0 {
            Err(format!("{} without a place", plural(unplaced, "pod")))
        } else if unreadable > 0 {
            let pods = plural(unreadable, "pod");
            Err(format!("GPUs of {pods} that cannot be read"))
        } else {
            let suffice = plan.gpus + self.kept(None);
            Ok((suffice, plan.lower_bound.gpus + parts))
        };
        Totals {
            all: self.gpus.values().sum(),
            requested: self.requested(|_| true),
            needed,
        }
    }

    fn summary(&self, needs: &[Need], totals: &Totals) -> String {
        let is_known = |need: &Need| !matches!(need.request, Err(OwnGpu::Unknown | OwnGpu::Kept));
        let Totals { all, requested, .. } = totals;
        match &totals.needed {
            Err(lacks) => format!("Unknown: there are {lacks}."),
            Ok(_) if !needs.iter().any(is_known) => {
                "Unknown: of no workload is it known what it needs.".into()
            }
            Ok((suffice, bound)) if suffice < requested => {
                let saved = requested - suffice;
                format!(
                    "{suffice} of {all} GPUs would suffice: {saved} fewer than pods request today. The lower bound is {bound}."
                )
            }
            Ok((suffice, _)) => format!(
                "Nothing can be saved by sharing: pods request {requested} of {all} GPUs, and {suffice} are needed."
            ),
        }
    }

    fn figures(&self, needs: &[Need], totals: &Totals, hours: &[HourAnswer]) -> Vec<Figure> {
        let (all, requested) = (totals.all, totals.requested);
        let (suffice, bound) = totals.needed.as_ref().ok().copied().unzip();
        let is_unknown = |need: &&Need| need.request == Err(OwnGpu::Unknown);
        let unknown = plural(needs.iter().filter(is_unknown).count(), "workload");
        let unknown = format!("with all GPUs of {unknown} of unknown need");
        let caution = totals.needed.as_ref().err().unwrap_or(&unknown);
        let idle: Option<f64> = (0..24).map(|hour| self.usage.idle_gpu_hours(hour)).sum();
        let measured = self.usage.gpu_samples().map_or(0, |one| one.gpus.len());
        let measured = format!("known of {measured} of {all} GPUs; gaps are not idle");
        let jobs = hours.iter().map(|hour| hour.jobs).min().flatten();
        let nodes = "as labels, a DRA driver or HAMi count them";
        let parts = "shares and slices count as parts of GPUs";
        let placed = "jobs placed beside all pods on today's GPUs, at the worst hour";
        let arithmetic = "arithmetic over the same requests";
        let mut figures = vec![
            figure("GPUs today", Some(all), "the dump's nodes", nodes),
            figure("GPUs requested", Some(requested), "the dump's pods", parts),
            figure(
                "GPUs that suffice",
                suffice,
                "a plan under the policy",
                caution,
            ),
            figure("lower bound", bound, arithmetic, "of no other requests"),
            figure(
                "idle GPU hours a day",
                idle,
                "DCGM: below 1 % of compute",
                &measured,
            ),
            figure("jobs that fit beside", jobs, placed, "by VRAM alone"),
        ];
        if let Some(price) = self.gpu_hour_price {
            let source = "--gpu-hour-price, 730 hours a month";
            let (idle, whole) = (
                "with the GPUs that nobody requests",
                "nodes are bought whole",
            );
            let month = |count: u32| f64::from(count) * price * HOURS_PER_MONTH;
            figures.extend([
                figure("price today", Some(month(all)), source, idle),
                figure(
                    "price of what is requested",
                    Some(month(requested)),
                    source,
                    whole,
                ),
                figure("price of what suffices", suffice.map(month), source, whole),
            ]);
        }
        figures
    }

    fn workload(&self, index: usize, need: &Need, slower: &BTreeMap<usize, f64>) -> WorkloadAnswer {
        let (one, measured) = (&self.workloads[index], self.measured(index));
        let of = |of| Distribution::new(measured, of, self.quantile);
        WorkloadAnswer {
            workload: one.name.clone(),
            pods: one.pods.len(),
            gpus: one.pods.len() as u32 * one.gpus,
            vram_bytes: of(Quantity::Vram),
            compute_percent: measured.compute().and_then(of),
            kv_cache_percent: of(Quantity::KvUsage),
            waiting: of(Quantity::Waiting),
            could_request_bytes: need.request.ok(),
            own_gpu: need.request.err(),
            why: need.why.clone(),
            slower_beside: slower
                .get(&index)
                .map(|most| (most * 100.0).round() / 100.0),
        }
    }

    fn cautions(&self) -> Vec<String> {
        let usage = &self.usage;
        let stays = "Every pod stays on the GPU model that it has. Hours are those of UTC.";
        let none = "Without figures of pods nothing is known of what they need.";
        let samples =
            |count, what: &str| (count > 0).then(|| format!("{} {what}", plural(count, "sample")));
        let window = usage.step.map(|step| {
            let (hours, quantile) = (usage.window_s() / 3600, self.quantile);
            format!(
                "The window is {hours} hours, with a sample each {step} s; the quantile is {quantile} %. A figure counts if it covers a day."
            )
        });
        let several = "are of several series of one GPU or engine: the highest counts.";
        let texts = [
            Some(stays.into()),
            window,
            usage.workloads.is_empty().then(|| none.into()),
            samples(usage.impossible, "cannot be, and count as gaps."),
            samples(usage.duplicates, several),
        ];
        texts.into_iter().flatten().collect()
    }
}

fn figure(
    name: &'static str,
    value: Option<impl Into<f64>>,
    source: &'static str,
    caution: &str,
) -> Figure {
    Figure {
        name,
        value: value.map(|value| rounded(value.into())),
        source,
        caution: caution.into(),
    }
}

/// To tenths.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
