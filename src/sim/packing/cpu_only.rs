//! Who places pods that run on CPUs alone. In a cluster they never come to Stowage: the stock scheduler places them, by a
//! configuration that is the owner's. Here they go where the least is left over ([`BestFit`]), as `MostAllocated` would have it.

use super::baseline::Score;
use super::baseline::fit::BestFit;
use super::baseline::scored::Scored;
use super::cluster::Cluster;
use super::kinds::Setting;
use super::placer::{Arrival, Placed, Placer};

pub struct CpuOnly<'s>(Box<dyn Placer + 's>);

impl<'s> CpuOnly<'s> {
    pub fn new(setting: &'s Setting) -> Self {
        Self::by(setting, BestFit)
    }

    /// By another score.
    pub fn by(setting: &'s Setting, score: impl Score + 's) -> Self {
        Self(Box::new(Scored::new(setting, score)))
    }

    pub fn place(&mut self, cluster: &Cluster, arrival: Arrival) -> Option<Placed> {
        self.0.place(cluster, arrival)
    }
}
