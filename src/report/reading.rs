//! Converts a report into the core's types: free VRAM, engine load and models.

use super::{
    EngineReport, EngineState, GpuReport, NodeReport, ProcessReport, ReportFinding, ReportPart,
};
use std::collections::{BTreeMap, BTreeSet};
use stowage_scheduling::ids::{GpuUuid, ModelId, PodUid};
use stowage_scheduling::units::{Bytes, Millis, Moment, Percent};
use stowage_scheduling::vocabulary::engine_model::{EngineModelState, EngineReading, SleepLevel};
use stowage_scheduling::vocabulary::latency::{EngineLatency, Latency};
use stowage_scheduling::vocabulary::model_tier::{NodeModel, NodeModelSet};
use stowage_scheduling::vocabulary::node_reading::{
    EngineLoad, GpuActivity, GpuReading, NodeReading, OverGrant, SleepState, UnreadPod, VramLimit,
};

impl NodeReport {
    /// The reading, if the GPUs could be read. An engine's figures count while they are younger than `fresh`.
    pub fn reading(&self, received: Moment, fresh: Millis) -> Option<NodeReading> {
        let engine_loads = self.engine_loads(fresh);
        let gpus = self.gpus.as_ref()?.iter();
        let unmeasured = self.unmeasured_pods();
        Some(NodeReading {
            sampled: received.before(self.age_millis),
            gpus: gpus
                .map(|gpu| self.gpu_reading(gpu, &engine_loads))
                .collect(),
            activities: self.activities(),
            holdings: self.holdings(),
            engines: self.engine_readings(received),
            in_flight: self.in_flight(fresh),
            latencies: self.latencies(fresh),
            sleep: self.sleep_states(fresh, &unmeasured),
            unread: self.unread_pods(),
            over_grant: self.over_grants(),
            isolation: self.isolation,
            has_legacy_runtime: self.legacy_runtime,
            unmeasured,
            limits: self.limits(),
        })
    }

    fn activities(&self) -> BTreeMap<GpuUuid, GpuActivity> {
        let gpus = self.gpus.iter().flatten();
        gpus.filter_map(|gpu| Some((gpu.uuid.clone(), gpu.activity?)))
            .collect()
    }

    fn over_grants(&self) -> Vec<OverGrant> {
        let over = |finding: &ReportFinding| match finding {
            ReportFinding::OverGrant {
                pod,
                granted_bytes: granted,
                used_bytes: used,
            } => Some(OverGrant {
                pod: pod.clone(),
                granted: *granted,
                used: *used,
                ungranted: None,
            }),
            ReportFinding::Drift { .. } => None,
        };
        let mut all: Vec<OverGrant> = self.findings.iter().filter_map(over).collect();
        if !self.unrecorded.is_empty() {
            let mut used: BTreeMap<PodUid, Bytes> = BTreeMap::new();
            for (pod, bytes) in self.gpus.iter().flatten().flat_map(attributed) {
                *used.entry(pod).or_default() += bytes;
            }
            all.extend(self.unrecorded.iter().filter_map(|unrecorded| {
                let (pod, ungranted) = (unrecorded.pod.clone(), Some(unrecorded.key()?));
                Some(OverGrant {
                    used: *used.get(&pod)?,
                    granted: Bytes::ZERO,
                    pod,
                    ungranted,
                })
            }));
        }
        all
    }

    fn limits(&self) -> Vec<VramLimit> {
        let gpus = self.gpus.iter().flatten();
        let all = gpus.flat_map(|gpu| gpu.cgroups.iter().map(move |cgroup| (gpu, cgroup)));
        all.filter(|(_, cgroup)| cgroup.limit_bytes.or(cgroup.guaranteed_bytes).is_some())
            .map(|(gpu, cgroup)| VramLimit {
                pod: cgroup.pod.clone(),
                gpu: gpu.uuid.clone(),
                limit: cgroup.limit_bytes,
                guaranteed: cgroup.guaranteed_bytes,
            })
            .collect()
    }

    fn gpu_reading(
        &self,
        gpu: &GpuReport,
        engine_loads: &BTreeMap<&GpuUuid, EngineLoad>,
    ) -> GpuReading {
        GpuReading {
            uuid: gpu.uuid.clone(),
            used: gpu.used_bytes,
            attributed: attributed(gpu),
            engine_load: match engine_loads.get(&gpu.uuid) {
                // The agent did not look for engines, or not all that it found are in the report.
                Some(engine_load) if self.lacks_engines() => engine_load.with_unread_engine(),
                Some(engine_load) => *engine_load,
                // Or it does not know on which GPU an engine runs: the load of a GPU with any process is unknown.
                None if (self.lacks_engines() || self.has_engine_without_gpus())
                    && !self.is_idle(gpu) =>
                {
                    EngineLoad::UNKNOWN
                }
                None => EngineLoad::NONE,
            },
        }
    }

    fn unread_pods(&self) -> Vec<UnreadPod> {
        let unread = self.unread.iter().map(|one| UnreadPod {
            pod: one.pod.clone(),
            gpus: one.gpus.as_slice().into(),
            declares_port: one.declares_port,
        });
        unread.collect()
    }

    /// The load of each GPU. An engine on several GPUs counts on each.
    fn engine_loads(&self, fresh: Millis) -> BTreeMap<&GpuUuid, EngineLoad> {
        let mut engine_loads = BTreeMap::new();
        for engine in &self.engines {
            let Some(load) = engine_load(engine, fresh) else {
                continue;
            };
            for gpu in &engine.gpus {
                let combined = engine_loads
                    .get(gpu)
                    .map_or(load, |others: &EngineLoad| others.combined_with(load));
                engine_loads.insert(gpu, combined);
            }
        }
        engine_loads
    }

    /// Requests by pod, in order of UID; draining engines included, because their requests would be lost as well.
    fn in_flight(&self, fresh: Millis) -> Vec<(PodUid, u32)> {
        let mut by_pod: BTreeMap<&PodUid, u64> = BTreeMap::new();
        for engine in self
            .engines
            .iter()
            .filter(|engine| engine.age_millis < fresh)
        {
            if let Some(running) = engine.running {
                let sum = by_pod.entry(&engine.pod).or_default();
                *sum = sum.saturating_add(running);
            }
        }
        let count =
            |(uid, sum): (&PodUid, u64)| (uid.clone(), u32::try_from(sum).unwrap_or(u32::MAX));
        by_pod.into_iter().map(count).collect()
    }

    /// How long the requests of each pod's engines take, in order of UID.
    fn latencies(&self, fresh: Millis) -> Vec<EngineLatency> {
        let mut by_pod: BTreeMap<&PodUid, EngineLatency> = BTreeMap::new();
        let serves = |engine: &&EngineReport| {
            let is_serving = matches!(engine.state, EngineState::Serving | EngineState::Draining);
            is_serving && engine.age_millis < fresh
        };
        for engine in self.engines.iter().filter(serves) {
            let mean = |latency: Option<Latency>| Some(latency?.mean.rounded());
            let own = EngineLatency {
                pod: engine.pod.clone(),
                time_per_token: mean(engine.time_per_token),
                time_to_first_token: mean(engine.time_to_first_token),
                busy: engine.busy.and_then(Percent::from_share),
            };
            let all = by_pod.entry(&engine.pod).or_insert_with(|| own.clone());
            all.time_per_token = all.time_per_token.max(own.time_per_token);
            all.time_to_first_token = all.time_to_first_token.max(own.time_to_first_token);
            all.busy = all.busy.zip(own.busy).map(|(one, other)| one.max(other));
        }
        let says_something =
            |latency: &EngineLatency| latency.is_measured() || latency.busy.is_some();
        by_pod.into_values().filter(says_something).collect()
    }

    /// Engines whose model is known, in order of their pods' UIDs. One that does not answer shows nothing of its model.
    fn engine_readings(&self, received: Moment) -> Vec<EngineReading> {
        let reading = |engine: &EngineReport| {
            Some(EngineReading {
                pod: engine.pod.clone(),
                model: engine.model.clone()?,
                gpus: engine.gpus.as_slice().into(),
                state: match engine.state {
                    // Most engines open their port when the model is loaded.
                    EngineState::Starting | EngineState::Loading => EngineModelState::Loading,
                    EngineState::Serving | EngineState::Draining => EngineModelState::Resident,
                    EngineState::Sleeping => {
                        EngineModelState::Asleep(SleepLevel::from_reported(engine.sleep_level))
                    }
                    EngineState::Unreachable | EngineState::Other => return None,
                },
                reusable_in: engine.reusable_in.clone(),
                observed_at: received.before(engine.age_millis),
            })
        };
        let mut readings: Vec<EngineReading> = self.engines.iter().filter_map(reading).collect();
        readings.sort_by(|a, b| a.pod.cmp(&b.pod));
        readings
    }

    /// Whether the engines of each pod sleep, in order of UID. An engine that does not answer, or whose answer is old, says
    /// nothing, and a sleeping one without the figures of its processes does not say what it keeps.
    fn sleep_states(&self, fresh: Millis, unmeasured: &[PodUid]) -> Vec<(PodUid, SleepState)> {
        let mut by_pod: BTreeMap<&PodUid, Option<SleepState>> = BTreeMap::new();
        for engine in &self.engines {
            let state = match engine.state {
                _ if engine.age_millis >= fresh => None,
                EngineState::Sleeping => Some(SleepState::Asleep),
                EngineState::Starting | EngineState::Loading => Some(SleepState::Starting),
                EngineState::Serving | EngineState::Draining => Some(SleepState::Awake),
                EngineState::Unreachable | EngineState::Other => None,
            };
            let pod_state = by_pod.entry(&engine.pod).or_insert(state);
            // Whoever is awake says more than whoever sleeps or is silent.
            let is_up =
                |state: &Option<SleepState>| state.is_some_and(|one| one != SleepState::Asleep);
            *pod_state = match (*pod_state, state) {
                (one, other) if is_up(&one) || is_up(&other) => one.max(other),
                (recorded, state) => recorded.and(state),
            };
        }
        let is_known = |(uid, state): &(PodUid, SleepState)| {
            *state != SleepState::Asleep || unmeasured.binary_search(uid).is_err()
        };
        let states = by_pod.into_iter();
        let states = states.filter_map(|(uid, state)| Some((uid.clone(), state?)));
        states.filter(is_known).collect()
    }

    /// Pods with a process whose use is unknown, in order of UID.
    fn unmeasured_pods(&self) -> Vec<PodUid> {
        let pods: BTreeSet<&PodUid> = self.gpus.iter().flatten().flat_map(unmeasured).collect();
        pods.into_iter().cloned().collect()
    }

    fn lacks_engines(&self) -> bool {
        self.lacks_part(ReportPart::Engines) || self.lacks_part(ReportPart::Pods)
    }

    fn lacks_part(&self, part: ReportPart) -> bool {
        self.missing.iter().any(|missing| missing.part == part)
    }

    fn has_engine_without_gpus(&self) -> bool {
        self.engines.iter().any(|engine| engine.gpus.is_empty())
    }

    /// Whether no process is on the GPU. A report that lacks processes may lack all of one GPU.
    fn is_idle(&self, gpu: &GpuReport) -> bool {
        gpu.processes.as_ref().is_some_and(Vec::is_empty) && !self.lacks_part(ReportPart::Processes)
    }

    /// The models on the node. For a model that is found twice, the copy nearer to a GPU.
    fn holdings(&self) -> NodeModelSet {
        let mut best: BTreeMap<&ModelId, NodeModel> = BTreeMap::new();
        for report in &self.models {
            let found = NodeModel {
                model: report.model.clone(),
                tier: report.tier,
                bytes: report.bytes,
            };
            match best.get_mut(&report.model) {
                Some(best_found) => {
                    best_found.bytes = best_found.bytes.max(found.bytes);
                    best_found.tier = best_found.tier.max(found.tier);
                }
                None => {
                    best.insert(&report.model, found);
                }
            }
        }
        best.into_values().collect()
    }
}

/// The load of an engine; `None` if it serves no requests.
fn engine_load(engine: &EngineReport, fresh: Millis) -> Option<EngineLoad> {
    match engine.state {
        EngineState::Starting | EngineState::Loading | EngineState::Sleeping => None,
        EngineState::Unreachable | EngineState::Other => Some(EngineLoad::UNKNOWN),
        EngineState::Serving | EngineState::Draining if engine.age_millis >= fresh => {
            Some(EngineLoad::UNKNOWN)
        }
        EngineState::Serving | EngineState::Draining => {
            let queue = engine
                .waiting
                .map(|waiting| u32::try_from(waiting).unwrap_or(u32::MAX));
            let load = EngineLoad::new(engine.kv_cache_usage.and_then(Percent::from_share), queue);
            Some(EngineLoad {
                preempting: engine.preempting,
                ..load
            })
        }
    }
}

/// Pods with processes on a GPU of which neither the driver nor a cgroup says what they have there.
fn unmeasured(gpu: &GpuReport) -> impl Iterator<Item = &PodUid> {
    let processes = gpu.processes.iter().flatten();
    processes
        .filter(|process| process.used_bytes.is_none())
        .filter_map(|process| process.pod.as_ref())
        .filter(|pod| gpu.used_by_cgroup(pod).is_none())
}

/// VRAM of each pod on a GPU, in order of UID: what its cgroups are charged or its processes have, whichever is more, because no cgroup
/// is charged managed memory. A process whose amount the driver does not report counts as present.
fn attributed(gpu: &GpuReport) -> Vec<(PodUid, Bytes)> {
    let processes = gpu.processes.iter().flatten();
    let owned = |process: &ProcessReport| {
        Some((process.pod.clone()?, process.used_bytes.unwrap_or_default()))
    };
    let mut by_pod: Vec<(PodUid, Bytes)> = processes.filter_map(owned).collect();
    by_pod.sort_unstable();
    by_pod.dedup_by(|next, first| {
        let is_same = next.0 == first.0;
        if is_same {
            first.1 += next.1;
        }
        is_same
    });
    for (pod, used) in &mut by_pod {
        *used = gpu.used_by_cgroup(pod).unwrap_or_default().max(*used);
    }
    by_pod
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FRESH: Millis = Millis::seconds(5);

    fn report(engines: serde_json::Value) -> NodeReport {
        let gpu = |uuid: &str, processes: serde_json::Value| json!({ "uuid": uuid, "index": 0, "model": "H100", "totalBytes": 100, "usedBytes": 40, "processes": processes });
        let a = gpu(
            "GPU-a",
            json!([
                { "pid": 1, "usedBytes": 10, "pod": "x" }, { "pid": 2, "usedBytes": 5, "pod": "x" },
                { "pid": 3, "usedBytes": 7 }, { "pid": 4, "pod": "w" },
            ]),
        );
        serde_json::from_value(json!({
            "node": "n", "bootId": "b", "sequence": 1, "ageMillis": 400,
            "gpus": [a, gpu("GPU-b", json!([]))], "engines": engines,
        }))
        .unwrap()
    }

    fn engine(edit: serde_json::Value) -> serde_json::Value {
        let mut engine = json!({
            "pod": "x", "engine": "vllm", "gpus": ["GPU-a"], "state": "serving",
            "kvCacheUsage": 0.501, "waiting": 3, "ageMillis": 200,
        });
        for (key, value) in edit.as_object().unwrap() {
            engine[key] = value.clone();
        }
        engine
    }

    fn on_a(engines: serde_json::Value) -> (Option<u8>, Option<u32>) {
        let reading = report(engines).reading(Moment(10_000), FRESH).unwrap();
        let engine_load = reading.gpus[0].engine_load;
        (engine_load.kv_cache.map(Percent::get), engine_load.queue)
    }

    #[test]
    fn engine_readings_have_model_gpus_and_sleep_for_any_agent_version() {
        let asleep = json!({ "state": "sleeping", "sleepLevel": 1, "model": "m" });
        let newer = json!({ "state": "sleeping", "sleepLevel": 7, "model": "m", "reusableIn": "team", "unheardOf": 1 });
        let others = [
            json!({ "state": "serving", "model": "m", "pod": "a" }),
            json!({ "state": "starting", "model": "m", "pod": "b" }),
            json!({ "state": "unreachable", "model": "m", "pod": "c" }),
            json!({ "state": "of-a-later-version", "model": "m", "pod": "d" }),
            json!({ "state": "sleeping", "sleepLevel": 1, "pod": "e" }),
        ];
        let engines: Vec<_> = [asleep, newer]
            .into_iter()
            .chain(others)
            .map(engine)
            .collect();
        let reading = report(json!(engines))
            .reading(Moment(10_000), FRESH)
            .unwrap();
        let reported: Vec<_> = reading
            .engines
            .iter()
            .map(|engine| {
                (
                    engine.pod.as_str(),
                    engine.state,
                    engine.reusable_in.as_deref(),
                )
            })
            .collect();
        let asleep = EngineModelState::Asleep;
        assert_eq!(
            reported,
            [
                ("a", EngineModelState::Resident, None),
                ("b", EngineModelState::Loading, None),
                ("x", asleep(SleepLevel::WeightsOffloaded), None),
                ("x", asleep(SleepLevel::WeightsDiscarded), Some("team")),
            ]
        );
        assert_eq!(reading.engines[2].observed_at, Moment(9_800));
        assert_eq!(
            reading.engines[2]
                .gpus
                .iter()
                .map(GpuUuid::as_str)
                .collect::<Vec<_>>(),
            ["GPU-a"]
        );
    }

    #[test]
    fn what_a_cgroup_is_charged_counts_where_it_is_more_than_processes_have() {
        let mut report = report(json!([
            engine(json!({ "state": "sleeping" })),
            engine(json!({ "state": "sleeping", "pod": "w" })),
        ]));
        let known = report.reading(Moment(0), FRESH).unwrap();
        assert_eq!(known.sleep.len(), 1, "nothing says what w has");
        assert_eq!(known.limits, []);
        report.gpus.as_mut().unwrap()[0].cgroups = serde_json::from_value(json!([
            { "pod": "elsewhere", "usedBytes": 99 },
            { "pod": "w", "usedBytes": 30, "limitBytes": 100, "ofALaterVersion": 1 },
            { "pod": "x", "limitBytes": 12, "guaranteedBytes": 11 },
        ]))
        .unwrap();
        report.isolation =
            serde_json::from_value(json!({ "cgroupVersion": 2, "dmem": true })).unwrap();
        let reading = report.reading(Moment(0), FRESH).unwrap();
        let pod = |name: &str| PodUid::parse(name).unwrap();
        assert_eq!(
            reading.gpus[0].attributed,
            [(pod("w"), Bytes(30)), (pod("x"), Bytes(15))],
            "a pod without a process there has nothing"
        );
        assert_eq!(reading.sleep.len(), 2);
        let limit = |name, gpu: &str| {
            let found = reading.limit_of(&pod(name), &GpuUuid::parse(gpu).unwrap())?;
            Some((found.limit?.0, found.guaranteed.map(|min| min.0)))
        };
        assert_eq!(limit("w", "GPU-a"), Some((100, None)));
        assert_eq!(limit("x", "GPU-a"), Some((12, Some(11))));
        assert_eq!(
            (limit("x", "GPU-b"), limit("elsewhere", "GPU-a")),
            (None, None)
        );
        assert_eq!(reading.isolation, report.isolation);
    }

    #[test]
    fn use_is_attributed_to_pods_and_dated_by_the_receivers_clock() {
        let reading = report(json!([])).reading(Moment(10_000), FRESH).unwrap();
        assert_eq!(reading.sampled, Moment(9_600));
        let pod = |name: &str| PodUid::parse(name).unwrap();
        assert_eq!(
            reading.gpus[0].attributed,
            [(pod("w"), Bytes(0)), (pod("x"), Bytes(15))]
        );
        assert_eq!(
            (reading.gpus[0].used, reading.gpus[0].engine_load),
            (Some(Bytes(40)), EngineLoad::NONE)
        );
    }

    #[test]
    fn the_fullest_cache_counts_and_queues_add_up() {
        assert_eq!(
            on_a(json!([
                engine(json!({})),
                engine(json!({ "kvCacheUsage": 0.2, "waiting": 4 }))
            ])),
            (Some(51), Some(7))
        );
    }

    #[test]
    fn an_engine_that_interrupts_its_own_requests_is_full_whatever_its_gauge_says() {
        let load = |engines| report(engines).reading(Moment(0), FRESH).unwrap().gpus[0].engine_load;
        let preempting = engine(json!({ "kvCacheUsage": 0.4, "preempting": true }));
        assert_eq!(load(json!([preempting])).occupancy(), Some(Percent::FULL));
        let both = load(json!([engine(json!({})), preempting]));
        assert_eq!(
            (both.occupancy(), both.kv_cache),
            (Some(Percent::FULL), Percent::new(51))
        );
        assert_eq!(
            load(json!([engine(json!({}))])).occupancy(),
            Percent::new(51),
            "of an older agent"
        );
        assert_eq!(
            load(json!([engine(
                json!({ "preempting": true, "ageMillis": 5000 })
            )])),
            EngineLoad::UNKNOWN
        );
    }

    #[test]
    fn an_engine_that_does_not_serve_has_no_load_and_an_unknown_load_is_not_zero() {
        for state in ["starting", "loading", "sleeping"] {
            assert_eq!(
                on_a(json!([engine(json!({ "state": state }))])),
                (Some(0), Some(0)),
                "{state}"
            );
        }
        assert_eq!(
            on_a(json!([engine(json!({ "state": "unreachable" }))])),
            (None, None)
        );
        let both = json!([
            engine(json!({ "kvCacheUsage": 0.97 })),
            engine(json!({ "state": "unreachable" }))
        ]);
        assert_eq!(
            on_a(both),
            (Some(97), Some(3)),
            "a dead engine hides no full one"
        );
        assert_eq!(
            on_a(json!([engine(json!({ "state": "of-a-later-version" }))])),
            (None, None)
        );
        assert_eq!(
            on_a(json!([engine(json!({ "ageMillis": 5000 }))])),
            (None, None),
            "too old to act on"
        );
        assert_eq!(
            on_a(json!([engine(json!({ "kvCacheUsage": null }))])),
            (None, Some(3))
        );
    }

    #[test]
    fn if_the_agent_did_not_look_for_engines_only_an_idle_gpu_has_no_load() {
        let mut report = report(json!([]));
        report.missing =
            serde_json::from_value(json!([{ "part": "pods", "reason": "forbidden" }])).unwrap();
        let reading = report.reading(Moment(0), FRESH).unwrap();
        assert_eq!(reading.gpus[0].engine_load, EngineLoad::UNKNOWN);
        assert_eq!(reading.gpus[1].engine_load, EngineLoad::NONE);
    }

    #[test]
    fn parts_cut_from_a_report_are_unknown_and_not_idle() {
        let pods = |count: usize, gpu: &str| {
            let pod =
                |n| json!({ "pod": format!("{gpu}-{n}"), "gpus": [gpu], "reason": "no page" });
            (0..count).map(pod).collect::<Vec<_>>()
        };
        let engine_load = |edit: &dyn Fn(&mut NodeReport)| {
            let mut report = report(json!([engine(json!({}))]));
            edit(&mut report);
            report.truncate_to_limits();
            report
                .reading(Moment(0), FRESH)
                .unwrap()
                .gpus
                .into_iter()
                .map(|gpu| gpu.engine_load)
                .collect::<Vec<_>>()
        };
        let known = EngineLoad::new(Percent::new(51), Some(3));
        assert_eq!(engine_load(&|_| ()), [known, EngineLoad::NONE]);
        let beside = EngineLoad {
            partial: true,
            ..known
        };
        let unread = serde_json::from_value::<Vec<_>>(json!(pods(600, "GPU-a"))).unwrap();
        let many_unread = engine_load(&|report| report.unread = unread.clone());
        assert_eq!(
            many_unread,
            [beside, EngineLoad::NONE],
            "some of these pods are not named"
        );
        let many_engines =
            engine_load(&|report| report.engines = vec![report.engines[0].clone(); 600]);
        assert!(many_engines[0].partial, "{many_engines:?}");
        let no_processes = engine_load(&|report| {
            report.unread = unread.clone();
            let gpus = report.gpus.as_mut().unwrap();
            gpus[1].processes = gpus[0].processes.clone();
            gpus[0].processes = gpus[0]
                .processes
                .take()
                .map(|list| list.into_iter().cycle().take(5000).collect());
        });
        assert_eq!(
            no_processes[1],
            EngineLoad::UNKNOWN,
            "its processes are not listed"
        );
    }

    #[test]
    fn a_model_found_twice_has_the_nearer_tier() {
        let mut report = report(json!([]));
        report.models = serde_json::from_value(json!([
            { "model": "b", "tier": "disk", "bytes": 7, "source": "huggingface" },
            { "model": "a", "tier": "partial", "bytes": 3, "source": "huggingface" },
            { "model": "b", "tier": "resident", "source": "engine" },
        ]))
        .unwrap();
        let reading = report.reading(Moment(0), FRESH).unwrap();
        let held: Vec<_> = reading
            .holdings
            .iter()
            .map(|h| (h.model.as_str(), h.tier, h.bytes.0))
            .collect();
        use stowage_scheduling::vocabulary::model_tier::ModelTier;
        assert_eq!(
            held,
            [("a", ModelTier::Partial, 3), ("b", ModelTier::Resident, 7)]
        );
    }

    #[test]
    fn how_busy_a_gpu_is_is_known_only_where_its_agent_says_it() {
        let gpu = |uuid: &str, activity: serde_json::Value| json!({ "uuid": uuid, "index": 0, "model": "m", "totalBytes": 1, "activity": activity });
        let report: NodeReport = serde_json::from_value(json!({
            "node": "n", "bootId": "b", "sequence": 1, "gpus": [
                { "uuid": "GPU-old", "index": 0, "model": "m", "totalBytes": 1 },
                gpu("GPU-unknown", serde_json::Value::Null),
                gpu("GPU-known", json!({ "smPercent": 0, "memoryBandwidthPercent": null, "ofLater": 3 })),
            ],
        }))
        .unwrap();
        let reading = report.reading(Moment(0), FRESH).unwrap();
        let known = GpuActivity::new(Percent::new(0), None).unwrap();
        let gpu = GpuUuid::parse("GPU-known").unwrap();
        assert_eq!(reading.activities, [(gpu, known)].into());
    }

    #[test]
    fn a_report_whose_gpus_could_not_be_read_measures_nothing() {
        let report = NodeReport {
            gpus: None,
            ..report(json!([]))
        };
        assert_eq!(report.reading(Moment(0), FRESH), None);
    }
}
