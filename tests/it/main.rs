//! The integration tests: one binary, a module per edge.

mod shared;
mod stand_in_api_server;
mod stand_in_extender;
mod stand_in_kubelet;
mod stand_in_scheduler;
mod stand_in_shapes;
