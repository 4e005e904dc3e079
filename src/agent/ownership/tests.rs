//! The owners of processes, found with a `/proc` of files and a stand-in kubelet.

use super::device_id::DeviceId;
use super::fake_kubelet::{FakeKubelet, pod_with_claim, pod_with_devices};
use super::*;
use serde_json::json;
use stowage_report::DeviceNumbers;
use tempfile::TempDir;

const LLAMA: &str = "0e5c2a4b-93d1-4f7e-8a06-5b1d2c3e4f50";
const QWEN: &str = "1e5c2a4b-93d1-4f7e-8a06-5b1d2c3e4f51";

struct OwnershipFixture {
    proc: TempDir,
    kubelet: FakeKubelet,
    owners: Owners,
}

fn node(kubelet: FakeKubelet) -> OwnershipFixture {
    let proc = tempfile::tempdir().unwrap();
    let (cgroups, pod_resources) = (
        Cgroups::new(proc.path().into()),
        PodResources::with_long_timeout(kubelet.socket()),
    );
    let owners = Owners {
        cgroups,
        dmem: Dmem::new(proc.path().join("cgroups")),
        pod_resources,
    };
    OwnershipFixture {
        proc,
        kubelet,
        owners,
    }
}

impl OwnershipFixture {
    fn runs(&self, pid: u32, cgroup: &str) {
        let folder = self.proc.path().join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(
            folder.join("stat"),
            format!("{pid} (x) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 0"),
        )
        .unwrap();
        std::fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    /// Of every process in order, its pod; and what is missing.
    async fn owners(
        &mut self,
        mut gpus: Vec<GpuReport>,
        pods: &[PodOnNode],
    ) -> (Vec<Option<String>>, Vec<String>) {
        let missing = self.owners.owners(&mut gpus, pods).await;
        assert!(
            missing
                .iter()
                .all(|missing| missing.part == ReportPart::Owners)
        );
        let owners = processes(&gpus)
            .map(|process| process.pod.as_ref().map(ToString::to_string))
            .collect();
        (
            owners,
            missing.into_iter().map(|missing| missing.reason).collect(),
        )
    }
}

fn gpu(uuid: &str, index: u32, pids: &[u32]) -> GpuReport {
    let processes: Vec<_> = pids
        .iter()
        .map(|pid| json!({ "pid": pid, "usedBytes": 1, "pod": "stale" }))
        .collect();
    serde_json::from_value(
        json!({ "uuid": uuid, "index": index, "model": "H100", "totalBytes": 80u64 << 30, "processes": processes }),
    )
    .unwrap()
}

fn pod(uid: &str, name: &str) -> PodOnNode {
    PodOnNode {
        uid: PodUid::parse(uid).unwrap(),
        key: PodKey::parse("team-a", name).unwrap(),
        ip: None,
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        ports: vec![],
        containers: BTreeMap::new(),
        is_too_large: false,
        written_limit: None,
        devices: None,
        granted_vram: None,
        wants_gpu: true,
        is_terminating: false,
        is_ready: true,
    }
}

fn in_pod(uid: &str) -> String {
    format!("0::/kubepods/pod{uid}/x\n")
}

fn is_llamas() -> Option<String> {
    Some(LLAMA.into())
}

#[tokio::test]
async fn the_kubelet_is_not_asked_if_the_cgroup_names_a_pod() {
    let mut node = node(FakeKubelet::start(vec![pod_with_devices(
        "team-a",
        "qwen",
        "nvidia.com/gpu",
        &["GPU-a"],
    )]));
    node.runs(7, &in_pod(LLAMA));
    node.runs(8, "0::/system.slice/dcgm.service\n");
    let gpus = vec![gpu("GPU-a", 0, &[7, 8]), gpu("GPU-b", 1, &[7])];
    let (owners, missing) = node
        .owners(gpus, &[pod(LLAMA, "llama"), pod(QWEN, "qwen")])
        .await;
    assert_eq!(
        owners,
        [is_llamas(), None, is_llamas()],
        "a service of the host is nobody's"
    );
    assert_eq!(missing, [""; 0]);
    assert_eq!(node.kubelet.list_calls(), 0);
}

#[tokio::test]
async fn a_pod_that_is_not_listed_yet_is_named_all_the_same() {
    let mut node = node(FakeKubelet::stopped());
    node.runs(7, &in_pod(LLAMA));
    assert_eq!(
        node.owners(vec![gpu("GPU-a", 0, &[7])], &[]).await,
        (vec![is_llamas()], vec![])
    );
}

#[tokio::test]
async fn for_a_node_inside_a_pod_the_owner_is_the_pod_of_this_node() {
    let mut node = node(FakeKubelet::stopped());
    node.runs(
        7,
        &format!("0::/kubepods/pod{QWEN}/kubelet/kubepods/pod{LLAMA}/x\n"),
    );
    let (owners, _) = node
        .owners(vec![gpu("GPU-a", 0, &[7])], &[pod(LLAMA, "llama")])
        .await;
    assert_eq!(owners, [is_llamas()]);
}

#[tokio::test]
async fn a_static_pod_is_found_by_its_mirrors_annotation() {
    let hash = LLAMA.replace('-', "");
    let mut node = node(FakeKubelet::stopped());
    node.runs(7, &in_pod(&hash));
    node.runs(8, &in_pod(QWEN));
    let mut mirror = pod("mirror", "llama");
    mirror.annotations.insert(STATIC_POD_UID.into(), hash);
    let mut thief = pod("thief", "thief");
    thief.annotations.insert(STATIC_POD_UID.into(), QWEN.into());
    let (owners, _) = node
        .owners(
            vec![gpu("GPU-a", 0, &[7, 8])],
            &[mirror, pod(QWEN, "qwen"), thief],
        )
        .await;
    assert_eq!(
        owners,
        [Some("mirror".into()), Some(QWEN.into())],
        "no annotation takes another pod's UID"
    );
}

#[tokio::test]
async fn without_a_cgroup_path_the_process_belongs_to_the_only_pod_with_the_gpu() {
    let kubelet = FakeKubelet::start(vec![
        pod_with_devices("team-a", "llama", "nvidia.com/gpu", &["GPU-a"]),
        pod_with_devices("team-a", "llama", "nvidia.com/gpu", &["nvidia1"]),
        pod_with_devices("team-a", "llama", "nvidia.com/gpu.shared", &["GPU-c::0"]),
        pod_with_devices("team-a", "qwen", "nvidia.com/gpu.shared", &["GPU-c::1"]),
        pod_with_devices("team-a", "gone", "nvidia.com/gpu", &["GPU-d"]),
    ]);
    let mut node = node(kubelet);
    node.runs(7, "0::/\n");
    node.runs(8, "0::/system.slice/x.service\n");
    let gpus = vec![
        gpu("GPU-a", 0, &[7, 8]),
        gpu("GPU-b", 1, &[7]),
        gpu("GPU-c", 2, &[7]),
        gpu("GPU-d", 3, &[7]),
        gpu("GPU-e", 4, &[7]),
    ];
    let (owners, missing) = node
        .owners(gpus, &[pod(LLAMA, "llama"), pod(QWEN, "qwen")])
        .await;
    assert_eq!(owners, [is_llamas(), None, is_llamas(), None, None, None]);
    assert_eq!(missing, [""; 0]);
}

#[tokio::test]
async fn a_gpu_is_found_by_each_name_that_device_plugins_give_it() {
    for id in [
        "GPU-a",
        "GPU-a::1",
        "GPU-a-3",
        "0",
        "0::1",
        "nvidia0",
        "nvidia0/vgpu2",
    ] {
        let mut node = node(FakeKubelet::start(vec![pod_with_devices(
            "team-a",
            "llama",
            "nvidia.com/gpu",
            &[id],
        )]));
        node.runs(7, "0::/\n");
        let gpus = vec![gpu("GPU-a", 0, &[7]), gpu("GPU-a-30", 1, &[7])];
        let (owners, missing) = node.owners(gpus, &[pod(LLAMA, "llama")]).await;
        assert_eq!((owners, missing), (vec![is_llamas(), None], vec![]), "{id}");
    }
}

#[tokio::test]
async fn a_slice_is_found_by_its_place_and_by_its_gpu_instance() {
    let slice = |uuid: &str, mig_index, instance, pid| {
        let mut slice = gpu(uuid, 0, &[pid]);
        slice.parent = Some(GpuUuid::parse("GPU-a").unwrap());
        slice.numbers = DeviceNumbers {
            minor: Some(5),
            mig_index: Some(mig_index),
            gpu_instance: Some(instance),
            ..DeviceNumbers::default()
        };
        slice
    };
    for id in ["MIG-x", "0:1", "0:1::2", "nvidia5/gi9", "nvidia5/gi9/vgpu0"] {
        let mut node = node(FakeKubelet::start(vec![pod_with_devices(
            "team-a",
            "llama",
            "nvidia.com/gpu",
            &[id],
        )]));
        [7, 8].iter().for_each(|pid| node.runs(*pid, "0::/\n"));
        let gpus = vec![slice("MIG-x", 1, 9, 7), slice("MIG-y", 2, 1, 8)];
        let (owners, missing) = node.owners(gpus, &[pod(LLAMA, "llama")]).await;
        assert_eq!((owners, missing), (vec![is_llamas(), None], vec![]), "{id}");
    }
}

#[tokio::test]
async fn the_gpu_of_a_claim_is_found_by_its_device_and_another_drivers_device_is_none() {
    let uuid = "GPU-0E5C2a4b-93d1-4f7e-8a06-5b1d2c3e4f50";
    let lower = uuid.to_lowercase();
    let (mut by_minor, elsewhere) = (gpu(uuid, 0, &[7]), gpu("GPU-b", 1, &[7]));
    by_minor.numbers.minor = Some(3);
    for (driver, device, cdi, is_found) in [
        (
            "gpu.nvidia.com",
            "gpu-3",
            "k8s.gpu.nvidia.com/claim=x-gpu-3",
            true,
        ),
        ("gpu.nvidia.com", lower.as_str(), "", true),
        (
            "gpu.example.com",
            "card",
            &format!("nvidia.com/gpu={uuid}"),
            true,
        ),
        ("gpu.nvidia.com", "gpu-0", "", false),
        ("dra.net", "gpu-3", "", false),
    ] {
        let mut node = node(FakeKubelet::start(vec![pod_with_claim(
            "team-a", "llama", driver, device, cdi,
        )]));
        node.runs(7, "0::/\n");
        let gpus = vec![by_minor.clone(), elsewhere.clone()];
        let (owners, missing) = node.owners(gpus, &[pod(LLAMA, "llama")]).await;
        assert_eq!(
            (owners[0].clone(), missing),
            (is_llamas().filter(|_| is_found), vec![]),
            "{device}"
        );
    }
    let slice = pod_with_claim("team-a", "llama", "gpu.nvidia.com", "gpu-3-mig-9-4-4", "");
    let mut node = node(FakeKubelet::start(vec![slice]));
    node.runs(7, "0::/\n");
    let (_, missing) = node.owners(vec![by_minor], &[pod(LLAMA, "llama")]).await;
    assert!(
        missing[0].contains("gpu-3-mig-9-4-4") && missing[0].contains("gpu.nvidia.com"),
        "{missing:?}"
    );
}

#[tokio::test]
async fn a_device_id_that_no_rule_understands_is_reported_with_its_resource() {
    let mut node = node(FakeKubelet::start(vec![
        pod_with_devices("team-a", "llama", "nvidia.com/gpu", &["card:7", "card:8"]),
        pod_with_devices("team-a", "qwen", "acme.com/gpu-share", &["card:7"]),
        pod_with_devices("team-a", "qwen", "acme.com/nic", &["0"]),
    ]));
    node.runs(7, "0::/\n");
    let gpus = vec![gpu("GPU-a", 0, &[7])];
    let (owners, missing) = node
        .owners(gpus, &[pod(LLAMA, "llama"), pod(QWEN, "qwen")])
        .await;
    assert_eq!(owners, [None], "another resource's number is no GPU's");
    let [acme, nvidia] = &missing[..] else {
        panic!("{missing:?}")
    };
    assert!(
        nvidia.contains("card:7") && nvidia.contains("nvidia.com/gpu"),
        "{nvidia}"
    );
    assert!(
        acme.contains("card:7") && acme.contains("acme.com/gpu-share"),
        "{acme}"
    );
}

#[test]
fn a_gpu_that_a_binding_gave_to_another_pod_too_has_no_sole_owner() {
    let key = PodKey::parse("team-a", "llama").unwrap();
    let ids = vec![Ok(DeviceId::Uuid(GpuUuid::parse("GPU-a").unwrap()))];
    let allocation = Allocation {
        key,
        resource: String::new(),
        ids,
    };
    let pods = |devices: Option<&str>| {
        let devices = devices.map(|uuid| vec![GpuUuid::parse(uuid).unwrap()]);
        [
            pod(LLAMA, "llama"),
            PodOnNode {
                devices,
                ..pod(QWEN, "qwen")
            },
        ]
    };
    let holder = |pods: &[PodOnNode]| {
        only_holder(
            &gpu("GPU-a", 0, &[]),
            std::slice::from_ref(&allocation),
            pods,
        )
        .map(|uid| uid.to_string())
    };
    assert_eq!(holder(&pods(None)), is_llamas());
    assert_eq!(holder(&pods(Some("GPU-b"))), is_llamas());
    assert_eq!(holder(&pods(Some("GPU-a"))), None);
    assert_eq!(holder(&pods(Some("index-0"))), None);
    assert_eq!(
        holder(&[pod(LLAMA, "llama"), pod(QWEN, "llama")]),
        None,
        "one of them is on its way out"
    );
}

#[tokio::test]
async fn a_slice_is_not_the_gpu_it_is_cut_from() {
    let mut node = node(FakeKubelet::start(vec![pod_with_devices(
        "team-a",
        "llama",
        "nvidia.com/gpu",
        &["nvidia0"],
    )]));
    node.runs(7, "0::/\n");
    let mut slice = gpu("MIG-a", 0, &[7]);
    slice.parent = Some(GpuUuid::parse("GPU-a").unwrap());
    let (owners, _) = node
        .owners(vec![slice, gpu("GPU-a", 0, &[7])], &[pod(LLAMA, "llama")])
        .await;
    assert_eq!(owners, [None, is_llamas()]);
}

#[tokio::test]
async fn a_missing_host_proc_and_a_missing_kubelet_are_both_reported() {
    let mut node = node(FakeKubelet::stopped());
    let (owners, missing) = node
        .owners(vec![gpu("GPU-a", 0, &[7, 8])], &[pod(LLAMA, "llama")])
        .await;
    assert_eq!(owners, [None, None]);
    let [proc, kubelet] = &missing[..] else {
        panic!("{missing:?}")
    };
    assert!(
        proc.contains("none of the 2 processes") && proc.contains("--proc"),
        "{proc}"
    );
    assert!(kubelet.contains("--pod-resources"), "{kubelet}");
}

#[tokio::test]
async fn a_single_ended_process_is_not_reported() {
    let mut node = node(FakeKubelet::start(vec![]));
    node.runs(7, &in_pod(LLAMA));
    let (owners, missing) = node.owners(vec![gpu("GPU-a", 0, &[7, 8])], &[]).await;
    assert_eq!((owners, missing), (vec![is_llamas(), None], vec![]));
}

#[tokio::test]
async fn a_node_with_no_process_on_its_gpus_misses_nothing() {
    let mut node = node(FakeKubelet::stopped());
    let mut unread = gpu("GPU-b", 1, &[]);
    unread.processes = None;
    assert_eq!(
        node.owners(vec![gpu("GPU-a", 0, &[]), unread], &[]).await,
        (vec![], vec![])
    );
}
