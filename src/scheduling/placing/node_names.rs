//! The names of a snapshot's nodes, and the place of each: side by side, because a request about all nodes looks up every one of
//! them.
//!
//! The names stand one behind the other in one text, in order. A table with a quarter of its places free or more has the place of
//! each name where the name's hash says, or in the next free row after that; so a look-up reads one row, and a name that lies
//! among its like.

use rustc_hash::FxBuildHasher;
use std::hash::BuildHasher;

/// A row without a name.
const FREE: u32 = u32::MAX;

#[derive(Debug, Default)]
pub struct NodeNames {
    text: String,
    /// Of each name, by its place, where it ends in the text.
    ends: Vec<u32>,
    /// The places by the hash of the name; as many rows as a power of two, or none at all.
    rows: Vec<u32>,
}

impl NodeNames {
    /// The names must be in order, and each there once.
    pub fn of<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        let (mut text, mut ends) = (String::new(), Vec::new());
        for name in names {
            text.push_str(name);
            ends.push(offset(text.len()));
        }
        let mut rows = 8;
        while ends.len() > rows / 4 * 3 {
            rows *= 2;
        }
        let mut names = Self { text, ends, rows: vec![FREE; rows] };
        (0..names.ends.len()).for_each(|place| names.enter(place));
        names
    }

    #[inline]
    pub fn place_of(&self, name: &str) -> Option<usize> {
        if self.rows.is_empty() {
            return None;
        }
        let mut row = self.row_of(name);
        loop {
            match self.rows[row] {
                FREE => return None,
                place if self.name(place as usize) == name => return Some(place as usize),
                _ => row = (row + 1) & (self.rows.len() - 1),
            }
        }
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
        let mut row = self.row_of(self.name(place));
        while self.rows[row] != FREE {
            row = (row + 1) & (self.rows.len() - 1);
        }
        self.rows[row] = place as u32;
    }

    #[inline]
    fn row_of(&self, name: &str) -> usize {
        FxBuildHasher.hash_one(name) as usize & (self.rows.len() - 1)
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
        }
    }

    #[test]
    fn without_a_node_no_name_has_a_place() {
        assert_eq!(NodeNames::default().place_of("a"), None);
        assert_eq!(NodeNames::of([].into_iter()).place_of("a"), None);
    }
}
