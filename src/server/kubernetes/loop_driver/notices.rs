//! Reports the control loop's notices in the log, the metrics and the traces.

use super::LoopDriver;
use std::time::Duration;
use stowage_scheduling::control_loop::{EvictionOutcome, Notice};
use stowage_scheduling::ids::listed;
use stowage_scheduling::planning::{PlannedPlacement, WaitReason};
use stowage_scheduling::units::Millis;
use tracing::{error, info, warn};

impl LoopDriver {
    pub(super) fn tell(&self, notice: Notice) {
        let metrics = &self.service.metrics;
        match notice {
            Notice::Planned(place, took) => self.tell_planned(&place, took),
            Notice::RunEnded {
                took,
                outcome,
                left_over,
            } => {
                metrics.planner.run_seconds.observe(took.0 as f64 / 1e3);
                metrics.planner.runs.with_label_values(&[outcome]).inc();
                metrics.planner.left_over.set(left_over as i64);
            }
            Notice::PlanningFails(pod) => error!(%pod, "{}", WaitReason::PlanningFailed),
            Notice::PutOff(kind) => {
                metrics.planner.postponed.with_label_values(&[kind]).inc();
            }
            Notice::LandedLate(pod) => {
                warn!(%pod, "ended a reservation that a previous leader wrote too late");
                let labels = ["reservation", "landed-late"];
                metrics.writes.with_label_values(&labels).inc();
            }
            Notice::Recalls { begun, ended } => {
                info!(recalled = begun, ended, "sleeping engines' loans");
                metrics.lending.recalls.inc_by(begun as u64);
            }
            Notice::LoanEnds { pod, lender, gpu } => info!(%pod, %lender, %gpu, "its loan ends"),
            Notice::LoanEviction(outcome) => {
                let evictions = &metrics.lending.evictions;
                evictions.with_label_values(&[outcome]).inc();
            }
            Notice::WakesWaiting(waiting) => metrics.lending.waiting.set(waiting as i64),
            Notice::MayWake(pod) => {
                metrics.lending.wakes.with_label_values(&["wakeable"]).inc();
                info!(%pod, "it may wake");
            }
            Notice::OveruseEviction { pod, outcome } => {
                let evictions = &metrics.planner.overuse_evictions;
                evictions.with_label_values(&[outcome.code()]).inc();
                match outcome {
                    EvictionOutcome::Evicted => {
                        info!(%pod, "evicted: it used more VRAM than it was granted");
                    }
                    outcome => {
                        warn!(%pod, %outcome, "not evicted yet, although it uses more VRAM than it was granted");
                    }
                }
            }
            Notice::Evicted(pod) => info!(%pod, "evicted"),
            Notice::PlaceLost { pod, refusal } => {
                info!(%pod, refusal, "the cluster or the policy changed while the plan was made");
            }
            Notice::Failed { pod, what, why } => warn!(%pod, why, "{what}"),
        }
    }

    /// Logs a planned placement, and adds the planning run as a span to the pod's trace.
    fn tell_planned(&self, place: &PlannedPlacement, took: Millis) {
        let PlannedPlacement {
            uid,
            key,
            reservation,
            eviction_cost,
            exact,
            by,
        } = place;
        let (node, victims) = (&reservation.node, listed(reservation.victims.iter()));
        let (lost_gpu_ms, by) = (eviction_cost.cost, by.code());
        info!(pod = %key, %node, %victims, lost_gpu_ms, exact, by, "place planned");
        let took = Duration::from_millis(took.0);
        let span = self.service.traces().planned(uid, key, took);
        if span.is_recorded() {
            span.set_node(node);
            span.set("stowage.gpus", listed(&*reservation.devices).to_string());
            span.set("stowage.victims", reservation.victims.len() as i64);
        }
    }
}
