//! Who places pods that run on CPUs alone. In a cluster they never come to Stowage: the stock scheduler places them, by rules that
//! are the owner's. Two stand in for it here: one that goes by what free VRAM is worth, as Stowage does, and one that knows
//! nothing of it. What they take of CPU decides what GPUs can still be used, so it matters which.

use crate::scheduling::ledger::Ledger;
use crate::scheduling::request::Companion;
use crate::sim::packing::baseline::fit::BestFit;
use crate::sim::packing::baseline::scored::Scored;
use crate::sim::packing::cluster::{Cluster, Seat};
use crate::sim::packing::kinds::{Kind, Setting};
use crate::sim::packing::placer::{Arrival, Placed, Placer};
use crate::units::{Bytes, MilliCpu};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CpuRule {
    /// Where it costs least of what free VRAM is worth; best fit as long as nothing was learned.
    #[default]
    Worth,
    /// Where the least CPU and GPU is left over.
    BestFit,
}

pub struct CpuOnly<'s> {
    setting: &'s Setting,
    rule: CpuRule,
    best_fit: Scored<'s, BestFit>,
}

impl<'s> CpuOnly<'s> {
    pub fn new(setting: &'s Setting, rule: CpuRule) -> Self {
        Self { setting, rule, best_fit: Scored::new(setting, BestFit) }
    }

    pub fn place(&mut self, ledger: &mut Ledger, cluster: &Cluster, arrival: Arrival) -> Option<Placed> {
        if self.rule == CpuRule::BestFit || !ledger.worth().is_learned() {
            return self.best_fit.place(cluster, arrival);
        }
        let node = cheapest(ledger, cluster, &self.setting.kinds[arrival.kind])?;
        Some(Placed::alone(Seat { node, gpus: Default::default() }))
    }
}

/// By its rank, which is its place in a snapshot too.
fn cheapest(ledger: &mut Ledger, cluster: &Cluster, kind: &Kind) -> Option<usize> {
    let snapshot = ledger.snapshot();
    let taken = Companion { cpu: MilliCpu(kind.cpu), memory: Bytes(kind.memory) };
    let loss = |rank: &usize| snapshot.worth().loss_of_company(snapshot.outlook(*rank), taken);
    super::accepted(cluster, kind).min_by_key(|rank| (loss(rank), *rank))
}
