//! The lab: what runs the decision core without a cluster. [`simulate`] plays workloads in simulated time on the functions that
//! ship, beside other policies; [`demo`] runs the whole service among stand-ins for the API server, kube-scheduler, kubelets and
//! engines, in one process.
//!
//! No rule about pods, GPUs or victims stands here, and nothing that serves a cluster imports from here.

#[cfg(feature = "service")]
pub mod demo;
pub mod simulate;
