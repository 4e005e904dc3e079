//! The inference engines on this node: finds them on their pods, probes them once a round, and reports them, and the pods of
//! which none can be read.
//!
//! [`address`] lists candidate addresses, `probe` makes the requests, through [`fetch`] and within [`limits`]; [`watched`] keeps
//! the state, and `reuse` reads from a pod's labels whether its engine may be taken over. [`stowage_report::engine_metrics`] interprets
//! the pages. Nothing here decides what a report is used for.

pub mod address;
pub mod fetch;
pub mod limits;
pub mod probe;
mod reuse;
mod token_rate;
pub mod watched;

#[cfg(test)]
mod http_tests;
#[cfg(test)]
mod proptests;
#[cfg(test)]
mod watched_tests;

use crate::ownership::dual_pods;
use crate::pods::PodOnNode;
use address::{AddressOwner, EngineEvidence, EngineQuery, sought};
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
    slots: BTreeMap<Place, EngineSlot>,
    visits: JoinSet<Visited>,
}

/// Where an engine is probed: on a pod, at all its addresses until one is found (`None`), or at one of its ports.
type Place = (PodUid, Option<u16>);

#[derive(Debug)]
struct EngineSlot {
    watched: WatchedEngine,
    visit: Option<AbortHandle>,
}

struct Visited {
    place: Place,
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
            visits: JoinSet::new(),
        }
    }

    /// One round: probes every engine that is due, waits a moment, and returns what is known of all of them. An engine that takes
    /// longer delays nothing: its answer is used in the next round, and until then its last figures are reported with their age.
    ///
    /// `gpus`: the GPUs with the processes seen on them.
    pub async fn round(&mut self, pods: &[PodOnNode], gpus: &[GpuReport]) -> EngineRound {
        let seen = seen_on(gpus);
        let candidates: BTreeMap<&PodUid, &PodOnNode> = pods
            .iter()
            .filter(|pod| pod.wants_gpu || seen.contains_key(pod.uid.as_str()))
            .map(|pod| (&pod.uid, pod))
            .collect();
        self.take_finished();
        let mut found = EngineRound::default();
        let mut wanted = BTreeMap::new();
        for pod in candidates.values() {
            match sought(pod, owner(pod, pods)) {
                Ok(sought) => self.add_places(pod, sought, &mut wanted),
                Err(error) => {
                    let now = Instant::now();
                    let engine = WatchedEngine::misconfigured(&error, now);
                    found.engines.extend(engine.report(
                        pod,
                        gpus_of(pod, &seen),
                        now,
                        &self.limits,
                    ));
                }
            }
        }
        self.leave_gone(&wanted);
        for (place, sought) in wanted {
            self.ask(candidates[&place.0], place, sought);
        }
        self.wait().await;
        let now = Instant::now();
        for pod in candidates.values() {
            self.report(pod, &seen, now, &mut found);
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
    fn add_places(
        &self,
        pod: &PodOnNode,
        sought: EngineQuery,
        wanted: &mut BTreeMap<Place, EngineQuery>,
    ) {
        let (all, is_named) = (
            (pod.uid.clone(), None),
            pod.annotations.contains_key(address::METRICS_PORT),
        );
        let home = self.slots.get(&all).and_then(|slot| slot.watched.port());
        let claim = if is_named {
            EngineEvidence::Declared
        } else {
            EngineEvidence::Guessed
        };
        let apart = sought
            .ports
            .iter()
            .filter(|&&port| is_named || home.is_some_and(|home| home != port));
        wanted.extend(apart.map(|&port| ((pod.uid.clone(), Some(port)), sought.at(port, claim))));
        if !is_named {
            wanted.insert(all, sought);
        }
    }

    /// Starts a probe if the place is due and its last one is over.
    fn ask(&mut self, pod: &PodOnNode, place: Place, sought: EngineQuery) {
        let now = Instant::now();
        let slot = self
            .slots
            .entry(place.clone())
            .or_insert_with(|| EngineSlot {
                watched: WatchedEngine::new(sought.clone(), now),
                visit: None,
            });
        slot.watched.seek(sought, now);
        let is_under_way = slot
            .visit
            .as_ref()
            .is_some_and(|visit| !visit.is_finished());
        let (Some(ip), false) = (pod.ip, is_under_way) else {
            return;
        };
        let Some(visit) = slot.watched.due(pod, ip, now, &self.limits) else {
            return;
        };
        let (probe_kind, fetcher) = (visit.probe_kind.clone(), self.fetcher.clone());
        let visited = async move {
            Visited {
                place,
                probe_kind,
                answer: visit.make(&fetcher).await,
            }
        };
        slot.visit = Some(self.visits.spawn(visited));
    }

    /// What is known of a pod's engines. One whose port a single container declares is on the GPUs of that container's processes,
    /// and on those of the pod on which no other is known to be, so that none reads as idle: of several in one container, or
    /// where no process is seen, each is on all GPUs of the pod. A proxy before an engine shows the engine's page, and is
    /// none: its container has no process on a GPU. Without that no two are taken for one, for queues add up.
    fn report(
        &self,
        pod: &PodOnNode,
        seen: &BTreeMap<&str, Vec<GpuUuid>>,
        now: Instant,
        found: &mut EngineRound,
    ) {
        let places = (pod.uid.clone(), None)..=(pod.uid.clone(), Some(u16::MAX));
        let all: Vec<&WatchedEngine> = self
            .slots
            .range(places)
            .map(|(_, slot)| &slot.watched)
            .collect();
        let container = |one: &WatchedEngine| Some(seen.get(&**pod.containers.get(&one.port()?)?));
        let own = |one: &WatchedEngine| container(one).flatten();
        let is_proxy = |one: &&&WatchedEngine| {
            let is_before = |other: &&WatchedEngine| own(other).is_some() && one.is_same_as(other);
            container(one) == Some(None) && all.iter().any(is_before)
        };
        let (gpus, before) = (gpus_of(pod, seen), found.engines.len());
        let covered: Vec<&GpuUuid> = all.iter().filter_map(|one| own(one)).flatten().collect();
        for one in all.iter().filter(|one| !is_proxy(one)) {
            let is_on = |gpu: &&GpuUuid| {
                own(one).is_none_or(|own| own.contains(gpu) || !covered.contains(gpu))
            };
            let gpus = gpus.iter().filter(is_on).cloned().collect();
            found
                .engines
                .extend(one.report(pod, gpus, now, &self.limits));
        }
        // A pod that is not ready yet starts, and one that has no GPU takes no load.
        let may_serve = pod.is_ready || pod.is_beyond_bound;
        let is_unread = found.engines.len() == before && may_serve && !gpus.is_empty();
        let Some(first) = all.first().filter(|_| is_unread) else {
            return;
        };
        let reason = match pod.is_beyond_bound {
            true => "the pod is larger than an agent reads",
            false => first
                .trouble()
                .unwrap_or("none of its ports has been asked yet"),
        };
        found.unread.push(UnreadPod {
            pod: pod.uid.clone(),
            gpus,
            declares_port: !pod.ports.is_empty() || pod.is_beyond_bound,
            reason: reason.to_owned(),
        });
    }

    /// Waits until all probes are finished or the round times out.
    async fn wait(&mut self) {
        let deadline = Instant::now() + self.limits.patience;
        while let Ok(Some(visited)) = timeout_at(deadline, self.visits.join_next()).await {
            // Otherwise its pod is gone, and the probe was aborted.
            visited.into_iter().for_each(|visited| self.note(visited));
        }
    }

    fn take_finished(&mut self) {
        while let Some(visited) = self.visits.try_join_next() {
            visited.into_iter().for_each(|visited| self.note(visited));
        }
    }

    fn note(&mut self, visited: Visited) {
        if let Some(slot) = self.slots.get_mut(&visited.place) {
            slot.visit = None;
            slot.watched
                .note(&visited.probe_kind, visited.answer, &self.limits);
        }
    }

    fn leave_gone(&mut self, wanted: &BTreeMap<Place, EngineQuery>) {
        self.slots.retain(|place, slot| {
            let stays = wanted.contains_key(place);
            if let (false, Some(visit)) = (stays, &slot.visit) {
                visit.abort();
            }
            stays
        });
    }
}

/// Whether another pod has the same address.
fn owner(pod: &PodOnNode, pods: &[PodOnNode]) -> AddressOwner {
    let has_same = |other: &PodOnNode| other.uid != pod.uid && other.ip == pod.ip;
    if pods.iter().any(has_same) {
        AddressOwner::Shared
    } else {
        AddressOwner::Pod
    }
}

/// The GPUs on which processes were seen, of each pod by its UID and of each container by its id.
fn seen_on(gpus: &[GpuReport]) -> BTreeMap<&str, Vec<GpuUuid>> {
    let mut seen: BTreeMap<&str, Vec<GpuUuid>> = BTreeMap::new();
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
            .for_each(|owner| seen.entry(owner).or_default().push(gpu.uuid.clone()));
    }
    seen
}

/// The GPUs of a pod's processes; if it has none, the GPUs that its Binding recorded.
fn gpus_of(pod: &PodOnNode, seen: &BTreeMap<&str, Vec<GpuUuid>>) -> Vec<GpuUuid> {
    seen.get(pod.uid.as_str())
        .or(pod.devices.as_ref())
        .cloned()
        .unwrap_or_default()
}
