//! What an agent would have reported of a node whose pods are others than the recorded ones.
//!
//! VRAM that no pod has stays where it was. What a pod's processes use, and how busy its engine is, goes with the pod; the load of
//! a GPU that several pods share cannot be told apart, and is unknown as soon as one of them is elsewhere. How busy its SMs and memory
//! are, no decision asks: that is left out.

use super::demand::RecordedDemand;
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::{GpuUuid, NodeName, PodUid};
use stowage_scheduling::units::{Bytes, Moment};
use stowage_scheduling::vocabulary::node_reading::{
    EngineLoad, GpuReading, NodeReading, SleepState,
};

/// The recorded pods as the latest reports showed them, and where they were.
#[derive(Debug)]
pub(crate) struct RecordedLoads<'d> {
    demand: &'d RecordedDemand,
    /// Recorded pods by node, over the whole recording.
    on_node: BTreeMap<&'d NodeName, Vec<&'d PodUid>>,
    pods: BTreeMap<&'d PodUid, RecordedLoad>,
}

/// Latest reported load of one recorded pod.
#[derive(Debug, Default)]
pub(crate) struct RecordedLoad {
    /// Maximum VRAM of its processes on one GPU, in bytes; `None` if no agent reported it.
    used: Option<Bytes>,
    /// Load of its engine; `None` as long as it shared its GPU.
    engine_load: Option<EngineLoad>,
    in_flight: Option<u32>,
    sleep: Option<SleepState>,
}

/// A pod of a loop, on a node.
#[derive(Debug)]
pub struct Resident<'l> {
    pub uid: &'l PodUid,
    /// UID of the recorded pod that it replays.
    pub recorded: &'l PodUid,
    pub devices: &'l [GpuUuid],
}

impl<'d> RecordedLoads<'d> {
    pub fn new(demand: &'d RecordedDemand) -> Self {
        let mut on_node: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (uid, pod) in &demand.pods {
            pod.bound
                .iter()
                .for_each(|bound| on_node.entry(&bound.node).or_default().push(uid));
        }
        Self {
            demand,
            on_node,
            pods: BTreeMap::new(),
        }
    }

    /// Records the loads of a report.
    pub fn record_reading(&mut self, now: Moment, node: &NodeName, reading: &NodeReading) {
        let mut loads: BTreeMap<&'d PodUid, RecordedLoad> = BTreeMap::new();
        for gpu in &reading.gpus {
            let here = self.recorded_pods_on(now, node, &gpu.uuid);
            for uid in &here {
                let load = loads.entry(uid).or_default();
                load.used = load.used.max(gpu.attributed_to(uid));
                load.engine_load = (here.len() == 1).then_some(gpu.engine_load);
                (load.in_flight, load.sleep) = (reading.in_flight_of(uid), reading.sleep_of(uid));
            }
        }
        self.pods.extend(loads);
    }

    /// The recorded pods on a GPU.
    fn recorded_pods_on(
        &self,
        now: Moment,
        node: &NodeName,
        gpu: &GpuUuid,
    ) -> BTreeSet<&'d PodUid> {
        let is_here = |uid: &&&'d PodUid| {
            let pod = &self.demand.pods[**uid];
            let bound = pod.bound.as_ref().filter(|bound| bound.at <= now);
            let devices = bound.and_then(|bound| bound.devices.as_ref());
            devices.is_some_and(|devices| devices.contains(gpu))
                && pod.gone_at.is_none_or(|gone| now < gone)
        };
        self.on_node
            .get(node)
            .into_iter()
            .flatten()
            .filter(is_here)
            .copied()
            .collect()
    }

    /// The reading as it would have been with these pods on the node.
    pub fn reading(
        &self,
        now: Moment,
        node: &NodeName,
        recorded: &NodeReading,
        residents: &[Resident<'_>],
    ) -> NodeReading {
        let gpus = recorded
            .gpus
            .iter()
            .map(|gpu| self.gpu_reading(now, node, gpu, residents))
            .collect();
        let load_of = |resident: &Resident<'_>| self.pods.get(resident.recorded);
        let mut in_flight: Vec<_> = residents
            .iter()
            .filter_map(|resident| Some((resident.uid.clone(), load_of(resident)?.in_flight?)))
            .collect();
        let mut sleep: Vec<_> = residents
            .iter()
            .filter_map(|resident| Some((resident.uid.clone(), load_of(resident)?.sleep?)))
            .collect();
        in_flight.sort_unstable();
        sleep.sort_unstable();
        let is_here = |pod: &PodUid, gpus: &[GpuUuid]| {
            residents.iter().any(|resident| {
                resident.uid == pod && gpus.iter().all(|gpu| resident.devices.contains(gpu))
            })
        };
        NodeReading {
            sampled: recorded.sampled,
            gpus,
            activities: BTreeMap::new(),
            holdings: recorded.holdings.clone(),
            engines: recorded
                .engines
                .iter()
                .filter(|engine| is_here(&engine.pod, &engine.gpus))
                .cloned()
                .collect(),
            in_flight,
            latencies: recorded
                .latencies
                .iter()
                .filter(|latency| is_here(&latency.pod, &[]))
                .cloned()
                .collect(),
            sleep,
            unread: recorded
                .unread
                .iter()
                .filter(|unread| is_here(&unread.pod, &unread.gpus))
                .cloned()
                .collect(),
            over_grant: recorded
                .over_grant
                .iter()
                .filter(|over| is_here(&over.pod, &[]))
                .cloned()
                .collect(),
            isolation: recorded.isolation,
            has_legacy_runtime: recorded.has_legacy_runtime,
            unmeasured: recorded
                .unmeasured
                .iter()
                .filter(|pod| is_here(pod, &[]))
                .cloned()
                .collect(),
            limits: recorded
                .limits
                .iter()
                .filter(|limit| is_here(&limit.pod, std::slice::from_ref(&limit.gpu)))
                .cloned()
                .collect(),
        }
    }

    fn gpu_reading(
        &self,
        now: Moment,
        node: &NodeName,
        recorded: &GpuReading,
        residents: &[Resident<'_>],
    ) -> GpuReading {
        let here: Vec<&Resident<'_>> = residents
            .iter()
            .filter(|resident| resident.devices.contains(&recorded.uuid))
            .collect();
        let as_recorded = self.recorded_pods_on(now, node, &recorded.uuid);
        if here
            .iter()
            .map(|resident| resident.uid)
            .collect::<BTreeSet<_>>()
            == as_recorded
        {
            return recorded.clone();
        }
        let load_of = |resident: &&Resident<'_>| self.pods.get(resident.recorded);
        let mut attributed: Vec<(PodUid, Bytes)> = here
            .iter()
            .filter_map(|resident| Some((resident.uid.clone(), load_of(resident)?.used?)))
            .collect();
        attributed.sort_unstable();
        let sum = |attributed: &[(PodUid, Bytes)]| {
            attributed.iter().map(|(_, used)| *used).sum::<Bytes>()
        };
        let unknown = EngineLoad::new(None, None);
        let loads = here.iter().map(|resident| {
            load_of(resident)
                .and_then(|load| load.engine_load)
                .unwrap_or(unknown)
        });
        GpuReading {
            uuid: recorded.uuid.clone(),
            used: recorded
                .used
                .map(|used| used.minus(sum(&recorded.attributed)) + sum(&attributed)),
            engine_load: loads.fold(EngineLoad::NONE, EngineLoad::combined_with),
            attributed,
        }
    }
}
