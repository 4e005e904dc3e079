//! Kinds of long computations beside the requests.

/// What a computation is for; the label in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkKind {
    Plan,
    Preempt,
    Relief,
    PackingModel,
    Capacity,
    ConflictAudit,
    DesiredReplicas,
    Policy,
    /// A page for operators.
    Page,
}

impl WorkKind {
    pub const ALL: [Self; 9] = [
        Self::Plan,
        Self::Preempt,
        Self::Relief,
        Self::PackingModel,
        Self::Capacity,
        Self::ConflictAudit,
        Self::DesiredReplicas,
        Self::Policy,
        Self::Page,
    ];

    pub fn label(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Preempt => "preempt",
            Self::Relief => "relief",
            Self::PackingModel => "packing-model",
            Self::Capacity => "capacity",
            Self::ConflictAudit => "conflict-audit",
            Self::DesiredReplicas => "desired-replicas",
            Self::Policy => "policy",
            Self::Page => "page",
        }
    }
}
