//! The command line of Stowage, which places LLM pods on single GPUs as an extender of the stock kube-scheduler. Nothing decides
//! here: `docs/inside/architecture.md` draws the packages.

pub mod cli;
