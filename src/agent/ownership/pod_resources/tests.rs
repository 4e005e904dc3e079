//! The pod-resources client against a real server on a unix socket, and against sockets that are no kubelet's.

use super::*;
use crate::ownership::fake_kubelet::{FakeKubelet, pod_with_devices};
use stowage_scheduling::ids::GpuUuid;
use tokio::net::UnixListener;

/// Nothing here waits this long unless something is broken.
const LONG: Duration = Duration::from_secs(60);

/// Asks again at once, and forgets nothing.
const EAGER: Timeouts = Timeouts {
    response: LONG,
    retry_pause: Duration::ZERO,
    max_age: LONG,
};

fn asking(socket: PathBuf, timeouts: Timeouts) -> PodResources {
    PodResources {
        timeouts,
        ..PodResources::new(socket)
    }
}

fn ids(known: &[Allocation]) -> Vec<&str> {
    known
        .iter()
        .flat_map(|allocation| &allocation.ids)
        .flatten()
        .map(uuid)
        .collect()
}

fn uuid(id: &DeviceId) -> &str {
    match id {
        DeviceId::Uuid(uuid) => uuid.as_str(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_list_says_which_container_has_which_devices() {
    let kubelet = FakeKubelet::start(vec![
        pod_with_devices("team-a", "llama", "nvidia.com/gpu", &["GPU-a", "GPU-b"]),
        pod_with_devices("team-b", "qwen", "nvidia.com/mig-1g.10gb", &["MIG-c"]),
        pod_with_devices("team-b", "bare", "acme.com/nic", &["0"]),
    ]);
    let mut source = asking(kubelet.socket(), EAGER);
    let (known, problem) = source.allocations().await;
    assert_eq!(problem, None);
    assert_eq!(known.len(), 2, "a NIC is none");
    assert_eq!(known[0].key.to_string(), "team-a/llama");
    assert_eq!(known[1].resource, "nvidia.com/mig-1g.10gb");
    assert_eq!(ids(known), ["GPU-a", "GPU-b", "MIG-c"]);
}

#[test]
fn ids_are_read_as_the_plugins_write_them() {
    let uuid = |uuid: &str| Some(DeviceId::Uuid(GpuUuid::parse(uuid).unwrap()));
    let index = |gpu, slice| Some(DeviceId::Index { gpu, slice });
    let minor = |gpu, slice| Some(DeviceId::Minor { gpu, slice });
    for (id, read) in [
        ("GPU-0e5c", uuid("GPU-0e5c")),
        ("MIG-0e5c", uuid("MIG-0e5c")),
        ("GPU-0e5c::3", uuid("GPU-0e5c")),
        ("MIG-GPU-0e5c/1/0", uuid("MIG-GPU-0e5c/1/0")),
        ("3", index(3, None)),
        ("3::1", index(3, None)),
        ("3:1", index(3, Some(1))),
        ("nvidia3", minor(3, None)),
        ("nvidia3/vgpu1", minor(3, None)),
        ("nvidia3/gi1", minor(3, Some(1))),
        ("nvidia3/gi1/vgpu0", minor(3, Some(1))),
        ("nvidiax", None),
        ("nvidia3/gix", None),
        ("card0", None),
        ("3:1:1", None),
        ("-1", None),
        ("", None),
        ("::3", None),
        ("GPU a", None),
    ] {
        assert_eq!(DeviceId::from_plugin(id), read, "{id}");
    }
    let long = "gpu-0e5c2a4b-93d1-4f7e-8a06-5b1d2c3e4f50";
    assert_eq!(DeviceId::from_claim("gpu-1"), minor(1, None));
    assert_eq!(DeviceId::from_claim(long), uuid(long));
    assert_eq!(
        ["gpu-0-mig-9-4-4", "channel-0", ""].map(DeviceId::from_claim),
        [None, None, None]
    );
}

#[tokio::test]
async fn a_pod_with_an_invalid_name_is_left_out() {
    let kubelet = FakeKubelet::start(vec![
        pod_with_devices("", "x", "nvidia.com/gpu", &["GPU-a"]),
        pod_with_devices("team-a", "llama", "nvidia.com/gpu", &["GPU-b", "\n"]),
    ]);
    assert_eq!(
        ids(asking(kubelet.socket(), EAGER).allocations().await.0),
        ["GPU-b"]
    );
}

#[tokio::test]
async fn a_missing_socket_is_reported_with_the_remedy() {
    let kubelet = FakeKubelet::stopped();
    let mut source = asking(kubelet.socket(), EAGER);
    let (known, problem) = source.allocations().await;
    assert_eq!(known, []);
    let problem = problem.unwrap();
    assert_eq!(
        problem,
        PodResourcesError::NoSocket {
            socket: kubelet.socket()
        }
    );
    assert!(
        problem
            .to_string()
            .contains("mount its pod-resources folder"),
        "{problem}"
    );
}

#[tokio::test]
async fn the_last_answer_is_used_until_the_kubelet_is_back() {
    let mut kubelet = FakeKubelet::start(vec![pod_with_devices(
        "team-a",
        "llama",
        "nvidia.com/gpu",
        &["GPU-a"],
    )]);
    let mut source = asking(kubelet.socket(), EAGER);
    assert_eq!(ids(source.allocations().await.0), ["GPU-a"]);
    kubelet.stop().await;
    let (known, problem) = source.allocations().await;
    assert_eq!(ids(known), ["GPU-a"]);
    assert!(
        matches!(problem, Some(PodResourcesError::Failed { .. })),
        "{problem:?}"
    );
    kubelet.set_answer(Ok(vec![pod_with_devices(
        "team-a",
        "llama",
        "nvidia.com/gpu",
        &["GPU-b"],
    )]));
    kubelet.restart();
    let (known, problem) = source.allocations().await;
    assert_eq!((ids(known), problem), (vec!["GPU-b"], None));
}

#[tokio::test]
async fn an_old_answer_expires() {
    let mut kubelet = FakeKubelet::start(vec![pod_with_devices(
        "team-a",
        "llama",
        "nvidia.com/gpu",
        &["GPU-a"],
    )]);
    let mut source = asking(
        kubelet.socket(),
        Timeouts {
            max_age: Duration::ZERO,
            ..EAGER
        },
    );
    source.allocations().await;
    kubelet.stop().await;
    assert_eq!(source.allocations().await.0, []);
}

#[tokio::test]
async fn a_socket_without_a_listener_is_reported() {
    let kubelet = FakeKubelet::stopped();
    drop(UnixListener::bind(kubelet.socket()).unwrap());
    let problem = asking(kubelet.socket(), EAGER)
        .allocations()
        .await
        .1
        .unwrap()
        .to_string();
    assert!(problem.contains("refused"), "{problem}");
}

#[tokio::test]
async fn a_kubelet_that_never_answers_times_out_and_is_retried_later() {
    let kubelet = FakeKubelet::stopped();
    let listener = UnixListener::bind(kubelet.socket()).unwrap();
    let short = Timeouts {
        response: Duration::from_millis(1),
        retry_pause: LONG,
        max_age: LONG,
    };
    let mut source = asking(kubelet.socket(), short);
    let problem = source.allocations().await.1.unwrap();
    assert!(
        matches!(problem, PodResourcesError::Hangs { .. }),
        "{problem}"
    );
    // Were it asked again, the reason would be another one.
    drop(listener);
    std::fs::remove_file(kubelet.socket()).unwrap();
    assert_eq!(source.allocations().await.1, Some(problem));
}

#[tokio::test]
async fn a_server_that_speaks_another_protocol_or_has_no_such_call_is_a_reason() {
    let mut kubelet = FakeKubelet::start(vec![]);
    kubelet.set_answer(Err(Status::unimplemented("no such method")));
    let problem = asking(kubelet.socket(), EAGER)
        .allocations()
        .await
        .1
        .unwrap()
        .to_string();
    assert!(problem.contains("no such method"), "{problem}");
}

#[tokio::test]
async fn an_oversized_answer_is_rejected() {
    let id = "x".repeat(250);
    let ids = vec![id.as_str(); 20 << 12];
    let kubelet = FakeKubelet::start(vec![pod_with_devices(
        "team-a",
        "llama",
        "nvidia.com/gpu",
        &ids,
    )]);
    let problem = asking(kubelet.socket(), EAGER)
        .allocations()
        .await
        .1
        .unwrap()
        .to_string();
    assert!(problem.contains("too large"), "{problem}");
}
