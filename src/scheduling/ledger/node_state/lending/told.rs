//! Loans as a person is told of them who asks why; nothing that decides should come here.

use super::super::{NodeState, ResidentPod};
use super::lent::kept_from_borrowing;
use crate::ids::{PodKey, PodUid};
use crate::ledger::pod_state::PodState;
use crate::ledger::{KeepReason, Ledger};
use crate::units::{Bytes, Millis};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// What a pod has to do with VRAM that is lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    rename_all = "kebab-case",
    rename_all_fields = "camelCase",
    tag = "stage"
)]
pub enum LoanStage {
    /// Its VRAM is lent: it is evicted when an engine beside it is to wake.
    Borrows,
    /// It sleeps, and lends so much of each of its GPUs, used or not.
    Lends { bytes_per_gpu: Bytes },
    /// It sleeps, and lends after that time at the earliest.
    Sleeps { lends_in_millis: Millis },
    /// It sleeps, and got back what it lent, because its model is in demand.
    Recalled,
    /// It asked to wake, and is not told yet that it may.
    WaitsToWake,
    /// It may wake.
    MayWake,
}

/// What a bound pod has to do with VRAM that is lent, and with whom.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLoan {
    pub stage: LoanStage,
    /// What its annotation says.
    pub request: Option<Arc<str>>,
    /// Of a pod that borrows, the pods on its GPUs that may lend; of any other, the pods that borrow there.
    pub others: Vec<PodKey>,
    /// What pods borrow on its GPUs.
    pub borrowed: Bytes,
    /// All of its grant is free, and stays so.
    pub is_free: bool,
}

impl Ledger {
    /// What a bound pod has to do with VRAM that is lent; `None` if that is nothing.
    pub(crate) fn loan_of(&self, uid: &PodUid) -> Option<PodLoan> {
        let pod_state = self.pod_states.get(uid)?;
        let node_state = self.node_states.get(pod_state.node()?)?;
        let stage = self.loan_stage(node_state, pod_state, uid)?;
        let resident = node_state.resident_of(uid)?;
        let is_other = |other: &&ResidentPod| match stage {
            LoanStage::Borrows => other.lends,
            _ => other.borrows,
        };
        let beside = node_state
            .residents()
            .iter()
            .filter(|other| other.gpus.meets(resident.gpus));
        let others = beside.filter(|other| other.uid != *uid).filter(is_other);
        let keys = others.filter_map(|other| Some(self.pod_states.get(&other.uid)?.key.clone()));
        Some(PodLoan {
            stage,
            request: pod_state
                .bound()
                .and_then(|bound| bound.wake.request.clone()),
            others: keys.collect(),
            borrowed: resident
                .gpus
                .iter()
                .map(|place| node_state.borrowed_on(place))
                .sum(),
            is_free: node_state.is_wakeable(
                resident,
                self.policy.planning.lending.margin,
                self.now,
            ),
        })
    }

    pub(in crate::ledger) fn loan_stage(
        &self,
        node_state: &NodeState,
        pod_state: &PodState,
        uid: &PodUid,
    ) -> Option<LoanStage> {
        if pod_state.borrows() {
            return Some(LoanStage::Borrows);
        }
        let wake = &pod_state.bound()?.wake;
        if wake.is_open() {
            let waits = wake.request.is_some() && wake.request != wake.told;
            return Some(if waits {
                LoanStage::WaitsToWake
            } else {
                LoanStage::MayWake
            });
        }
        let resident = node_state
            .resident_of(uid)
            .filter(|resident| resident.lends)?;
        let lender = node_state.lending.lenders.get(uid)?;
        if lender.is_recalled {
            return Some(LoanStage::Recalled);
        }
        let sleep = lender.sleep.as_ref()?;
        if !sleep.lends {
            let pause = lender.pause(self.now, &self.policy.planning.lending);
            return Some(LoanStage::Sleeps {
                lends_in_millis: (sleep.since + pause).since(self.now),
            });
        }
        let lent = sleep
            .kept
            .iter()
            .map(|(_, kept)| resident.per_gpu.minus(*kept));
        Some(LoanStage::Lends {
            bytes_per_gpu: lent.min().unwrap_or_default(),
        })
    }

    /// Whether a pod's class may borrow, and then what keeps the pod itself from it, if anything does.
    pub(crate) fn borrowing_of(&self, pod_state: &PodState) -> Option<Option<KeepReason>> {
        let may = pod_state.demand.terms.borrows;
        may.then(|| kept_from_borrowing(&pod_state.demand, pod_state, &self.policy))
    }
}
