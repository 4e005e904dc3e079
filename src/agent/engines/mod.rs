//! The inference engines on this node: finds them on their pods, probes them once a round, and reports them, and the pods of
//! which none can be read.
//!
//! [`address`] lists candidate addresses, `probe` makes the requests, through [`fetch`] and within [`limits`]; [`watched`] keeps
//! the state, and `reuse` reads from a pod's labels whether its engine may be taken over. [`stowage_report::engine_metrics`] interprets
//! the pages. Nothing here decides what a report is used for.

pub mod address;
mod counter_window;
pub mod fetch;
pub mod limits;
pub mod probe;
mod reuse;
pub mod watched;

#[cfg(test)]
mod http_tests;
#[cfg(test)]
mod proptests;
#[cfg(test)]
mod watched_tests;

use crate::ownership::dual_pods;
use crate::pods::PodOnNode;
use address::{AddressOwner, EngineEvidence, EngineQuery, engine_query};
use fetch::Fetcher;
use limits::EngineLimits;
use probe::{ProbeKind, ProbeResult};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use stowage_report::{EngineReport, GpuReport, UnreadPod};
use stowage_scheduling::ids::{GpuUuid, PodUid};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout_at};
use watched::WatchedEngine;

/// The engines of one node, from round to round.
#[derive(Debug)]
pub struct EngineWatcher {
    limits: EngineLimits,
    fetcher: Arc<Fetcher>,
    slots: BTreeMap<EndpointKey, EngineSlot>,
    probes: JoinSet<FinishedProbe>,
}

/// Where an engine is probed: on a pod, at all its addresses until one is found (`None`), or at one of its ports.
type EndpointKey = (PodUid, Option<u16>);

#[derive(Debug)]
struct EngineSlot {
    engine: WatchedEngine,
    running_probe: Option<AbortHandle>,
}

struct FinishedProbe {
    endpoint: EndpointKey,
    probe_kind: ProbeKind,
    answer: ProbeResult,
}

/// The engines that a round read, and the pods of which it could read none.
#[derive(Debug, Default, PartialEq)]
pub struct EngineRound {
    /// In order of their pods' UIDs and of their ports.
    pub engines: Vec<EngineReport>,
    /// Pods of which no engine can be read.
    pub unread: Vec<UnreadPod>,
}

impl EngineWatcher {
    pub fn new(limits: EngineLimits) -> Self {
        let fetcher = Arc::new(Fetcher::new(limits.clone()));
        Self {
            limits,
            fetcher,
            slots: BTreeMap::new(),
            probes: JoinSet::new(),
        }
    }

    /// One round: probes every engine that is due, waits a moment, and returns what is known of all of them. An engine that takes
    /// longer delays nothing: its answer is used in the next round, and until then its last figures are reported with their age.
    ///
    /// `gpus`: the GPUs with the processes seen on them.
    pub async fn round(&mut self, pods: &[PodOnNode], gpus: &[GpuReport]) -> EngineRound {
        let gpus_by_owner = gpus_by_owner(gpus);
        let candidates: BTreeMap<&PodUid, &PodOnNode> = pods
            .iter()
            .filter(|pod| pod.wants_gpu || gpus_by_owner.contains_key(pod.uid.as_str()))
            .map(|pod| (&pod.uid, pod))
            .collect();
        self.record_finished();
        let mut found = EngineRound::default();
        let mut queries = BTreeMap::new();
        for pod in candidates.values() {
            match engine_query(pod, address_owner(pod, pods)) {
                Ok(query) => self.add_queries(pod, query, &mut queries),
                Err(error) => {
                    let now = Instant::now();
                    let engine = WatchedEngine::misconfigured(&error, now);
                    found.engines.extend(engine.report(
                        pod,
                        gpus_of(pod, &gpus_by_owner),
                        now,
                        &self.limits,
                    ));
                }
            }
        }
        self.remove_gone(&queries);
        for (endpoint, query) in queries {
            self.start_probe(candidates[&endpoint.0], endpoint, query);
        }
        self.wait_for_probes().await;
        let now = Instant::now();
        for pod in candidates.values() {
            self.report(pod, &gpus_by_owner, now, &mut found);
        }
        let requesters = dual_pods::requesters(pods);
        found
            .unread
            .retain(|unread| !requesters.contains(&unread.pod));
        found
            .engines
            .sort_by(|a, b| (&a.pod, a.port).cmp(&(&b.pod, b.port)));
        found
    }

    /// One place for each port that the pod names. Of a pod that names none, one for it all, and one for each port beside that of the
    /// engine found there: each may have an engine of its own.
    fn add_queries(
        &self,
        pod: &PodOnNode,
        query: EngineQuery,
        queries: &mut BTreeMap<EndpointKey, EngineQuery>,
    ) {
        let (all, is_named) = (
            (pod.uid.clone(), None),
            pod.annotations.contains_key(address::METRICS_PORT),
        );
        let found_port = self.slots.get(&all).and_then(|slot| slot.engine.port());
        let evidence = if is_named {
            EngineEvidence::Declared
        } else {
            EngineEvidence::Guessed
        };
        let separate_ports = query
            .ports
            .iter()
            .filter(|&&port| is_named || found_port.is_some_and(|home| home != port));
        queries.extend(
            separate_ports
                .map(|&port| ((pod.uid.clone(), Some(port)), query.at_port(port, evidence))),
        );
        if !is_named {
            queries.insert(all, query);
        }
    }

    /// Starts a probe if the place is due and its last one is over.
    fn start_probe(&mut self, pod: &PodOnNode, endpoint: EndpointKey, query: EngineQuery) {
        let now = Instant::now();
        let slot = self
            .slots
            .entry(endpoint.clone())
            .or_insert_with(|| EngineSlot {
                engine: WatchedEngine::new(query.clone(), now),
                running_probe: None,
            });
        slot.engine.set_query(query, now);
        let is_probing = slot
            .running_probe
            .as_ref()
            .is_some_and(|visit| !visit.is_finished());
        let (Some(ip), false) = (pod.ip, is_probing) else {
            return;
        };
        let Some(probe) = slot.engine.next_probe(pod, ip, now, &self.limits) else {
            return;
        };
        let (probe_kind, fetcher) = (probe.probe_kind.clone(), self.fetcher.clone());
        let finished = async move {
            FinishedProbe {
                endpoint,
                probe_kind,
                answer: probe.run(&fetcher).await,
            }
        };
        slot.running_probe = Some(self.probes.spawn(finished));
    }

    /// What is known of a pod's engines. One whose port a single container declares is on the GPUs of that container's processes,
    /// and on those of the pod on which no other is known to be, so that none reads as idle: of several in one container, or
    /// where no process is seen, each is on all GPUs of the pod. A proxy before an engine shows the engine's page, and is
    /// none: its container has no process on a GPU. Without that no two are taken for one, for queues add up.
    fn report(
        &self,
        pod: &PodOnNode,
        gpus_by_owner: &BTreeMap<&str, Vec<GpuUuid>>,
        now: Instant,
        found: &mut EngineRound,
    ) {
        let endpoints = (pod.uid.clone(), None)..=(pod.uid.clone(), Some(u16::MAX));
        let all: Vec<&WatchedEngine> = self
            .slots
            .range(endpoints)
            .map(|(_, slot)| &slot.engine)
            .collect();
        let container =
            |one: &WatchedEngine| Some(gpus_by_owner.get(&**pod.containers.get(&one.port()?)?));
        let container_gpus = |one: &WatchedEngine| container(one).flatten();
        let is_proxy = |one: &&&WatchedEngine| {
            let is_before = |other: &&WatchedEngine| {
                container_gpus(other).is_some() && one.may_be_same_as(other)
            };
            container(one) == Some(None) && all.iter().any(is_before)
        };
        let (gpus, before) = (gpus_of(pod, gpus_by_owner), found.engines.len());
        let covered: Vec<&GpuUuid> = all
            .iter()
            .filter_map(|one| container_gpus(one))
            .flatten()
            .collect();
        for one in all.iter().filter(|one| !is_proxy(one)) {
            let is_on = |gpu: &&GpuUuid| {
                container_gpus(one).is_none_or(|own| own.contains(gpu) || !covered.contains(gpu))
            };
            let gpus = gpus.iter().filter(is_on).cloned().collect();
            found
                .engines
                .extend(one.report(pod, gpus, now, &self.limits));
        }
        // A pod that is not ready yet starts, and one that has no GPU takes no load.
        let may_serve = pod.is_ready || pod.is_too_large;
        let is_unread = found.engines.len() == before && may_serve && !gpus.is_empty();
        let Some(first) = all.first().filter(|_| is_unread) else {
            return;
        };
        let reason = match pod.is_too_large {
            true => "the pod is larger than an agent reads",
            false => first
                .last_error()
                .unwrap_or("none of its ports has been asked yet"),
        };
        found.unread.push(UnreadPod {
            pod: pod.uid.clone(),
            gpus,
            declares_port: !pod.ports.is_empty() || pod.is_too_large,
            reason: reason.to_owned(),
        });
    }

    /// Waits until all probes are finished or the round times out.
    async fn wait_for_probes(&mut self) {
        let deadline = Instant::now() + self.limits.round_timeout;
        while let Ok(Some(visited)) = timeout_at(deadline, self.probes.join_next()).await {
            // Otherwise its pod is gone, and the probe was aborted.
            visited.into_iter().for_each(|visited| self.record(visited));
        }
    }

    fn record_finished(&mut self) {
        while let Some(visited) = self.probes.try_join_next() {
            visited.into_iter().for_each(|visited| self.record(visited));
        }
    }

    fn record(&mut self, finished: FinishedProbe) {
        if let Some(slot) = self.slots.get_mut(&finished.endpoint) {
            slot.running_probe = None;
            slot.engine
                .record(&finished.probe_kind, finished.answer, &self.limits);
        }
    }

    fn remove_gone(&mut self, queries: &BTreeMap<EndpointKey, EngineQuery>) {
        self.slots.retain(|endpoint, slot| {
            let stays = queries.contains_key(endpoint);
            if let (false, Some(visit)) = (stays, &slot.running_probe) {
                visit.abort();
            }
            stays
        });
    }
}

/// Whether another pod has the same address.
fn address_owner(pod: &PodOnNode, pods: &[PodOnNode]) -> AddressOwner {
    let has_same = |other: &PodOnNode| other.uid != pod.uid && other.ip == pod.ip;
    if pods.iter().any(has_same) {
        AddressOwner::Shared
    } else {
        AddressOwner::Pod
    }
}

/// The GPUs on which processes were seen, of each pod by its UID and of each container by its id.
fn gpus_by_owner(gpus: &[GpuReport]) -> BTreeMap<&str, Vec<GpuUuid>> {
    let mut by_owner: BTreeMap<&str, Vec<GpuUuid>> = BTreeMap::new();
    for gpu in gpus {
        let processes = gpu.processes.iter().flatten();
        let owners: BTreeSet<&str> = processes
            .flat_map(|process| {
                [
                    process.pod.as_ref().map(PodUid::as_str),
                    process.container.as_deref(),
                ]
            })
            .flatten()
            .collect();
        owners
            .into_iter()
            .for_each(|owner| by_owner.entry(owner).or_default().push(gpu.uuid.clone()));
    }
    by_owner
}

/// The GPUs of a pod's processes; if it has none, the GPUs that its Binding recorded.
fn gpus_of(pod: &PodOnNode, gpus_by_owner: &BTreeMap<&str, Vec<GpuUuid>>) -> Vec<GpuUuid> {
    gpus_by_owner
        .get(pod.uid.as_str())
        .or(pod.devices.as_ref())
        .cloned()
        .unwrap_or_default()
}
