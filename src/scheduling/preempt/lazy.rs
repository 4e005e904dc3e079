//! The search over many nodes of which little is known yet: each is looked at closely only when it could be cheaper than what
//! was found. The answer is that of a close look at all of them.

use super::allowance::EvictionAllowance;
use super::bound::floor;
use super::price::Price;
use super::room::Room;
use super::search::Search;
use super::unit::{Case, NoSet};
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
    /// No set there has fewer pods that are evicted.
    pub least_evicted: u32,
}

/// A room that has been looked at, and no more than what the cheapest set of victims costs in it.
pub type Seen<R> = (Price, R);

/// What a search came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub set: Option<VictimSet>,
    /// Some set was left out because of a limit on evictions.
    pub is_limited: bool,
}

/// Where a search finds its rooms, and what it must keep to. Whoever keeps rooms for the next search can keep what this one learns
/// of them.
pub trait Rooms {
    type Room: Borrow<Room>;

    /// `None` if nobody's leaving would be enough.
    fn look(&mut self, node: &NodeName) -> Option<Seen<Self::Room>>;

    /// No set of the node's room costs less; `None` as above.
    fn learn(&mut self, _node: &NodeName, _least: Option<Price>) {}

    /// How many pods may be evicted; `None` if that does not matter.
    fn allowance(&self) -> Option<EvictionAllowance<'_>> {
        None
    }

    /// Whether the best set of a room can be had. If not, none of that room is.
    fn accepts(&mut self, _set: &VictimSet) -> bool {
        true
    }

    /// Whether to go on, after so many steps more. A search that does not has found nothing.
    fn goes_on(&mut self, _steps: u32) -> bool {
        true
    }
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
    rooms: R,
) -> Option<VictimSet> {
    find_among(prospects, demand, rules, effort, rooms).set
}

/// The same, with what was left out.
pub fn find_among<R: Rooms>(
    prospects: impl IntoIterator<Item = Prospect>,
    demand: &Demand,
    rules: Rules,
    effort: Effort,
    mut rooms: R,
) -> Found {
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
            if rooms.allowance().is_some_and(|allowance| !is_within(&prospect, &allowance)) {
                search.note_limited();
                continue;
            }
            if !rooms.goes_on(LOOK) {
                return Found { set: None, is_limited: false };
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
        let before = search.steps();
        try_room(&mut search, room.borrow(), demand, rules, &mut rooms);
        if !rooms.goes_on(search.steps() - before) {
            return Found { set: None, is_limited: false };
        }
    }
    Found { is_limited: search.is_limited(), set: search.best() }
}

/// Steps that the first look at a room counts for: it asks the entry of each pod there.
const LOOK: u32 = 16;

/// Whether as many may be evicted as each set of the node has at least.
fn is_within(prospect: &Prospect, allowance: &EvictionAllowance<'_>) -> bool {
    let least = prospect.least_evicted;
    least == 0 || (least <= allowance.left_in_cluster() && least <= allowance.left_on(&prospect.node))
}

fn try_room<R: Rooms>(search: &mut Search, room: &Room, demand: &Demand, rules: Rules, rooms: &mut R) {
    match Case::new(room, demand, rules, rooms.allowance()) {
        Err(NoSet::Ever) => rooms.learn(&room.node, None),
        // Without a limit, or later, it has one.
        Err(NoSet::Now) => search.note_limited(),
        Ok(case) => {
            if !case.is_limited {
                rooms.learn(&room.node, Some(case.least));
            }
            search.try_room(&case);
            if search.best_on(&room.node).is_some_and(|set| !rooms.accepts(set)) {
                search.reject_best();
            }
        }
    }
}

/// The same of rooms that are all known, each of another node.
pub fn cheapest(rooms: &[Room], demand: &Demand, rules: Rules, effort: Effort) -> Option<VictimSet> {
    let known = rooms.iter().filter_map(|room| Some((&room.node, (floor(room, demand)?, room))));
    let known: BTreeMap<&NodeName, Seen<&Room>> = known.collect();
    let mut prospects: Vec<Prospect> =
        known.iter().map(|(node, (floor, _))| prospect(node, *floor)).collect();
    prospects.sort_unstable();
    cheapest_among(prospects, demand, rules, effort, |node: &NodeName| known.get(node).copied())
}

fn prospect(node: &NodeName, floor: Price) -> Prospect {
    Prospect { floor, node: node.clone(), least_evicted: 0 }
}
