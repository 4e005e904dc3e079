//! What `serve` does beside the requests: it says how much CPU and memory nodes have left, and has what free VRAM is worth
//! learned anew when enough pods have come.

use super::{Knowledge, Shipped, books};
use crate::scheduling::node::Node;
use crate::scheduling::policy::Policy;
use crate::scheduling::request::Companion;
use crate::scheduling::worth::{EVERY, Mix, Wish, Worth};
use crate::sim::packing::cluster::Cluster;
use crate::sim::packing::kinds::Setting;
use crate::units::{Bytes, MilliCpu};
use std::sync::Arc;

impl Knowledge {
    /// Of each pod of the trace, as if all had come already.
    pub fn of_all(setting: &Setting) -> Self {
        let window = u16::try_from(setting.pods.len()).unwrap_or(u16::MAX);
        let policy = Policy::default();
        let wishes: Vec<Option<Wish>> =
            setting.kinds.iter().map(|kind| Wish::of(&books::demands(setting, kind, &policy)?[0])).collect();
        let mut mix = Mix::of_last(window);
        setting.pods.iter().filter_map(|pod| wishes[pod.kind].clone()).for_each(|wish| mix.arrive(wish));
        Self::Told { mix: Arc::new(mix), next_at: 0 }
    }
}

impl Shipped<'_> {
    /// Nodes that have changed since the last look.
    pub(super) fn look_at_nodes(&mut self, cluster: &Cluster) {
        for (rank, node) in cluster.nodes().iter().enumerate() {
            if self.versions[rank] != node.version {
                self.versions[rank] = node.version;
                let spare = Companion { cpu: MilliCpu(node.cpu), memory: Bytes(node.memory) };
                self.ledger.set_spare(&self.names[rank], Some(spare));
            }
        }
    }

    /// As often as `serve` does.
    pub(super) fn learn(&mut self) {
        let mix = match &mut self.knowledge {
            Knowledge::Learned if self.ledger.is_worth_due() => self.ledger.mix().clone(),
            Knowledge::Learned => return,
            Knowledge::Told { mix, next_at } if *next_at <= self.ledger.mix().arrivals() => {
                *next_at = self.ledger.mix().arrivals() + EVERY;
                mix.clone()
            }
            Knowledge::Told { .. } => return,
        };
        let snapshot = self.ledger.snapshot();
        let worth = Worth::learn(&mix, snapshot.nodes().iter().map(Node::site));
        // The ledger copies one that somebody still reads.
        drop(snapshot);
        self.ledger.set_worth(worth);
    }
}
