//! The search over many nodes of which little is known yet: each is looked at closely only when it could be cheaper than what
//! was found. The answer is that of a close look at all of them.

use super::bound::floor;
use super::price::Price;
use super::room::Room;
use super::search::Search;
use super::unit::Case;
use super::{Effort, Rules, VictimSet};
use crate::ids::NodeName;
use crate::scheduling::request::Demand;
use std::borrow::Borrow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// A node, and no more than what the cheapest set of victims costs there. In order, the one that could be cheapest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prospect {
    pub floor: Price,
    pub node: NodeName,
}

/// A room that has been looked at, and no more than what the cheapest set of victims costs in it.
pub type Seen<R> = (Price, R);

/// Where a search finds its rooms. Whoever keeps them for the next search can keep what this one learns of them.
pub trait Rooms {
    type Room: Borrow<Room>;

    /// `None` if nobody's leaving would be enough.
    fn look(&mut self, node: &NodeName) -> Option<Seen<Self::Room>>;

    /// No set of the node's room costs less; `None` as above.
    fn learn(&mut self, _node: &NodeName, _least: Option<Price>) {}
}

impl<R: Borrow<Room>, F: FnMut(&NodeName) -> Option<Seen<R>>> Rooms for F {
    type Room = R;

    fn look(&mut self, node: &NodeName) -> Option<Seen<R>> {
        self(node)
    }
}

/// `None` if nobody's leaving would be enough.
pub fn seen(room: Room, demand: &Demand) -> Option<Seen<Room>> {
    Some((floor(&room, demand)?, room))
}

/// Of all sets of candidates of one room whose leaving makes `demand` fit there, the cheapest; of rooms that cost the same, the
/// first by name. `prospects` stand in order; only those that could be cheapest are looked at.
pub fn cheapest_among<R: Rooms>(
    prospects: impl IntoIterator<Item = Prospect>,
    demand: &Demand,
    rules: Rules,
    effort: Effort,
    mut rooms: R,
) -> Option<VictimSet> {
    let mut search = Search::new(effort);
    let mut distant = prospects.into_iter().peekable();
    // Rooms that have been looked at, and what they cost at least by what is known now.
    let mut seen: Vec<Option<R::Room>> = Vec::new();
    let mut near: BinaryHeap<Reverse<(Prospect, usize)>> = BinaryHeap::new();
    loop {
        let next = near.peek().map(|Reverse((prospect, _))| prospect);
        if let Some(prospect) = distant.next_if(|prospect| next.is_none_or(|next| prospect <= next)) {
            if !search.beats(prospect.floor, &prospect.node) {
                // All others could only be dearer.
                break;
            }
            let Some((floor, room)) = rooms.look(&prospect.node) else { continue };
            debug_assert!(prospect.floor <= floor, "{prospect:?} {floor:?}");
            near.push(Reverse((Prospect { floor, ..prospect }, seen.len())));
            seen.push(Some(room));
            continue;
        }
        let Some(Reverse((prospect, place))) = near.pop() else { break };
        let room = seen[place].take().expect("each room stands in the queue once");
        if !search.beats(prospect.floor, &prospect.node) {
            break;
        }
        let case = Case::new(room.borrow(), demand, rules);
        rooms.learn(&prospect.node, case.as_ref().map(|case| case.least));
        if let Some(case) = case {
            search.try_room(&case);
        }
    }
    search.best()
}

/// The same of rooms that are all known, each of another node.
pub fn cheapest(rooms: &[Room], demand: &Demand, rules: Rules, effort: Effort) -> Option<VictimSet> {
    let known = rooms.iter().filter_map(|room| Some((&room.node, (floor(room, demand)?, room))));
    let known: BTreeMap<&NodeName, Seen<&Room>> = known.collect();
    let mut prospects: Vec<Prospect> =
        known.iter().map(|(node, (floor, _))| Prospect { floor: *floor, node: (*node).clone() }).collect();
    prospects.sort_unstable();
    cheapest_among(prospects, demand, rules, effort, |node: &NodeName| known.get(node).copied())
}
