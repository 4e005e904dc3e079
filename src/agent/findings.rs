//! Findings: deviations between the GPUs and VRAM that a pod's processes use and those that Stowage assigned.
//!
//! Nothing is corrected here. The extender decides what a finding means.

use super::pods::PodOnNode;
use std::collections::BTreeMap;
use stowage_report::{GpuReport, ReportFinding, UnrecordedPod};
use stowage_scheduling::ids::{GpuUuid, PodUid};
use stowage_scheduling::units::Bytes;

/// What a process has on a GPU beyond its engine's request: the CUDA context and its kernels. Half a GiB is usual, and the
/// headroom of every GPU covers it.
const CUDA_CONTEXT: Bytes = Bytes::mib(512);

/// All deviations, in order of the pods.
pub fn findings(pods: &[PodOnNode], gpus: &[GpuReport]) -> Vec<ReportFinding> {
    let used = usage_by_pod(gpus);
    let found = pods
        .iter()
        .filter_map(|pod| Some((pod, used.get(&pod.uid)?)));
    found
        .flat_map(|(pod, used)| {
            drift(pod, used, gpus)
                .into_iter()
                .chain(over_grant(pod, used))
        })
        .collect()
}

/// Pods that use GPUs and record none, in order.
pub fn unrecorded_pods(pods: &[PodOnNode], gpus: &[GpuReport]) -> Vec<UnrecordedPod> {
    let used = usage_by_pod(gpus);
    let unrecorded = pods
        .iter()
        .filter(|pod| pod.devices.is_none())
        .filter_map(|pod| {
            Some(UnrecordedPod {
                gpus: used
                    .get(&pod.uid)?
                    .keys()
                    .map(|gpu| (*gpu).clone())
                    .collect(),
                pod: pod.uid.clone(),
                namespace: pod.key.namespace.to_string(),
                name: pod.key.name.to_string(),
            })
        });
    unrecorded.collect()
}

/// One pod's use of one GPU.
#[derive(Debug, Clone, Copy, Default)]
struct GpuUsage {
    bytes: Bytes,
    processes: u64,
}

fn usage_by_pod(gpus: &[GpuReport]) -> BTreeMap<&PodUid, BTreeMap<&GpuUuid, GpuUsage>> {
    let mut used: BTreeMap<&PodUid, BTreeMap<&GpuUuid, GpuUsage>> = BTreeMap::new();
    for gpu in gpus {
        for process in gpu.processes.iter().flatten() {
            if let Some(pod) = &process.pod {
                let used = used.entry(pod).or_default().entry(&gpu.uuid).or_default();
                used.bytes += process.used_bytes.unwrap_or_default();
                used.processes += 1;
            }
        }
        for cgroup in &gpu.cgroups {
            let by_processes = used
                .get_mut(&cgroup.pod)
                .and_then(|used| used.get_mut(&gpu.uuid));
            if let (Some(used), Some(bytes)) = (by_processes, cgroup.used_bytes) {
                used.bytes = used.bytes.max(bytes);
            }
        }
    }
    used
}

fn drift(
    pod: &PodOnNode,
    used: &BTreeMap<&GpuUuid, GpuUsage>,
    gpus: &[GpuReport],
) -> Option<ReportFinding> {
    let recorded = pod.devices.as_ref()?;
    // A record made before the first report of an agent names the card by its index.
    let is_recorded = |gpu: &GpuUuid| {
        recorded.iter().any(|record| match record.index() {
            None => record == gpu,
            Some(index) => gpus
                .iter()
                .any(|reported| reported.uuid == *gpu && reported.index == index),
        })
    };
    let is_elsewhere = used.keys().any(|gpu| !is_recorded(gpu));
    is_elsewhere.then(|| ReportFinding::Drift {
        pod: pod.uid.clone(),
        recorded: recorded.clone(),
        actual: used.keys().map(|gpu| (*gpu).clone()).collect(),
    })
}

fn over_grant(pod: &PodOnNode, used: &BTreeMap<&GpuUuid, GpuUsage>) -> Option<ReportFinding> {
    let granted_bytes = pod.granted_vram?;
    let used_bytes: Bytes = used.values().map(|used| used.bytes).sum();
    let contexts = CUDA_CONTEXT.times(used.values().map(|used| used.processes).sum());
    (used_bytes > granted_bytes + contexts).then(|| ReportFinding::OverGrant {
        pod: pod.uid.clone(),
        granted_bytes,
        used_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use stowage_scheduling::ids::PodKey;

    fn pod(devices: &[&str], granted_gib: u64) -> PodOnNode {
        PodOnNode {
            uid: PodUid::parse("x").unwrap(),
            key: PodKey::parse("default", "x").unwrap(),
            ip: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            ports: vec![],
            containers: BTreeMap::new(),
            is_too_large: false,
            written_limit: None,
            devices: Some(
                devices
                    .iter()
                    .map(|uuid| GpuUuid::parse(uuid).unwrap())
                    .collect(),
            ),
            granted_vram: Some(Bytes::gib(granted_gib)),
            wants_gpu: true,
            is_terminating: false,
            is_ready: true,
        }
    }

    /// GPU a (index 0) and b (index 1), each with what pod x has there, in GiB.
    fn gpus(a: &[u64], b: &[u64]) -> Vec<GpuReport> {
        let gpu = |index: usize, uuid: &str, used: &[u64]| {
            let process = |gib: &u64| json!({ "pid": 7, "usedBytes": gib << 30, "pod": "x" });
            let processes: Vec<_> = used.iter().map(process).collect();
            let gpu = json!({
                "uuid": uuid, "index": index, "model": "H100", "totalBytes": 80u64 << 30, "processes": processes,
            });
            serde_json::from_value(gpu).unwrap()
        };
        vec![gpu(0, "GPU-a", a), gpu(1, "GPU-b", b)]
    }

    #[test]
    fn a_pod_on_its_gpus_within_its_grant_has_no_finding() {
        assert_eq!(findings(&[pod(&["GPU-a"], 20)], &gpus(&[10, 10], &[])), []);
        assert_eq!(findings(&[pod(&["index-0"], 20)], &gpus(&[20], &[])), []);
        assert_eq!(
            findings(&[pod(&["GPU-a", "GPU-b"], 20)], &gpus(&[], &[10])),
            [],
            "it may still be starting"
        );
    }

    #[test]
    fn a_pod_on_another_gpu_has_drifted() {
        let found = findings(&[pod(&["GPU-a"], 20)], &gpus(&[], &[10]));
        let uuids = |uuid| vec![GpuUuid::parse(uuid).unwrap()];
        let pod = PodUid::parse("x").unwrap();
        assert_eq!(
            found,
            [ReportFinding::Drift {
                pod,
                recorded: uuids("GPU-a"),
                actual: uuids("GPU-b")
            }]
        );
    }

    #[test]
    fn a_pod_that_uses_gpus_without_a_record_is_listed_with_all_of_them() {
        let without = PodOnNode {
            devices: None,
            granted_vram: None,
            ..pod(&[], 0)
        };
        let gpus = gpus(&[1], &[2]);
        let [found] = &unrecorded_pods(std::slice::from_ref(&without), &gpus)[..] else {
            panic!("one pod")
        };
        assert_eq!(
            (found.namespace.as_str(), found.name.as_str()),
            ("default", "x")
        );
        assert_eq!(
            found.gpus.iter().map(GpuUuid::as_str).collect::<Vec<_>>(),
            ["GPU-a", "GPU-b"]
        );
        assert_eq!(findings(&[without], &gpus), [], "nothing to compare with");
        assert_eq!(
            unrecorded_pods(&[pod(&["GPU-a"], 20)], &gpus),
            [],
            "it has drifted"
        );
    }

    #[test]
    fn a_cgroup_says_better_what_a_pod_uses() {
        let mut gpus = gpus(&[10], &[]);
        gpus[0].cgroups =
            serde_json::from_value(json!([{ "pod": "x", "usedBytes": 12u64 << 30 }])).unwrap();
        let found = findings(&[pod(&["GPU-a"], 10)], &gpus);
        assert!(
            matches!(found[..], [ReportFinding::OverGrant { used_bytes, .. }] if used_bytes == Bytes::gib(12))
        );
    }

    #[test]
    fn a_cuda_context_beyond_the_grant_is_normal_and_more_is_a_finding() {
        assert_eq!(findings(&[pod(&["GPU-a"], 10)], &gpus(&[10], &[])), []);
        let found = findings(&[pod(&["GPU-a"], 10)], &gpus(&[12], &[]));
        assert!(
            matches!(found[..], [ReportFinding::OverGrant { used_bytes, .. }] if used_bytes == Bytes::gib(12))
        );
    }
}
