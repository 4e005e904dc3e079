//! Loops over recordings that are made here.
