//! How many replicas of each model its load asks for. Nothing here changes replicas: an HPA or KEDA reads the number.
//!
//! ```text
//!  ledger, engines' figures ─► ModelLoad ─► need by KV cache, queue, requests ─► windows and steps ─► DesiredReplicas
//!                    replicas               signals, trend                       model_state
//! ```
//!
//! The number of replicas is that of Kubernetes' HPA, with totals in place of averages: what all replicas use, divided by what
//! one is meant to use, is how many are needed, however many there are now. A replica that starts uses nothing and adds nothing,
//! so that a slow start does not make the number rise. What a replica does not report counts as nothing on the way up and as a
//! full replica on the way down: unknown load never removes a replica.
//!
//! Replicas are counted in thousandths ([`MilliReplicas`]), so that sums are exact and the same on every machine.

mod autoscaler;
mod desired;
mod load;
mod model_state;
mod recommendations;
mod replicas;
mod signals;
mod trend;

pub use autoscaler::{Autoscaler, MAX_MODELS};
pub use desired::{DecidingFactor, DesiredReplicas, SignalNeed};
pub use load::{EngineFigures, EngineSample, ModelLoad, Permille, ReportedSum};
pub use model_state::ModelScaling;
pub use replicas::loads;
pub use signals::{MilliReplicas, Signal};

#[cfg(test)]
mod closed_loop_tests;
#[cfg(test)]
mod proptests;
#[cfg(test)]
mod replicas_tests;
#[cfg(test)]
mod tests;
