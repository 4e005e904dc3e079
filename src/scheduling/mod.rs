//! The decision core. Data in, decision out: nothing here knows a clock, a network, a thread, a Kubernetes type, a
//! logger or a random number. `now` is an argument, every order ends in a name, and no hash map is iterated, so the
//! same snapshot, policy and request give the same answer, byte for byte.
//!
//! How a pod comes through: [`request`] understands what it asks for; [`ledger`] knows what was promised, takes in what
//! was measured ([`reading`], [`loading`]) and hands out a [`snapshot`]; [`fit`] and [`pack`] find the GPUs on each node ([`plugin`],
//! where a device plugin hands them out) by what free VRAM is [`packing_model`], [`rank`] the best nodes ([`score_cache`] keeps what they answered), and [`preempt`] who would have to leave, by what each has at
//! [`disruption_info`] and what a [`budget`] allows; [`kube_filters`] knows which nodes the stock scheduler would refuse for reasons of its own,
//! and [`plan`] places whoever waits; the ledger then
//! holds, assumes and confirms. [`audit`] checks the books against themselves; [`explain`] tells a person why a pod is where it
//! is, and what would have to change.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod audit;
pub mod budget;
pub mod conflicts;
pub mod decision;
pub mod device;
pub mod disruption_info;
pub mod explain;
pub mod fit;
pub mod kube_filters;
pub mod ledger;
pub mod loading;
pub mod node;
pub mod pack;
pub mod packing_model;
pub mod plan;
pub mod plugin;
pub mod policy;
pub mod preempt;
pub mod rank;
pub mod reading;
pub mod request;
pub mod score_cache;
pub mod selector;
pub mod snapshot;

#[cfg(test)]
mod proptests;
