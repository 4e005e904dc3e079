//! VRAM that sleeping engines lend, as an explanation says it.

use crate::ledger::LoanStage;
use crate::units::Bytes;
use serde::{Deserialize, Serialize};

/// What the explained pod, which is bound, has to do with VRAM that is lent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodLoanPart {
    #[serde(flatten)]
    pub stage: LoanStage,
    /// What `stowage.dev/wake-requested` says.
    pub request: Option<String>,
    /// Of a pod that borrows, the pods on its GPUs that lend; of any other, the pods that borrow there.
    pub others: Vec<String>,
    /// VRAM that pods borrow on its GPUs.
    pub borrowed_bytes: Bytes,
    /// All of its grant is free, and stays so.
    pub is_free: bool,
}

/// Whether a pod that waits may have VRAM that sleeping engines lend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BorrowingPart {
    /// Why it may not; `None` if it may.
    pub kept_out_because: Option<String>,
}

/// VRAM that is lent on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuLoansPart {
    /// What sleeping engines lend here now, used or not.
    pub lent_bytes: Bytes,
    pub borrowed_bytes: Bytes,
    /// They lend to pods of a lower priority than this.
    pub below_priority: i32,
    /// What such pods may still have.
    pub free_to_borrowers_bytes: Bytes,
}
