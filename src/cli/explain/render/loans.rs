//! Formats what an explanation says of VRAM that engines lend.

use stowage_scheduling::explaining::explanation::{BorrowingPart, GpuLoansPart, PodLoanPart};
use stowage_scheduling::explaining::obstacle::list_names;
use stowage_scheduling::explaining::units::human_duration;
use stowage_scheduling::ledger::LoanStage;
use stowage_scheduling::units::Bytes;

/// Whether a pending pod may borrow VRAM, as text.
pub fn borrowing_text(part: &BorrowingPart) -> String {
    match &part.kept_out_because {
        None => {
            "it may borrow VRAM that engines lend, and is evicted when one of them needs it".into()
        }
        Some(why) => format!("it may not borrow VRAM that engines lend: {why}"),
    }
}

/// What a bound pod lends or borrows, as text.
pub fn pod_loan_text(loan: &PodLoanPart) -> String {
    let PodLoanPart {
        stage,
        request,
        others,
        borrowed_bytes,
        is_free,
    } = loan;
    let request_text = request
        .as_ref()
        .map_or(String::new(), |request| format!(" (request {request})"));
    let borrowed = match others.is_empty() {
        true => "none of it is borrowed".into(),
        false => format!(
            "{} of its GPUs are borrowed by {}",
            borrowed_bytes,
            list_names(others)
        ),
    };
    match stage {
        LoanStage::Borrows => {
            format!(
                "it borrows VRAM of {}, and is evicted when that is needed there",
                list_names(others)
            )
        }
        LoanStage::Lends { bytes_per_gpu } => {
            format!("its engine sleeps and lends {bytes_per_gpu} of each GPU; {borrowed}")
        }
        LoanStage::Sleeps { lends_in_millis } => {
            format!(
                "its engine sleeps, and lends in {} at the earliest; {borrowed}",
                human_duration(*lends_in_millis)
            )
        }
        LoanStage::LendsUnused { bytes_per_gpu } => format!(
            "its engine does not use {bytes_per_gpu} of each GPU, and lends that until it allocates it: the driver ends the borrower then; {borrowed}"
        ),
        LoanStage::KeepsUnused { bytes_per_gpu } => format!(
            "its engine does not use {bytes_per_gpu} of each GPU, and lends no more of that now: a pod beside it has no VRAM limits, the node's condition is not True, or the agent is silent; {borrowed}"
        ),
        LoanStage::Steadies {
            bytes_per_gpu,
            lends_in_millis,
        } => format!(
            "its engine does not use {bytes_per_gpu} of each GPU, and lends that in {} at the earliest; {borrowed}",
            human_duration(*lends_in_millis)
        ),
        LoanStage::Recalled => format!(
            "its engine sleeps, and lends nothing because the engines of its model are nearly full; {borrowed}"
        ),
        LoanStage::WaitsToWake if !others.is_empty() => {
            format!("it asked to wake{request_text}, and waits for evictions: {borrowed}")
        }
        LoanStage::WaitsToWake if *is_free => {
            format!("it asked to wake{request_text}, and its VRAM is free: it is being told")
        }
        LoanStage::WaitsToWake => format!(
            "it asked to wake{request_text}, and waits for a report that shows nothing of the pods that borrowed"
        ),
        LoanStage::MayWake => format!("it may wake{request_text}; {borrowed}"),
    }
}

/// What a pod on a GPU lends or borrows, as text behind its figures.
pub fn occupant_loan_text(loan: LoanStage) -> String {
    match loan {
        LoanStage::Borrows => ", borrows".into(),
        LoanStage::Lends { bytes_per_gpu } => format!(", asleep, lends {bytes_per_gpu}"),
        LoanStage::Sleeps { lends_in_millis } => {
            format!(
                ", asleep, lends in {} at the earliest",
                human_duration(lends_in_millis)
            )
        }
        LoanStage::LendsUnused { bytes_per_gpu } => {
            format!(", lends {bytes_per_gpu} that it does not use")
        }
        LoanStage::KeepsUnused { bytes_per_gpu } => {
            format!(", does not use {bytes_per_gpu}, lends no more of it now")
        }
        LoanStage::Steadies {
            bytes_per_gpu,
            lends_in_millis,
        } => format!(
            ", does not use {bytes_per_gpu}, lends that in {} at the earliest",
            human_duration(lends_in_millis)
        ),
        LoanStage::Recalled => ", asleep, recalled".into(),
        LoanStage::WaitsToWake => ", waits to wake".into(),
        LoanStage::MayWake => ", may wake".into(),
    }
}

pub fn gpu_loans_text(part: &GpuLoansPart) -> String {
    let GpuLoansPart {
        lent_bytes,
        borrowed_bytes,
        below_priority,
        free_to_borrowers_bytes,
    } = part;
    match *lent_bytes {
        Bytes::ZERO if *borrowed_bytes > Bytes::ZERO => {
            format!("{borrowed_bytes} are borrowed, and nothing more is lent now")
        }
        Bytes::ZERO => {
            "nothing is lent now: its report is not fresh, it is reserved for a pod that may not borrow, or \
             the node's capacity does not show it yet"
                .into()
        }
        _ => format!(
            "{lent_bytes} are lent to preemptible pods of a priority below {below_priority}, {borrowed_bytes} \
             borrowed; {free_to_borrowers_bytes} are free to them"
        ),
    }
}
