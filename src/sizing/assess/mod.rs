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
use need::{Need, OwnGpu, Workload, work};
use report::{Assessment, Distribution, Figure, HourAnswer, WorkloadAnswer};
use std::collections::BTreeMap;
use std::sync::Arc;
use stowage_scheduling::contention::{ComputeSharing, EngineWork, GpuSpeed, contention};
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

struct Planned {
    plan: CapacityPlan,
    /// By workload the most by which neighbors lengthen its steps, and why it should have none.
    slower: BTreeMap<usize, f64>,
    beyond: BTreeMap<usize, (OwnGpu, String)>,
}

pub fn assess(question: &AssessQuestion<'_>) -> Assessment {
    let mut needs = question.needs(None);
    let mut planned = question.plan(&needs);
    // Each round takes the neighbors from a workload that had some.
    while planned
        .beyond
        .keys()
        .any(|index| needs[*index].request.is_ok())
    {
        for (index, (reason, why)) in planned.beyond {
            (needs[index].request, needs[index].why) = (Err(reason), why);
        }
        planned = question.plan(&needs);
    }
    let is_known = question.unreadable == 0 && planned.plan.not_held.is_empty();
    let hours = question.hours(&needs, is_known);
    let (summary, figures) = question.figures(&needs, &planned.plan, &hours);
    let answers = needs.iter().enumerate();
    Assessment {
        summary,
        figures,
        hours,
        workloads: answers
            .map(|(index, need)| question.workload(index, need, planned.slower.get(&index)))
            .collect(),
        cautions: question.cautions(),
        not_held: planned.plan.not_held,
    }
}

impl AssessQuestion<'_> {
    fn needs(&self, hour: Option<(usize, f64)>) -> Vec<Need> {
        let all = self.workloads.iter().enumerate();
        all.map(|(index, one)| Need::new(one, index, &self.usage, hour))
            .collect()
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
        let plan = plan(&asked);
        let by_key: BTreeMap<_, _> = asked.pods.iter().map(|pod| (&pod.key, pod)).collect();
        let (mut slower, mut beyond) = (BTreeMap::new(), BTreeMap::new());
        for node in &plan.layout {
            let kind = self.node_kinds.iter().find(|kind| kind.name == node.kind);
            let speed = kind.and_then(|kind| GpuSpeed::of(kind.gpu.model.as_str()));
            for gpu in node.gpus.iter().filter(|gpu| gpu.pods.len() > 1) {
                let pods = gpu.pods.iter().filter_map(|pod| by_key.get(&pod.pod));
                let works = pods.map(|pod| {
                    let one = &self.workloads[pod.workload];
                    (*pod, work(one, pod.workload, &self.usage, speed))
                });
                let (pods, works): (Vec<&PodToPlace>, Vec<EngineWork>) = works.unzip();
                let busy: f64 = works.iter().map(|work| work.busy).sum();
                let busiest = pods.iter().zip(&works);
                let busiest = busiest.max_by(|one, other| one.1.busy.total_cmp(&other.1.busy));
                if let Some((pod, _)) = busiest.filter(|_| busy > 1.0) {
                    let percent = busy * 100.0;
                    let why =
                        format!("with its neighbors it would compute {percent:.0} % of an hour");
                    beyond.insert(pod.workload, (OwnGpu::Busy, why));
                }
                let under = contention(&works, ComputeSharing::TimeSlicing);
                for ((pod, work), under) in pods.into_iter().zip(&works).zip(&under) {
                    let step_s = work.step_s(under);
                    // Time-slicing lengthens all parts alike.
                    let most = slower.entry(pod.workload).or_insert(1.0);
                    *most = under.memory.max(*most);
                    let limit = (self.limit)(pod.demand.class);
                    if let Some(limit) = limit.filter(|limit| step_s * 1e6 > limit.0 as f64) {
                        let step_ms = step_s * 1e3;
                        let limit_ms = limit.0 as f64 / 1e3;
                        let why = format!("a token would take {step_ms:.1} ms of {limit_ms} ms");
                        beyond.insert(pod.workload, (OwnGpu::Latency, why));
                    }
                }
            }
        }
        Planned {
            plan,
            slower,
            beyond,
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

    fn figures(
        &self,
        needs: &[Need],
        plan: &CapacityPlan,
        hours: &[HourAnswer],
    ) -> (String, Vec<Figure>) {
        let (all, requested) = (self.gpus.values().sum(), self.requested(|_| true));
        let is_unknown = |need: &&Need| need.request == Err(OwnGpu::Unknown);
        let unplaced = plural(plan.not_held.len(), "pod");
        let unreadable = plural(self.unreadable, "pod");
        let lacks = if !plan.not_held.is_empty() {
            Some(format!("{unplaced} without a place"))
        } else {
            let text = format!("GPUs of {unreadable} that cannot be read");
            (self.unreadable > 0).then_some(text)
        };
        let suffice = lacks.is_none().then(|| plan.gpus + self.kept(None));
        let bound = plan.lower_bound.gpus + self.requested(|one| one.kept.is_some());
        let bound = lacks.is_none().then_some(bound);
        let is_known = |need: &Need| !matches!(need.request, Err(OwnGpu::Unknown | OwnGpu::Kept));
        let summary = match (suffice, &lacks) {
            (_, Some(lacks)) => format!("Unknown: there are {lacks}."),
            _ if !needs.iter().any(is_known) => {
                "Unknown: of no workload is it known what it needs.".into()
            }
            (Some(suffice), _) if suffice < requested => {
                let (saved, bound) = (requested - suffice, bound.unwrap_or(0));
                format!(
                    "{suffice} of {all} GPUs would suffice: {saved} fewer than pods request today. The lower bound is {bound}."
                )
            }
            _ => format!(
                "Nothing can be saved by sharing: pods request {requested} of {all} GPUs, and {} are needed.",
                suffice.unwrap_or(requested)
            ),
        };
        let unknown = plural(needs.iter().filter(is_unknown).count(), "workload");
        let caution = lacks.unwrap_or(format!("with all GPUs of {unknown} of unknown need"));
        let figure = |name, value: Option<f64>, source, caution: &str| Figure {
            name,
            value: value.map(rounded),
            source,
            caution: caution.into(),
        };
        let gpus = |name, count: Option<u32>, source, caution: &str| {
            figure(name, count.map(f64::from), source, caution)
        };
        let idle: Option<f64> = (0..24).map(|hour| self.usage.idle_gpu_hours(hour)).sum();
        let measured = self.usage.gpu_samples().map_or(0, |one| one.gpus.len());
        let measured = format!("known of {measured} of {all} GPUs; gaps are not idle");
        let jobs = hours.iter().map(|hour| hour.jobs).min().flatten();
        let shares = "shares and slices count as parts of GPUs";
        let placed = "jobs placed beside all pods on today's GPUs, at the worst hour";
        let mut figures = vec![
            gpus(
                "GPUs today",
                Some(all),
                "the dump's nodes",
                "as their labels count them",
            ),
            gpus("GPUs requested", Some(requested), "the dump's pods", shares),
            gpus(
                "GPUs that suffice",
                suffice,
                "a plan under the policy",
                &caution,
            ),
            gpus(
                "lower bound",
                bound,
                "arithmetic over the same requests",
                "of no other requests",
            ),
            figure(
                "idle GPU hours a day",
                idle,
                "DCGM: below 1 % of compute",
                &measured,
            ),
            figure(
                "jobs that fit beside",
                jobs.map(f64::from),
                placed,
                "by VRAM alone",
            ),
        ];
        if let Some(price) = self.gpu_hour_price {
            let hours = "--gpu-hour-price, 730 hours a month";
            let whole = "nodes are bought whole";
            for (name, count, caution) in [
                (
                    "price today",
                    Some(all),
                    "with the GPUs that nobody requests",
                ),
                ("price of what is requested", Some(requested), whole),
                ("price of what suffices", suffice, whole),
            ] {
                let month = count.map(|count| f64::from(count) * price * HOURS_PER_MONTH);
                figures.push(figure(name, month, hours, caution));
            }
        }
        (summary, figures)
    }

    fn workload(&self, index: usize, need: &Need, slower: Option<&f64>) -> WorkloadAnswer {
        let one = &self.workloads[index];
        let of = |of| {
            let samples = self.usage.of(index, of)?;
            Distribution::new(&self.usage, samples, of, self.quantile)
        };
        WorkloadAnswer {
            workload: one.name.clone(),
            pods: one.pods.len(),
            gpus: one.pods.len() as u32 * one.gpus,
            vram_bytes: of(Quantity::Vram),
            compute_percent: self.usage.compute(index).and_then(of),
            kv_cache_percent: of(Quantity::KvUsage),
            waiting: of(Quantity::Waiting),
            could_request_bytes: need.request.ok(),
            own_gpu: need.request.err(),
            why: need.why.clone(),
            slower_beside: slower.map(|most| (most * 100.0).round() / 100.0),
        }
    }

    fn cautions(&self) -> Vec<String> {
        let usage = &self.usage;
        let stays = "Every pod stays on the GPU model that it has. Hours are those of UTC.";
        let mut texts = vec![stays.to_owned()];
        if let Some(step) = usage.step {
            let (hours, quantile) = (usage.window_s() / 3600, self.quantile);
            texts.push(format!(
                "The window is {hours} hours, with a sample each {step} s; the quantile is {quantile} %. A figure counts if it covers a day."
            ));
        }
        if usage.workloads.is_empty() {
            texts.push("Without figures of pods nothing is known of what they need.".into());
        }
        if usage.impossible > 0 {
            let count = plural(usage.impossible, "sample");
            texts.push(format!("{count} cannot be, and count as gaps."));
        }
        if usage.duplicates > 0 {
            let count = plural(usage.duplicates, "sample");
            texts.push(format!(
                "{count} are of several series of one GPU or engine: the highest counts."
            ));
        }
        texts
    }
}

/// To tenths.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}
