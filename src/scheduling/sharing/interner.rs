//! One value in memory for all that are equal.

use rustc_hash::FxHashSet;
use std::hash::Hash;
use std::sync::Arc;

/// Below so many values it is not looked which of them are still in use.
const MIN_TIDY_SIZE: usize = 1024;

#[derive(Debug)]
pub(crate) struct Interner<T: ?Sized> {
    values: FxHashSet<Arc<T>>,
    /// With so many values those that nobody else has are forgotten: twice as many as were in use then, so that each new one pays
    /// a constant share of that.
    tidy_at: usize,
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self {
            values: FxHashSet::default(),
            tidy_at: MIN_TIDY_SIZE,
        }
    }
}

impl<T: ?Sized> Clone for Interner<T> {
    fn clone(&self) -> Self {
        Self {
            values: self.values.clone(),
            tidy_at: self.tidy_at,
        }
    }
}

impl<T: Eq + Hash + ?Sized> Interner<T> {
    /// Puts the known value in place of one that is equal.
    pub fn share(&mut self, value: &mut Arc<T>) {
        match self.values.get(value) {
            Some(interned) => *value = interned.clone(),
            None => {
                self.drop_unused();
                self.values.insert(value.clone());
            }
        }
    }

    fn drop_unused(&mut self) {
        if self.values.len() < self.tidy_at {
            return;
        }
        self.values = std::mem::take(&mut self.values)
            .into_iter()
            .filter(|value| Arc::strong_count(value) > 1)
            .collect();
        self.tidy_at = MIN_TIDY_SIZE.max(2 * self.values.len());
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
        (0..10 * MIN_TIDY_SIZE).for_each(|n| drop(shared(&format!("gone-{n}"))));
        assert!(kept.iter().all(|value| Arc::ptr_eq(value, &shared(value))));
        assert!(interner.values.len() <= MIN_TIDY_SIZE);
    }
}
