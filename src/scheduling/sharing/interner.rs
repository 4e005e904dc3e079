//! One value in memory for all that are equal.

use rustc_hash::FxHashSet;
use std::hash::Hash;
use std::sync::Arc;

/// Below so many values it is not looked which of them are still in use.
const FEW: usize = 1024;

#[derive(Debug)]
pub(crate) struct Interner<T: ?Sized> {
    known: FxHashSet<Arc<T>>,
    /// With so many values those that nobody else has are forgotten: twice as many as were in use then, so that each new one pays
    /// a constant share of that.
    tidy_at: usize,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self {
            known: FxHashSet::default(),
            tidy_at: FEW,
        }
    }
}

impl<T: ?Sized> Clone for Interner<T> {
    fn clone(&self) -> Self {
        Self {
            known: self.known.clone(),
            tidy_at: self.tidy_at,
        }
    }
}

impl<T: Eq + Hash + ?Sized> Interner<T> {
    /// Puts the known value in place of one that is equal.
    pub fn share(&mut self, value: &mut Arc<T>) {
        match self.known.get(value) {
            Some(known) => *value = known.clone(),
            None => {
                self.tidy();
                self.known.insert(value.clone());
            }
        }
    }

    fn tidy(&mut self) {
        if self.known.len() < self.tidy_at {
            return;
        }
        self.known = std::mem::take(&mut self.known)
            .into_iter()
            .filter(|value| Arc::strong_count(value) > 1)
            .collect();
        self.tidy_at = FEW.max(2 * self.known.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_equal_is_one_and_what_nobody_has_any_more_is_forgotten() {
        let mut interner = Interner::default();
        let mut shared = |text: &str| {
            let mut value: Arc<str> = text.into();
            interner.share(&mut value);
            value
        };
        let (one, other) = (shared("a"), shared("a"));
        assert!(Arc::ptr_eq(&one, &other));
        let kept: Vec<Arc<str>> = (0..10).map(|n| shared(&n.to_string())).collect();
        (0..10 * FEW).for_each(|n| drop(shared(&format!("gone-{n}"))));
        assert!(kept.iter().all(|value| Arc::ptr_eq(value, &shared(value))));
        assert!(interner.known.len() <= FEW);
    }
}
