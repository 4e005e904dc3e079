//! Containers that share memory.
//!
//! A copy of a [`PieceList`] or a [`ShardedMap`] is made at once: it shares all parts, and a change on either side copies one
//! part. A plan, an operator's page and a decision read a copy beside the lock, while the original goes on. With a million pods
//! and tens of thousands of nodes neither the copy nor the first change after it may take longer than a request can wait. An
//! [`Interner`] keeps values that are equal once.

mod interner;
mod piece_list;
mod sharded_map;

pub(crate) use interner::Interner;
pub(crate) use piece_list::PieceList;
pub(crate) use sharded_map::ShardedMap;
