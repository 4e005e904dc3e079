//! The kubelets.
