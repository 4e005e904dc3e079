//! The integration tests: one binary, a module per edge.

mod agent;
mod agent_auth;
mod bind;
mod client;
mod cluster;
mod concurrency;
mod control_plane;
mod device_plugin;
mod golden;
mod http;
mod process;
mod publish;
mod readme;
mod refusals;
mod reports;
mod served;
mod shadow;
mod shared;
mod stand_in_api_server;
mod stand_in_extender;
mod stand_in_kubelet;
mod stand_in_scheduler;
mod stand_in_shapes;
mod tls;
mod wake;
mod whole_way;
