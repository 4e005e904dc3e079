//! A whole small cluster in one process: stand-ins for the API server, the kube-scheduler and the kubelets.
//!
//! `stowage demo` shows Stowage on them and the integration tests drive it through them, over real loopback HTTP,
//! so that what runs is what ships. They behave as EXTENDER.md records of kube-scheduler v1.36.2; they are no
//! Kubernetes, and nothing of Stowage's own deciding may live here. They print nothing.

pub mod api_server;
pub mod kubelet;
pub mod scheduler;
