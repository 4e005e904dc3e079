//! Rotation under load: two replicas and fifty agents that report every second, while certificates and CAs are replaced every few
//! seconds by a wall clock that runs through months meanwhile. No report is lost, none is refused.

use super::{create_empty, published};
use crate::client::PATIENCE;
use crate::served::{Served, ServedCluster, endpoints, node, report};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use stowage_agent::publish::{Destination, PublishOutcome, Publisher};
use stowage_lab::demo::api_server::ApiServer;
use stowage_report::NodeReport;
use stowage_server::extender::server;
use stowage_server::extender::tls::{Tls, from_pem};
use stowage_server::kubernetes::certificates::{self, CertificateOptions, CertificateSettings};
use stowage_server::service::{Tenure, TimeSource};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, sleep};
use tokio_util::sync::CancellationToken;

const AGENTS: usize = 50;
const DAY: Duration = Duration::from_secs(24 * 3600);
/// What a kubelet takes at most to bring the ConfigMap to an agent. The agent reads the file with its next report, a second
/// later, or two on a busy machine.
const KUBELET_TAKES: Duration = Duration::from_millis(500);

/// How fast certificates are replaced, and how many are to be.
#[derive(Clone, Copy)]
struct Rotation {
    /// They last 90 days, and are renewed after 60.
    wall: fn() -> jiff::Timestamp,
    ca_lifetime: Duration,
    /// What a new CA waits for, in seconds that do not run faster.
    publication_delay: Duration,
    certificates: u64,
    cas: usize,
}

static START: LazyLock<(Instant, jiff::Timestamp)> =
    LazyLock::new(|| (Instant::now(), jiff::Timestamp::now()));

/// A clock on which so many days pass in a second. It starts now: the agents verify certificates by the machine's clock, which is
/// never ahead of this one.
fn fast<const DAYS: u32>() -> jiff::Timestamp {
    let (started, at) = *START;
    at + jiff::SignedDuration::try_from(started.elapsed() * 24 * 3600 * DAYS).unwrap()
}

fn time_source(wall: fn() -> jiff::Timestamp) -> TimeSource {
    TimeSource { wall, ..TimeSource::SYSTEM }
}

/// A replica that keeps its certificate in the stand-in API server.
struct RotatingReplica {
    served: Served,
    agents: SocketAddr,
    stop: CancellationToken,
    keeping: tokio::task::JoinHandle<()>,
}

impl RotatingReplica {
    fn start(api: &ApiServer, runtime: &Runtime, rotation: Rotation) -> Self {
        let mut cluster = ServedCluster::of(&[]);
        cluster.nodes.extend((0..AGENTS).map(|agent| node(&name_of(agent))));
        cluster.time = time_source(rotation.wall);
        let served = cluster.serve();
        let tls = Tls::awaiting().unwrap();
        let (mut endpoints, [_, agents, _]) = endpoints();
        endpoints.agents.tls = Some(tls.clone());
        let stop = CancellationToken::new();
        drop(served.spawn(server::serve(served.extender.clone(), endpoints, stop.clone())));
        let settings = CertificateSettings {
            names: vec!["127.0.0.1".into()],
            lifetime: 90 * DAY,
            ca_lifetime: rotation.ca_lifetime,
            publication_delay: rotation.publication_delay,
        };
        let options = CertificateOptions {
            secret: "kube-system/stowage-agents-tls".parse().unwrap(),
            config_map: "kube-system/stowage-agents-ca".parse().unwrap(),
            settings,
            look_every: Duration::from_millis(100),
        };
        let client = {
            let _inside = runtime.enter();
            api.client("stowage").unwrap()
        };
        let serve = move |found: &certificates::ServingCertificate| {
            let loaded = from_pem(&found.chain, &found.key.0).map_err(|error| error.to_string())?;
            tls.replace(&loaded);
            Ok(())
        };
        let keeping =
            runtime.spawn(certificates::run(client, served.service.clone(), options, vec!["agents"], serve));
        Self { served, agents, stop, keeping }
    }

    fn certificates(&self) -> u64 {
        let applied = &self.served.service.metrics.edge.tls_reloads;
        applied.with_label_values(&["agents", "applied"]).get()
    }

    fn leads(&self, leads: bool) {
        let tenure = if leads { Tenure::without_end() } else { Tenure::Standby };
        self.served.service.set_tenure(tenure);
    }
}

fn name_of(agent: usize) -> String {
    format!("node-{agent}")
}

/// Brings the ConfigMap to each agent's file, to each after another time.
async fn kubelets(api: Arc<ApiServer>, files: Vec<PathBuf>) {
    let mut brought = String::new();
    loop {
        let bundle = published(&api);
        if bundle != brought {
            let writes = files.iter().enumerate().map(|(agent, file)| {
                let (file, bundle) = (file.clone(), bundle.clone());
                async move {
                    sleep(KUBELET_TAKES * agent as u32 / AGENTS as u32).await;
                    write_whole(&file, &bundle);
                }
            });
            futures::future::join_all(writes).await;
            brought = bundle;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

/// As the kubelet does: a reader sees the file before or after.
fn write_whole(file: &Path, text: &str) {
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, file).unwrap();
}

/// How many reports an agent has sent, and what was not accepted.
#[derive(Default)]
struct Tally {
    sent: u64,
    lost: Vec<String>,
}

/// Reports every second until the end. Every other agent connects again each time, as one that restarts: a connection once made
/// needs no certificate any more.
async fn agent(number: usize, replicas: Vec<Destination>, ca: PathBuf, end: CancellationToken) -> Tally {
    let new = || Publisher::new(replicas.clone(), None, Some(ca.clone())).unwrap().with_patience(PATIENCE);
    let (mut publisher, mut tally) = (new(), Tally::default());
    sleep(Duration::from_millis(1000 * number as u64 / AGENTS as u64)).await;
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !end.is_cancelled() {
        ticks.tick().await;
        if number.is_multiple_of(2) {
            publisher = new();
        }
        tally.sent += 1;
        let report: NodeReport =
            serde_json::from_value(report(&name_of(number), "boot", tally.sent, 2)).unwrap();
        publisher.publish(report, Instant::now()).await;
        let state = publisher.state();
        let accepted = state.replicas.values().filter(|one| one.latest == PublishOutcome::Accepted);
        if accepted.count() != replicas.len() || !state.problems.is_empty() {
            tally.lost.push(format!("report {}: {state:?}", tally.sent));
        }
    }
    tally
}

/// Rotates until both replicas have had so many certificates, and so many CAs have signed.
fn rotate(rotation: Rotation) {
    let runtime = Runtime::new().unwrap();
    let api = Arc::new(runtime.block_on(ApiServer::start()).unwrap());
    create_empty(&api);
    let replicas = [(); 2].map(|()| RotatingReplica::start(&api, &runtime, rotation));
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<PathBuf> = (0..AGENTS).map(|agent| folder.path().join(format!("{agent}.crt"))).collect();
    let kubelets = runtime.spawn(kubelets(api.clone(), files.clone()));
    let end = CancellationToken::new();
    let tallies = runtime.block_on(async {
        // Agents that are there before the first CA lose what they cannot send: another test's matter.
        while !files.iter().all(|file| file.exists()) || replicas.iter().any(|one| one.certificates() == 0) {
            sleep(Duration::from_millis(50)).await;
        }
        let extenders: Vec<Destination> =
            replicas.iter().map(|one| format!("https://{}", one.agents).parse().unwrap()).collect();
        let mut agents: JoinSet<Tally> = JoinSet::new();
        for (number, file) in files.iter().enumerate() {
            agents.spawn(agent(number, extenders.clone(), file.clone(), end.clone()));
        }
        let mut signed = std::collections::BTreeSet::new();
        for turn in 0.. {
            // Now the one leads, now the other, now both believe it.
            let leader = turn / 10 % 3;
            replicas.iter().enumerate().for_each(|(place, one)| one.leads(leader == 2 || leader == place));
            let secret = api.get(super::SECRET).unwrap();
            signed.insert(secret["data"]["ca.crt"].to_string());
            let is_enough = |one: &RotatingReplica| one.certificates() >= rotation.certificates;
            if signed.len() >= rotation.cas && replicas.iter().all(is_enough) {
                break;
            }
            sleep(Duration::from_millis(200)).await;
        }
        end.cancel();
        agents.join_all().await
    });
    kubelets.abort();
    let sent: u64 = tallies.iter().map(|tally| tally.sent).sum();
    let lost: Vec<&String> = tallies.iter().flat_map(|tally| &tally.lost).collect();
    println!(
        "{sent} reports of {AGENTS} agents to two replicas in {:?}; certificates: {:?}; CAs: {}",
        START.0.elapsed(),
        replicas.each_ref().map(RotatingReplica::certificates),
        rotation.cas
    );
    assert!(lost.is_empty(), "{} of {sent} reports are lost, such as {}", lost.len(), lost[0]);
    assert!(sent >= AGENTS as u64);
    for replica in &replicas {
        replica.keeping.abort();
        replica.stop.cancel();
    }
}

#[test]
fn no_report_is_lost_while_certificates_and_cas_rotate() {
    rotate(Rotation {
        wall: fast::<60>,
        ca_lifetime: 900 * DAY,
        publication_delay: Duration::from_millis(2500),
        certificates: 12,
        cas: 2,
    });
}

#[test]
#[ignore = "two minutes: a certificate every five seconds"]
fn no_report_is_lost_in_two_minutes_with_a_rotation_every_five_seconds() {
    rotate(Rotation {
        wall: fast::<12>,
        ca_lifetime: 360 * DAY,
        publication_delay: Duration::from_secs(4),
        certificates: 25,
        cas: 5,
    });
}
