//! The lab runs the decision core without a cluster. [`simulate`] plays workloads in simulated time with the production
//! functions, beside other policies; [`demo`] runs the whole service among stand-ins for the API server, kube-scheduler,
//! kubelets and engines, in one process; [`faults`] plays two of its replicas in simulated time, and breaks what it can;
//! [`picture`] draws what came of a simulation.
//!
//! No rule about pods, GPUs or victims is here, and nothing that serves a cluster depends on this package.

pub mod demo;
pub mod faults;
pub mod picture;
pub mod simulate;

#[cfg(test)]
#[path = "../../tests/it/needs.rs"]
#[expect(
    dead_code,
    reason = "the lab's own tests run no program that `.ci/run` installs"
)]
mod needs;
