//! Leader election: the only code that opens and closes leadership.
//!
//! Beside a kube-scheduler the Lease of that kube-scheduler decides, because a replica whose scheduler does not schedule would
//! have no requests to answer. Otherwise Stowage has a Lease of its own. Either way the replica begins no write later than two
//! thirds of the Lease's duration after its latest renewal, and a successor begins none before the last of those can have
//! landed ([`WriteTimes::max_commit_delay`]). The decisions are in `scheduler_lease`, `own_lease` and `tenure`, pure; this file
//! reads and writes the Lease at intervals, and sets leadership by the result.

mod own_lease;
mod scheduler_lease;
mod tenure;
#[cfg(test)]
mod tests;

use super::request::{ApiRequestError, within};
use crate::service::{FailureStreak, ServerState, Tenure};
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
const LEASE_READ_INTERVAL: Duration = Duration::from_secs(1);
/// Five renewals fit into the ten seconds before this replica steps down.
const LEASE_RENEW_INTERVAL: Duration = Duration::from_secs(2);
/// Time limit of a request for the Lease: a slower answer is outdated, and the next attempt shows more.
const LEASE_REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How often leadership is set from the latest read, so how late it may begin. It ends by itself at the Lease's safe end.
const TENURE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Duration of a Lease that has none: Kubernetes' default.
const DEFAULT_LEASE_DURATION: Millis = Millis::seconds(15);

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
    pub fn for_kube_scheduler() -> Self {
        Self {
            namespace: "kube-system".into(),
            name: "kube-scheduler".into(),
        }
    }

    /// The Lease of Stowage's own in this namespace.
    pub fn for_stowage(namespace: &str) -> Self {
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
    renewed_at: Option<jiff::Timestamp>,
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
    fn from_lease(lease: &Lease) -> Self {
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
            renewed_at: spec.renew_time.map(|time| time.0),
            duration: seconds.map_or(DEFAULT_LEASE_DURATION, Millis::seconds),
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
    state: Arc<ServerState>,
    lead_with: LeadWith,
    times: WriteTimes,
    nonce: String,
    shutdown: CancellationToken,
) {
    state.leadership.set_max_commit_delay(times);
    let succession = Succession::new(Millis(times.max_commit_delay().as_millis() as u64), &nonce);
    match lead_with {
        LeadWith::Always | LeadWith::FromTheStart => {
            let started = state.now();
            let from = match lead_with {
                LeadWith::Always => succession.end_of_writes_after_send(started),
                _ => started,
            };
            shutdown
                .run_until_cancelled(lead_alone(&state, &succession, from))
                .await;
        }
        LeadWith::KubeScheduler { lease, hostname } => {
            let scheduler_lease = Mutex::new(SchedulerLease::new(hostname, succession));
            let tenure = |now| scheduler_lease.lock().tenure(now);
            tokio::select! {
                // In this order, so that a simulation is reproducible.
                biased;
                () = poll_scheduler_lease(&client, &state, &lease, &scheduler_lease) => {}
                () = keep_tenure_current(&state, tenure) => {}
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
                () = campaign(&client, &state, &lease, &candidate) => {}
                () = keep_tenure_current(&state, tenure) => {}
                () = shutdown.cancelled() => {}
            }
            set_tenure(&state, Tenure::Standby);
            resign(&client, &state, &lease, &candidate).await;
        }
    }
    set_tenure(&state, Tenure::Standby);
}

/// Leads without a Lease from `from` on, and again after each time that this replica has to succeed itself.
async fn lead_alone(state: &ServerState, succession: &Succession, from: Moment) {
    set_tenure(state, succession.tenure_without_lease(from, state.now()));
    loop {
        tokio::time::sleep(TENURE_CHECK_INTERVAL).await;
        if state.leadership.is_awaiting_earlier_writes() {
            set_tenure(state, succession.tenure_without_lease(from, state.now()));
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
async fn keep_tenure_current(state: &ServerState, tenure: impl Fn(Moment) -> Tenure) {
    loop {
        set_tenure(state, tenure(state.now()));
        tokio::time::sleep(TENURE_CHECK_INTERVAL).await;
    }
}

fn set_tenure(state: &ServerState, tenure: Tenure) {
    let before = state.leadership.tenure();
    state.set_tenure(tenure);
    // The gate waits where this replica succeeds itself.
    let after = state.leadership.tenure();
    state
        .metrics
        .leading
        .set(i64::from(state.leadership.is_leading()));
    match after {
        _ if std::mem::discriminant(&before) == std::mem::discriminant(&after) => {}
        Tenure::Standby => tracing::info!("this replica stops acting"),
        Tenure::AwaitingEarlierWrites { from } => {
            let seconds = from.since(state.now()).0.div_ceil(1000);
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
async fn poll_scheduler_lease(
    client: &Client,
    state: &ServerState,
    name: &LeaseName,
    scheduler_lease: &Mutex<SchedulerLease>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &name.namespace);
    let mut log = LeaseLog::default();
    loop {
        let sent_at = state.now();
        let read = within(LEASE_REQUEST_TIMEOUT, leases.get_opt(&name.name)).await;
        log.log_result(name, &read, state.now());
        if let Ok(lease) = read {
            let reading = lease.as_ref().map(LeaseReading::from_lease);
            record_holder(state, reading.as_ref());
            scheduler_lease
                .lock()
                .apply_read(reading, sent_at, state.now());
        }
        tokio::time::sleep(LEASE_READ_INTERVAL).await;
    }
}

fn record_holder(state: &ServerState, reading: Option<&LeaseReading>) {
    state
        .leadership
        .set_holder(reading.and_then(|reading| reading.holder.as_deref()));
}

/// Takes the Lease when it is free, and keeps it.
async fn campaign(
    client: &Client,
    state: &ServerState,
    name: &LeaseName,
    candidate: &Mutex<LeaseCandidate>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &name.namespace);
    let mut log = LeaseLog::default();
    loop {
        let attempted = attempt(&leases, state, name, candidate).await;
        log.log_result(name, &attempted, state.now());
        if attempted.is_err() {
            count(state, "failed");
        }
        tokio::time::sleep(LEASE_RENEW_INTERVAL).await;
    }
}

async fn attempt(
    leases: &Api<Lease>,
    state: &ServerState,
    name: &LeaseName,
    candidate: &Mutex<LeaseCandidate>,
) -> Result<(), ApiRequestError> {
    let found = within(LEASE_REQUEST_TIMEOUT, leases.get_opt(&name.name)).await?;
    record_holder(state, found.as_ref().map(LeaseReading::from_lease).as_ref());
    let sent_at = state.now();
    let next = candidate
        .lock()
        .step(found.as_ref(), sent_at, state.clock.wall());
    let Some(spec) = next else { return Ok(()) };
    let params = PostParams::default();
    let written = match found {
        None => {
            let metadata = ObjectMeta {
                name: Some(name.name.clone()),
                ..ObjectMeta::default()
            };
            within(
                LEASE_REQUEST_TIMEOUT,
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
                LEASE_REQUEST_TIMEOUT,
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
    record_holder(state, Some(&LeaseReading::from_lease(&written)));
    candidate.lock().record_write(sent_at, &written);
    count(state, "written");
    Ok(())
}

/// Gives up the Lease, so that another replica need not wait until it expires.
async fn resign(
    client: &Client,
    state: &ServerState,
    name: &LeaseName,
    candidate: &Mutex<LeaseCandidate>,
) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), &name.namespace);
    let Ok(Some(found)) = within(LEASE_REQUEST_TIMEOUT, leases.get_opt(&name.name)).await else {
        return;
    };
    let released_spec = candidate
        .lock()
        .resign(&found.spec.clone().unwrap_or_default());
    let Some(spec) = released_spec else { return };
    let release = Lease {
        spec: Some(spec),
        ..found
    };
    match within(
        LEASE_REQUEST_TIMEOUT,
        leases.replace(&name.name, &PostParams::default(), &release),
    )
    .await
    {
        Ok(_) => count(state, "released"),
        Err(error) => {
            tracing::warn!(lease = %name.name, %error, "could not release the Lease; it expires by itself")
        }
    }
}

/// Logs when a Lease becomes unreachable, at longer and longer intervals while it is, and when it is back.
#[derive(Default)]
struct LeaseLog(FailureStreak);

impl LeaseLog {
    fn log_result<T>(
        &mut self,
        name: &LeaseName,
        result: &Result<T, ApiRequestError>,
        now: Moment,
    ) {
        match result {
            Err(error) if self.0.record_failure(now) => {
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

fn count(state: &ServerState, outcome: &str) {
    state
        .metrics
        .writes
        .with_label_values(&["lease", outcome])
        .inc();
}
