//! VRAM that engines lend: what the pod has to do with it, and what is lent on a GPU.

use super::explanation::{BorrowingPart, GpuLoansPart, PodLoanPart};
use super::facts::{Facts, GpuOccupants};
use crate::ledger::{KeepReason, LoanStage, Occupant, PodLoan, PodPhase};
use crate::units::Bytes;
use crate::vocabulary::demand::Sharing;
use crate::vocabulary::gpu::Gpu;

pub(crate) fn pod_loan(facts: &Facts) -> Option<PodLoanPart> {
    facts.loan.as_ref().map(
        |PodLoan {
             stage,
             request,
             others,
             borrowed,
             is_free,
         }| PodLoanPart {
            stage: *stage,
            request: request.as_ref().map(|request| request.to_string()),
            others: facts.names(others),
            borrowed_bytes: *borrowed,
            is_free: *is_free,
        },
    )
}

/// Whether the pod may borrow; `None` unless it waits and its class may borrow.
pub fn borrowing(facts: &Facts) -> Option<BorrowingPart> {
    let kept_out = facts
        .borrowing
        .as_ref()
        .filter(|_| matches!(facts.entry.phase, PodPhase::Waiting(_)))?;
    let because = |why: &KeepReason| match why {
        KeepReason::Group(group) => format!("its {group} is evicted together or not at all"),
        other => other.to_string(),
    };
    let is_exclusive = facts.demand().sharing == Sharing::Exclusive;
    let exclusive = is_exclusive.then(|| "it requests its GPUs exclusively".to_owned());
    let max_borrowed = facts.policy.class(facts.demand().class).max_borrowed;
    let too_large = max_borrowed
        .filter(|max| *max < facts.demand().vram())
        .map(|max| format!("its class lets each pod borrow {max} at most (maxBorrowed)"));
    Some(BorrowingPart {
        kept_out_because: kept_out.as_ref().map(because).or(exclusive).or(too_large),
    })
}

/// The VRAM that is lent on one GPU; `None` where no pod lends or borrows.
pub fn gpu_loans(gpu: &Gpu, gpu_occupants: GpuOccupants<'_>) -> Option<GpuLoansPart> {
    let occupants_where = |is_one: fn(&LoanStage) -> bool| {
        gpu_occupants
            .iter()
            .filter(move |occupant| occupant.loan.as_ref().is_some_and(is_one))
    };
    let borrowers = occupants_where(|stage| matches!(stage, LoanStage::Borrows));
    let borrowed: Bytes = borrowers.map(|Occupant { per_gpu, .. }| *per_gpu).sum();
    let lends = occupants_where(|stage| {
        matches!(
            stage,
            LoanStage::Lends { .. } | LoanStage::LendsUnused { .. }
        )
    })
    .next()
    .is_some();
    let is_lent = lends || borrowed > Bytes::ZERO || gpu.lendable > Bytes::ZERO;
    let free = (gpu.capacity + gpu.lendable)
        .minus(gpu.charged)
        .minus(gpu.unaccounted_vram);
    is_lent.then_some(GpuLoansPart {
        lent_bytes: gpu.lendable,
        borrowed_bytes: borrowed,
        below_priority: gpu.lends_below,
        free_to_borrowers_bytes: free,
    })
}
