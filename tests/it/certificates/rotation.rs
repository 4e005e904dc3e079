//! Rotation under load: two replicas and fifty agents that report every second, while certificates and CAs are replaced every few
//! seconds by a wall clock that runs through months meanwhile. No report is lost, none is refused.

use super::{create_empty, published};
use crate::client::TEST_TIMEOUT;
use crate::served::{Served, ServedCluster, endpoints, node, report};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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
/// Maximum delay until a kubelet has brought the ConfigMap to an agent, which reads the file with its next report, a second later.
const KUBELET_SYNC_DELAY: Duration = Duration::from_millis(500);
/// Later than this is no kubelet, and no report from its beginning to the end of the next. Together they are within what a new CA
/// waits for.
const MAX_FILE_DELAY_MS: u64 = 700;
const MAX_REPORT_DELAY_MS: u64 = 1600;
const TICK: u64 = 50;

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

static START: LazyLock<jiff::Timestamp> = LazyLock::new(jiff::Timestamp::now);

/// The replicas' milliseconds. They pass as the machine's do, but while a kubelet or an agent is late: how long a new CA is to wait
/// for them is not for a busy machine to say.
static MILLIS: AtomicU64 = AtomicU64::new(0);

fn millis() -> u64 {
    MILLIS.load(Ordering::SeqCst)
}

/// A clock on which so many days pass in a second of the replicas. It starts now: by the machine's clock, by which the agents
/// verify certificates, none of its certificates ends.
fn fast<const DAYS: u32>() -> jiff::Timestamp {
    let elapsed = Duration::from_millis(millis()) * 24 * 3600 * DAYS;
    *START + jiff::SignedDuration::try_from(elapsed).unwrap()
}

fn time_source(wall: fn() -> jiff::Timestamp) -> TimeSource {
    TimeSource {
        wall,
        monotonic: || Duration::from_millis(millis()),
    }
}

/// When what is done began: the files' latest bundle was looked up, and each agent's latest report that has ended was begun.
struct RotationProgress {
    files: AtomicU64,
    reports: [AtomicU64; AGENTS],
}

impl RotationProgress {
    /// There are no agents yet, whose reports could be late.
    fn new() -> Arc<Self> {
        let reports = std::array::from_fn(|_| AtomicU64::new(u64::MAX / 2));
        Arc::new(Self {
            files: AtomicU64::default(),
            reports,
        })
    }

    fn are_all_agents_current(&self) -> bool {
        let began = |at: &AtomicU64| at.load(Ordering::SeqCst);
        let report = self
            .reports
            .iter()
            .map(began)
            .min()
            .expect("there are agents");
        began(&self.files) + MAX_FILE_DELAY_MS >= millis()
            && report + MAX_REPORT_DELAY_MS >= millis()
    }

    /// Lets time pass.
    async fn run(self: Arc<Self>) {
        loop {
            sleep(Duration::from_millis(TICK)).await;
            if self.are_all_agents_current() {
                MILLIS.fetch_add(TICK, Ordering::SeqCst);
            }
        }
    }
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
        let mut cluster = ServedCluster::with_gpus(&[]);
        cluster
            .nodes
            .extend((0..AGENTS).map(|agent| node(&name_of(agent))));
        cluster.time = time_source(rotation.wall);
        let served = cluster.serve();
        let tls = Tls::self_signed().unwrap();
        let (mut endpoints, [_, agents, _]) = endpoints();
        endpoints.agents.tls = Some(tls.clone());
        let stop = CancellationToken::new();
        drop(served.spawn(server::serve(
            served.extender.clone(),
            endpoints,
            stop.clone(),
        )));
        let settings = CertificateSettings {
            dns_names: vec!["127.0.0.1".into()],
            lifetime: 90 * DAY,
            ca_lifetime: rotation.ca_lifetime,
            publication_delay: rotation.publication_delay,
        };
        let options = CertificateOptions {
            webhook_configuration: None,
            secret: "kube-system/stowage-agents-tls".parse().unwrap(),
            config_map: "kube-system/stowage-agents-ca".parse().unwrap(),
            settings,
            read_interval: Duration::from_millis(100),
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
        let keeping = runtime.spawn(certificates::run(
            client,
            served.service.clone(),
            options,
            vec!["agents"],
            serve,
        ));
        Self {
            served,
            agents,
            stop,
            keeping,
        }
    }

    fn certificates(&self) -> u64 {
        let applied = &self.served.service.metrics.edge.tls_reloads;
        applied.with_label_values(&["agents", "applied"]).get()
    }

    fn leads(&self, leads: bool) {
        let tenure = if leads {
            Tenure::without_end()
        } else {
            Tenure::Standby
        };
        self.served.service.set_tenure(tenure);
    }
}

fn name_of(agent: usize) -> String {
    format!("node-{agent}")
}

/// Brings the ConfigMap to each agent's file, to each after another time.
async fn kubelets(api: Arc<ApiServer>, files: Vec<PathBuf>, progress: Arc<RotationProgress>) {
    let mut brought = String::new();
    loop {
        let (looked, bundle) = (millis(), published(&api));
        if bundle != brought {
            let writes = files.iter().enumerate().map(|(agent, file)| {
                let (file, bundle) = (file.clone(), bundle.clone());
                async move {
                    sleep(KUBELET_SYNC_DELAY * agent as u32 / AGENTS as u32).await;
                    write_whole(&file, &bundle);
                }
            });
            futures::future::join_all(writes).await;
            brought = bundle;
        }
        progress.files.store(looked, Ordering::SeqCst);
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
async fn agent(
    number: usize,
    replicas: Vec<Destination>,
    ca: PathBuf,
    progress: Arc<RotationProgress>,
    end: CancellationToken,
) -> Tally {
    let new = || {
        Publisher::new(replicas.clone(), None, Some(ca.clone()))
            .unwrap()
            .with_replica_timeout(TEST_TIMEOUT)
    };
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
        let began = millis();
        let report: NodeReport =
            serde_json::from_value(report(&name_of(number), "boot", tally.sent, 2)).unwrap();
        publisher.publish(report, Instant::now()).await;
        progress.reports[number].store(began, Ordering::SeqCst);
        let state = publisher.state();
        let accepted = state
            .replicas
            .values()
            .filter(|one| one.latest == PublishOutcome::Accepted);
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
    let files: Vec<PathBuf> = (0..AGENTS)
        .map(|agent| folder.path().join(format!("{agent}.crt")))
        .collect();
    let progress = RotationProgress::new();
    let kubelets = runtime.spawn(kubelets(api.clone(), files.clone(), progress.clone()));
    let time = runtime.spawn(progress.clone().run());
    let end = CancellationToken::new();
    let tallies = runtime.block_on(async {
        // Agents that are there before the first CA lose what they cannot send: another test's matter.
        while !files.iter().all(|file| file.exists())
            || replicas.iter().any(|one| one.certificates() == 0)
        {
            sleep(Duration::from_millis(50)).await;
        }
        let extenders: Vec<Destination> = replicas
            .iter()
            .map(|one| format!("https://{}", one.agents).parse().unwrap())
            .collect();
        let mut agents: JoinSet<Tally> = JoinSet::new();
        for (number, file) in files.iter().enumerate() {
            progress.reports[number].store(millis(), Ordering::SeqCst);
            agents.spawn(agent(
                number,
                extenders.clone(),
                file.clone(),
                progress.clone(),
                end.clone(),
            ));
        }
        let mut signed = std::collections::BTreeSet::new();
        let began = Instant::now();
        for turn in 0.. {
            assert!(
                began.elapsed() < 10 * TEST_TIMEOUT,
                "an agent or a kubelet is late for good"
            );
            // Now the one leads, now the other, now both believe it.
            let leader = turn / 10 % 3;
            replicas
                .iter()
                .enumerate()
                .for_each(|(place, one)| one.leads(leader == 2 || leader == place));
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
    time.abort();
    let sent: u64 = tallies.iter().map(|tally| tally.sent).sum();
    let lost: Vec<&String> = tallies.iter().flat_map(|tally| &tally.lost).collect();
    println!(
        "{sent} reports of {AGENTS} agents to two replicas in {} ms of theirs; certificates: {:?}; CAs: {}",
        millis(),
        replicas.each_ref().map(RotatingReplica::certificates),
        rotation.cas
    );
    assert!(
        lost.is_empty(),
        "{} of {sent} reports are lost, such as {}",
        lost.len(),
        lost[0]
    );
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
