//! Room for a pod on GPUs that are not free: who has to leave for it.

use super::Place;
use super::ranking::Seat;
use super::scratch::Scratch;
use crate::scheduling::decision::Hold;
use crate::scheduling::ledger::Pending;
use crate::scheduling::preempt::{Room, Shortfall, VictimSet, cheapest_victims};
use crate::scheduling::request::Companion;
use crate::scheduling::stock::Freed;

impl Scratch<'_> {
    /// The node where the cheapest pods leave, held on the scratch ledger.
    pub(super) fn evicting(&mut self, pod: &Pending) -> Option<Place> {
        if !pod.demand.may_preempt {
            return None;
        }
        let set = self.rooms(pod).into_iter().filter_map(|room| {
            let shortfall = Shortfall::default();
            cheapest_victims(&room, &pod.demand, shortfall)
        }).min_by(|a,b| a.price.cmp(&b.price))?;
        self.hold_set(pod, set)
    }
}
