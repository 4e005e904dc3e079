//! A list in pieces. A copy counts the pieces; a change copies one; an element that comes or goes moves those of its piece.

use serde::{Serialize, Serializer};
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Index;
use std::sync::Arc;

/// Elements in a piece at most. Tens of thousands of nodes are some hundreds of pieces, and a piece is copied in microseconds.
const MAX_PIECE_LEN: usize = 128;

#[derive(Debug, Clone)]
pub struct PieceList<T> {
    /// The pieces, none of which is empty.
    pieces: Vec<Arc<Vec<T>>>,
    /// The index of the first element of each piece.
    starts: Vec<usize>,
    len: usize,
}

impl<T> Default for PieceList<T> {
    fn default() -> Self {
        Self {
            pieces: Vec::new(),
            starts: Vec::new(),
            len: 0,
        }
    }
}

impl<T> PieceList<T> {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn get(&self, index: usize) -> Option<&T> {
        let (piece, offset) = self.locate(index)?;
        self.pieces[piece].get(offset)
    }

    pub fn iter(&self) -> Iter<'_, T> {
        Iter {
            pieces: self.pieces.iter(),
            piece: [].iter(),
            left: self.len,
        }
    }

    /// The index of the element that `order` finds equal, or where it would be. The elements must be in that order.
    pub fn search(&self, order: impl Fn(&T) -> Ordering) -> Result<usize, usize> {
        let later = self
            .pieces
            .partition_point(|piece| order(&piece[0]).is_le());
        let Some(piece) = later.checked_sub(1) else {
            return Err(0);
        };
        let found = self.pieces[piece].binary_search_by(order);
        found
            .map(|offset| self.starts[piece] + offset)
            .map_err(|offset| self.starts[piece] + offset)
    }

    /// The elements of pieces that another list does not share, each with its index.
    pub(crate) fn unshared_with<'a>(
        &'a self,
        other: &'a Self,
    ) -> impl Iterator<Item = (usize, &'a T)> {
        let theirs: BTreeSet<*const Vec<T>> = other.pieces.iter().map(Arc::as_ptr).collect();
        let own_pieces = self.pieces.iter().zip(&self.starts);
        let own = own_pieces.filter(move |(piece, _)| !theirs.contains(&Arc::as_ptr(piece)));
        own.flat_map(|(piece, start)| (*start..).zip(piece.iter()))
    }

    /// The piece of an element, and its place there.
    fn locate(&self, index: usize) -> Option<(usize, usize)> {
        let piece = self
            .starts
            .partition_point(|start| *start <= index)
            .checked_sub(1)?;
        Some((piece, index - self.starts[piece]))
    }

    fn recount(&mut self, from: usize) {
        self.starts.truncate(from);
        let mut next = from
            .checked_sub(1)
            .map_or(0, |last| self.starts[last] + self.pieces[last].len());
        for piece in &self.pieces[from..] {
            self.starts.push(next);
            next += piece.len();
        }
        self.len = next;
    }
}

impl<T: Clone> PieceList<T> {
    pub fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        let (piece, offset) = self.locate(index)?;
        // An element that is not there needs no copy of a piece.
        (offset < self.pieces[piece].len())
            .then(|| &mut Arc::make_mut(&mut self.pieces[piece])[offset])
    }

    /// Inserts an element before the one that has this index.
    pub fn insert(&mut self, index: usize, element: T) {
        assert!(
            index <= self.len,
            "a list of {} has no place {index}",
            self.len
        );
        // At the boundary of two pieces, to the end of the first.
        let Some((piece, offset)) = self
            .locate(index.saturating_sub(1))
            .map(|(piece, offset)| (piece, if index == 0 { 0 } else { offset + 1 }))
        else {
            self.pieces.push(Arc::new(vec![element]));
            return self.recount(0);
        };
        let elements = Arc::make_mut(&mut self.pieces[piece]);
        if elements.len() < MAX_PIECE_LEN {
            elements.insert(offset, element);
        } else if offset == MAX_PIECE_LEN {
            // What comes in order fills its pieces.
            self.pieces.insert(piece + 1, Arc::new(vec![element]));
        } else {
            let mut upper = elements.split_off(MAX_PIECE_LEN / 2);
            match offset.checked_sub(MAX_PIECE_LEN / 2) {
                Some(offset) => upper.insert(offset, element),
                None => elements.insert(offset, element),
            }
            self.pieces.insert(piece + 1, Arc::new(upper));
        }
        self.recount(piece);
    }

    /// Takes out the element at this index.
    pub fn remove(&mut self, index: usize) -> T {
        let (piece, offset) = self.locate(index).expect("the list has an element there");
        let elements = Arc::make_mut(&mut self.pieces[piece]);
        let removed = elements.remove(offset);
        if elements.is_empty() {
            self.pieces.remove(piece);
        }
        self.recount(piece);
        removed
    }
}

/// The elements of a list, in order.
#[derive(Debug)]
pub struct Iter<'a, T> {
    pieces: std::slice::Iter<'a, Arc<Vec<T>>>,
    /// The remaining elements of the piece before those.
    piece: std::slice::Iter<'a, T>,
    left: usize,
}

impl<T> Clone for Iter<'_, T> {
    fn clone(&self) -> Self {
        Self {
            pieces: self.pieces.clone(),
            piece: self.piece.clone(),
            left: self.left,
        }
    }
}

impl<'a, T> Iterator for Iter<'a, T> {
    type Item = &'a T;

    fn next(&mut self) -> Option<&'a T> {
        loop {
            if let Some(element) = self.piece.next() {
                self.left -= 1;
                return Some(element);
            }
            self.piece = self.pieces.next()?.iter();
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T> ExactSizeIterator for Iter<'_, T> {}

impl<'a, T> IntoIterator for &'a PieceList<T> {
    type Item = &'a T;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Iter<'a, T> {
        self.iter()
    }
}

impl<T> FromIterator<T> for PieceList<T> {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut elements = elements.into_iter().peekable();
        let mut list = Self::default();
        while elements.peek().is_some() {
            list.pieces
                .push(Arc::new(elements.by_ref().take(MAX_PIECE_LEN).collect()));
        }
        list.recount(0);
        list
    }
}

impl<T> Index<usize> for PieceList<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        self.get(index).expect("the list has an element there")
    }
}

impl<T: PartialEq> PartialEq for PieceList<T> {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl<T: Eq> Eq for PieceList<T> {}

impl<T: Serialize> Serialize for PieceList<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_list(
            first in 0usize..400,
            edits in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 0..400),
        ) {
            let mut list: PieceList<usize> = (0..first).collect();
            let mut plain: Vec<usize> = (0..first).collect();
            let (before, copy) = (plain.clone(), list.clone());
            for (edit, (comes, index)) in edits.into_iter().enumerate() {
                match comes {
                    true => {
                        let index = index.index(plain.len() + 1);
                        list.insert(index, 1000 + edit);
                        plain.insert(index, 1000 + edit);
                    }
                    false if plain.is_empty() => {}
                    false => {
                        let index = index.index(plain.len());
                        prop_assert_eq!(list.remove(index), plain.remove(index));
                    }
                }
            }
            prop_assert!(list.iter().eq(&plain) && list.iter().len() == plain.len());
            prop_assert!((0..plain.len()).all(|index| list[index] == plain[index]));
            prop_assert_eq!((list.len(), list.get(plain.len())), (plain.len(), None));
            prop_assert!(list.pieces.iter().all(|piece| !piece.is_empty() && piece.len() <= MAX_PIECE_LEN));
            prop_assert!(copy.iter().eq(&before), "the copy has not changed");
        }

        #[test]
        fn what_is_in_order_is_found(elements in prop::collection::btree_set(0u32..2000, 0..600)) {
            let list: PieceList<u32> = elements.iter().copied().collect();
            let plain: Vec<u32> = elements.into_iter().collect();
            for wanted in 0..2000 {
                let order = |element: &u32| element.cmp(&wanted);
                prop_assert_eq!(list.search(order), plain.binary_search_by(order));
            }
        }
    }

    #[test]
    fn what_comes_in_order_fills_its_pieces_and_a_change_copies_one() {
        let mut list = PieceList::default();
        (0..10 * MAX_PIECE_LEN).for_each(|index| list.insert(index, index));
        assert_eq!(list.pieces.len(), 10);
        let copy = list.clone();
        *list.get_mut(3 * MAX_PIECE_LEN + 5).unwrap() = 0;
        assert!(list.get_mut(10 * MAX_PIECE_LEN).is_none());
        let shared = list
            .pieces
            .iter()
            .zip(&copy.pieces)
            .filter(|(a, b)| Arc::ptr_eq(a, b))
            .count();
        assert_eq!(
            (shared, copy[3 * MAX_PIECE_LEN + 5]),
            (9, 3 * MAX_PIECE_LEN + 5)
        );
        let unshared = copy
            .unshared_with(&list)
            .map(|(offset, element)| (offset, *element));
        assert!(
            unshared
                .eq((3 * MAX_PIECE_LEN..4 * MAX_PIECE_LEN)
                    .zip(3 * MAX_PIECE_LEN..4 * MAX_PIECE_LEN))
        );
    }
}
