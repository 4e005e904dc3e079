//! The lab runs the decision core without a cluster. [`simulate`] plays workloads in simulated time with the production
//! functions, beside other policies; [`demo`] runs the whole service among stand-ins for the API server, kube-scheduler,
//! kubelets and engines, in one process; [`faults`] plays two of its replicas in simulated time, and breaks what it can;
//! [`campaign`] plays many seeds at once.
//!
//! No rule about pods, GPUs or victims is here, and no module that serves a cluster imports from here.

#[cfg(feature = "service")]
pub mod campaign;
#[cfg(feature = "service")]
pub mod demo;
#[cfg(feature = "service")]
pub mod faults;
pub mod simulate;
