//! The integration tests: one binary, a module per edge.

mod agent;
mod agent_auth;
mod bind;
mod client;
mod cluster;
mod concurrency;
mod control_plane;
mod golden;
mod http;
mod process;
mod publish;
mod readme;
mod refusals;
mod reload;
mod reports;
mod served;
mod shared;
mod shipped_policies;
mod stand_in_api_server;
mod stand_in_extender;
mod stand_in_kubelet;
mod stand_in_scheduler;
mod stand_in_shapes;
mod tls;
mod wake;
mod whole_way;
