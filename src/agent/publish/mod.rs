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
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval at which names are resolved: a replica that moves is away for longer than that.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The first report may wait at least this long for a name to be resolved.
const FIRST_LOOK: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    #[error("no extender to report to: give --extender https://HOST:PORT")]
    Nobody,
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
    patience: Duration,
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
            return Err(PublishError::Nobody);
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
        let (trust, waits_for) = Trust::awaiting(ca)?;
        if let Some(problem) = &waits_for {
            warn!("{problem}; no report is sent until there is one");
        }
        Ok(Self {
            targets: extenders.into_iter().map(PublishTarget::new).collect(),
            token_file,
            trust,
            trust_problem: waits_for,
            patience: PATIENCE,
            problems: BTreeSet::new(),
        })
    }

    /// Sets each replica's timeout.
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Sends a report whose ages were right at `as_of` to every replica, and returns when each has answered or timed out.
    pub async fn publish(&mut self, mut report: NodeReport, as_of: Instant) {
        self.problems.clear();
        self.look_at_trust();
        let wait = self.patience.max(FIRST_LOOK);
        for target in &mut self.targets {
            self.problems.extend(target.look(&self.trust, wait).await);
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
                age(&mut report, as_of.elapsed());
                let body =
                    Bytes::from(serde_json::to_vec(&report).expect("a report is plain data"));
                let posts = replicas
                    .map(|one| one.post(body.clone(), authorization.clone(), self.patience));
                join_all(posts).await;
                if self.look_at_trust() {
                    let replicas = self
                        .targets
                        .iter_mut()
                        .flat_map(|target| target.replicas.values_mut());
                    let missed = replicas.filter(|replica| replica.is_unreachable());
                    let again = missed
                        .map(|one| one.post(body.clone(), authorization.clone(), self.patience));
                    join_all(again).await;
                }
            }
            Err(error) => {
                let reason = error.to_string();
                replicas.for_each(|replica| {
                    replica.note(PublishOutcome::Unsent {
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
    fn look_at_trust(&mut self) -> bool {
        let renewed = self.trust.renew();
        match &renewed {
            Ok(false) => {}
            Ok(true) => {
                info!("the extenders' CA has changed");
                let replicas = self
                    .targets
                    .iter_mut()
                    .flat_map(|target| target.replicas.values_mut());
                replicas.for_each(|replica| replica.trust(&self.trust.config));
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
fn age(report: &mut NodeReport, by: Duration) {
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
    looked: Option<Instant>,
    problem: Option<String>,
}

impl PublishTarget {
    fn new(destination: Destination) -> Self {
        Self {
            destination,
            addresses: BTreeSet::new(),
            replicas: BTreeMap::new(),
            lookup: None,
            looked: None,
            problem: None,
        }
    }

    /// Updates the replicas to the name's present addresses. Waits for them only while no replica is known, and no longer than
    /// `wait`; returns what is wrong with the name.
    async fn look(&mut self, trust: &Trust, wait: Duration) -> Option<String> {
        if self.lookup.is_none()
            && self
                .looked
                .is_none_or(|looked| looked.elapsed() >= LOOK_EVERY)
        {
            let (host, port) = (self.destination.host.to_string(), self.destination.port);
            self.looked = Some(Instant::now());
            self.lookup = Some(tokio::spawn(async move {
                Ok(tokio::net::lookup_host((host.as_str(), port))
                    .await?
                    .collect())
            }));
        }
        if let Some(found) = self.found(wait).await {
            self.take(found);
        }
        for address in &self.addresses {
            let fresh = || ReplicaClient::new(&self.destination, *address, &trust.config);
            self.replicas.entry(*address).or_insert_with(fresh);
        }
        self.problem.clone()
    }

    async fn found(&mut self, wait: Duration) -> Option<io::Result<Vec<SocketAddr>>> {
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
    fn take(&mut self, found: io::Result<Vec<SocketAddr>>) {
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
        let gone = |address: &SocketAddr| !self.addresses.contains(address);
        let left: Vec<SocketAddr> = self
            .replicas
            .keys()
            .filter(|address| gone(address))
            .copied()
            .collect();
        for address in left {
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
        age(&mut report, Duration::from_millis(50));
        assert_eq!(
            (report.age_millis, report.engines[0].age_millis),
            (Millis(150), Millis(750))
        );
        age(&mut report, Duration::MAX);
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
            Err(PublishError::Nobody)
        ));
    }

    #[tokio::test]
    async fn replicas_come_and_go_with_what_their_name_stands_for() {
        let trust = Trust::new(None).unwrap();
        let mut target = PublishTarget::new("http://stowage".parse().unwrap());
        target.looked = Some(Instant::now());
        let address = |n: u8| SocketAddr::from(([127, 0, 0, n], 9446));
        let known = |target: &PublishTarget| target.replicas.keys().copied().collect::<Vec<_>>();
        target.take(Ok(vec![address(2), address(1), address(1)]));
        assert_eq!(target.look(&trust, FIRST_LOOK).await, None);
        assert_eq!(known(&target), [address(1), address(2)]);
        target
            .replicas
            .get_mut(&address(2))
            .unwrap()
            .note(PublishOutcome::Accepted);
        target.take(Ok(vec![address(3), address(2)]));
        target.look(&trust, FIRST_LOOK).await;
        assert_eq!(known(&target), [address(2), address(3)]);
        assert_eq!(
            target.replicas[&address(2)].state().unwrap().accepted,
            1,
            "who stays is not asked again"
        );
        for nothing in [Ok(Vec::new()), Err(io::Error::other("no such name"))] {
            target.take(nothing);
            let problem = target.look(&trust, FIRST_LOOK).await.unwrap();
            assert!(problem.starts_with("http://stowage:9446: "), "{problem}");
            assert_eq!(
                known(&target),
                [address(2), address(3)],
                "a name server that fails takes nobody away"
            );
        }
    }
}
