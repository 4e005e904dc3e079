//! Reports the control loop's notices in the log, the metrics and the traces.

use super::LoopDriver;
use std::time::Duration;
use stowage_scheduling::control_loop::{EvictionOutcome, LoopNotice};
use stowage_scheduling::ids::comma_separated;
use stowage_scheduling::planning::{PlannedPlacement, WaitReason};
use stowage_scheduling::units::Millis;
use tracing::{error, info, warn};

impl LoopDriver {
    pub(super) fn report(&self, notice: LoopNotice) {
        let metrics = &self.state.metrics;
        match notice {
            LoopNotice::Planned(planned, took) => self.report_planned(&planned, took),
            LoopNotice::RunEnded {
                took,
                outcome,
                left_over,
            } => {
                metrics.planner.run_seconds.observe(took.0 as f64 / 1e3);
                metrics.planner.runs.with_label_values(&[outcome]).inc();
                metrics.planner.left_over.set(left_over as i64);
            }
            LoopNotice::PlanningFails(pod) => error!(%pod, "{}", WaitReason::PlanningFailed),
            LoopNotice::WritePostponed(kind) => {
                metrics.planner.postponed.with_label_values(&[kind]).inc();
            }
            LoopNotice::LateReservation(pod) => {
                warn!(%pod, "ended a reservation that a previous leader wrote too late");
                let labels = ["reservation", "landed-late"];
                metrics.writes.with_label_values(&labels).inc();
            }
            LoopNotice::Recalls { begun, ended } => {
                info!(recalled = begun, ended, "sleeping engines' loans");
                metrics.lending.recalls.inc_by(begun as u64);
            }
            LoopNotice::LoanEnds { pod, lender, gpu } => {
                let lender = lender.map(tracing::field::display);
                info!(%pod, lender, %gpu, "its loan ends")
            }
            LoopNotice::LoanEviction(outcome) => {
                let evictions = &metrics.lending.evictions;
                evictions.with_label_values(&[outcome]).inc();
            }
            LoopNotice::WakesWaiting(waiting) => metrics.lending.waiting.set(waiting as i64),
            LoopNotice::MayWake(pod) => {
                metrics.lending.wakes.with_label_values(&["wakeable"]).inc();
                info!(%pod, "it may wake");
            }
            LoopNotice::OveruseEviction { pod, outcome } => {
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
            LoopNotice::Evicted(pod) => info!(%pod, "evicted"),
            LoopNotice::PlacementLost { pod, refusal } => {
                info!(%pod, refusal, "the cluster or the policy changed while the plan was made");
            }
            LoopNotice::Failed { pod, what, why } => warn!(%pod, why, "{what}"),
        }
    }

    /// Logs a planned placement, and adds the planning run as a span to the pod's trace.
    fn report_planned(&self, planned: &PlannedPlacement, took: Millis) {
        let PlannedPlacement {
            uid,
            key,
            reservation,
            eviction_cost,
            exact,
            by,
        } = planned;
        let (node, victims) = (
            &reservation.node,
            comma_separated(reservation.victims.iter()),
        );
        let (lost_gpu_ms, by) = (eviction_cost.cost, by.into_str());
        info!(pod = %key, %node, %victims, lost_gpu_ms, exact, by, "place planned");
        let took = Duration::from_millis(took.0);
        let span = self.state.traces().plan(uid, key, took);
        if span.is_recorded() {
            span.set_node(node);
            span.set(
                "stowage.gpus",
                comma_separated(&*reservation.devices).to_string(),
            );
            span.set("stowage.victims", reservation.victims.len() as i64);
        }
    }
}
