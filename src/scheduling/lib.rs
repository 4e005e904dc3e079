//! The decision core. Data in, decision out: nothing here knows a clock, a network, a thread, a Kubernetes type, a
//! logger or a random number. `now` is an argument, every order ends in a name, and no hash map is iterated, so the
//! same snapshot, policy and request give the same answer, byte for byte.
//!
//! In layers: a module imports only from those above it in this list.
//!
//! - [`mod@coded`]: enums whose values have codes; [`ids`], [`units`]: names and quantities, parsed once.
//! - [`engines`]: what is known of each inference engine, in one declaration.
//! - [`sharing`]: containers whose copies share memory.
//! - [`mod@contention`]: what engines on one GPU cost each other.
//! - [`vocabulary`]: demand, GPU, node, model tier, disruption info.
//! - [`policy`]: the validated policy: classes, tenants, pools, weights.
//! - [`kube_filters`]: what kube-scheduler's own filters say of a node.
//! - [`reasons`]: why a pod is not placed: the one list.
//! - [`placing`]: snapshot, fit, pack, score and rank.
//! - [`ledger`]: which pod has which VRAM: node states, pod states, reservations. The one writer.
//! - [`evicting`]: which pods to evict for a preemptor, and at what cost.
//! - [`planning`]: places for pods that wait, groups, consolidation, relief of loaded engines.
//! - [`autoscaling`]: how many replicas the load of each model asks for.
//! - [`audit`]: the ledger against itself, and bound pods against each other.
//! - [`verbs`]: the entry point: every change as an input, and kube-scheduler's four verbs as functions.
//! - [`mod@control_loop`]: what happens around the verbs and the planner, sans I/O: events and the time in, acts out.
//! - [`explaining`]: why a pod is where it is, and what would have to change.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod audit;
pub mod autoscaling;
pub mod coded;
pub mod contention;
pub mod control_loop;
pub mod engines;
pub mod evicting;
pub mod explaining;
pub mod ids;
pub mod kube_filters;
pub mod ledger;
pub mod placing;
pub mod planning;
pub mod policy;
pub mod reasons;
pub mod sharing;
pub mod units;
pub mod verbs;
pub mod vocabulary;

#[cfg(test)]
#[path = "../../tests/it/needs.rs"]
#[allow(
    clippy::disallowed_methods,
    dead_code,
    reason = "tests read traces, and run no program"
)]
mod needs;
#[cfg(test)]
mod proptests;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
