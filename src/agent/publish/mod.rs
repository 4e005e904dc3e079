//! Publishes each report to every replica of Stowage, whichever of them leads.
//!
//! A dead or slow replica delays no other: each is sent to separately, with its own timeout. Names are resolved in the
//! background every few seconds, so that replicas may come and go. The CA's file is read before each report, as the token is:
//! what a replica serves and what the agent trusts change at about the same time, so a report that does not get through is sent
//! once more if the file has changed just now. Nothing else is queued or repeated: the next report is a second away and is newer.

pub(crate) mod destination;
pub mod replica;

pub use destination::Destination;
pub(crate) use destination::Scheme;
pub use replica::{PublishOutcome, ReplicaState};
use stowage_telemetry::trust;
pub use stowage_telemetry::trust::TrustError;

use bytes::Bytes;
use futures::future::join_all;
use replica::ReplicaClient;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use stowage_report::NodeReport;
use stowage_scheduling::units::Millis;
use tokio::task::JoinHandle;
use tracing::{info, warn};
use trust::Trust;

/// Timeout for one replica: then the next report is due.
const DEFAULT_REPLICA_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval at which names are resolved: a replica that moves is away for longer than that.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(5);
/// The first report may wait at least this long for a name to be resolved.
const FIRST_RESOLVE_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("no extender to report to: give --extender https://HOST:PORT")]
    NoExtender,
    #[error("{0} needs a CA to verify its certificate: give --ca FILE")]
    NoCa(Destination),
    #[error(
        "{0} would get the agent's token in the clear: write https://, or leave out --token-file"
    )]
    TokenInTheClear(Destination),
    #[error(transparent)]
    Trust(#[from] TrustError),
}

/// The results of reports, as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PublishState {
    /// The state of each replica, by its name: the destination and the replica's address.
    pub replicas: BTreeMap<String, ReplicaState>,
    /// A problem that concerns all of them.
    pub problems: BTreeSet<String>,
}

pub struct Publisher {
    targets: Vec<PublishTarget>,
    token_file: Option<PathBuf>,
    trust: Trust,
    trust_problem: Option<TrustError>,
    replica_timeout: Duration,
    problems: BTreeSet<String>,
}

impl Publisher {
    /// Must be used inside a tokio runtime.
    pub fn new(
        extenders: Vec<Destination>,
        token_file: Option<PathBuf>,
        ca: Option<PathBuf>,
    ) -> Result<Self, PublishError> {
        if extenders.is_empty() {
            return Err(PublishError::NoExtender);
        }
        for extender in &extenders {
            match extender.scheme {
                Scheme::Https if ca.is_none() => return Err(PublishError::NoCa(extender.clone())),
                Scheme::Http if token_file.is_some() && !extender.is_loopback() => {
                    return Err(PublishError::TokenInTheClear(extender.clone()));
                }
                _ => {}
            }
        }
        let (trust, ca_problem) = Trust::new_or_awaiting(ca)?;
        if let Some(problem) = &ca_problem {
            warn!("{problem}; no report is sent until there is one");
        }
        Ok(Self {
            targets: extenders.into_iter().map(PublishTarget::new).collect(),
            token_file,
            trust,
            trust_problem: ca_problem,
            replica_timeout: DEFAULT_REPLICA_TIMEOUT,
            problems: BTreeSet::new(),
        })
    }

    /// Sets each replica's timeout.
    pub fn with_replica_timeout(self, replica_timeout: Duration) -> Self {
        Self {
            replica_timeout,
            ..self
        }
    }

    /// Sends a report whose ages were right at `as_of` to every replica, and returns when each has answered or timed out.
    pub async fn publish(&mut self, mut report: NodeReport, as_of: Instant) {
        self.problems.clear();
        self.renew_trust();
        let wait = self.replica_timeout.max(FIRST_RESOLVE_TIMEOUT);
        for target in &mut self.targets {
            self.problems
                .extend(target.update_replicas(&self.trust, wait).await);
        }
        let authorization = self
            .token_file
            .as_deref()
            .map(trust::authorization)
            .transpose();
        let replicas = self
            .targets
            .iter_mut()
            .flat_map(|target| target.replicas.values_mut());
        match authorization {
            Ok(authorization) => {
                add_age(&mut report, as_of.elapsed());
                let body =
                    Bytes::from(serde_json::to_vec(&report).expect("a report is plain data"));
                let posts = replicas
                    .map(|one| one.post(body.clone(), authorization.clone(), self.replica_timeout));
                join_all(posts).await;
                if self.renew_trust() {
                    let replicas = self
                        .targets
                        .iter_mut()
                        .flat_map(|target| target.replicas.values_mut());
                    let missed = replicas.filter(|replica| replica.is_unreachable());
                    let again = missed.map(|one| {
                        one.post(body.clone(), authorization.clone(), self.replica_timeout)
                    });
                    join_all(again).await;
                }
            }
            Err(error) => {
                let reason = error.to_string();
                replicas.for_each(|replica| {
                    replica.record(PublishOutcome::Unsent {
                        reason: reason.clone(),
                    })
                });
                self.problems.insert(reason);
            }
        }
    }

    pub fn state(&self) -> PublishState {
        let replicas = self
            .targets
            .iter()
            .flat_map(|target| target.replicas.values());
        let states = replicas.filter_map(|one| Some((one.name().to_owned(), one.state()?.clone())));
        PublishState {
            replicas: states.collect(),
            problems: self.problems.clone(),
        }
    }

    /// Trusts what the CA's file says now; `true` if that has changed. A file that cannot be used changes nothing.
    fn renew_trust(&mut self) -> bool {
        let renewed = self.trust.reload();
        match &renewed {
            Ok(false) => {}
            Ok(true) => {
                info!("the extenders' CA has changed");
                let replicas = self
                    .targets
                    .iter_mut()
                    .flat_map(|target| target.replicas.values_mut());
                replicas.for_each(|replica| replica.set_trusted_cas(&self.trust.config));
            }
            Err(error) => {
                self.problems.insert(error.to_string());
                if self.trust_problem.as_ref() != Some(error) {
                    warn!("{error}; the CA before it stays in use");
                }
            }
        }
        self.trust_problem = renewed.as_ref().err().cloned();
        renewed == Ok(true)
    }
}

/// Adds the elapsed time to every age in a report.
fn add_age(report: &mut NodeReport, by: Duration) {
    let by = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
    let older = |age: &mut Millis| age.0 = age.0.saturating_add(by);
    older(&mut report.age_millis);
    report
        .engines
        .iter_mut()
        .for_each(|engine| older(&mut engine.age_millis));
}

/// A destination and the replicas behind it.
struct PublishTarget {
    destination: Destination,
    addresses: BTreeSet<SocketAddr>,
    replicas: BTreeMap<SocketAddr, ReplicaClient>,
    lookup: Option<JoinHandle<io::Result<Vec<SocketAddr>>>>,
    lookup_started: Option<Instant>,
    problem: Option<String>,
}

impl PublishTarget {
    fn new(destination: Destination) -> Self {
        Self {
            destination,
            addresses: BTreeSet::new(),
            replicas: BTreeMap::new(),
            lookup: None,
            lookup_started: None,
            problem: None,
        }
    }

    /// Updates the replicas to the name's present addresses. Waits for them only while no replica is known, and no longer than
    /// `wait`; returns what is wrong with the name.
    async fn update_replicas(&mut self, trust: &Trust, wait: Duration) -> Option<String> {
        if self.lookup.is_none()
            && self
                .lookup_started
                .is_none_or(|looked| looked.elapsed() >= RESOLVE_INTERVAL)
        {
            let (host, port) = (self.destination.host.to_string(), self.destination.port);
            self.lookup_started = Some(Instant::now());
            self.lookup = Some(tokio::spawn(async move {
                Ok(tokio::net::lookup_host((host.as_str(), port))
                    .await?
                    .collect())
            }));
        }
        if let Some(found) = self.finished_lookup(wait).await {
            self.apply_lookup(found);
        }
        for address in &self.addresses {
            let fresh = || ReplicaClient::new(&self.destination, *address, &trust.config);
            self.replicas.entry(*address).or_insert_with(fresh);
        }
        self.problem.clone()
    }

    async fn finished_lookup(&mut self, wait: Duration) -> Option<io::Result<Vec<SocketAddr>>> {
        let lookup = self.lookup.as_mut()?;
        let ended = match self.addresses.is_empty() {
            true => tokio::time::timeout(wait, lookup).await.ok()?,
            false if lookup.is_finished() => lookup.await,
            false => return None,
        };
        self.lookup = None;
        Some(ended.unwrap_or_else(|error| Err(io::Error::other(error))))
    }

    /// If the name cannot be resolved, the previous addresses stay in use.
    fn apply_lookup(&mut self, found: io::Result<Vec<SocketAddr>>) {
        let problem = match found {
            Ok(addresses) if addresses.is_empty() => Some("it stands for no address".to_owned()),
            Ok(addresses) => {
                self.addresses = addresses.into_iter().collect();
                None
            }
            Err(error) => Some(error.to_string()),
        };
        let problem = problem.map(|why| format!("{}: {why}", self.destination));
        if let Some(problem) = problem.as_ref().filter(|_| self.problem != problem) {
            warn!("{problem}");
        }
        self.problem = problem;
        let is_gone = |address: &SocketAddr| !self.addresses.contains(address);
        let gone_addresses: Vec<SocketAddr> = self
            .replicas
            .keys()
            .filter(|address| is_gone(address))
            .copied()
            .collect();
        for address in gone_addresses {
            if let Some(replica) = self.replicas.remove(&address) {
                info!("reports to {}: it has gone", replica.name());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_as_old_as_it_is_when_it_is_sent() {
        let mut report: NodeReport = serde_json::from_value(serde_json::json!({
            "node": "a", "bootId": "b", "sequence": 1, "ageMillis": 100, "gpus": [],
            "engines": [{ "pod": "p", "engine": "vllm", "gpus": [], "state": "serving", "ageMillis": 700 }],
        }))
        .unwrap();
        add_age(&mut report, Duration::from_millis(50));
        assert_eq!(
            (report.age_millis, report.engines[0].age_millis),
            (Millis(150), Millis(750))
        );
        add_age(&mut report, Duration::MAX);
        assert_eq!(report.age_millis, Millis(u64::MAX));
    }

    #[test]
    fn unsafe_destinations_are_refused_at_the_start() {
        let new = |extender: &str, token: bool| {
            let token_file = token.then(|| PathBuf::from("token"));
            Publisher::new(vec![extender.parse().unwrap()], token_file, None)
                .err()
                .map(|e| e.to_string())
        };
        assert!(new("https://stowage", false).unwrap().contains("--ca FILE"));
        assert!(
            new("http://stowage", true)
                .unwrap()
                .contains("in the clear")
        );
        assert_eq!(
            (new("http://127.0.0.1", true), new("http://stowage", false)),
            (None, None)
        );
        assert!(matches!(
            Publisher::new(Vec::new(), None, None),
            Err(PublishError::NoExtender)
        ));
    }

    #[tokio::test]
    async fn replicas_follow_the_addresses_of_their_name() {
        let trust = Trust::new(None).unwrap();
        let mut target = PublishTarget::new("http://stowage".parse().unwrap());
        target.lookup_started = Some(Instant::now());
        let address = |n: u8| SocketAddr::from(([127, 0, 0, n], 9446));
        let known = |target: &PublishTarget| target.replicas.keys().copied().collect::<Vec<_>>();
        target.apply_lookup(Ok(vec![address(2), address(1), address(1)]));
        assert_eq!(
            target.update_replicas(&trust, FIRST_RESOLVE_TIMEOUT).await,
            None
        );
        assert_eq!(known(&target), [address(1), address(2)]);
        target
            .replicas
            .get_mut(&address(2))
            .unwrap()
            .record(PublishOutcome::Accepted);
        target.apply_lookup(Ok(vec![address(3), address(2)]));
        target.update_replicas(&trust, FIRST_RESOLVE_TIMEOUT).await;
        assert_eq!(known(&target), [address(2), address(3)]);
        assert_eq!(
            target.replicas[&address(2)].state().unwrap().accepted,
            1,
            "who stays is not asked again"
        );
        for nothing in [Ok(Vec::new()), Err(io::Error::other("no such name"))] {
            target.apply_lookup(nothing);
            let problem = target
                .update_replicas(&trust, FIRST_RESOLVE_TIMEOUT)
                .await
                .unwrap();
            assert!(problem.starts_with("http://stowage:9446: "), "{problem}");
            assert_eq!(
                known(&target),
                [address(2), address(3)],
                "a name server that fails takes nobody away"
            );
        }
    }
}
