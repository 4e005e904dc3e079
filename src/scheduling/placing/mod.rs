//! Where a pod goes: [`snapshot`] is the cluster at one generation; [`fit`] says whether a node can take the pod, and why not;
//! [`pack`] chooses its GPUs there, those of an engine that it may wake or those whose use costs least: the usable VRAM that is
//! lost ([`learned`]), or best fit; [`start_model`] says when an engine would answer there; [`rank`] orders the nodes, by what
//! joining busy engines costs, too; [`score_cache`] remembers what a node scored for a demand until the node changes. On
//! [`whole_nodes`] others choose the GPUs.
//!
//! All of it reads a snapshot and changes nothing. Evictions are not considered here.

pub mod fit;
pub mod learned;
pub(crate) mod pack;
pub mod rank;
pub mod score_cache;
pub mod snapshot;
pub mod start_model;
pub mod whole_nodes;
