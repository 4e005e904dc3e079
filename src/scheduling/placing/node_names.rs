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

#[derive(Debug, Clone, Default)]
pub struct NodeNames {
    text: String,
    /// Of each name, by its place, where it ends in the text.
    ends: Vec<u32>,
    /// The places by the hash of the name; as many rows as a power of two, or none.
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
        let mut names = Self { text, ends, rows: Vec::new() };
        names.enter_all();
        names
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The place of a name, or where it would be.
    pub fn search(&self, name: &str) -> Result<usize, usize> {
        let (mut from, mut to) = (0, self.len());
        while from < to {
            let middle = (from + to) / 2;
            match self.name(middle).cmp(name) {
                std::cmp::Ordering::Less => from = middle + 1,
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Greater => to = middle,
            }
        }
        Err(from)
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

    /// Puts a name before the one that has this place.
    pub fn insert(&mut self, place: usize, name: &str) {
        let start = self.start(place);
        self.text.insert_str(start as usize, name);
        self.ends.insert(place, start);
        self.ends[place..].iter_mut().for_each(|end| *end += offset(name.len()));
        if is_full(self.len(), self.rows.len()) {
            return self.enter_all();
        }
        self.rows
            .iter_mut()
            .filter(|known| **known != FREE && **known as usize >= place)
            .for_each(|known| *known += 1);
        self.enter(place);
    }

    /// Takes out the name at this place.
    pub fn remove(&mut self, place: usize) {
        let (start, end) = (self.start(place), self.ends[place]);
        self.text.replace_range(start as usize..end as usize, "");
        self.ends.remove(place);
        self.ends[place..].iter_mut().for_each(|later| *later -= end - start);
        // A row that came free would end the search for those that were put behind it.
        self.enter_all();
    }

    #[inline]
    fn name(&self, place: usize) -> &str {
        &self.text[self.start(place) as usize..self.ends[place] as usize]
    }

    #[inline]
    fn start(&self, place: usize) -> u32 {
        place.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn enter_all(&mut self) {
        let mut rows = 8;
        while is_full(self.len(), rows) {
            rows *= 2;
        }
        self.rows.clear();
        self.rows.resize(rows, FREE);
        (0..self.len()).for_each(|place| self.enter(place));
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

fn is_full(names: usize, rows: usize) -> bool {
    names > rows / 4 * 3
}

/// Of a cluster with the longest names that Kubernetes allows, sixteen million nodes.
fn offset(length: usize) -> u32 {
    u32::try_from(length).expect("the names of all nodes are less than four gigabytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn each_name_has_the_place_that_it_has_in_order(
            first in prop::collection::btree_set("[ab]{1,9}", 0..40),
            edits in prop::collection::vec("[ab]{1,9}", 0..60),
        ) {
            let mut plain: BTreeSet<String> = first;
            let mut names = NodeNames::of(plain.iter().map(String::as_str));
            for edit in edits {
                match names.search(&edit) {
                    Ok(place) => {
                        names.remove(place);
                        plain.remove(&edit);
                    }
                    Err(place) => {
                        names.insert(place, &edit);
                        plain.insert(edit);
                    }
                }
                prop_assert_eq!(names.len(), plain.len());
                for (place, name) in plain.iter().enumerate() {
                    prop_assert_eq!(names.place_of(name), Some(place));
                }
                prop_assert_eq!(names.place_of("c"), None);
                prop_assert_eq!(names.place_of(""), None);
            }
        }
    }

    #[test]
    fn without_a_node_no_name_has_a_place() {
        assert_eq!(NodeNames::default().place_of("a"), None);
        assert_eq!(NodeNames::of([].into_iter()).place_of("a"), None);
    }
}
