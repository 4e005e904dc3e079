//! The names of a snapshot's nodes, and the place of each: side by side, because a request about all nodes looks up every one of
//! them.
//!
//! The names stand one behind the other in one text, in order. A table with a quarter of its rows free or more has the place of
//! each name where the name's hash says, or in the next free row after that. Beside the place a row has eight more bits of the
//! hash: a name that only stands in the way is hardly ever compared.

use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

/// A row without a name, and the place of a name that is not there.
pub const NO_PLACE: u32 = u32::MAX;

/// Of a row: its lower bits are the place, the others bits of the name's hash.
const PLACE_BITS: u32 = 24;

/// Names whose rows are read side by side. Rows lie all over a table that is larger than a core's cache; read one after the other,
/// each would be waited for.
const AT_ONCE: usize = 32;

#[derive(Debug, Clone, Default)]
pub struct NodeNames {
    text: String,
    /// Of each name, by its place, where it ends in the text.
    ends: Vec<u32>,
    /// As many as a power of two, or none at all.
    rows: Vec<u32>,
}

/// Where to look for a name first, and what its row has beside the place.
#[derive(Debug, Clone, Copy)]
struct Hashed {
    row: usize,
    tag: u32,
}

impl NodeNames {
    /// The names must be in order, and each there once.
    pub fn of<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let (mut text, mut ends) = (String::new(), Vec::new());
        for name in names {
            text.push_str(name);
            ends.push(offset(text.len()));
        }
        assert!(
            ends.len() < 1 << PLACE_BITS,
            "a cluster has less than sixteen million nodes"
        );
        let mut rows = 8;
        while ends.len() > rows / 4 * 3 {
            rows *= 2;
        }
        let mut names = Self {
            text,
            ends,
            rows: vec![NO_PLACE; rows],
        };
        (0..names.ends.len()).for_each(|place| names.enter(place));
        names
    }

    #[inline]
    pub fn place_of(&self, name: &str) -> Option<usize> {
        if self.rows.is_empty() {
            return None;
        }
        let hashed = self.hash(name);
        let place = self.find(name, hashed, self.rows[hashed.row]);
        (place != NO_PLACE).then_some(place as usize)
    }

    /// The place of each of these names, or [`NO_PLACE`].
    pub fn places_of<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> Vec<u32> {
        if self.rows.is_empty() {
            return names.map(|_| NO_PLACE).collect();
        }
        let mut places = Vec::with_capacity(names.size_hint().0);
        let mut few: Vec<(&str, Hashed)> = Vec::with_capacity(AT_ONCE);
        let mut read = [NO_PLACE; AT_ONCE];
        loop {
            few.clear();
            few.extend(
                names
                    .by_ref()
                    .take(AT_ONCE)
                    .map(|name| (name, self.hash(name))),
            );
            for (row, (_, hashed)) in read.iter_mut().zip(&few) {
                *row = self.rows[hashed.row];
            }
            places.extend(
                few.iter()
                    .zip(read)
                    .map(|((name, hashed), row)| self.find(name, *hashed, row)),
            );
            if few.len() < AT_ONCE {
                return places;
            }
        }
    }

    /// The name's place, or [`NO_PLACE`]; `first` is what the row has where it is looked for first.
    #[inline]
    fn find(&self, name: &str, hashed: Hashed, first: u32) -> u32 {
        let (mut at, mut row) = (hashed.row, first);
        while row != NO_PLACE {
            let place = row & ((1 << PLACE_BITS) - 1);
            if row >> PLACE_BITS == hashed.tag && self.name(place as usize) == name {
                return place;
            }
            at = (at + 1) & (self.rows.len() - 1);
            row = self.rows[at];
        }
        NO_PLACE
    }

    #[inline]
    fn name(&self, place: usize) -> &str {
        &self.text[self.start(place) as usize..self.ends[place] as usize]
    }

    #[inline]
    fn start(&self, place: usize) -> u32 {
        place.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn enter(&mut self, place: usize) {
        let Hashed { mut row, tag } = self.hash(self.name(place));
        while self.rows[row] != NO_PLACE {
            row = (row + 1) & (self.rows.len() - 1);
        }
        self.rows[row] = tag << PLACE_BITS | place as u32;
    }

    #[inline]
    fn hash(&self, name: &str) -> Hashed {
        let hash = FxBuildHasher.hash_one(name);
        Hashed {
            row: hash as usize & (self.rows.len() - 1),
            tag: (hash >> (64 - 8)) as u32,
        }
    }
}

/// Of a cluster with the longest names that Kubernetes allows, sixteen million nodes.
fn offset(length: usize) -> u32 {
    u32::try_from(length).expect("the names of all nodes are less than four gigabytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_name_has_the_place_that_it_has_in_order(
            known in prop::collection::btree_set("[ab]{1,9}", 0..200),
            other in "[ab]{0,9}",
        ) {
            let names = NodeNames::of(known.iter().map(String::as_str));
            for (place, name) in known.iter().enumerate() {
                prop_assert_eq!(names.place_of(name), Some(place));
            }
            prop_assert_eq!(names.place_of(&other), known.iter().position(|name| *name == other));
            let asked: Vec<&str> = known.iter().map(String::as_str).rev().chain([&*other]).collect();
            let each = asked.iter().map(|name| names.place_of(name).map_or(NO_PLACE, |place| place as u32));
            prop_assert_eq!(names.places_of(asked.iter().copied()), each.collect::<Vec<_>>());
        }
    }

    #[test]
    fn without_a_node_no_name_has_a_place() {
        assert_eq!(NodeNames::default().place_of("a"), None);
        assert_eq!(NodeNames::of([].into_iter()).place_of("a"), None);
        assert_eq!(
            NodeNames::default().places_of(["a"].into_iter()),
            [NO_PLACE]
        );
    }
}
