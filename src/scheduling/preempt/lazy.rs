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

/// A node, and less than what any set of victims costs there. In order, the one that could be cheapest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prospect {
    pub floor: Price,
    pub node: NodeName,
}

/// A room that has been looked at, and less than what any set of victims costs in it.
pub type Seen<R> = (Price, R);

/// `None` if nobody's leaving would be enough.
pub fn seen(room: Room, demand: &Demand) -> Option<Seen<Room>> {
    Some((floor(&room, demand)?, room))
}

/// Of all sets of candidates of one room whose leaving makes `demand` fit there, the cheapest; of rooms that cost the same, the
/// first by name. `prospects` stand in order; of those that could be cheapest, `look` finds the rooms, if they are any.
pub fn cheapest_among<R: Borrow<Room>>(
    prospects: Vec<Prospect>,
    demand: &Demand,
    rules: Rules,
    effort: Effort,
    mut look: impl FnMut(&NodeName) -> Option<Seen<R>>,
) -> Option<VictimSet> {
    let mut search = Search::new(effort);
    let mut distant = prospects.into_iter().peekable();
    // Rooms that have been looked at, and what they cost at least by what is known now.
    let mut rooms: Vec<Option<R>> = Vec::new();
    let mut near: BinaryHeap<Reverse<(Prospect, usize)>> = BinaryHeap::new();
    loop {
        let next = near.peek().map(|Reverse((prospect, _))| prospect);
        if let Some(prospect) = distant.next_if(|prospect| next.is_none_or(|next| prospect <= next)) {
            if !search.beats(prospect.floor, &prospect.node) {
                // All others could only be dearer.
                break;
            }
            let Some((floor, room)) = look(&prospect.node) else { continue };
            debug_assert!(prospect.floor <= floor, "{prospect:?} {floor:?}");
            near.push(Reverse((Prospect { floor, ..prospect }, rooms.len())));
            rooms.push(Some(room));
            continue;
        }
        let Some(Reverse((prospect, place))) = near.pop() else { break };
        let room = rooms[place].take().expect("each room stands in the queue once");
        if !search.beats(prospect.floor, &prospect.node) {
            break;
        }
        if let Some(case) = Case::new(room.borrow(), demand, rules) {
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
    cheapest_among(prospects, demand, rules, effort, |node| known.get(node).copied())
}
