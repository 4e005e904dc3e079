//! The inference engines on this node: finds them on their pods, probes them once a round, and reports them.
//!
//! [`address`] lists candidate addresses, `probe` makes the requests, through [`fetch`] and within [`limits`]; [`watched`] keeps
//! the state, and `reuse` reads from a pod's labels whether its engine may be taken over. [`crate::engine_metrics`] interprets
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
mod watched_tests;

use crate::agent::pods::PodOnNode;
use crate::ids::{GpuUuid, PodUid};
use crate::report::{EngineReport, EngineState};
use crate::units::Millis;
use address::{AddressOwner, BadAnnotation, sought};
use fetch::Fetcher;
use limits::EngineLimits;
use probe::{ProbeKind, ProbeResult};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, timeout_at};
use watched::{WatchedEngine, declared_model};

/// The engines of one node, from round to round.
#[derive(Debug)]
pub struct EngineWatcher {
    limits: EngineLimits,
    fetcher: Arc<Fetcher>,
    pods: BTreeMap<PodUid, EngineSlot>,
    visits: JoinSet<Visited>,
}

#[derive(Debug)]
struct EngineSlot {
    watched: WatchedEngine,
    visit: Option<AbortHandle>,
}

struct Visited {
    pod: PodUid,
    probe_kind: ProbeKind,
    answer: ProbeResult,
}

impl EngineWatcher {
    pub fn new(limits: EngineLimits) -> Self {
        let fetcher = Arc::new(Fetcher::new(limits.clone()));
        Self { limits, fetcher, pods: BTreeMap::new(), visits: JoinSet::new() }
    }

    /// One round: probes every engine that is due, waits a moment, and returns what is known of all of them, in order of their
    /// pods' UIDs. An engine that takes longer delays nothing: its answer is used in the next round, and until then its last
    /// figures are reported with their age.
    ///
    /// `gpus`: the GPUs on which a pod's processes were seen; without any, those that its Binding recorded.
    pub async fn round(
        &mut self,
        pods: &[PodOnNode],
        gpus: &BTreeMap<PodUid, Vec<GpuUuid>>,
    ) -> Vec<EngineReport> {
        let candidates: BTreeMap<&PodUid, &PodOnNode> = pods
            .iter()
            .filter(|pod| pod.wants_gpu || gpus.contains_key(&pod.uid))
            .map(|pod| (&pod.uid, pod))
            .collect();
        self.take_finished();
        self.leave_gone(&candidates);
        let mut refused = Vec::new();
        for pod in candidates.values() {
            if let Err(error) = self.ask(pod, owner(pod, pods)) {
                refused.push(misconfigured(pod, gpus_of(pod, gpus), &error));
            }
        }
        self.wait().await;
        let now = Instant::now();
        let reports = self.pods.iter().filter_map(|(uid, place)| {
            let pod = candidates.get(uid)?;
            place.watched.report(pod, gpus_of(pod, gpus), now, &self.limits)
        });
        let mut reports: Vec<EngineReport> = reports.chain(refused).collect();
        reports.sort_by(|a, b| a.pod.cmp(&b.pod));
        reports
    }

    /// Starts a probe if the pod is due and its last one is over.
    fn ask(&mut self, pod: &PodOnNode, owner: AddressOwner) -> Result<(), BadAnnotation> {
        let now = Instant::now();
        let sought = sought(pod, owner).inspect_err(|_| drop(self.pods.remove(&pod.uid)))?;
        let place = self
            .pods
            .entry(pod.uid.clone())
            .or_insert_with(|| EngineSlot { watched: WatchedEngine::new(sought.clone(), now), visit: None });
        place.watched.seek(sought, now);
        let is_under_way = place.visit.as_ref().is_some_and(|visit| !visit.is_finished());
        let (Some(ip), false) = (pod.ip, is_under_way) else { return Ok(()) };
        let Some(visit) = place.watched.due(pod, ip, now, &self.limits) else { return Ok(()) };
        let (pod, probe_kind, fetcher) = (pod.uid.clone(), visit.probe_kind.clone(), self.fetcher.clone());
        let visited = async move { Visited { pod, probe_kind, answer: visit.make(&fetcher).await } };
        place.visit = Some(self.visits.spawn(visited));
        Ok(())
    }

    /// Until all probes are over, or the round's time is.
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
        if let Some(place) = self.pods.get_mut(&visited.pod) {
            place.visit = None;
            place.watched.note(&visited.probe_kind, visited.answer, &self.limits);
        }
    }

    fn leave_gone(&mut self, candidates: &BTreeMap<&PodUid, &PodOnNode>) {
        self.pods.retain(|uid, place| {
            let stays = candidates.contains_key(uid);
            if let (false, Some(visit)) = (stays, &place.visit) {
                visit.abort();
            }
            stays
        });
    }
}

/// Whether another pod has the same address.
fn owner(pod: &PodOnNode, pods: &[PodOnNode]) -> AddressOwner {
    let has_same = |other: &PodOnNode| other.uid != pod.uid && other.ip == pod.ip;
    if pods.iter().any(has_same) { AddressOwner::Shared } else { AddressOwner::Pod }
}

fn gpus_of(pod: &PodOnNode, seen: &BTreeMap<PodUid, Vec<GpuUuid>>) -> Vec<GpuUuid> {
    let seen = seen.get(&pod.uid).filter(|gpus| !gpus.is_empty());
    seen.or(pod.devices.as_ref()).cloned().unwrap_or_default()
}

/// An engine whose metrics annotations cannot be parsed.
fn misconfigured(pod: &PodOnNode, gpus: Vec<GpuUuid>, error: &BadAnnotation) -> EngineReport {
    EngineReport {
        pod: pod.uid.clone(),
        engine: "unknown".into(),
        gpus,
        state: if pod.is_leaving { EngineState::Draining } else { EngineState::Starting },
        sleep_level: None,
        model: declared_model(pod),
        kv_cache_usage: None,
        kv_cache_tokens: None,
        waiting: None,
        preempting: false,
        running: None,
        tokens_per_second: None,
        reusable_in: None,
        age_millis: Millis(0),
        problem: Some(error.to_string()),
    }
}
