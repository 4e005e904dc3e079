//! A week of a cluster with a device plugin, and the same week under what an assessment of it proposes: whether requests are late
//! that were not late before.
//!
//! # The cluster
//!
//! Twelve nodes, six with eight A100 and six with four L40S, and sixty pods of fifteen Deployments, which have 66 of the 72 GPUs
//! ([`catalog`]). Engines serve models of 7B to 70B, with nine tenths of the memory of their GPUs. Of what a Deployment's engines
//! keep up with, the busiest minute brings between 0.3 % and 30 %, each factor as likely as any other: most models of a company are
//! hardly asked for. Requests follow the week of one of two services, moved by up to three hours; how many come in a minute is
//! drawn, and they come evenly within it. Training computes all the time; notebooks and rendering do by day.
//!
//! # What is compared
//!
//! *As it is*: kube-scheduler, whole GPUs, nobody beside a pod. [`texts`] are what `kubectl get` and a Prometheus would print of
//! that week, in steps of five minutes: gauges of engines at their highest, as a scrape each minute would find it, compute as a
//! mean. Whoever has the assessment of these texts asks for *the plan*: pods with the VRAM that it proposes for their workload, or
//! with GPUs of their own, on the fewest GPUs of each model on which Stowage places all of them ([`placement`]); KV caches as
//! large as that leaves; pods take turns on their GPU. Both weeks have the same requests ([`played`]).
//!
//! A pod stays where it is: nothing restarts, and nobody scales. The engines preempt no request: one waits until it has room.

mod catalog;
mod placement;
mod played;
pub mod texts;

use super::engines::{DoesNotFit, Slo};
use super::schedulers::{
    FleetScheduler, KubeSchedulerBaseline, PreemptionMode, ScoringStrategy, Stowage,
};
use super::traffic::{MINUTES, TrafficError, TrafficText, week};
use catalog::{CATALOG, KINDS, Workload};
use placement::{PlacedPod, place};
use played::Played;
use serde::Serialize;
use std::cmp::Reverse;
use stowage_scheduling::contention::ComputeSharing;
use stowage_scheduling::policy::Policy;
use stowage_scheduling::testkit::random::Random;
use stowage_scheduling::units::Bytes;
use stowage_sizing::assess::report::Assessment;
use stowage_sizing::capacity_plan::PlacingOrder;

/// The file that `--trace DIR` is read for.
pub const TRACE: &str = "azure2024_week_7min.csv";

const SLO: Slo = Slo {
    ttft_s: 5.0,
    tpot_s: 0.2,
};
/// What the numbers drawn here are for; see [`Random::seeded`].
const PURPOSE: u64 = 71;

/// A cluster and what is asked of it.
pub struct AssessedWeek {
    seed: u64,
    minutes: usize,
    /// Nodes of each kind.
    nodes: [u32; 2],
    workloads: Vec<Workload>,
}

/// A week on some GPUs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WeekServed {
    /// GPUs of the nodes.
    pub gpus: u32,
    pub pods: usize,
    pub placed: usize,
    pub requests: f64,
    /// First token after more than 5 s, or more than 0.2 s for a further one, or never served.
    pub late: f64,
    /// More than twice as long for a token as alone.
    pub slowed: f64,
    pub ttft_p99_s: Option<f64>,
    pub time_per_token_p99_s: Option<f64>,
}

/// The week as it is: its figures, and what is needed to print it.
pub struct AsItIs {
    pub served: WeekServed,
    placed: Vec<PlacedPod>,
    played: Played,
}

/// The plan does not hold if more GPUs are needed than suffice, or more requests are late.
pub fn holds(before: &WeekServed, plan: &WeekServed, suffice: Option<f64>) -> bool {
    let has_place =
        plan.placed == plan.pods && suffice.is_some_and(|most| f64::from(plan.gpus) <= most);
    // Half a request is rounding.
    has_place && plan.late < before.late + 0.5
}

impl AssessedWeek {
    /// The short one is a day, with a pod of each Deployment on four nodes.
    pub fn new(
        seed: u64,
        trace: Option<TrafficText<'_>>,
        is_short: bool,
    ) -> Result<Self, TrafficError> {
        let mut draws = Random::seeded(seed, PURPOSE);
        let workloads = CATALOG.iter().map(|of| {
            let pods = if is_short { 1 } else { of.pods };
            let own = Random::seeded(draws.next_u64(), PURPOSE);
            Workload::new(of, pods, trace, own)
        });
        Ok(Self {
            seed,
            minutes: if is_short {
                MINUTES
            } else {
                week::WEEK_MINUTES
            },
            nodes: KINDS.map(|kind| if is_short { 2 } else { kind.nodes }),
            workloads: workloads.collect::<Result<_, _>>()?,
        })
    }

    pub fn as_it_is(&self) -> Result<AsItIs, DoesNotFit> {
        let grants: Vec<Option<Bytes>> = self.workloads.iter().map(|_| None).collect();
        let scheduler = || -> Box<dyn FleetScheduler> {
            let scoring = ScoringStrategy::LeastAllocated;
            let never = PreemptionMode::Never;
            Box::new(KubeSchedulerBaseline::new(scoring, never, self.seed))
        };
        let kinds = KINDS.iter().zip(self.nodes).enumerate();
        let mut placed = Vec::new();
        let mut gpus = 0;
        for (index, (kind, nodes)) in kinds {
            gpus += kind.gpus * nodes;
            let pods = self.pods(index, &grants, PlacingOrder::ExclusiveFirst);
            placed.extend(place(scheduler(), kind, kind.gpus * nodes, pods));
        }
        let played = played::play(self, &placed, &grants, ComputeSharing::Exclusive)?;
        Ok(AsItIs {
            served: played.served(gpus, &placed),
            placed,
            played,
        })
    }

    /// The week with what the assessment proposes.
    pub fn plan(&self, answer: &Assessment, policy: &Policy) -> Result<WeekServed, DoesNotFit> {
        let proposed = |one: &Workload| {
            let name = one.of.assessed_name();
            let found = answer.workloads.iter().find(|it| it.workload == name);
            found.and_then(|it| it.could_request_bytes)
        };
        let grants: Vec<Option<Bytes>> = self.workloads.iter().map(proposed).collect();
        let (mut placed, mut gpus) = (Vec::new(), 0);
        for (index, (kind, nodes)) in KINDS.iter().zip(self.nodes).enumerate() {
            let all = kind.gpus * nodes;
            // In each order that a plan tries.
            let on = |gpus: u32| {
                let placed = PlacingOrder::ALL.map(|order| {
                    let stowage = Box::new(Stowage::new(policy.clone()));
                    place(stowage, kind, gpus, self.pods(index, &grants, order))
                });
                let count =
                    |pods: &Vec<PlacedPod>| pods.iter().filter(|pod| pod.binding.is_some()).count();
                placed.into_iter().max_by_key(count).unwrap_or_default()
            };
            let has_places = |pods: &Vec<PlacedPod>| pods.iter().all(|pod| pod.binding.is_some());
            let mut tried = (1..all).map(|gpus| (gpus, on(gpus)));
            let found = tried.find(|(_, pods)| has_places(pods));
            let (fewest, here) = found.unwrap_or_else(|| (all, on(all)));
            placed.extend(here);
            gpus += fewest;
        }
        let played = played::play(self, &placed, &grants, ComputeSharing::TimeSlicing)?;
        Ok(played.served(gpus, &placed))
    }

    fn pods(&self, kind: usize, grants: &[Option<Bytes>], order: PlacingOrder) -> Vec<PlacedPod> {
        let here = self.workloads.iter().enumerate();
        let here = here.filter(|(_, one)| one.of.kind == kind);
        let pods = here.flat_map(|(workload, one)| {
            (0..one.pods).map(move |replica| PlacedPod {
                workload,
                replica,
                spec: one.spec(grants[workload]),
                binding: None,
            })
        });
        let mut pods: Vec<PlacedPod> = pods.collect();
        pods.sort_by_key(|pod| {
            let (shared, gpus) = (!pod.spec.is_exclusive, Reverse(pod.spec.gpus));
            let vram = Reverse(pod.spec.vram_per_gpu());
            match order {
                PlacingOrder::ExclusiveFirst => (shared, gpus, vram),
                // Those with GPUs of their own have all of their memory.
                PlacingOrder::DecreasingSize => (shared, Reverse(0), vram),
                PlacingOrder::Given => (true, Reverse(0), Reverse(Bytes::ZERO)),
            }
        });
        pods
    }
}
