//! Where a pod goes: [`snapshot`] is the cluster at one generation; [`fit`] says whether a node can take the pod, and why not;
//! [`affinity`] chooses the GPUs on which an engine sleeps that the pod may wake; of others [`pack`] chooses by their [`packing`]
//! cost: the usable VRAM that is lost ([`learned`]), or best fit; [`engine_load_cost`] says what joining busy engines costs, and
//! [`start_model`] when an engine would answer there; [`rank`] orders the nodes; [`score_cache`] remembers what a node scored for
//! a demand until the node changes.
//!
//! All of it reads a snapshot and changes nothing. Evictions are not considered here.

pub mod affinity;
pub mod claims;
pub mod device_plugin;
pub(crate) mod engine_load_cost;
pub mod fit;
pub mod learned;
mod node_names;
pub(crate) mod pack;
pub mod packing;
pub mod rank;
pub mod score_cache;
pub mod snapshot;
pub mod start_model;
