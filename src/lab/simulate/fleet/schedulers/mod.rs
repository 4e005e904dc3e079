//! Schedulers of a simulated fleet. [`Stowage`] is the shipped one: it knows what messages say, and decides through the core's
//! entry point. The others are what it is compared with, and see the hardware itself, which is in their favor.

mod stock;
mod stowage;

pub(crate) use stock::KubeSchedulerBaseline;
pub use stock::{PreemptionMode, ScoringStrategy};
pub use stowage::Stowage;

use super::machines::Machines;
use super::messages::{Message, SchedulerAction};
use stowage_scheduling::units::Moment;

pub trait FleetScheduler {
    /// Called once, with the fleet as it is at the beginning.
    fn initialize(&mut self, now: Moment, machines: &Machines);

    fn observe(&mut self, now: Moment, message: &Message);

    /// Places what can be placed, and evicts for what cannot. Only a baseline reads the machines.
    fn round(&mut self, now: Moment, machines: &Machines) -> Vec<SchedulerAction>;

    /// Whether it reads what agents report.
    fn reads_reports(&self) -> bool;

    /// Whether another round may change something: a pod waits, or an engine may need relief.
    fn has_pending(&self) -> bool;
}
