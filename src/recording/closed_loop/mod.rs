//! What would have differed under another policy: a recording's demand, played again with decisions of its own.
//!
//! A recording fixes what the world answered: a pod that another policy places elsewhere was never seen there. So its inputs
//! cannot be applied to other decisions. What can be kept is what was *asked* of the cluster: nodes and their GPUs, and pods with
//! their requests, when they came, and for how long they ran. [`demand`] reads that from a recording; [`stage`] plays it on the
//! recorded clock, from the first checkpoint on, and the core's own verbs and planner decide ([`scheduler`]). [`reports`] makes of
//! each recorded report what the agent would have reported of the pods as they are placed now.
//!
//! Two loops are played side by side, one under the recorded policy and one under the other: what the model leaves out is left out
//! of both. How far the first agrees with what was recorded says how far the model can be believed ([`comparison`]).
//!
//! Left out: kube-scheduler's queue and its other plugins' scores (a pod is bound where Stowage ranks it first), its own
//! preemption (the planner's stands for it), and what a placement changes of files and caches on nodes.

pub mod comparison;
pub mod demand;
pub mod policies;
mod reports;
mod scheduler;
mod stage;
mod tally;

#[cfg(test)]
mod tests;
