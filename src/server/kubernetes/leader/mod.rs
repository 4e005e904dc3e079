//! Leader election: the only code that opens and closes leadership.
//!
//! Beside a kube-scheduler the Lease of that kube-scheduler decides, because a replica whose scheduler does not schedule would
//! have no requests to answer. Otherwise Stowage has a Lease of its own. Either way the replica begins no write later than two
//! thirds of the Lease's duration after its latest renewal, and a successor begins none before the last of those can have
//! landed ([`WriteTimes::latest_landing`]). The decisions are in `scheduler_lease`, `own_lease` and `tenure`, pure; this file
//! reads and writes the Lease at intervals, and sets leadership by the result.

mod own_lease;
mod scheduler_lease;
mod tenure;
#[cfg(test)]
mod tests;

use super::request::{ApiRequestError, within};
use crate::service::{Service, Tenure, Trouble};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use own_lease::LeaseCandidate;
use parking_lot::Mutex;
use scheduler_lease::SchedulerLease;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;
use stowage_kubernetes_objects::port::WriteTimes;
use stowage_scheduling::units::{Millis, Moment};
use tenure::Succession;
use tokio_util::sync::CancellationToken;

/// kube-scheduler renews every two seconds: each renewal is seen, and counts from at most a second before it.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Five renewals fit into the ten seconds before this replica steps down.
const RENEW_EVERY: Duration = Duration::from_secs(2);
/// Time limit of a request for the Lease: a slower answer is outdated, and the next attempt shows more.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How often leadership is set from the latest read, so how late it may begin. It ends by itself at the Lease's safe end.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// Duration of a Lease that has none: Kubernetes' default.
const DEFAULT_DURATION: Millis = Millis::seconds(15);

/// What decides whether this replica acts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeadWith {
    /// The kube-scheduler in the same pod. `hostname` is the pod's, with which its identity begins.
    KubeScheduler { lease: LeaseName, hostname: String },
    /// A Lease of Stowage's own. `identity` distinguishes the replicas.
    Lease { lease: LeaseName, identity: String },
    /// There is one replica, and it acts once no write of an earlier process can land any more.
    Always,
    /// There is one replica, and there was none before it: the cluster is as old as this process.
    FromTheStart,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseName {
    pub namespace: String,
    pub name: String,
}

impl LeaseName {
    /// The Lease of kube-scheduler by default.
    pub fn of_kube_scheduler() -> Self {
        Self {
            namespace: "kube-system".into(),
            name: "kube-scheduler".into(),
        }
    }

    /// The Lease of Stowage's own in this namespace.
    pub fn own(namespace: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: "stowage".into(),
        }
    }
}

/// The relevant fields of a Lease. Two equal readings show no renewal between them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeaseReading {
    /// `None` if it has no holder.
    holder: Option<String>,
    term: LeaseTerm,
    /// By its holder's clock: compared only with itself.
    renewed: Option<jiff::Timestamp>,
    duration: Millis,
}

/// One holder's uninterrupted tenure of one Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeaseTerm {
    /// The Lease's UID: one that is deleted and recreated counts its transitions from zero.
    lease: String,
    transitions: i32,
    holder: Option<String>,
}

impl LeaseReading {
    fn of(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let seconds = spec
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok());
        let holder = spec.holder_identity.filter(|holder| !holder.is_empty());
        let term = LeaseTerm {
            lease: lease.metadata.uid.clone().unwrap_or_default(),
            transitions: spec.lease_transitions.unwrap_or(0),
            holder: holder.clone(),
        };
        Self {
            holder,
            term,
            renewed: spec.renew_time.map(|time| time.0),
            duration: seconds.map_or(DEFAULT_DURATION, Millis::seconds),
        }
    }
}

/// How long a holder may act after a renewal: the duration without the margin.
fn safe_duration(duration: Millis) -> Millis {
    Millis(duration.0 - duration.0 / 3)
}

/// Updates leadership until `shutdown`; then ends it, and gives up a Lease of Stowage's own.
pub async fn run(
    client: Client,
    service: Arc<Service>,
    lead_with: LeadWith,
    times: WriteTimes,
    nonce: String,
    shutdown: CancellationToken,
) {
    service.leadership.set_latest_landing(times);
    let succession = Succession::new(Millis(times.latest_landing().as_millis() as u64), &nonce);
    match lead_with {
        LeadWith::Always | LeadWith::FromTheStart => {
            let started = service.now();
            let from = match lead_with {
                LeadWith::Always => succession.after_a_last_send_at(started),
                _ => started,
            };
            shutdown
                .run_until_cancelled(lead_alone(&service, &succession, from))
                .await;
        }
        LeadWith::KubeScheduler { lease, hostname } => {
            let scheduler_lease = Mutex::new(SchedulerLease::new(hostname, succession));
            let tenure = |now| scheduler_lease.lock().tenure(now);
            tokio::select! {
                // In this order, so that a simulation is reproducible.
                biased;
                () = look(&client, &service, &lease, &scheduler_lease) => {}
                () = keep_current(&service, tenure) => {}
                () = shutdown.cancelled() => {}
            }
        }
        LeadWith::Lease { lease, identity } => {
            // Two replicas of one name, such as a pod and its replacement on another node, are two candidates.
            let candidate = Mutex::new(LeaseCandidate::new(
                format!("{identity}_{nonce}"),
                succession,
            ));
            let tenure = |now| candidate.lock().tenure(now);
            tokio::select! {
                biased;
                () = campaign(&client, &service, &lease, &candidate) => {}
                () = keep_current(&service, tenure) => {}
                () = shutdown.cancelled() => {}
            }
            set_tenure(&service, Tenure::Standby);
            resign(&client, &service, &lease, &candidate).await;
        }
    }
    set_tenure(&service, Tenure::Standby);
}

/// Leads without a Lease from `from` on, and again after each time that this replica has to succeed itself.
async fn lead_alone(service: &Service, succession: &Succession, from: Moment) {
    set_tenure(service, succession.alone(from, service.now()));
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        if service.leadership.is_succeeding() {
            set_tenure(service, succession.alone(from, service.now()));
        }
    }
}

/// Distinguishes this process from every other that has acted or will act.
pub(super) fn nonce() -> String {
    // The keys of the standard library's hash maps are drawn from the system's random numbers.
    format!(
        "{:016x}",
        std::hash::RandomState::new().hash_one(std::process::id())
    )
}

/// Sets leadership to the present state again and again: a hanging request must not extend it.
async fn keep_current(service: &Service, tenure: impl Fn(Moment) -> Tenure) {
    loop {
        set_tenure(service, tenure(service.now()));
        tokio::time::sleep(CHECK_EVERY).await;
    }
}

fn set_tenure(service: &Service, tenure: Tenure) {
    let before = service.leadership.tenure();
    service.set_tenure(tenure);
    // The gate waits where this replica succeeds itself.
    let after = service.leadership.tenure();
    service
        .metrics
        .leading
        .set(i64::from(service.leadership.is_leading()));
    match after {
        _ if std::mem::discriminant(&before) == std::mem::discriminant(&after) => {}
        Tenure::Standby => tracing::info!("this replica stops acting"),
        Tenure::Succeeding { from } => {
            let seconds = from.since(service.now()).0.div_ceil(1000);
            tracing::info!(
                seconds,
                "this replica is about to lead: it waits until no earlier write can take effect"
            )
        }
        Tenure::Leading { epoch, .. } => {
            tracing::info!(%epoch, "this replica leads from now on, and acts once its watches are up to date")
        }
    }
}

/// Reads kube-scheduler's Lease. A plain read, not a watch: the delay of a watch is unknown.
async fn look(
    client: &Client,
    service: &Service,
    name: &LeaseName,
    scheduler_lease: &Mutex<SchedulerLease>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &name.namespace);
    let mut log = LeaseLog::default();
    loop {
        let asked = service.now();
        let looked = within(REQUEST_TIMEOUT, leases.get_opt(&name.name)).await;
        log.about(name, &looked, service.now());
        if let Ok(lease) = looked {
            let reading = lease.as_ref().map(LeaseReading::of);
            note_holder(service, reading.as_ref());
            scheduler_lease.lock().see(reading, asked, service.now());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn note_holder(service: &Service, reading: Option<&LeaseReading>) {
    service
        .leadership
        .set_holder(reading.and_then(|reading| reading.holder.as_deref()));
}

/// Takes the Lease when it is free, and keeps it.
async fn campaign(
    client: &Client,
    service: &Service,
    name: &LeaseName,
    candidate: &Mutex<LeaseCandidate>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &name.namespace);
    let mut log = LeaseLog::default();
    loop {
        let attempted = attempt(&leases, service, name, candidate).await;
        log.about(name, &attempted, service.now());
        if attempted.is_err() {
            count(service, "failed");
        }
        tokio::time::sleep(RENEW_EVERY).await;
    }
}

async fn attempt(
    leases: &Api<Lease>,
    service: &Service,
    name: &LeaseName,
    candidate: &Mutex<LeaseCandidate>,
) -> Result<(), ApiRequestError> {
    let found = within(REQUEST_TIMEOUT, leases.get_opt(&name.name)).await?;
    note_holder(service, found.as_ref().map(LeaseReading::of).as_ref());
    let sent = service.now();
    let next = candidate
        .lock()
        .step(found.as_ref(), sent, service.clock.wall());
    let Some(spec) = next else { return Ok(()) };
    let params = PostParams::default();
    let written = match found {
        None => {
            let metadata = ObjectMeta {
                name: Some(name.name.clone()),
                ..ObjectMeta::default()
            };
            within(
                REQUEST_TIMEOUT,
                leases.create(
                    &params,
                    &Lease {
                        metadata,
                        spec: Some(spec),
                    },
                ),
            )
            .await?
        }
        Some(found) => {
            // With the resourceVersion that was read: of two candidates one is rejected.
            within(
                REQUEST_TIMEOUT,
                leases.replace(
                    &name.name,
                    &params,
                    &Lease {
                        spec: Some(spec),
                        ..found
                    },
                ),
            )
            .await?
        }
    };
    note_holder(service, Some(&LeaseReading::of(&written)));
    candidate.lock().wrote(sent, &written);
    count(service, "written");
    Ok(())
}

/// Gives up the Lease, so that another replica need not wait until it expires.
async fn resign(
    client: &Client,
    service: &Service,
    name: &LeaseName,
    candidate: &Mutex<LeaseCandidate>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &name.namespace);
    let Ok(Some(found)) = within(REQUEST_TIMEOUT, leases.get_opt(&name.name)).await else {
        return;
    };
    let given_up = candidate
        .lock()
        .resign(&found.spec.clone().unwrap_or_default());
    let Some(spec) = given_up else { return };
    let release = Lease {
        spec: Some(spec),
        ..found
    };
    match within(
        REQUEST_TIMEOUT,
        leases.replace(&name.name, &PostParams::default(), &release),
    )
    .await
    {
        Ok(_) => count(service, "released"),
        Err(error) => {
            tracing::warn!(lease = %name.name, %error, "could not release the Lease; it expires by itself")
        }
    }
}

/// Logs when a Lease becomes unreachable and when it is back, not each attempt between.
#[derive(Default)]
struct LeaseLog(Trouble);

impl LeaseLog {
    fn about<T>(&mut self, name: &LeaseName, tried: &Result<T, ApiRequestError>, now: Moment) {
        match tried {
            Err(error) if self.0.begin(now) => {
                tracing::warn!(namespace = %name.namespace, lease = %name.name, %error, "the Lease is out of reach");
            }
            Err(_) => {}
            Ok(_) => {
                if let Some(lasted) = self.0.end(now) {
                    tracing::info!(lease = %name.name, seconds = lasted.0 / 1000, "the Lease is within reach again");
                }
            }
        }
    }
}

fn count(service: &Service, outcome: &str) {
    service
        .metrics
        .writes
        .with_label_values(&["lease", outcome])
        .inc();
}
