//! Kinds of long computations beside the requests.

/// What a computation is for; the label in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
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
