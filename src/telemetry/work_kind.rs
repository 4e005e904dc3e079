//! Kinds of long computations beside the requests.

use stowage_scheduling::coded::labels;

labels! {
    /// What a computation is for; the label in metrics.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum WorkKind: label {
        "plan" Plan,
        "preempt" Preempt,
        "relief" Relief,
        "packing-model" PackingModel,
        "capacity" Capacity,
        "conflict-audit" ConflictAudit,
        "desired-replicas" DesiredReplicas,
        "policy" Policy,
        /// A page for operators.
        "page" Page,
    }
}
