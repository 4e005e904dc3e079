//! The cost of a report without the network: the same bodies as function calls, all nodes in turn, so that the caches are as
//! cold for each as after a second. The fastest round counts, as the one the machine disturbed least.

use crate::cluster::BenchCluster;
use crate::node::{CacheUsage, ReportingNode};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stowage_scheduling::policy::Policy;
use stowage_server::extender::Extender;
use stowage_server::extender::reports::{Sender, reports};
use stowage_server::extender::request::RequestLimits;
use stowage_server::kubernetes::dump::{Dump, DumpControlPlane};
use stowage_server::kubernetes::index::ClusterIndex;
use stowage_server::service::ServerState;

const ROUNDS: usize = 8;

pub fn print(cluster: &BenchCluster) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _inside = runtime.enter();
    let service = ServerState::new(Policy::default());
    let dump = Dump::from_text(cluster.dump(), Path::new("bench"));
    let control_plane = Arc::new(
        DumpControlPlane::load(&dump, &service, &mut ClusterIndex::default())
            .expect("the dump is one"),
    );
    let extender = Extender::new(service, control_plane, RequestLimits::default());
    let mut nodes: Vec<ReportingNode> = (0..cluster.nodes())
        .map(|place| ReportingNode::new(place, 0))
        .collect();
    let mut least = Duration::MAX;
    for _ in 0..ROUNDS {
        let bodies: Vec<Vec<u8>> = nodes
            .iter_mut()
            .map(|node| node.next(CacheUsage::Mixed))
            .collect();
        let started = Instant::now();
        for body in &bodies {
            let taken =
                reports(&extender, &Sender::Anyone, extender.state.now(), body).expect("an answer");
            assert_eq!(taken.accepted, 1);
        }
        least = least.min(started.elapsed());
    }
    let micros = least.as_secs_f64() * 1e6 / nodes.len() as f64;
    println!("a report without its way: {micros:.1} µs");
}
